//! What plugins of each shape receive and return.

use crate::support::{Wat, host, reducer_manifest, running, span};
use ronde_plugin_host::{Given, Instance, Parameters, Stage};
use ronde_wire::DType;

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|value| f32::from_le_bytes(value.try_into().expect("four bytes"))).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A codec that encodes to the bytes at an address.
fn codec_that_dumps(address: u32, length: u32) -> Wat {
    let body =
        format!("(memory.copy (i32.const 0x4000) (i32.const {address}) (i32.const {length})) (i32.const {length})");
    Wat::codec().with("ronde_encode", &body)
}

fn dumped(instance: &mut Instance, dtype: DType, elements: usize) -> Vec<u8> {
    let span = ronde_plugin_host::Span {
        dtype,
        stage: Stage::Result,
        offset: 0x1_0000_0001,
        tensor_elements: 0x2_0000_0000,
        round: 5,
        tensor: 0x0807_0605_0403_0201,
    };
    let mut encoded = Vec::new();
    instance
        .encode(&span, &vec![7; elements * dtype.size_bytes()], &mut vec![3; 4 * elements], &mut encoded)
        .expect("an encoding");
    encoded
}

#[test]
fn a_call_is_described() {
    let host = host();
    let (_, mut instance) = running(&host, &codec_that_dumps(64, 64));
    let call = dumped(&mut instance, DType::I64, 9);
    let words: Vec<u32> = call.chunks(4).map(|word| u32::from_le_bytes(word.try_into().expect("a word"))).collect();
    assert_eq!(words[..4], [1, 5, 1, 9]);
    assert_eq!(words[4..12], [1, 1, 0, 2, 5, 0, 0x0403_0201, 0x0807_0605]);
    assert_eq!(words[12..], [0; 4]);
}

#[test]
fn the_rest_of_a_line_is_clear() {
    let host = host();
    let (_, mut instance) = running(&host, &codec_that_dumps(0x2000, 64));
    let _ = dumped(&mut instance, DType::F32, 16);
    let line = dumped(&mut instance, DType::F32, 9);
    assert_eq!(line, [vec![7; 36], vec![0; 28]].concat());
    let (_, mut instance) = running(&host, &codec_that_dumps(0x6000, 64));
    assert_eq!(dumped(&mut instance, DType::F32, 9), [vec![3; 36], vec![0; 28]].concat());
}

#[test]
fn parameters_arrive_in_the_order_of_the_manifest() {
    let host = host();
    let (plugin, mut defaults) = running(&host, &codec_that_dumps(128, 32));
    let expected = [0.5_f64.to_le_bytes(), 7_i64.to_le_bytes(), 1_i64.to_le_bytes(), 0_i64.to_le_bytes()].concat();
    assert_eq!(dumped(&mut defaults, DType::F32, 16), expected);
    let given = [("flag", Given::Bool(true)), ("mode", Given::Text("a".to_owned())), ("ratio", Given::Int(1))];
    let given = given.map(|(name, value)| (name.to_owned(), value));
    let parameters = Parameters::checked(plugin.manifest(), &given).expect("parameters");
    let mut instance = plugin.instance(&parameters).expect("an instance");
    let expected = [1.0_f64.to_le_bytes(), 7_i64.to_le_bytes(), 0_i64.to_le_bytes(), 1_i64.to_le_bytes()].concat();
    assert_eq!(dumped(&mut instance, DType::F32, 16), expected);
}

#[test]
fn blocks_are_as_large_as_buffers_and_bounds_allow() {
    let host = host();
    let block = |module: &Wat, dtype| running(&host, module).1.codec_facts(dtype).expect("facts");
    // The bound of 8 bytes per element fits 8 KiB for 1,024 elements.
    let facts = block(&Wat::codec(), DType::F32);
    assert_eq!((facts.block_elements, facts.block_bound, facts.state_bytes_per_element), (1_024, 8_192, 4));
    // Elements of 8 bytes fit 8 KiB for 1,024.
    let small = Wat::codec().with("ronde_bound", "(param i32) (i32.add (local.get 0) (i32.const 10))");
    assert_eq!(block(&small, DType::I64).block_elements, 1_024);
    assert_eq!(block(&small, DType::F32).block_elements, 2_048);
    assert_eq!(block(&small.clone().placed(9, 0x1000), DType::F32).block_elements, 1_024);
    assert_eq!(block(&small.clone().placed(7, 0x1004), DType::F32).block_elements, 1_024);
    assert_eq!(block(&small.placed(5, 2_047 * 4), DType::F32).block_elements, 1_984);
}

