//! The client over gRPC-Web, compiled to WebAssembly and run by Node: it takes part in collectives with ordinary ranks.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use ronde::blocking::Client;
use ronde::{JobName, Options, Rank, ReduceOp, TensorRef};
use ronde_tests::cluster::{Plan, ronde_binary};
use ronde_tests::harness::{DEADLINE, Run};
use ronde_tests::left_out;
use ronde_tests::web::address;
use serde_json::{Value, json};
use wasm_bindgen_cli_support::Bindgen;

use super::SILENCE_MS;

/// The worker's module for Node, in its own directory; `None` where this machine cannot run it.
fn module(test: &str) -> Result<Option<tempfile::TempDir>> {
    if Command::new("node").arg("--version").stdout(Stdio::null()).status().is_err() {
        left_out::note("node", test, "there is no node; on Debian: apt-get install nodejs");
        return Ok(None);
    }
    let folder = ronde_binary()?.parent().and_then(Path::parent).context("below the target directory")?.to_owned();
    let built = folder.join("web-worker/worker.wasm");
    if !built.is_file() {
        let why = format!("there is no {}; `make web-worker` builds it", built.display());
        left_out::note("wasm32", test, &why);
        return Ok(None);
    }
    let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
    Bindgen::new().input_path(built).nodejs(true)?.typescript(false).generate(directory.path())?;
    Ok(Some(directory))
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("web/worker.cjs")
}

/// Returns what the worker printed, by the first word of each line.
fn line<'a>(output: &'a str, word: &str) -> Result<&'a str> {
    let line = output.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    line.with_context(|| format!("no line {word} in {output}"))
}

/// The part of an ordinary rank, of two.
fn ordinary(client: &Client) -> Result<Vec<f32>> {
    let sum = client.allreduce("weights", TensorRef::of(&[3], &[1.0_f32, 10.0, 100.0])?, ReduceOp::Sum)?;
    client.allgather("rows", TensorRef::of(&[1, 2], &[0_i64, 7])?)?;
    client.broadcast("root", TensorRef::of(&[2], &[0.25_f64, 0.5])?, 0)?;
    client.allreduce("large", TensorRef::of(&[1 << 18], &vec![1.0_f32; 1 << 18])?, ReduceOp::Sum)?;
    let refused = client.broadcast("too large", TensorRef::of(&[1 << 19], &vec![0.0_f64; 1 << 19])?, 0);
    let refused = refused.err().context("rank 1 cannot take part")?.to_string();
    ensure!(refused.contains("inline_bytes_max"), "{refused}");
    client.barrier(None)?;
    Ok(sum.to_vec()?)
}

#[test]
fn a_worker_in_node_takes_part_beside_an_ordinary_one() -> Result<()> {
    let Some(module) = module("a_worker_in_node_takes_part_beside_an_ordinary_one")? else { return Ok(()) };
    let cluster = Plan::of(&[0, 1]).web(json!({ "listen": "127.0.0.1:0" })).peer_timeout_ms(SILENCE_MS).sidecars("")?;
    let web = format!("http://{}", address(&cluster.sidecars[1])?);
    let mut node = Command::new("timeout");
    node.args(["--kill-after=5", "120", "node"]).arg(script()).arg(module.path().join("worker.js"));
    node.envs([("RONDE_WEB", &*web), ("RONDE_JOB", "test"), ("RONDE_RANK", "1")]);
    node.env("RONDE_TOKEN_FILE", cluster.sidecars[1].token_file(1)?);
    let node = node.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let client = Client::connect(Options::new(cluster.sidecars[0].socket_dir()?, JobName::new("test")?, Rank(0)));
    let worked = client.map_err(anyhow::Error::from).and_then(|client| ordinary(&client));
    let output = node.wait_with_output()?;
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let worked = worked.with_context(|| format!("the output of node: {stdout}{stderr}"))?;
    ensure!(output.status.success(), "{stdout}{stderr}");
    ensure!(worked == [3.0, 30.0, 300.0], "{worked:?}");
    ensure!(line(&stdout, "rank")? == "1 of 2", "{stdout}");
    ensure!(line(&stdout, "sum")? == "[3.0, 30.0, 300.0]", "{stdout}");
    ensure!(line(&stdout, "rows")? == "[2, 2] [0, 7, 1, 8]", "{stdout}");
    ensure!(line(&stdout, "root")? == "[0.25, 0.5]", "{stdout}");
    ensure!(line(&stdout, "large")? == "262144 Some(3.0)", "{stdout}");
    ensure!(line(&stdout, "refused")?.contains("over inline_bytes_max = 1048576"), "{stdout}");
    let status: Value = serde_json::from_str(line(&stdout, "status")?)?;
    ensure!(status["job"] == "test" && status["sessions"]["live"] == 1, "{status}");
    Ok(())
}

#[test]
fn workers_that_the_launcher_starts_find_the_listener() -> Result<()> {
    let Some(module) = module("workers_that_the_launcher_starts_find_the_listener")? else { return Ok(()) };
    let (script, module) = (script(), module.path().join("worker.js"));
    let worker = ["node".as_ref(), script.as_os_str(), module.as_os_str()];
    let ended = Run::new(2).options(["--web-listen", "127.0.0.1:0"]).start(worker).wait(DEADLINE);
    ensure!(ended.code == Some(0), "{ended}");
    for rank in 0..2 {
        let lines = ended.stdout_of(rank).join("\n");
        ensure!(
            line(&lines, "rank")? == format!("{rank} of 2") && line(&lines, "sum")? == "[3.0, 30.0, 300.0]",
            "{ended}"
        );
    }
    Ok(())
}

#[test]
fn the_launcher_listens_on_the_loopback_only() {
    for (options, words) in [
        (&["--web-listen", "0.0.0.0:0"][..], "nobody could issue them in this job"),
        (&["--web-listen", "127.0.0.1:0", "--web-tls"], "nobody could issue them in this job"),
        (&["--web-origin", "https://lab.example"], "go with --web-listen"),
    ] {
        let ended = Run::new(1).options(options).start(["true"]).wait(DEADLINE);
        assert!(ended.code != Some(0) && ended.stderr.contains(words), "{ended}");
    }
}
