//! Mutates inputs: single bits, boundary numbers, chunks that are removed, doubled or copied from another input.

use fastrand::Rng;

/// An input made of one or two others.
pub(crate) fn mutated(random: &mut Rng, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    let changes = if random.bool() { 1 } else { random.usize(1..=6) };
    for _ in 0..changes {
        change(random, &mut bytes, other);
        bytes.truncate(INPUT_BYTES_MAX);
    }
    bytes
}

fn change(random: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    if bytes.is_empty() {
        bytes.extend(piece(random, other));
        bytes.push(random.u8(..));
        return;
    }
    let at = random.usize(..bytes.len());
    match random.u8(..13) {
        0 => bytes[at] ^= 1 << random.u8(..8),
        1 => bytes[at] = random.u8(..),
        2 => bytes[at] = bytes[at].wrapping_add(if random.bool() { 1 } else { 255 }),
        3 => bytes.truncate(at),
        4 => drop(bytes.drain(at..(at + random.usize(1..=16)).min(bytes.len()))),
        5 => put(random, bytes, at),
        6 => drop(bytes.splice(at..at, VARINT_MAX)),
        7 => decimal(random, bytes, at),
        8 => {
            let own = piece(random, bytes).to_vec();
            drop(bytes.splice(at..at, own));
        }
        9 => drop(bytes.splice(at..at, piece(random, other).to_vec())),
        10 => {
            let end = (at + random.usize(1..=16)).min(bytes.len());
            drop(bytes.splice(at..end, piece(random, other).to_vec()));
        }
        11 => drop(bytes.splice(at..at, (0..random.usize(1..=9)).map(|_| random.u8(..)).collect::<Vec<_>>())),
        _ => {
            bytes.truncate(at);
            bytes.extend_from_slice(&other[random.usize(..=other.len())..]);
        }
    }
}

/// Some consecutive bytes.
fn piece<'a>(random: &mut Rng, of: &'a [u8]) -> &'a [u8] {
    let start = random.usize(..=of.len());
    let most = if random.u8(..8) == 0 { of.len() } else { 32 };
    &of[start..(start + random.usize(..=most)).min(of.len())]
}

/// Writes a boundary number of 1, 2, 4 or 8 bytes in either byte order: lengths and counts.
fn put(random: &mut Rng, bytes: &mut [u8], at: usize) {
    let length = bytes.len() as u64;
    let border = [0, 1, 2, 7, 8, 63, 64, 127, 128, 255, 256, 4_096, 65_535, 1 << 20, 1 << 31, 1 << 32, 1 << 63, length];
    let border = border[random.usize(..border.len())];
    let number = [border, border.wrapping_sub(1), border.wrapping_add(1), u64::MAX][random.usize(..4)];
    let size = [1, 2, 4, 8][random.usize(..4)].min(bytes.len() - at);
    let mut number = number.to_le_bytes();
    let number = &mut number[..size];
    if random.bool() {
        number.reverse();
    }
    bytes[at..at + size].copy_from_slice(number);
}

/// Replaces decimal digits from a position on by another number.
fn decimal(random: &mut Rng, bytes: &mut Vec<u8>, at: usize) {
    let Some(start) = (at..bytes.len()).find(|at| bytes[*at].is_ascii_digit()) else { return };
    let end = (start..bytes.len()).find(|at| !bytes[*at].is_ascii_digit()).unwrap_or(bytes.len());
    let number = DECIMALS[random.usize(..DECIMALS.len())];
    drop(bytes.splice(start..end, number.bytes()));
}

const DECIMALS: [&str; 18] = [
    "0",
    "00",
    "-1",
    "1e308",
    "1e999",
    "0.5",
    "255",
    "256",
    "4096",
    "65535",
    "65536",
    "2147483647",
    "2147483648",
    "-2147483648",
    "4294967295",
    "4294967296",
    "18446744073709551615",
    "18446744073709551616",
];
/// The greatest u64 as a varint.
const VARINT_MAX: [u8; 10] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
/// Longer inputs are slow and find nothing more.
const INPUT_BYTES_MAX: usize = 64 << 10;
