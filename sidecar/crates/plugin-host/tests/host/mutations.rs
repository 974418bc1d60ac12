//! Mutated modules and random lengths: loading and calling always end in time with a result or an error, and the host
//! keeps working. `RONDE_FUZZ_SECONDS` sets the duration, `RONDE_FUZZ_SEED` the seed.

use std::time::{Duration, Instant};

use crate::support::{Wat, reducer_manifest, works};
use fastrand::Rng;
use ronde_plugin_host::{Host, HostConfig, Parameters, Plugin, Shape, Span, Stage};
use ronde_wire::DType;
use std::sync::Arc;

/// More than any load with all its calls takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

fn originals() -> Vec<Vec<u8>> {
    let two_pass =
        Wat::reducer("two-pass", 2).with("ronde_measure", "(i32.const 0)").with("ronde_conclude", "(i32.const 0)");
    let manifest = reducer_manifest("adaptive", 0).replace(", \"uint8\"", "");
    let adaptive = Wat { manifests: vec![manifest], ..Wat::reducer("n-ary", 0) };
    let logging = Wat { imports: "(import \"ronde\" \"log\" (func $log (param i32 i32)))".to_owned(), ..Wat::codec() };
    let text =
        wat::parse_str(include_str!("../../../../../plugins/text-sum/sum.wat")).expect("the text is WebAssembly");
    let modules = [
        Wat::codec(),
        Wat::reducer("n-ary", 0),
        two_pass,
        adaptive.with("ronde_conclude", "(i32.const 0)"),
        logging.with("ronde_decode", "(call $log (i32.load (i32.const 112)) (i32.const 9)) (i32.const 0)"),
    ];
    modules.iter().map(Wat::wasm).chain([text]).collect()
}

/// Opcodes of unreachable, end, br, br_if, i32.const, load and store, and of binary arithmetic.
const OPERATORS: [u8; 12] = [0x00, 0x0b, 0x0c, 0x0d, 0x41, 0x28, 0x36, 0x6a, 0x6b, 0x6c, 0x6d, 0x6e];

/// Changes some bytes, or removes, doubles or moves a piece; or changes a single byte, so that more modules stay valid.
fn mutated(random: &mut Rng, original: &[u8]) -> Vec<u8> {
    let mut bytes = original.to_vec();
    let (changes, kinds) = if random.bool() { (1, 4..=8) } else { (random.usize(1..=4), 0..=8) };
    for _ in 0..changes {
        let at = random.usize(..bytes.len());
        match random.u8(kinds.clone()) {
            0 => bytes.truncate(at.max(8)),
            1 => drop(bytes.remove(at)),
            2 => bytes.insert(at, random.u8(..)),
            3 => {
                let end = (at + random.usize(..16)).min(bytes.len());
                let piece: Vec<u8> = bytes[at..end].to_vec();
                let to = random.usize(..=bytes.len());
                bytes.splice(to..to, piece);
            }
            4 => bytes[at] = bytes[at].wrapping_add(1),
            5 => bytes[at] ^= 1 << random.u8(..8),
            // Operators that remain valid in place of others.
            6 => bytes[at] = *random.choice(&OPERATORS).expect("there are some"),
            _ => bytes[at] = random.u8(..),
        }
        if bytes.is_empty() {
            bytes.push(0);
        }
    }
    bytes
}

/// Lengths that fit, that nearly fit, and others.
fn length(random: &mut Rng, fits: usize) -> usize {
    match random.u8(..6) {
        0 => random.usize(..20_000),
        1 => 0,
        2 => fits + 1,
        _ => fits,
    }
}

fn call(random: &mut Rng, plugin: &Arc<Plugin>) {
    let Ok(mut instance) = plugin.instance(&Parameters::defaults(plugin.manifest())) else { return };
    for _ in 0..3 {
        let dtype = *random.choice(&[DType::F32, DType::F32, DType::I64, DType::U8]).unwrap_or(&DType::F32);
        let tensor_elements = if random.u8(..8) == 0 { random.u64(..) } else { 1 << 20 };
        let offset = if random.u8(..8) == 0 { random.u64(..) } else { 0 };
        let span =
            Span { dtype, stage: Stage::Contribution, offset, tensor_elements, round: 1, tensor: random.u64(..) };
        let elements = random.usize(..1_100);
        let bytes = length(random, elements * dtype.size_bytes());
        let values: Vec<u8> = (0..bytes).map(|_| random.u8(..)).collect();
        let state = instance.codec_facts(dtype).map_or(0, |facts| elements * facts.state_bytes_per_element);
        let mut encoded = Vec::new();
        let _ = instance.encode(&span, &values, &mut vec![0; length(random, state)], &mut encoded);
        let hostile: Vec<u8> = (0..length(random, encoded.len())).map(|_| random.u8(..)).collect();
        let _ = instance.decode(&span, &hostile, &mut vec![0; bytes]);
        let Some(reducer) = &plugin.manifest().reducer else { continue };
        let measures = match reducer.shape {
            Shape::TwoPass { measures } => measures,
            Shape::Adaptive => 1,
            Shape::Pairwise | Shape::Nary => 0,
        };
        let ranks = length(random, 2) % 300;
        let mut own = vec![0.0; length(random, measures) % 300];
        let _ = instance.measure(&span, &values, &mut own);
        let mut all = vec![f64::NAN; length(random, ranks * measures)];
        let _ = instance.conclude(&span, ranks, &mut all);
        let operands = vec![values.as_slice(); ranks];
        let _ = instance.reduce(&span, &operands, &all, &mut vec![0; bytes]);
    }
}

#[test]
fn mutated_modules_and_lengths_do_no_harm() {
    let seed = setting("RONDE_FUZZ_SEED", 7);
    let time = Duration::from_secs(setting("RONDE_FUZZ_SECONDS", 5));
    let originals = originals();
    let host = Host::new(HostConfig::default()).expect("a host");
    let (begin, mut rounds, mut loaded) = (Instant::now(), 0_u64, 0_u64);
    while begin.elapsed() < time || rounds < 50 {
        let round = seed.wrapping_add(rounds);
        let mut random = Rng::with_seed(round);
        let original = random.choice(&originals).expect("there are some");
        let module = mutated(&mut random, original);
        let once = Instant::now();
        if let Ok(plugin) = host.load(&module, None) {
            loaded += 1;
            call(&mut random, &plugin);
        }
        assert!(once.elapsed() < PATIENCE, "RONDE_FUZZ_SEED={round} takes {:?}", once.elapsed());
        rounds += 1;
    }
    println!("{rounds} modules, of which {loaded} were let in");
    assert!(loaded > 0, "all {rounds} modules were refused, so nothing was called; the mutations are too strong");
    works(&host);
}
