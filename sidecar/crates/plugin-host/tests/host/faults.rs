//! Plugins that misbehave in calls. Each call fails with a reason and the host keeps working; after several faults only
//! that plugin is disabled.

use crate::support::{Wat, host, running, span, works};
use ronde_plugin_host::{Fault, FaultKind, Host, HostConfig, Instance, Parameters, determinism};
use ronde_wire::DType;

/// Encodes 16 numbers.
fn encode(instance: &mut Instance) -> Result<Vec<u8>, Fault> {
    let (mut state, mut encoded) = ([0; 64], Vec::new());
    instance.encode(&span(DType::F32), &[1; 64], &mut state, &mut encoded)?;
    Ok(encoded)
}

/// Encodes twice with this function body. Both calls fail with the same fault, which is returned, and the host keeps
/// working.
fn fails(body: &str) -> Fault {
    let host = host();
    let (_, mut instance) = running(&host, &Wat::codec().with("ronde_encode", body));
    let fault = encode(&mut instance).expect_err("the call fails");
    assert_eq!(encode(&mut instance).expect_err("the next one, too"), fault);
    assert!(fault.to_string().contains("test-codec@0.1.0"), "{fault}");
    works(&host);
    fault
}

fn trap(body: &str) -> String {
    match fails(body).kind {
        FaultKind::Trap { function: "ronde_encode", reason } => reason,
        other => panic!("another fault: {other}"),
    }
}

#[test]
fn traps() {
    assert!(trap("(unreachable)").contains("unreachable"));
    assert!(trap("(i32.load (i32.const -4))").contains("out of bounds"));
    assert!(trap("(i32.load (i32.const 131070))").contains("out of bounds"));
    assert!(trap("(i32.div_u (i32.const 1) (i32.load (i32.const 60)))").contains("divide by zero"));
    assert!(trap("(memory.fill (i32.const 131000) (i32.const 1) (i32.const 1000)) (i32.const 0)").contains("bounds"));
    assert!(trap("(i32.trunc_f32_s (f32.const nan))").contains("conversion"));
}

#[test]
fn endless_recursion() {
    let host = host();
    let module = Wat::codec().with("ronde_encode", "(call $deep (i64.const 1)) (i32.const 0)");
    let deep = "(func $deep (param i64) (call $deep (i64.add (local.get 0) (i64.const 1))) (drop (local.get 0)))";
    let (_, mut instance) = running(&host, &module.and(deep));
    let fault = encode(&mut instance).expect_err("the stack ends");
    assert!(fault.to_string().contains("stack"), "{fault}");
    works(&host);
}

#[test]
fn endless_loops() {
    let deadline = FaultKind::Deadline { function: "ronde_encode", milliseconds: 10 };
    assert_eq!(fails("(loop $l (br $l)) (i32.const 0)").kind, deadline);
    assert_eq!(fails("(loop $l (br_if $l (i32.const 1))) (i32.const 0)").kind, deadline);
}

#[test]
fn lengths_beyond_the_bound() {
    let length = |bytes| FaultKind::Length { function: "ronde_encode", bytes, elements: 16, bound: 128 };
    assert_eq!(fails("(i32.const 129)").kind, length(129));
    assert_eq!(fails("(i32.const 0x7fffffff)").kind, length(0x7fff_ffff));
    // A negative length is an error code.
    assert!(matches!(fails("(i32.const -2)").kind, FaultKind::Code { code: -2, .. }));
    assert!(matches!(fails("(i32.const 0x80000000)").kind, FaultKind::Code { code: i32::MIN, .. }));
}

#[test]
fn bounds_that_are_none() {
    let host = host();
    // A whole block is bounded by 512 bytes, a smaller one by more.
    let module = Wat::codec().with(
        "ronde_bound",
        "(param i32) (select (i32.const 512) (i32.const 600) (i32.ge_u (local.get 0) (i32.const 64)))",
    );
    let (_, mut instance) = running(&host, &module);
    let fault = encode(&mut instance).expect_err("16 elements take more than a block");
    assert!(matches!(fault.kind, FaultKind::Bound { bound: 600, elements: 16, .. }), "{fault}");
    works(&host);
}

