//! Valid and invalid manifests and parameters.

use crate::support::{CODEC, reducer_manifest};
use proptest::prelude::*;
use ronde_plugin_host::{Given, Manifest, ManifestError, ParameterKind, ParameterValue, Parameters, Shape};
use ronde_wire::DType;

fn manifest() -> Manifest {
    Manifest::parse(CODEC.as_bytes()).expect("a manifest")
}

/// Why a manifest is rejected after one piece of text is replaced.
fn wrong(piece: &str, other: &str) -> String {
    assert!(CODEC.contains(piece), "{piece} is not in the manifest");
    Manifest::parse(CODEC.replacen(piece, other, 1).as_bytes()).expect_err(other).to_string()
}

#[test]
fn a_manifest_is_read() {
    let manifest = manifest();
    assert_eq!(manifest.label(), "test-codec@0.1.0");
    let codec = manifest.codec.as_ref().expect("it is a codec");
    assert_eq!((codec.dtypes.as_slice(), codec.state_bytes), (&[DType::F32, DType::I64][..], 4));
    assert!(codec.lossless && !codec.elementwise && manifest.reducer.is_none());
    assert_eq!(manifest.parameters[1].kind, ParameterKind::Int { default: 7, min: 0, max: 4_294_967_295 });
    assert_eq!((manifest.limits.call_ms, manifest.limits.ranks), (10, 4));
    let reducer = Manifest::parse(reducer_manifest("two-pass", 3).as_bytes()).expect("a reducer");
    assert_eq!(reducer.reducer.expect("it is one").shape, Shape::TwoPass { measures: 3 });
}

#[test]
fn wrong_manifests_teach() {
    let cases = [
        ("\"abi\": 1", "\"abi\": 2", "ABI version 2"),
        ("\"name\": \"test-codec\"", "\"name\": \"Top K\"", "\"Top K\", but has 1 to 64 small letters"),
        ("\"name\": \"test-codec\"", "\"name\": \"\"", "1 to 64"),
        ("\"version\": \"0.1.0\"", "\"version\": \"1 2\"", "version is \"1 2\""),
        ("\"about\": \"values", "\"about\": \"two\\nlines", "more than one line"),
        ("\"about\"", "\"abuot\"", "unknown field `abuot`"),
        ("\"name\": \"test-codec\",", "", "missing field `name`"),
        ("\"name\": \"test-codec\"", "\"name\": \"a\", \"name\": \"b\"", "duplicate field `name`"),
        ("\"float32\", \"int64\"", "\"float31\"", "\"float31\", which is no type; there are uint8"),
        ("\"float32\", \"int64\"", "\"float32\", \"float32\"", "names float32 twice"),
        ("\"float32\", \"int64\"", "", "is empty"),
        ("\"state_bytes\": 4", "\"state_bytes\": 17", "17, but may be 0 to 16"),
        ("\"lossless\": true", "\"lossless\": 1", "invalid type"),
        ("\"name\": \"ratio\"", "\"name\": \"Ratio\"", "\"Ratio\""),
        ("\"name\": \"ratio\"", "\"name\": \"1st\"", "begin with a letter"),
        ("\"name\": \"ratio\"", "\"name\": \"seed\"", "name seed twice"),
        ("\"type\": \"float\"", "\"type\": \"number\"", "there are int, float, bool and choice"),
        ("\"default\": 0.5", "\"default\": 1.5", "default 1.5 outside of 0 to 1"),
        ("\"default\": 0.5", "\"default\": \"half\"", "no float"),
        ("\"default\": 0.5", "\"default\": 1e999", "not valid JSON with the fields of a manifest"),
        ("\"default\": 7", "\"default\": 7.5", "no int"),
        ("\"default\": 7", "\"default\": 18446744073709551616", "no int"),
        ("\"default\": \"b\"", "\"default\": \"c\"", "none of its choices"),
        ("[\"a\", \"b\"]", "[\"a\", \"a\"]", "the choice \"a\""),
        ("[\"a\", \"b\"]", "[]", "has 0 choices"),
        ("\"default\": false", "\"default\": false, \"min\": 0", "only int and float have"),
        ("\"default\": false", "\"default\": false, \"choices\": []", "only the type choice has"),
        ("\"default\": false", "\"default\": 0", "which is no bool"),
        ("\"call_ms\": 10", "\"call_ms\": 0", "limits.call_ms is 0, but may be 1 to 100"),
        ("\"ranks\": 4", "\"ranks\": 257", "1 to 256"),
        ("\"ranks\": 4", "\"ranks\": -1", "not valid JSON with the fields of a manifest"),
    ];
    for (piece, other, words) in cases {
        let text = wrong(piece, other);
        assert!(text.contains(words), "{other}: {text}");
    }
    let reducer = |shape, measures| Manifest::parse(reducer_manifest(shape, measures).as_bytes()).map(drop);
    assert!(reducer("n-ary", 1).expect_err("it measures nothing").to_string().contains("only a two-pass"));
    assert!(reducer("two-pass", 0).is_err() && reducer("two-pass", 65).is_err() && reducer("two-pass", 64).is_ok());
    let nothing = r#"{"abi": 1, "name": "a", "version": "1", "kinds": {}}"#;
    assert!(
        Manifest::parse(nothing.as_bytes()).expect_err("no kind").to_string().contains("neither codec nor reducer")
    );
}

