//! Rejected modules. Each is a real one, and the same host accepts valid ones afterwards.

use crate::support::{CODEC, Wat, host, reducer_manifest, refused, works};
use ronde_plugin_host::{FaultKind, Host, HostConfig, Limits, LoadError};

/// Loading fails with these words, and the host keeps working.
fn load_fails_with(module: &[u8], words: &[&str]) {
    let host = host();
    let text = refused(&host, module).to_string();
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
    works(&host);
}

#[test]
fn what_is_no_module() {
    load_fails_with(b"", &["not a valid plugin module"]);
    load_fails_with(b"MZ\x90\x00 a program of another kind", &["not a valid plugin module", "magic"]);
    let wasm = Wat::codec().wasm();
    load_fails_with(&wasm[..wasm.len() - 3], &["not a valid plugin module"]);
    load_fails_with(&wat::parse_str("(component)").expect("a component"), &["component", "core module"]);
    let large = vec![0; (8 << 20) + 1];
    load_fails_with(&large, &["8388609 bytes", "the whole file"]);
}

#[test]
fn what_does_not_validate() {
    // An f32 where an i32 is expected.
    let mut wasm = Wat::codec().with("ronde_configure", "(i32.const 77777)").wasm();
    let place = wasm.windows(4).position(|window| window == [0x41, 0xd1, 0xdf, 0x04]).expect("the constant's code");
    wasm[place] = 0x43;
    load_fails_with(&wasm, &["not a valid plugin module", "at byte"]);
}

#[test]
fn what_uses_more_than_plain_webassembly() {
    let threads = Wat { memory: "(memory (export \"memory\") 1 2 shared)".to_owned(), ..Wat::codec() };
    load_fails_with(&threads.wasm(), &["threads"]);
    let wide = Wat { memory: "(memory (export \"memory\") i64 1)".to_owned(), ..Wat::codec() };
    load_fails_with(&wide.wasm(), &["memory64"]);
    load_fails_with(&Wat::codec().and("(memory 1)").wasm(), &["multiple memories"]);
    let relaxed = "(func (param v128) (result v128) (i32x4.relaxed_trunc_f32x4_s (local.get 0)))";
    load_fails_with(&Wat::codec().and(relaxed).wasm(), &["relaxed SIMD"]);
    load_fails_with(&Wat::codec().and("(tag $t) (func (throw $t))").wasm(), &["not a valid plugin module"]);
    load_fails_with(&Wat::codec().and("(type (struct))").wasm(), &["not a valid plugin module"]);
    load_fails_with(&Wat::codec().and("(func $f (return_call $f))").wasm(), &["tail calls"]);
}

#[test]
fn what_imports_something() {
    let importing = |imports: &str| Wat { imports: imports.to_owned(), ..Wat::codec() }.wasm();
    let file = "(import \"wasi_snapshot_preview1\" \"fd_write\" (func (param i32 i32 i32 i32) (result i32)))";
    load_fails_with(&importing(file), &["wasi_snapshot_preview1", "fd_write"]);
    load_fails_with(&importing("(import \"ronde\" \"log\" (func (param i32)))"), &["\"ronde\" \"log\" of (i32, i32)"]);
    load_fails_with(&importing("(import \"ronde\" \"log\" (global i32))"), &["imports"]);
    load_fails_with(&importing("(import \"ronde\" \"clock\" (func (result i64)))"), &["clock"]);
    load_fails_with(&importing("(import \"env\" \"table\" (table 1 funcref))"), &["env"]);
    let memory = Wat { memory: String::new(), ..Wat::codec() };
    let memory = Wat { imports: "(import \"env\" \"memory\" (memory 2))".to_owned(), ..memory };
    load_fails_with(&memory.and("(export \"memory\" (memory 0))").wasm(), &["imports \"env\" \"memory\""]);
}