#[test]
fn pairs_are_reduced_in_place() {
    let host = host();
    let difference = "(local $at i32)
        (loop $next
          (f32.store (i32.add (i32.const 0x4000) (local.get $at))
            (f32.sub (f32.load (i32.add (i32.const 0x2000) (local.get $at)))
              (f32.load (i32.add (i32.add (i32.const 0x2000) (i32.load (i32.const 120))) (local.get $at)))))
          (br_if $next (i32.lt_u (local.tee $at (i32.add (local.get $at) (i32.const 4))) (call $bytes))))
        (i32.const 0)";
    let (_, mut instance) = running(&host, &Wat::reducer("pairwise", 0).with("ronde_reduce", difference));
    // More than the buffers hold at once, and not a whole line.
    let values: Vec<f32> = (0..5_003_u16).map(f32::from).collect();
    let mut left = bytes(&values);
    instance.reduce_pair(&span(DType::F32), &mut left, &bytes(&vec![1.5; values.len()])).expect("a reduction");
    let expected: Vec<f32> = values.iter().map(|value| value - 1.5).collect();
    assert_eq!(floats(&left), expected);
    // Of many ranks: from the left.
    let operands: Vec<Vec<u8>> = [9.0_f32, 4.0, 2.0, 1.0].map(|value| bytes(&vec![value; 5_003])).into();
    let operands: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
    instance.fold(&span(DType::F32), &operands, &mut left).expect("a reduction");
    assert_eq!(floats(&left), vec![2.0; 5_003]);
    assert!(instance.fold(&span(DType::F32), &operands[..2], &mut left[4..]).is_err(), "of other lengths");
}

#[test]
fn operands_are_in_the_order_of_ranks() {
    let host = host();
    // The result is the operand that the first byte of the first operand names.
    let chosen = "(memory.copy (i32.const 0x4000)
          (i32.add (i32.const 0x2000) (i32.mul (i32.load (i32.const 120)) (i32.load8_u (i32.const 0x2000))))
          (call $bytes))
        (i32.const 0)";
    let (_, mut instance) = running(&host, &Wat::reducer("n-ary", 0).with("ronde_reduce", chosen));
    for ranks in 1..=4_u8 {
        let operands: Vec<Vec<u8>> =
            (0..ranks).map(|rank| vec![if rank == 0 { ranks - 1 } else { rank }; 9_001]).collect();
        let operands: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
        let mut result = vec![99; 9_001];
        instance.reduce(&span(DType::U8), &operands, &[], &mut result).expect("a reduction");
        assert_eq!(result, vec![ranks - 1; 9_001]);
    }
    assert!(
        instance.reduce(&span(DType::U8), &[&[0; 8][..]; 5], &[], &mut [0; 8]).is_err(),
        "five of at most four ranks"
    );
    assert!(instance.reduce(&span(DType::U8), &[], &[], &mut []).is_err(), "no ranks");
}

/// Two measures: the number of elements, and of calls. Concluding doubles them; reducing gives the second of the last rank.
fn two_pass() -> Wat {
    Wat::reducer("two-pass", 2)
        .with(
            "ronde_measure",
            "(f64.store (i32.const 0x1000) (f64.convert_i32_u (i32.load (i32.const 76))))
             (f64.store (i32.const 0x1008) (f64.add (f64.load (i32.const 0x1008)) (f64.const 1)))
             (i32.const 0)",
        )
        .with(
            "ronde_conclude",
            "(local $at i32)
             (loop $next
               (f64.store (i32.add (i32.const 0x1000) (local.get $at))
                 (f64.mul (f64.const 2) (f64.load (i32.add (i32.const 0x1000) (local.get $at)))))
               (br_if $next (i32.lt_u (local.tee $at (i32.add (local.get $at) (i32.const 8)))
                 (i32.mul (i32.const 16) (i32.load (i32.const 116))))))
             (i32.const 0)",
        )
        .with(
            "ronde_reduce",
            "(memory.fill (i32.const 0x4000)
               (i32.trunc_f64_u (f64.load (i32.add (i32.const 0xff8) (i32.mul (i32.const 16) (i32.load (i32.const 116))))))
               (call $bytes))
             (i32.const 0)",
        )
}

