//! The conformance checks find the problems that they are for.

use ronde_plugin_host::{Parameters, conformance};

use crate::support::{Wat, host};

/// The failed checks of a module, with their texts.
fn failures(module: &Wat) -> Vec<(&'static str, String)> {
    let plugin = host().load(&module.wasm(), None).expect("the module is let in");
    let mut failed = Vec::new();
    let mut count = 0;
    conformance::run(&plugin, &Parameters::defaults(plugin.manifest()), |outcome| {
        count += 1;
        failed.extend(outcome.problem.map(|problem| (outcome.check, problem)));
    });
    assert!(count > 10, "{count} checks");
    failed
}

#[test]
fn a_codec_that_changes_nothing_passes() {
    assert_eq!(failures(&Wat::codec()), []);
}

#[test]
fn an_overflow_that_stays_in_the_state_is_found() {
    // Adds the values to the state and sends the state.
    let accumulating = Wat::codec().with(
        "ronde_encode",
        "(local $at i32)
         (loop $next
           (f32.store (i32.add (i32.const 0x6000) (local.get $at))
             (f32.add (f32.load (i32.add (i32.const 0x6000) (local.get $at)))
               (f32.load (i32.add (i32.const 0x2000) (local.get $at)))))
           (local.set $at (i32.add (local.get $at) (i32.const 4)))
           (br_if $next (i32.lt_u (local.get $at) (call $bytes))))
         (memory.copy (i32.const 0x4000) (i32.const 0x6000) (call $bytes))
         (call $bytes)",
    );
    let failed = failures(&accumulating);
    let recovery = failed.iter().find(|(check, _)| *check == "recovery").expect("it is found");
    assert!(recovery.1.contains("decode to NaN or infinity in round 2, after 2 rounds"), "{}", recovery.1);
}
