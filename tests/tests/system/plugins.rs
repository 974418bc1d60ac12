//! Plugins through the Rust client over real sidecars: a hostile one fails its operation on all ranks, with the plugin
//! and the reason named, and the same sidecars complete the next ordinary all-reduce.

#![forbid(unsafe_code)]

#[path = "../../../sidecar/crates/plugin-host/tests/host/modules.rs"]
mod modules;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use modules::{CODEC, TABLE, Wat, reducer_manifest};
use ronde::blocking::Client;
use ronde::{Error, PluginCall, ReduceOp, ReduceOptions, Tensor, Transfer};
use ronde_tests::cluster::{Line, PATIENCE, Plan, ronde_binary};
use ronde_tests::crew::{Crew, floats};
use serde_json::{Value, json};
use tempfile::TempDir;

const PLACEMENT: [u32; 3] = [0, 0, 1];

/// A folder with modules.
struct Plugins(TempDir);

impl Plugins {
    fn new() -> Result<Self> {
        Ok(Self(tempfile::tempdir()?))
    }

    fn add(&self, name: &str, module: &[u8]) -> Result<()> {
        Ok(fs::write(self.path().join(format!("{name}.wasm")), module)?)
    }

    /// A good codec and a good reducer, which hostile ones may not harm.
    fn with_good_ones() -> Result<Self> {
        let plugins = Self::new()?;
        plugins.add("good-codec", &Wat::codec().named("good-codec").wasm())?;
        // It goes by the name in its manifest.
        plugins.add("build-17", &Wat::reducer("pairwise", 0).named("last").wasm())?;
        Ok(plugins)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn settings(&self) -> Value {
        json!({ "paths": [self.path()] })
    }
}

fn crew(of_sidecars: [Value; 2]) -> Result<Crew> {
    Crew::start(Plan::of(&PLACEMENT).plugins(of_sidecars.into()), Transfer::Arena)
}

fn crew_of(plugins: &Plugins) -> Result<Crew> {
    crew([plugins.settings(), plugins.settings()])
}

fn encoded(client: &Client, call: PluginCall) -> Result<Tensor, Error> {
    let mine = floats(&[500], |i| f32::from(i) + client.rank() as f32)?;
    client.allreduce("coded", &mine, ReduceOptions { op: ReduceOp::Sum, ..ReduceOptions::default() }.encoded_by(call))
}

fn reduced(client: &Client, call: PluginCall) -> Result<Tensor, Error> {
    let mine = floats(&[500], |i| f32::from(i) + client.rank() as f32)?;
    client.allreduce("reduced", &mine, ReduceOptions::reduced_by(call))
}

/// Checks the good ones: the sum of all ranks, and the last rank's values.
fn check_good_ones(crew: &Crew) -> Result<()> {
    crew.all(|client| {
        let (sum, last) = (encoded(client, PluginCall::new("good-codec"))?, reduced(client, PluginCall::new("last"))?);
        let sums: Vec<f32> = (0..500_u16).map(|i| 3.0 * f32::from(i) + 3.0).collect();
        let lasts: Vec<f32> = (0..500_u16).map(|i| f32::from(i) + 2.0).collect();
        ensure!(sum.to_vec::<f32>()? == sums && last.to_vec::<f32>()? == lasts, "{sum:?} {last:?}");
        Ok(())
    })?;
    Ok(())
}

/// Checks that every rank's request fails with these words, and that the sidecars continue.
fn fails(module: &[u8], words: &str) -> Result<()> {
    let plugins = Plugins::with_good_ones()?;
    plugins.add("hostile", module)?;
    let crew = crew_of(&plugins)?;
    for _ in 0..2 {
        crew.check_fails(words, |client| encoded(client, PluginCall::new("hostile")))?;
    }
    check_good_ones(&crew)
}

fn hostile() -> Wat {
    Wat::codec().named("hostile")
}

#[test]
fn an_invalid_module_is_rejected() -> Result<()> {
    let module = hostile().wasm();
    fails(&module[..module.len() - 3], "not a valid plugin module")
}

#[test]
fn a_module_with_imports_is_rejected() -> Result<()> {
    let import = "(import \"wasi_snapshot_preview1\" \"fd_write\" (func (param i32 i32 i32 i32) (result i32)))";
    fails(&Wat { imports: import.to_owned(), ..hostile() }.wasm(), "fd_write")
}

#[test]
fn a_function_of_a_wrong_type_is_rejected() -> Result<()> {
    fails(&hostile().with("ronde_encode", "(param i32) (local.get 0)").wasm(), "(i32) -> i32 as ronde_encode")
}

#[test]
fn another_abi_version_is_rejected() -> Result<()> {
    fails(&hostile().with("ronde_abi", "(i32.const 2)").wasm(), "ABI version 2")
}

#[test]
fn more_memory_than_declared_is_rejected() -> Result<()> {
    let greedy = Wat { memory: "(memory (export \"memory\") 3)".to_owned(), ..hostile() };
    fails(&greedy.wasm(), "196608 bytes of memory in its module")
}

#[test]
fn an_endless_loop_fails_its_operation() -> Result<()> {
    fails(&hostile().with("ronde_encode", "(loop $l (br $l)) (i32.const 0)").wasm(), "took longer than 10 ms")
}

#[test]
fn an_endless_start_fails_its_operation() -> Result<()> {
    fails(&hostile().with("ronde_configure", "(loop $l (br $l)) (i32.const 0)").wasm(), "took longer than 10 ms")
}

#[test]
fn a_trap_fails_its_operation() -> Result<()> {
    fails(&hostile().with("ronde_decode", "(unreachable)").wasm(), "ronde_decode trapped: ")
}

#[test]
fn access_outside_of_its_memory_fails_its_operation() -> Result<()> {
    fails(&hostile().with("ronde_encode", "(i32.load (i32.const -4))").wasm(), "out of bounds")
}

#[test]
fn an_output_beyond_its_bound_fails_its_operation() -> Result<()> {
    fails(&hostile().with("ronde_encode", "(i32.const 0x7fffffff)").wasm(), "for 250 elements, but the bound is 2000")
}

#[test]
fn a_buffer_outside_of_its_memory_fails_its_operation() -> Result<()> {
    let mut wild = hostile();
    wild.table = TABLE;
    fails(&wild.placed(6, 0xffff_ffc0).wasm(), "not within the memory of 131072 bytes")
}

/// A ring begins with another rank for each chunk, but the result must be the last rank's values.
#[test]
fn a_reducer_that_is_not_commutative_gets_pairs_in_rank_order() -> Result<()> {
    const ELEMENTS: usize = 300_000;
    let mut module = Wat::reducer("pairwise", 0).named("later");
    module.manifests[0] = module.manifests[0].replace("\"commutative\": true", "\"commutative\": false");
    let plugins = Plugins::with_good_ones()?;
    plugins.add("later", &module.wasm())?;
    let placement = [0, 1, 2, 2, 3];
    let crew = Crew::start(Plan::of(&placement).plugins(vec![plugins.settings(); 4]), Transfer::Arena)?;
    crew.all(|client| {
        let mine = Tensor::of(&[ELEMENTS as u64], &vec![client.rank() as f32; ELEMENTS])?;
        let later = client.allreduce("later", &mine, ReduceOptions::reduced_by(PluginCall::new("later")))?;
        ensure!(later.to_vec::<f32>()?.iter().all(|value| *value == 4.0), "the order of ranks does not count");
        Ok(())
    })?;
    Ok(())
}

/// Each call meets its deadline, but all of them together take forever: an output of one line, and a millisecond of work
/// for each. The deadline of a call is 10 ms by the clock, in which a busy machine may leave it a part of a core.
#[test]
fn many_slow_calls_fail_their_operation() -> Result<()> {
    let slow = "(local $i i32) (local.set $i (i32.const 1000000))
        (loop $l (br_if $l (local.tee $i (i32.sub (local.get $i) (i32.const 1))))) (i32.const 0)";
    let module = Wat::reducer("pairwise", 0).named("slow").with("ronde_reduce", slow).placed(7, 64).placed(5, 128);
    let plugins = Plugins::with_good_ones()?;
    plugins.add("slow", &module.wasm())?;
    let crew = crew_of(&plugins)?;
    crew.check_fails("took longer than 1000 ms", |client| {
        let mine = Tensor::of(&[4_000_000], &vec![1.0_f32; 4_000_000])?;
        client.allreduce("slow", &mine, ReduceOptions::reduced_by(PluginCall::new("slow")))
    })?;
    check_good_ones(&crew)
}

#[test]
fn a_plugin_that_fails_again_and_again_is_disabled_and_no_other() -> Result<()> {
    let plugins = Plugins::with_good_ones()?;
    plugins.add("hostile", &hostile().with("ronde_encode", "(unreachable)").wasm())?;
    let crew = crew_of(&plugins)?;
    // Both sidecars count their own faults; which of them fails first depends on their speed.
    for _ in 0..12 {
        crew.check_fails("plugin hostile@0.1.0", |client| encoded(client, PluginCall::new("hostile")))?;
    }
    crew.check_fails("it is disabled because it failed 3 times", |client| encoded(client, PluginCall::new("hostile")))?;
    check_good_ones(&crew)
}

#[test]
fn requests_that_a_plugin_does_not_support_are_rejected() -> Result<()> {
    let plugins = Plugins::with_good_ones()?;
    let crew = crew_of(&plugins)?;
    crew.check_fails("parameter ratio of plugin good-codec@0.1.0 is 2.0, but takes a float of 0.0 to 1.0", |client| {
        encoded(client, PluginCall::new("good-codec").with("ratio", 2.0))
    })?;
    crew.check_fails("encodes float32, int64, not float64", |client| {
        let mine = Tensor::of(&[3], &[1.0_f64, 2.0, 3.0])?;
        client.allreduce("t", &mine, ReduceOptions::default().encoded_by(PluginCall::new("good-codec")))
    })?;
    crew.check_fails("there is no plugin strange on this sidecar", |client| {
        encoded(client, PluginCall::new("strange"))
    })?;
    crew.check_fails("good-codec is of version 0.1.0", |client| encoded(client, PluginCall::new("good-codec@0.2.0")))?;
    crew.check_fails("is a codec, not a reduction", |client| reduced(client, PluginCall::new("good-codec")))?;
    crew.check_fails("is a reduction, not a codec", |client| encoded(client, PluginCall::new("last")))?;
    check_good_ones(&crew)
}

#[test]
fn another_file_on_one_sidecar_is_named_with_both() -> Result<()> {
    let (ours, theirs) = (Plugins::with_good_ones()?, Plugins::with_good_ones()?);
    ours.add("twin", &Wat::codec().named("twin").wasm())?;
    theirs.add("twin", &Wat::codec().named("twin").and("(func)").wasm())?;
    let crew = crew([ours.settings(), theirs.settings()])?;
    for words in
        ["Mismatched plugins: the sidecars have different modules by one name", "sidecar 0: twin@0.1.0", "sidecar 1:"]
    {
        crew.check_fails(words, |client| encoded(client, PluginCall::new("twin")))?;
    }
    check_good_ones(&crew)
}

#[test]
fn a_plugin_on_one_sidecar_only_is_an_error() -> Result<()> {
    let (ours, theirs) = (Plugins::with_good_ones()?, Plugins::with_good_ones()?);
    ours.add("rare", &Wat::codec().named("rare").wasm())?;
    let crew = crew([ours.settings(), theirs.settings()])?;
    crew.check_fails("there is no plugin rare on this sidecar", |client| encoded(client, PluginCall::new("rare")))?;
    check_good_ones(&crew)
}

#[test]
fn only_plugins_signed_with_a_trusted_key_are_loaded() -> Result<()> {
    let plugins = Plugins::with_good_ones()?;
    let reducer = Wat { manifests: vec![reducer_manifest("pairwise", 0)], ..Wat::reducer("pairwise", 0) };
    plugins.add("unsigned", &Wat::codec().named("unsigned").wasm())?;
    plugins.add("altered", &reducer.clone().named("altered").wasm())?;
    let key = plugins.path().join("key");
    ronde(&["plugin", "keygen", &key.to_string_lossy()])?;
    for name in ["good-codec", "build-17", "altered"] {
        let file = plugins.path().join(format!("{name}.wasm"));
        ronde(&["plugin", "sign", "--key", &key.to_string_lossy(), &file.to_string_lossy()])?;
    }
    plugins.add("altered", &reducer.named("altered").and("(func)").wasm())?;
    let settings = json!({ "paths": [plugins.path()], "keys": [plugins.path().join("key.pub")] });
    let crew = crew([settings.clone(), settings])?;
    crew.check_fails("the plugin is not signed", |client| encoded(client, PluginCall::new("unsigned")))?;
    crew.check_fails("signature", |client| reduced(client, PluginCall::new("altered")))?;
    check_good_ones(&crew)
}

/// The rank limit of a reducer is checked before data moves: it is never called.
#[test]
fn more_ranks_than_a_reducer_supports_are_rejected() -> Result<()> {
    let plugins = Plugins::with_good_ones()?;
    for (name, shape, measures) in [("narrow", "n-ary", 0), ("narrow-adaptive", "adaptive", 0)] {
        let mut module = Wat::reducer(shape, measures).named(name).with("ronde_conclude", "(i32.const 0)");
        let manifest = module.manifests[0].replace("\"ranks\": 4", "\"ranks\": 2");
        module.manifests = vec![manifest.replace(", \"uint8\"", "")];
        plugins.add(name, &module.wasm())?;
    }
    let crew = crew_of(&plugins)?;
    for name in ["narrow", "narrow-adaptive"] {
        let words = "at most 2 ranks at once, the limit of its manifest, and process set 0 has 3";
        crew.check_fails(words, |client| reduced(client, PluginCall::new(name)))?;
        crew.check_fails(&format!("plugin {name}@0.1.0"), |client| reduced(client, PluginCall::new(name)))?;
    }
    for sidecar in &crew.cluster.sidecars {
        let (_, page) = sidecar.page("/metrics")?;
        ensure!(metric(&page, "ronde_plugin_spans_total")? == 0.0, "{page}");
    }
    check_good_ones(&crew)
}

#[test]
fn calls_and_failures_of_plugins_are_counted() -> Result<()> {
    let plugins = Plugins::with_good_ones()?;
    plugins.add("hostile", &hostile().with("ronde_encode", "(unreachable)").wasm())?;
    let crew = crew_of(&plugins)?;
    crew.check_fails("trapped", |client| encoded(client, PluginCall::new("hostile")))?;
    check_good_ones(&crew)?;
    let (mut faults, mut state) = (0.0, 0.0);
    for sidecar in &crew.cluster.sidecars {
        let (_, page) = sidecar.page("/metrics")?;
        let value = |name| metric(&page, name);
        ensure!(value("ronde_plugin_spans_total")? >= 2.0 && value("ronde_plugin_seconds_total")? > 0.0, "{page}");
        faults += value("ronde_plugin_faults_total")?;
        state += value("ronde_plugin_state_bytes")?;
    }
    // Of 500 elements each keeps four bytes: as a contribution of both sidecars, and as a result of one.
    ensure!(faults >= 1.0 && state == 6_000.0, "{faults} faults, {state} bytes");
    Ok(())
}

/// A plugin may log 64 KiB in a call. A line of the sidecar's log has at most as much of that as a failure text.
#[test]
fn log_lines_of_a_plugin_do_not_flood_the_log_of_its_sidecar() -> Result<()> {
    let flood = "(local $i i32) (memory.fill (i32.const 256) (i32.const 120) (i32.const 1024))
        (loop $l (call $log (i32.const 256) (i32.const 1024))
          (br_if $l (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 64))))
        (i32.const -70)";
    let imports = "(import \"ronde\" \"log\" (func $log (param i32 i32)))".to_owned();
    let plugins = Plugins::with_good_ones()?;
    plugins.add("hostile", &Wat { imports, ..hostile() }.with("ronde_encode", flood).wasm())?;
    let mut crew = crew_of(&plugins)?;
    let failure = crew.all(|client| {
        let failed = encoded(client, PluginCall::new("hostile")).err();
        Ok(failed.context("the plugin refuses everything")?.to_string())
    })?;
    // The others may have received the failure before they called it.
    let culprit = usize::from(failure[0].contains("on sidecar 1"));
    let failed = |line: &Line| line.text.contains("a lane cannot perform an operation").then_some(line.text.len());
    let process = &mut crew.cluster.sidecars[culprit].process;
    let bytes = process.await_log("its failure", PATIENCE, failed)?;
    ensure!((4_096..5_000).contains(&bytes), "a line of {bytes} bytes");
    Ok(())
}