#[test]
fn memory_does_not_grow() {
    // It returns the result of memory.grow, which is -1: an error code.
    assert!(matches!(fails("(memory.grow (i32.const 1))").kind, FaultKind::Code { code: -1, .. }));
    assert!(matches!(fails("(memory.grow (i32.const 65535))").kind, FaultKind::Code { code: -1, .. }));
    let host = host();
    let growing = Wat::codec().and("(table $t 1 funcref)");
    let growing = growing.with("ronde_encode", "(table.grow $t (ref.null func) (i32.const 10000000))");
    let (_, mut instance) = running(&host, &growing);
    assert!(matches!(encode(&mut instance).expect_err("a code").kind, FaultKind::Code { code: -1, .. }));
    works(&host);
}

#[test]
fn floods_of_messages() {
    let host = host();
    let log = "(import \"ronde\" \"log\" (func $log (param i32 i32)))";
    let flood = "(local $i i32)
        (loop $l (call $log (i32.const 256) (i32.const 5))
          (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 1000))))
        (call $log (i32.const 256) (i32.const 1025))
        (call $log (i32.const 131071) (i32.const 2))
        (call $log (i32.const -1) (i32.const -1))
        (i32.const -70)";
    let module = Wat { imports: log.to_owned(), ..Wat::codec() };
    let module = module.with("ronde_encode", flood).and("(data (i32.const 256) \"a\\0ab\\ff!\")");
    let (_, mut instance) = running(&host, &module);
    let fault = encode(&mut instance).expect_err("a code");
    assert_eq!(fault.kind, FaultKind::Code { function: "ronde_encode", code: -70 });
    assert_eq!(fault.log.len(), 65);
    assert_eq!(fault.log[0], "a b\u{fffd}!");
    assert_eq!(fault.log[64], "(939 messages were dropped)");
    assert_eq!(encode(&mut instance).expect_err("the same again").log, fault.log);
    works(&host);
}

#[test]
fn a_code_comes_with_what_was_logged() {
    let host = host();
    let module = Wat { imports: "(import \"ronde\" \"log\" (func $log (param i32 i32)))".to_owned(), ..Wat::codec() };
    let body = "(call $log (i32.const 256) (i32.const 8)) (i32.const -5)";
    let (plugin, mut instance) =
        running(&host, &module.with("ronde_encode", body).and("(data (i32.const 256) \"too hot!\")"));
    for _ in 0..5 {
        let text = encode(&mut instance).expect_err("a code").to_string();
        assert!(text.contains("code -5: it does not take these values") && text.contains("too hot!"), "{text}");
    }
    assert_eq!(plugin.disabled(), None, "to fail with a code is within the rules");
}

#[test]
fn a_plugin_is_disabled_after_some_faults() {
    let host = Host::new(HostConfig { disable_after: 2, ..HostConfig::default() }).expect("a host");
    let (plugin, mut instance) = running(&host, &Wat::codec().with("ronde_encode", "(unreachable)"));
    let mut other = plugin.instance(&Parameters::defaults(plugin.manifest())).expect("another instance");
    assert!(matches!(encode(&mut instance).expect_err("a trap").kind, FaultKind::Trap { .. }));
    assert_eq!(plugin.disabled(), None);
    assert!(matches!(encode(&mut instance).expect_err("a trap").kind, FaultKind::Trap { .. }));
    let reason = plugin.disabled().expect("it is disabled");
    assert!(reason.contains("failed 2 times") && reason.contains("unreachable"), "{reason}");
    for instance in [&mut instance, &mut other] {
        let fault = encode(instance).expect_err("it does not run");
        assert!(matches!(fault.kind, FaultKind::Disabled { faults: 2, .. }), "{fault}");
    }
    let fault = plugin.instance(&Parameters::defaults(plugin.manifest())).expect_err("it does not start");
    assert!(fault.to_string().contains("disabled"), "{fault}");
    works(&host);
}

