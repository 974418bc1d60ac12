//! What `export!` defines: the manifest and the struct of parameters.

#![forbid(unsafe_code)]

use ronde_plugin::parameters::{Choice, Parameters as _};
use ronde_plugin::testing::round_trip;
use ronde_plugin::{Codec, CodecFor, Error, Operands, Plugin, Reducer, ReducerFor, Span};
use serde_json::{Value, json};

/// A codec and reducer without any effect.
struct Both;

impl Plugin for Both {
    type Parameters = Settings;

    fn new(_: &Settings) -> Result<Self, Error> {
        Ok(Self)
    }
}

impl Codec for Both {
    type State = [f32; 2];

    fn bound(&self, elements: usize) -> usize {
        elements
    }
}

impl CodecFor<u8> for Both {
    fn encode(&mut self, _: &Span, values: &[u8], _: &mut [[f32; 2]], encoded: &mut [u8]) -> Result<usize, Error> {
        encoded[..values.len()].copy_from_slice(values);
        Ok(values.len())
    }

    fn decode(&mut self, _: &Span, encoded: &[u8], values: &mut [u8]) -> Result<(), Error> {
        values.copy_from_slice(encoded);
        Ok(())
    }
}

impl Reducer for Both {}

impl ReducerFor<f64> for Both {
    fn reduce(&mut self, _: &Span, operands: &Operands<'_, f64>, _: &[f64], output: &mut [f64]) -> Result<(), Error> {
        operands.fold_into(output, f64::max);
        Ok(())
    }
}

ronde_plugin::export! {
    name: "both",
    about: "Every kind of everything.",
    codec: Both { dtypes: [uint8], state_bytes: 8, lossless: true, elementwise: true },
    reducer: Both { dtypes: [float64], shape: "pairwise", commutative: true, measures: 0 },
    parameters: Settings {
        ratio: float { default: 0.01, min: -1.5, max: 1.0, about: "A share." },
        seed: int { default: 7, min: -9223372036854775807, max: 9223372036854775807, about: "A seed." },
        mode: choice { default: "exact", choices: ["fast", "exact"], about: "A way." },
        feedback: bool { default: true, about: "A choice." },
    },
    limits: { memory_bytes: 1048576, call_ms: 20, ranks: 64 },
    buffers: { input: 4096, output: 4096, state: 4096, measures: 0 },
}

#[test]
fn what_was_declared_works_natively() {
    let mut both = Both::new(&Settings::default()).expect("it takes everything");
    let trip = round_trip(&mut both, &Span::whole(2), &[1_u8, 2], &mut [[0.0; 2]; 2]).expect("an encoding");
    assert_eq!(trip.decoded, [1, 2]);
    let operands = Operands::within(&[1.0, 5.0, 4.0, 2.0], 2, 2, 2).expect("they fit");
    let mut output = [0.0; 2];
    both.reduce(&Span::whole(2), &operands, &[], &mut output).expect("it cannot fail");
    assert_eq!(output, [4.0, 5.0]);
}

#[test]
fn the_manifest_is_what_was_declared() {
    let found: Value = serde_json::from_str(MANIFEST).expect("the manifest is JSON");
    let expected = json!({
        "abi": 1,
        "name": "both",
        "version": env!("CARGO_PKG_VERSION"),
        "about": "Every kind of everything.",
        "kinds": {
            "codec": {"dtypes": ["uint8"], "state_bytes": 8, "lossless": true, "elementwise": true},
            "reducer": {"dtypes": ["float64"], "shape": "pairwise", "commutative": true, "measures": 0},
        },
        "parameters": [
            {"name": "ratio", "type": "float", "default": 0.01, "min": -1.5, "max": 1.0, "about": "A share."},
            {
                "name": "seed", "type": "int", "default": 7, "min": -i64::MAX, "max": i64::MAX,
                "about": "A seed.",
            },
            {
                "name": "mode", "type": "choice", "default": "exact", "choices": ["fast", "exact"],
                "about": "A way.",
            },
            {"name": "feedback", "type": "bool", "default": true, "about": "A choice."},
        ],
        "limits": {"memory_bytes": 1_048_576, "call_ms": 20, "ranks": 64},
    });
    assert_eq!(found, expected);
}

#[test]
fn parameters_are_read_in_the_order_of_their_declaration() {
    let defaults = Settings::default();
    assert_eq!(defaults, Settings { ratio: 0.01, seed: 7, mode: Choice(1), feedback: true });
    assert_eq!(Settings::COUNT, 4);
    let block = [0.5_f64.to_le_bytes(), (-3_i64).to_le_bytes(), 0_i64.to_le_bytes(), 0_i64.to_le_bytes()];
    assert_eq!(Settings::read(&block), Settings { ratio: 0.5, seed: -3, mode: Choice(0), feedback: false });
}