#[test]
fn exports_of_another_type() {
    load_fails_with(&Wat::codec().with("ronde_encode", "none").wasm(), &["nothing as ronde_encode", "() -> i32"]);
    load_fails_with(
        &Wat::codec().with("ronde_encode", "(param i32) (local.get 0)").wasm(),
        &["(i32) -> i32 as ronde_encode"],
    );
    load_fails_with(
        &Wat::codec().with("ronde_bound", "(i32.const 8)").wasm(),
        &["ronde_bound", "(i32) -> i32 by that name"],
    );
    load_fails_with(
        &Wat::codec().with("ronde_decode", "(result i64) (i64.const 0)").wasm(),
        &["() -> i64 as ronde_decode"],
    );
    load_fails_with(&Wat::reducer("two-pass", 2).wasm(), &["ronde_measure"]);
    let measuring = Wat::reducer("two-pass", 2).with("ronde_measure", "(i32.const 0)");
    load_fails_with(
        &measuring.with("ronde_conclude", "(result f32) (f32.const 0)").wasm(),
        &["() -> f32 as ronde_conclude"],
    );
    let adaptive = reducer_manifest("adaptive", 0).replace(", \"uint8\"", "");
    load_fails_with(
        &Wat { manifests: vec![adaptive], ..Wat::reducer("n-ary", 0) }.wasm(),
        &["nothing as ronde_conclude"],
    );
    let global = Wat::codec().with("ronde_place", "none").and("(global (export \"ronde_place\") i32 (i32.const 0))");
    load_fails_with(&global.wasm(), &["a global as ronde_place"]);
    let hidden = Wat { memory: "(memory 2)".to_owned(), ..Wat::codec() };
    load_fails_with(&hidden.wasm(), &["nothing as memory"]);
}

#[test]
fn another_abi_version() {
    load_fails_with(&Wat::codec().with("ronde_abi", "(i32.const 2)").wasm(), &["ABI version 2", "version 1"]);
    load_fails_with(&Wat::codec().placed(0, 3).wasm(), &["table", "ABI version 3"]);
    let later = CODEC.replace("\"abi\": 1", "\"abi\": 9, \"colour\": \"blue\"");
    load_fails_with(&Wat { manifests: vec![later], ..Wat::codec() }.wasm(), &["ABI version 9", "matching SDK"]);
}

#[test]
fn none_two_and_bad_manifests() {
    load_fails_with(&Wat { manifests: Vec::new(), ..Wat::codec() }.wasm(), &["0 sections named ronde.manifest"]);
    load_fails_with(
        &Wat { manifests: vec![CODEC.to_owned(); 2], ..Wat::codec() }.wasm(),
        &["2 sections named ronde.manifest"],
    );
    load_fails_with(
        &Wat { manifests: vec!["{".to_owned()], ..Wat::codec() }.wasm(),
        &["not valid JSON with the fields of a manifest"],
    );
    let long = format!("{}{}", CODEC, " ".repeat(16 << 10));
    load_fails_with(&Wat { manifests: vec![long], ..Wat::codec() }.wasm(), &["may have 16384"]);
}

#[test]
fn buffers_that_do_not_lie_as_they_have_to() {
    load_fails_with(&Wat::codec().placed(4, 0x2004).wasm(), &["the input", "multiple of 64"]);
    load_fails_with(&Wat::codec().placed(1, 65).wasm(), &["the call", "multiple of 64"]);
    load_fails_with(&Wat::codec().placed(6, 0x3fc0).wasm(), &["the input and the output overlap"]);
    load_fails_with(&Wat::codec().placed(1, 0x2000).wasm(), &["overlap"]);
    // A result may replace the left operand, but must not be longer, nor overlap other operands.
    load_fails_with(&Wat::reducer("pairwise", 0).placed(6, 0x2000).wasm(), &["the input and the output overlap"]);
    load_fails_with(&Wat::reducer("pairwise", 0).placed(6, 0x2040).placed(7, 0x1000).wasm(), &["overlap"]);
    load_fails_with(
        &Wat::reducer("n-ary", 0).placed(6, 0x2000).placed(7, 0x1000).wasm(),
        &["the output and the input overlap"],
    );
    load_fails_with(&Wat::codec().placed(6, 0x2000).placed(7, 0x1000).wasm(), &["the output and the input overlap"]);
    load_fails_with(&Wat::codec().placed(2, 0).wasm(), &["overlap"]);
    load_fails_with(&Wat::codec().placed(6, 0x1_ffc0).wasm(), &["the output", "not within the memory of 131072"]);
    load_fails_with(&Wat::codec().placed(6, 0xffff_ffc0).wasm(), &["the output", "not within"]);
    load_fails_with(&Wat::codec().placed(5, 0xffff_ffff).wasm(), &["the input", "not within"]);
    load_fails_with(&Wat::codec().placed(14, 1).wasm(), &["reserved"]);
    load_fails_with(&Wat::codec().placed(3, 24).wasm(), &["the block of parameters has 24 bytes", "at least 32"]);
    load_fails_with(&Wat::codec().placed(9, 0).wasm(), &["the state has 0 bytes"]);
    load_fails_with(&Wat::codec().placed(7, 0).wasm(), &["the output has 0 bytes"]);
    load_fails_with(&Wat::codec().with("ronde_place", "(i32.const 4)").wasm(), &["the table", "multiple of 64"]);
    load_fails_with(&Wat::codec().with("ronde_place", "(i32.const -64)").wasm(), &["the table", "not within"]);
    let nary = Wat::reducer("n-ary", 0).placed(5, 3 * 64);
    load_fails_with(&nary.wasm(), &["the input has 192 bytes", "at least 256"]);
    let two_pass = Wat::reducer("two-pass", 64).with("ronde_measure", "(i32.const 0)").placed(11, 2_040);
    load_fails_with(&two_pass.wasm(), &["the block of measures has 2040 bytes", "at least 2048"]);
}