#[test]
fn two_passes() {
    let host = host();
    let (_, mut instance) = running(&host, &two_pass());
    let mut measures = Vec::new();
    for rank in 0..3 {
        let mut own = [0.0; 2];
        instance.measure(&span(DType::U8), &vec![rank; 20_000], &mut own).expect("measures");
        assert_eq!(own, [20_000.0, 3.0], "8,192 bytes fit at once, and each part begins with zeros");
        measures.extend(own);
    }
    instance.conclude(&span(DType::U8), 3, &mut measures).expect("a conclusion");
    assert_eq!(measures, [40_000.0, 6.0, 40_000.0, 6.0, 40_000.0, 6.0]);
    let mut result = vec![0; 100];
    instance.reduce(&span(DType::U8), &[&[0; 100][..]; 3], &measures, &mut result).expect("a reduction");
    assert_eq!(result, [6; 100]);
    assert!(instance.reduce(&span(DType::U8), &[&[0; 100][..]; 3], &measures[1..], &mut result).is_err());
    assert!(instance.conclude(&span(DType::U8), 4, &mut measures).is_err());
    let (_, mut plain) = running(&host, &two_pass().with("ronde_conclude", "none"));
    let mut kept = vec![1.0, 2.0];
    plain.conclude(&span(DType::U8), 1, &mut kept).expect("nothing to conclude");
    assert_eq!(kept, [1.0, 2.0]);
}

#[test]
fn weights_of_inner_products() {
    let host = host();
    let manifest = reducer_manifest("adaptive", 0).replace(", \"uint8\"", "");
    let adaptive = Wat { manifests: vec![manifest], ..Wat::reducer("n-ary", 0) };
    // The weights are the first row of the triangle, the result is the last weight.
    let adaptive = adaptive.with("ronde_conclude", "(i32.const 0)").with(
        "ronde_reduce",
        "(f32.store (i32.const 0x4000) (f32.demote_f64
           (f64.load (i32.add (i32.const 0xff8) (i32.mul (i32.const 8) (i32.load (i32.const 116)))))))
         (i32.const 0)",
    );
    let (_, mut instance) = running(&host, &adaptive);
    let mut weights = vec![4.0, 1.0, 2.5, 9.0, 3.0, 16.0];
    instance.conclude(&span(DType::F32), 3, &mut weights).expect("a conclusion");
    assert_eq!(weights, [4.0, 1.0, 2.5]);
    let mut result = [0; 4];
    instance.reduce(&span(DType::F32), &[&[0; 4][..]; 3], &weights, &mut result).expect("a reduction");
    assert_eq!(floats(&result), [2.5]);
}

#[test]
fn nans_are_canonical() {
    let host = host();
    let sum = "(f32.store (i32.const 0x4000) (f32.add (f32.load (i32.const 0x2000))
          (f32.load (i32.add (i32.const 0x2000) (i32.load (i32.const 120)))))) (i32.const 0)";
    let (_, mut instance) = running(&host, &Wat::reducer("pairwise", 0).with("ronde_reduce", sum));
    for (left, right) in [(0xffc0_1234_u32, 0x3f80_0000_u32), (0x7fa0_0001, 0xffff_ffff), (0x7f80_0000, 0xff80_0000)] {
        let mut value = left.to_le_bytes();
        instance.reduce_pair(&span(DType::F32), &mut value, &right.to_le_bytes()).expect("a sum");
        assert_eq!(u32::from_le_bytes(value), 0x7fc0_0000, "{left:x} + {right:x}");
    }
}