/// A codec that sends in the first value of each span how often it has encoded that: its state is visible.
#[test]
fn a_process_set_that_is_added_again_starts_without_residuals() -> Result<()> {
    let counting = "(i32.store (i32.const 0x6000) (i32.add (i32.load (i32.const 0x6000)) (i32.const 1)))
        (memory.copy (i32.const 0x4000) (i32.const 0x2000) (call $bytes))
        (f32.store (i32.const 0x4000) (f32.convert_i32_u (i32.load (i32.const 0x6000)))) (call $bytes)";
    let plugins = Plugins::new()?;
    plugins.add("counting", &Wat::codec().named("counting").with("ronde_encode", counting).wasm())?;
    let crew = crew_of(&plugins)?;
    let mut ids = Vec::new();
    for _ in 0..2 {
        let of_ranks = crew.all(|client| {
            let set = client.add_process_set(&[0, 2])?;
            for round in 1..=3_u16 {
                let encoded = ReduceOptions { op: ReduceOp::Sum, ..ReduceOptions::default() };
                let encoded = encoded.encoded_by(PluginCall::new("counting"));
                if set.position(client.rank()).is_some() {
                    let sum = client.allreduce(("same name", set.id), &floats(&[500], f32::from)?, encoded)?;
                    ensure!(sum.to_vec::<f32>()?[0] == f32::from(round), "round {round} on {}: {sum:?}", set.id);
                }
            }
            ensure!(client.remove_process_set(set.id)?, "the set was there");
            Ok(set.id)
        })?;
        ids.push(of_ranks[0]);
        for sidecar in &crew.cluster.sidecars {
            let (_, page) = sidecar.page("/metrics")?;
            ensure!(metric(&page, "ronde_plugin_state_bytes")? == 0.0, "{page}");
        }
    }
    ensure!(ids[0] == ids[1], "the id is used again: {ids:?}");
    Ok(())
}

/// A metric without labels.
fn metric(page: &str, name: &str) -> Result<f64> {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Ok(line.with_context(|| format!("{name} is missing in:\n{page}"))?.parse()?)
}

/// Residuals need room; without room the failure names the setting.
#[test]
fn state_beyond_its_limit_fails_its_operation() -> Result<()> {
    let plugins = Plugins::with_good_ones()?;
    let settings = json!({ "paths": [plugins.path()], "state_bytes_max": 1_000 });
    let crew = crew([settings.clone(), settings])?;
    crew.check_fails("--plugin-state-mb", |client| encoded(client, PluginCall::new("good-codec")))
}

fn ronde(arguments: &[&str]) -> Result<()> {
    let output = Command::new(ronde_binary()?).args(arguments).output()?;
    ensure!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The manifest that tests name is that of the codec.
#[test]
fn modules_are_what_they_are_called() {
    assert!(CODEC.contains("test-codec") && hostile().manifests[0].contains("\"hostile\""));
}