#[test]
fn bounds_for_which_there_is_no_block() {
    let bound = |body: &str| Wat::codec().with("ronde_bound", &format!("(param i32) {body}")).wasm();
    load_fails_with(&bound("(i32.const 8193)"), &["no block of 64 elements"]);
    load_fails_with(&bound("(i32.const -1)"), &["ronde_bound returned -1 bytes", "negative"]);
    load_fails_with(&bound("(unreachable)"), &["ronde_bound trapped"]);
    load_fails_with(&Wat::codec().placed(5, 64).wasm(), &["no block of 64 elements of 4 bytes"]);
}

#[test]
fn more_than_is_granted() {
    let asks = |what: &str, value: &str| {
        let manifest = CODEC.replace("\"memory_bytes\": 131072, \"call_ms\": 10", &format!("\"{what}\": {value}"));
        Wat { manifests: vec![manifest], ..Wat::codec() }.wasm()
    };
    load_fails_with(&asks("memory_bytes", "67108865"), &["limits.memory_bytes is 67108865", "1 to 67108864"]);
    load_fails_with(&asks("call_ms", "101"), &["limits.call_ms is 101"]);
    load_fails_with(&asks("memory_bytes", "65536"), &["131072 bytes of memory in its module", "65536"]);
    let limits = Limits { memory_bytes: 1 << 16, call_ms: 5, ranks: 2 };
    let host = Host::new(HostConfig { limits, ..HostConfig::default() }).expect("a small host");
    assert!(matches!(refused(&host, &Wat::codec().wasm()), LoadError::Wants { what: "bytes of memory", .. }));
    let excess = Limits { call_ms: 101, ..Limits::MAX };
    assert!(Host::new(HostConfig { limits: excess, ..HostConfig::default() }).is_err());
}

#[test]
fn modules_that_would_take_long_to_compile() {
    let function = format!("(func {})", "(drop (i32.const 1000000))".repeat(40_000));
    load_fails_with(&Wat::codec().and(&function).wasm(), &["one function", "131072"]);
    let functions = format!("(func {})", "(drop (i32.const 1000000))".repeat(20_000)).repeat(11);
    load_fails_with(&Wat::codec().and(&functions).wasm(), &["all functions"]);
    load_fails_with(&Wat::codec().and(&format!("(func (local {}))", "i32 ".repeat(5_000))).wasm(), &["locals"]);
    load_fails_with(&Wat::codec().and("(table 100000000 funcref)").wasm(), &["elements of a table"]);
    load_fails_with(&Wat::codec().and(&"(table 16000 funcref)".repeat(5)).wasm(), &["does not start"]);
}

#[test]
fn modules_that_do_not_start() {
    let starting = |body: &str| Wat::codec().and(&format!("(func $start {body}) (start $start)")).wasm();
    load_fails_with(&starting("(loop $l (br $l))"), &["does not start", "longer than 10 ms"]);
    load_fails_with(&starting("(unreachable)"), &["does not start", "unreachable"]);
    load_fails_with(
        &Wat::codec().and("(data (i32.const 131071) \"too far\")").wasm(),
        &["does not start", "out of bounds"],
    );
    load_fails_with(
        &Wat::codec().with("ronde_configure", "(i32.const -1)").wasm(),
        &["ronde_configure", "do not go together"],
    );
    load_fails_with(&Wat::codec().with("ronde_configure", "(i32.const 4)").wasm(), &["ronde_configure returned 4"]);
    let host = host();
    let looping = Wat::codec().with("ronde_configure", "(loop $l (br $l)) (i32.const 0)").wasm();
    let error = refused(&host, &looping);
    assert!(matches!(error, LoadError::Start { kind: FaultKind::Deadline { .. }, .. }), "{error}");
    works(&host);
}

#[test]
fn an_adaptive_reducer_of_integers() {
    load_fails_with(&Wat::reducer("adaptive", 0).wasm(), &["inner products"]);
    let other = reducer_manifest("spiral", 0);
    load_fails_with(
        &Wat { manifests: vec![other], ..Wat::codec() }.wasm(),
        &["\"spiral\"", "pairwise, n-ary, two-pass"],
    );
}
