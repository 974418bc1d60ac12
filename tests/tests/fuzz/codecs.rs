//! Encoded tensors of other sidecars: those of the kernels, and of the plugins that come with ronde, as native code.

use ronde_collectives::kernels::{decode, encode};
use ronde_fuzz::{Outcome, Target};
use ronde_plugin::{Bf16, CodecFor, Element, Error, F16, Float, Plugin, Span};
use ronde_wire::{Codec, DType};

const ELEMENTS: usize = 300;

pub(crate) fn codecs_of_kernels() -> Target {
    let values: Vec<u8> = (0..ELEMENTS).flat_map(|n| (n as f32 / 7.0).to_le_bytes()).collect();
    let seeds = [Codec::F16, Codec::Bf16].map(|codec| {
        let mut encoded = vec![0; 2 * ELEMENTS];
        encode(codec, DType::F32, &values, &mut encoded).expect("values");
        [&[u8::from(codec == Codec::F16)], &encoded[..]].concat()
    });
    Target::new("codecs_of_kernels", seeds.to_vec(), move |bytes| {
        let Some((codec, encoded)) = bytes.split_first() else { return Outcome::refused(&"nothing") };
        let codec = if *codec & 1 == 1 { Codec::F16 } else { Codec::Bf16 };
        let mut values = vec![0xa5; 4 * ELEMENTS];
        let decoded = decode(codec, DType::F32, encoded, &mut values);
        assert_eq!(decoded.is_ok(), encoded.len() == 2 * ELEMENTS, "any bytes of the right length are values");
        if decoded.is_err() {
            assert!(values.iter().all(|byte| *byte == 0xa5), "what is refused writes nothing");
            return Outcome::of(&decoded);
        }
        // Encoding the decoded value again gives the same bytes.
        let (mut again, mut same) = (vec![0; 2 * ELEMENTS], vec![0; 4 * ELEMENTS]);
        encode(codec, DType::F32, &values, &mut again).expect("values");
        decode(codec, DType::F32, &again, &mut same).expect("an encoding");
        assert_eq!(same, values);
        Outcome::of(&decoded)
    })
}

#[test]
fn fuzz_codecs_of_kernels() {
    codecs_of_kernels().run();
}

/// The first byte of an input selects the codec, and the type of elements it decodes to.
pub(crate) fn codecs_of_plugins() -> Target {
    let seeds: Vec<Vec<u8>> = (0..KINDS).map(|kind| [&[kind], &seed(kind)[..]].concat()).collect();
    Target::new("codecs_of_plugins", seeds, move |bytes| {
        let Some((kind, encoded)) = bytes.split_first() else { return Outcome::refused(&"nothing") };
        let result = decoded_as(kind % KINDS, encoded);
        if let Err(error) = &result {
            assert_eq!(error.code(), Error::malformed("").code(), "{error}");
        }
        Outcome::of(&result.map(|()| kind % KINDS))
    })
}

#[test]
fn fuzz_codecs_of_plugins() {
    codecs_of_plugins().run();
}

/// Four codecs of three types, and two casts.
const KINDS: u8 = 14;

fn seed(kind: u8) -> Vec<u8> {
    match kind / 3 {
        0 => typed_seed(kind, topk()),
        1 => typed_seed(kind, randomk()),
        2 => typed_seed(kind, onebit()),
        3 => typed_seed(kind, int8()),
        _ => vec![0x3c; 2 * ELEMENTS],
    }
}

fn decoded_as(kind: u8, encoded: &[u8]) -> Result<(), Error> {
    match (kind / 3, kind % 3) {
        (0, _) => typed(kind, topk(), encoded),
        (1, _) => typed(kind, randomk(), encoded),
        (2, _) => typed(kind, onebit(), encoded),
        (3, _) => typed(kind, int8(), encoded),
        (_, 0) => decoded::<f32, _>(&mut fp16::Cast::new(&fp16::Settings {})?, encoded),
        _ => decoded::<f32, _>(&mut bf16::Cast::new(&bf16::Settings {})?, encoded),
    }
}

fn topk() -> topk::TopK {
    topk::TopK::new(&topk::Settings { ratio: 0.1 }).expect("parameters")
}

fn randomk() -> randomk::RandomK {
    randomk::RandomK::new(&randomk::Settings { ratio: 0.1, seed: 5 }).expect("parameters")
}

fn onebit() -> onebit::OneBit {
    onebit::OneBit::new(&onebit::Settings { chunk: 64 }).expect("parameters")
}

fn int8() -> int8::Int8 {
    int8::Int8::new(&int8::Settings { chunk: 32 }).expect("parameters")
}

fn typed_seed<C: CodecFor<f32> + CodecFor<F16> + CodecFor<Bf16>>(kind: u8, mut codec: C) -> Vec<u8> {
    match kind % 3 {
        0 => encoded::<f32, C>(&mut codec),
        1 => encoded::<F16, C>(&mut codec),
        _ => encoded::<Bf16, C>(&mut codec),
    }
}

fn typed<C>(kind: u8, mut codec: C, encoded: &[u8]) -> Result<(), Error>
where
    C: CodecFor<f32> + CodecFor<F16> + CodecFor<Bf16>,
{
    match kind % 3 {
        0 => decoded::<f32, C>(&mut codec, encoded),
        1 => decoded::<F16, C>(&mut codec, encoded),
        _ => decoded::<Bf16, C>(&mut codec, encoded),
    }
}

fn encoded<E: Float, C: CodecFor<E>>(codec: &mut C) -> Vec<u8> {
    let values: Vec<E> = (0..ELEMENTS).map(|number| E::from_f64(number as f64 / 8.0 - 9.5)).collect();
    let mut state = vec![C::State::default(); ELEMENTS];
    let mut encoded = vec![0; codec.bound(ELEMENTS)];
    let bytes = codec.encode(&Span::whole(ELEMENTS), &values, &mut state, &mut encoded).expect("values");
    encoded.truncate(bytes);
    encoded
}

fn decoded<E: Element, C: CodecFor<E>>(codec: &mut C, encoded: &[u8]) -> Result<(), Error> {
    codec.decode(&Span::whole(ELEMENTS), encoded, &mut [E::default(); ELEMENTS])
}