#[test]
fn a_fresh_module_follows_a_fault() {
    let host = host();
    // Traps in the second call, which it detects by a global variable.
    let body = "(if (global.get $used) (then (unreachable))) (global.set $used (i32.const 1)) (i32.const 0)";
    let (_, mut instance) =
        running(&host, &Wat::codec().with("ronde_encode", body).and("(global $used (mut i32) (i32.const 0))"));
    for _ in 0..2 {
        assert_eq!(encode(&mut instance), Ok(Vec::new()));
        assert!(matches!(encode(&mut instance).expect_err("a trap").kind, FaultKind::Trap { .. }));
    }
}

#[test]
fn calls_that_a_plugin_does_not_take() {
    let host = host();
    let (plugin, mut codec) = running(&host, &Wat::codec());
    let mut refused = |dtype: DType, values: usize, state: usize, words: &[&str]| {
        let fault = codec.encode(&span(dtype), &vec![0; values], &mut vec![0; state], &mut Vec::new());
        let text = fault.expect_err("the call is refused").to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    refused(DType::F64, 64, 32, &["encodes float32, int64, not float64"]);
    refused(DType::F32, 63, 64, &["63 bytes", "whole number"]);
    refused(DType::F32, 64, 60, &["64 bytes of state", "not 60"]);
    refused(DType::F32, 4 * 1_025, 4 * 1_025, &["1025 elements", "block of 1024"]);
    let outside = ronde_plugin_host::Span { offset: (1 << 20) - 8, ..span(DType::F32) };
    assert!(codec.encode(&outside, &[0; 64], &mut [0; 64], &mut Vec::new()).is_err());
    assert!(codec.decode(&span(DType::F32), &[0; 129], &mut [0; 64]).is_err(), "more bytes than 16 elements have");
    assert!(codec.reduce_pair(&span(DType::F32), &mut [0; 64], &[0; 64]).is_err(), "it is no reducer");
    assert_eq!(encode(&mut codec), Ok(vec![1; 64]));
    assert_eq!(plugin.disabled(), None, "none of this was the plugin's fault");
    let (_, mut reducer) = running(&host, &Wat::reducer("pairwise", 0));
    assert!(reducer.codec_facts(DType::F32).is_err(), "it is no codec");
    assert!(reducer.reduce_pair(&span(DType::F64), &mut [0; 64], &[0; 64]).is_err());
    assert!(reducer.reduce_pair(&span(DType::F32), &mut [0; 64], &[0; 60]).is_err());
    assert!(reducer.reduce(&span(DType::F32), &[&[0; 64][..]; 3], &[], &mut [0; 64]).is_err(), "three of a pair");
    assert!(reducer.measure(&span(DType::F32), &[0; 64], &mut [0.0]).is_err());
    works(&host);
}

/// All threads that work on an operation get the same fault.
#[test]
fn an_operation_that_fails_is_one_fault() {
    let host = Host::new(HostConfig { disable_after: 2, ..HostConfig::default() }).expect("a host");
    let (plugin, mut one) = running(&host, &Wat::codec().with("ronde_encode", "(unreachable)"));
    let mut other = plugin.instance_for((1, 7), one.parameters()).expect("another instance");
    one.work_on((1, 7));
    for _ in 0..2 {
        for instance in [&mut one, &mut other] {
            assert!(matches!(encode(instance).expect_err("a trap").kind, FaultKind::Trap { .. }));
        }
    }
    assert_eq!(plugin.disabled(), None, "one operation has failed");
    other.work_on((1, 8));
    assert!(matches!(encode(&mut other).expect_err("a trap").kind, FaultKind::Trap { .. }));
    let reason = plugin.disabled().expect("two have");
    assert!(reason.contains("failed 2 times"), "{reason}");
}

/// This test runs itself with address space for a few instances, each of which reserves more than 4 GiB.
#[test]
fn a_host_that_lacks_memory_is_to_blame_itself() {
    if std::env::var_os(SHORT_OF_MEMORY).is_some() {
        return lacks_memory();
    }
    let program = std::env::current_exe().expect("this program");
    let name = "faults::a_host_that_lacks_memory_is_to_blame_itself";
    let mut shell = std::process::Command::new("sh");
    let shell = shell.args(["-c", "ulimit -v 30000000; exec \"$0\" --exact \"$1\" --nocapture"]);
    let output = shell.arg(program).arg(name).env(SHORT_OF_MEMORY, "1").output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn lacks_memory() {
    let host = host();
    let (plugin, first) = running(&host, &Wat::codec());
    let mut held = vec![first];
    let start = || plugin.instance(&Parameters::defaults(plugin.manifest()));
    let fault = (0..100).find_map(|_| start().map(|instance| held.push(instance)).err()).expect("there is a limit");
    assert!(matches!(fault.kind, FaultKind::Host(_)), "{fault}");
    assert!(
        fault.to_string().contains("plugin test-codec@0.1.0: it could not be started, because this host"),
        "{fault}"
    );
    for _ in 0..10 {
        start().expect_err("there is no more memory now");
    }
    assert_eq!(plugin.disabled(), None, "it has done nothing wrong");
    drop(held);
    works(&host);
    encode(&mut start().expect("there is memory again")).expect("it encodes");
}

/// Set for the run of the test within itself.
const SHORT_OF_MEMORY: &str = "RONDE_TEST_SHORT_OF_MEMORY";

#[test]
fn parameters_of_another_plugin() {
    let host = host();
    let (plugin, _) = running(&host, &Wat::codec());
    let (other, _) = running(&host, &Wat::reducer("n-ary", 0));
    assert!(plugin.instance(&Parameters::defaults(other.manifest())).is_err());
}

#[test]
fn different_output_on_equal_input_is_found() {
    let host = host();
    let check = |module: &Wat| {
        let (plugin, instance) = running(&host, module);
        determinism::check(&plugin, instance.parameters())
    };
    assert_eq!(check(&Wat::codec()), Ok(()));
    assert_eq!(check(&Wat::reducer("pairwise", 0)), Ok(()));
    assert_eq!(check(&Wat::reducer("n-ary", 0)), Ok(()));
    let counting = "(global.set $n (i32.add (global.get $n) (i32.const 1)))
        (i32.store (i32.const 0x4000) (global.get $n)) (i32.const 4)";
    let counter = "(global $n (mut i32) (i32.const 0))";
    let found = check(&Wat::codec().with("ronde_encode", counting).and(counter)).expect_err("it counts");
    assert!(found.to_string().contains("gives other bytes after other calls"), "{found}");
    // Only results are encoded like this: the stage is the third number of the call.
    let of_results = format!("(if (result i32) (i32.load (i32.const 72)) (then {counting}) (else (i32.const 0)))");
    let found = check(&Wat::codec().with("ronde_encode", &of_results).and(counter)).expect_err("it counts results");
    assert!(found.to_string().contains("encoding a result of 3 elements of float32 gives other bytes"), "{found}");
    // Unwritten bytes are what an earlier call left.
    let found = check(&Wat::codec().with("ronde_decode", "(i32.const 0)")).expect_err("it writes nothing");
    assert!(found.to_string().contains("decoding"), "{found}");
    let found = check(&Wat::reducer("n-ary", 0).with("ronde_reduce", "(unreachable)")).expect_err("it traps");
    assert!(found.to_string().contains("reducing 1 elements of float32: plugin test-reducer@0.1.0"), "{found}");
    works(&host);
}

#[test]
fn plugins_outlive_their_host() {
    let host = host();
    let (_, mut instance) = running(&host, &Wat::codec());
    let (_, mut looping) = running(&host, &Wat::codec().with("ronde_encode", "(loop $l (br $l)) (i32.const 0)"));
    drop(host);
    assert_eq!(encode(&mut instance), Ok(vec![1; 64]));
    assert!(matches!(encode(&mut looping).expect_err("it ends").kind, FaultKind::Deadline { .. }));
}