#[test]
fn hostile_json_is_refused() {
    let deep = "[".repeat(8_000) + &"]".repeat(8_000);
    for text in [deep.as_str(), "", "null", "[]", "{\"abi\":1}", "{\"abi\":-1}", "\u{feff}{}", "{\"abi\":1e400}"] {
        assert!(matches!(Manifest::parse(text.as_bytes()), Err(ManifestError::Json(_))));
    }
    assert!(Manifest::parse(b"\xff\xfe").is_err());
    let parameter = r#"{"name": "NAME", "type": "bool", "default": true},"#;
    let many: String = (0..17).map(|index| parameter.replace("NAME", &format!("p{index}"))).collect();
    let text = wrong("{\"name\": \"ratio\"", &format!("{many}{{\"name\": \"ratio\""));
    assert!(text.contains("may be 16"), "{text}");
}

fn given(name: &str, value: Given) -> Vec<(String, Given)> {
    vec![(name.to_owned(), value)]
}

#[test]
fn parameters_are_checked() {
    let manifest = manifest();
    let text = |text: &str| Given::Text(text.to_owned());
    let refused = |name: &str, value: Given| {
        Parameters::checked(&manifest, &given(name, value)).expect_err("it is refused").to_string()
    };
    assert!(refused("ration", Given::Float(0.1)).contains("no parameter \"ration\"; it has: ratio, seed, mode, flag"));
    assert!(
        refused("ratio", Given::Float(1.5))
            .contains("ratio of plugin test-codec@0.1.0 is 1.5, but takes a float of 0.0 to 1.0")
    );
    for value in [f64::NAN, f64::INFINITY, -0.1] {
        let _ = refused("ratio", Given::Float(value));
    }
    let _ = refused("ratio", text("many"));
    let _ = refused("ratio", text("nan"));
    let _ = refused("ratio", Given::Bool(true));
    assert!(refused("seed", Given::Int(-1)).contains("an int of 0 to 4294967295"));
    let _ = refused("seed", Given::Float(1.0));
    let _ = refused("seed", text("1.0"));
    assert!(refused("mode", text("c")).contains("one of a, b"));
    let _ = refused("mode", Given::Int(0));
    let _ = refused("flag", Given::Int(1));
    let _ = refused("flag", text("yes"));
    let twice = [given("seed", Given::Int(1)), given("seed", Given::Int(1))].concat();
    assert!(Parameters::checked(&manifest, &twice).expect_err("twice").to_string().contains("given twice"));
}

#[test]
fn equal_values_are_equal_blocks_however_they_are_given() {
    let manifest = manifest();
    let block = |given: &[(String, Given)]| Parameters::checked(&manifest, given).expect("parameters").block();
    let text = |text: &str| Given::Text(text.to_owned());
    assert_eq!(block(&given("ratio", Given::Float(0.5))), block(&[]));
    assert_eq!(block(&given("ratio", Given::Int(1))), block(&given("ratio", text("1.0"))));
    assert_eq!(block(&given("ratio", Given::Float(-0.0))), block(&given("ratio", Given::Float(0.0))));
    assert_eq!(block(&given("seed", text("12"))), block(&given("seed", Given::Int(12))));
    assert_eq!(block(&given("flag", text("true"))), block(&given("flag", Given::Bool(true))));
    let both = [given("seed", Given::Int(1)), given("flag", Given::Bool(true))].concat();
    let reversed: Vec<_> = both.iter().rev().cloned().collect();
    assert_eq!(block(&both), block(&reversed));
    let parameters = Parameters::checked(&manifest, &both).expect("parameters");
    assert_eq!(parameters.to_string(), "ratio=0.5, seed=1, mode=b, flag=true");
    assert_eq!(parameters.iter().nth(2), Some(("mode", ParameterValue::Choice(1))));
}

proptest! {
    #[test]
    fn no_bytes_make_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = Manifest::parse(&bytes);
    }

    #[test]
    fn no_change_of_a_manifest_makes_the_parser_panic(at in 0..CODEC.len(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut bytes = CODEC.as_bytes().to_vec();
        bytes[at] = byte;
        if cut {
            bytes.truncate(at);
        }
        let _ = Manifest::parse(&bytes);
    }

    #[test]
    fn displayed_parameters_parse_again(ratio in 0.0..=1.0_f64, seed in 0..=4_294_967_295_i64, mode in "[ab]", flag in any::<bool>()) {
        let manifest = manifest();
        let values = [("ratio", Given::Float(ratio)), ("seed", Given::Int(seed)), ("mode", Given::Text(mode)), ("flag", Given::Bool(flag))];
        let values = values.map(|(name, value)| (name.to_owned(), value));
        let parameters = Parameters::checked(&manifest, &values).expect("they are within their ranges");
        let text = parameters.to_string();
        let pairs = text.split(", ").filter_map(|pair| pair.split_once('='));
        let again: Vec<_> = pairs.map(|(name, value)| (name.to_owned(), Given::Text(value.to_owned()))).collect();
        prop_assert_eq!(Parameters::checked(&manifest, &again).expect("a displayed value").block(), parameters.block());
    }

    #[test]
    fn integers_outside_of_their_range_are_refused(seed in any::<i64>()) {
        let within = (0..=4_294_967_295).contains(&seed);
        prop_assert_eq!(Parameters::checked(&manifest(), &given("seed", Given::Int(seed))).is_ok(), within);
    }
}
