//! The search for better settings with real processes: `ronde run --autotune`, `ronde tune`, and profiles.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use ronde::blocking::Client;
use ronde::{DType, Operation, ReduceOp, TensorRef, Transfer};
use ronde_tests::cluster::Plan;
use ronde_tests::crew::Crew;
use ronde_tests::harness::{DEADLINE, Run, ronde_binary};
use ronde_tests::script::Fill;
use serde_json::{Value, json};

/// The elements of the tensors of a step: some take several chunks of 4 KiB, most share a bucket with others.
const ELEMENTS: [u64; 9] = [70_001, 5_003, 9, 2_048, 12_289, 1, 40_000, 3_001, 1_500];

/// Steps of tensors whose sums depend on the order of addition, all of a step in flight at once; returns the results of all
/// steps.
fn steps(client: &Client) -> Result<Vec<Vec<u8>>> {
    let mut results = Vec::new();
    for step in 0..70 {
        let mut handles = Vec::new();
        for (number, elements) in (0_u64..).zip(ELEMENTS) {
            let fill = Fill::Rough { seed: 11 + step + 1_000 * number };
            let bytes = fill.bytes(client.rank(), usize::try_from(elements * 4)?);
            let shape = [elements];
            let tensor = TensorRef { dtype: DType::F32, shape: &shape, bytes: &bytes };
            let name = format!("layer.{number}");
            handles.push(client.submit_from(&Operation::allreduce(name.as_str(), tensor, ReduceOp::Average))?);
        }
        for handle in handles {
            results.push(handle.wait()?.tensor.context("a sum")?.bytes);
        }
    }
    Ok(results)
}

/// The results, which are the same on all ranks, and the status of the coordinator.
fn results_on(plan: Plan<'_>) -> Result<(Vec<Vec<u8>>, Value)> {
    let crew = Crew::start(plan, Transfer::Arena)?;
    let mut all = crew.all(steps)?;
    let first = all.remove(0);
    ensure!(all.iter().all(|other| *other == first), "ranks differ");
    let (_, status) = crew.cluster.sidecars[0].page("/status")?;
    let status: Value = serde_json::from_str(&status)?;
    let fused = status["stats"]["fused_tensors"].as_u64().context("a counter")?;
    ensure!(fused > 0, "no tensor shares a bucket: {}", status["stats"]);
    Ok((first, status))
}

#[test]
fn results_have_the_same_bits_with_and_without_a_search() -> Result<()> {
    let placement = [0, 0, 1, 1];
    let (plain, status) = results_on(Plan::of(&placement))?;
    ensure!(status["autotune"].is_null(), "{status}");
    let search = json!({"autotune": true, "warmup_samples": 0, "steps_per_sample": 1, "samples_max": 6});
    let (tuned, status) = results_on(Plan::of(&placement).autotune(search, 4_096))?;
    ensure!(status["autotune"]["stage"] == "finished", "the search is not over: {}", status["autotune"]);
    ensure!(status["autotune"]["samples"] == 6, "{}", status["autotune"]);
    ensure!(tuned == plain, "a search changes bits");
    Ok(())
}

/// A file in a directory, as text of an argument.
fn file(directory: &Path, name: &str) -> String {
    directory.join(name).to_str().expect("a temporary path is text").to_owned()
}

/// From 1 MB and chunks of 4 KiB. Times on a busy machine differ, so that only a loss would be a failure.
#[test]
fn tune_finds_settings_that_are_not_slower_and_a_job_uses_its_profile() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let profile = file(directory.path(), "found.toml");
    let ended = Run::tune(2)
        .sidecars(2)
        .options(["--transports", "tls", "--samples", "10", "--warmup-samples", "0", "--steps-per-sample", "1"])
        .options(["--run-option=--fusion-threshold-mb=1", "--run-option=--chunk-bytes=4096"])
        .options(["--tensors", "16384x40,1048576x4", "--output", &profile])
        .start(Vec::<String>::new())
        .wait(DEADLINE);
    ensure!(ended.code == Some(0), "{ended}");
    let text = fs::read_to_string(&profile).with_context(|| ended.to_string())?;
    for part in ["[tuning]", "transport = \"tls\"", "[cost]", "alpha-us = ", "[measured]", "samples = 10"] {
        ensure!(text.contains(part), "{part} is missing: {text}");
    }
    let gain = text.lines().find_map(|line| line.strip_prefix("gain = ")).context("a gain")?;
    ensure!(gain.parse::<f64>()? > 0.9, "the settings are slower than the start: {text}");
    let log = fs::read_to_string(directory.path().join("found.tls.csv"))?;
    ensure!(log.lines().count() == 12, "a head, ten samples and the outcome: {log}");
    ensure!(log.lines().nth(1).is_some_and(|first| first.contains(",1048576,4096,")), "the start comes first: {log}");
    let picture = fs::read_to_string(directory.path().join("found.svg"))?;
    ensure!(picture.matches("<circle").count() == 10, "{picture}");

    let ronde = ronde_binary();
    let report = file(directory.path(), "report.json");
    let ended = Run::new(2)
        .sidecars(2)
        .options(["--tuning", &profile, "--measure-cost", "--report", &report])
        .start([ronde.to_str().context("a path of text")?, "tune-worker"])
        .wait(DEADLINE);
    ensure!(ended.code == Some(0), "{ended}");
    let report = fs::read_to_string(report)?;
    ensure!(report.contains("beta_us_per_byte"), "the cost model is not in the report: {report}");
    Ok(())
}

/// An admin page of the sidecar with this socket directory.
fn page(directory: &Path, path: &str) -> Result<String> {
    let address: SocketAddr = fs::read_to_string(directory.join("admin"))?.trim().parse()?;
    let mut stream = TcpStream::connect_timeout(&address, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: sidecar\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("an answer of HTTP has a head")?;
    Ok(body.to_owned())
}

/// The latency of a round in the cost model of this sidecar in seconds, and the algorithm that it has chosen for 1 MiB.
fn chosen_by(directory: &Path) -> Result<(f64, String)> {
    let status: Value = serde_json::from_str(&page(directory, "/status")?)?;
    let mut reasons = status["selections"].as_array().context("reasons")?.iter().filter_map(Value::as_str);
    let is_of_tensor = |reason: &&str| reason.starts_with("all-reduce of 1024 KiB over 4 members: ");
    let reason = reasons.find(is_of_tensor).context("nothing was chosen yet")?;
    let (_, choice) = reason.split_once("; chosen ").context("a reason ends with the choice")?;
    let algorithm = choice.split(',').next().context("an algorithm")?;
    let metrics = page(directory, "/metrics")?;
    let round = metrics.lines().find_map(|line| line.strip_prefix("ronde_cost_round_seconds ")).context("a metric")?;
    Ok((round.parse()?, algorithm.to_owned()))
}

/// Without a profile alpha is 60 us, and the algorithm for this tensor is halving-doubling.
#[test]
fn the_cost_model_of_a_profile_selects_the_algorithms_of_its_job() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let profile = file(directory.path(), "known.toml");
    let ronde = ronde_binary();
    let ronde = ronde.to_str().context("a path of text")?;
    for (alpha_us, expected) in [(1.0, "ring"), (10_000.0, "recursive-doubling")] {
        let costs = "beta-us-per-byte = 0.001\ngamma-us-per-byte = 0.0001\n";
        fs::write(&profile, format!("[cost]\nalpha-us = {alpha_us:?}\n{costs}"))?;
        let worker = [ronde, "tune-worker", "--steps", "1000000", "--tensors", "1048576"];
        let mut job = Run::new(4).sidecars(4).options(["--tuning", &profile]).start(worker);
        let (round, algorithm) = job.wait_for("the choice of an algorithm", DEADLINE, |job| {
            job.runtime_files().iter().find_map(|directory| chosen_by(directory).ok())
        });
        ensure!((round / (alpha_us * 1e-6) - 1.0).abs() < 1e-6, "alpha is {alpha_us} us, but a round has {round} s");
        ensure!(algorithm == expected, "{algorithm} was chosen with {alpha_us} us");
    }
    Ok(())
}

#[test]
fn a_job_that_measures_first_runs_with_what_was_measured() {
    let worker = r#"echo ran; exec "$0" status --json"#;
    let ronde = ronde_binary();
    let worker = ["sh", "-c", worker, ronde.to_str().expect("a path of text")];
    let ended = Run::new(2).sidecars(2).options(["--calibrate", "--verbose"]).start(worker).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    for rank in [0, 1] {
        let lines = ended.stdout_of(rank);
        assert_eq!((lines.len(), lines.first()), (2, Some(&"ran")), "{ended}");
        let status: Value = serde_json::from_str(lines[1]).expect("a status page");
        let costs = ["alpha_us", "beta_us_per_byte", "gamma_us_per_byte"].map(|name| status["cost"][name].as_f64());
        let assumed = [60.0, 1e-3, 1e-4];
        let is_measured = |(cost, assumed): (&Option<f64>, f64)| cost.is_some_and(|cost| cost > 0.0 && cost != assumed);
        assert!(costs.iter().zip(assumed).all(is_measured), "{costs:?} is not measured: {ended}");
    }
    let alone = Run::new(1).options(["--calibrate"]).start(["true"]).wait(DEADLINE);
    assert_eq!(alone.code, Some(69), "{alone}");
    assert!(alone.stderr.contains("nothing was measured: the job has one sidecar"), "{alone}");
}

#[test]
fn a_coordinator_that_dies_while_it_searches_ends_the_job_with_its_name() {
    let ronde = ronde_binary();
    let worker = [ronde.to_str().expect("a path of text"), "tune-worker", "--steps", "1000000", "--tensors", "65536"];
    let options = ["--autotune", "--autotune-steps-per-sample", "1000", "--log-level", "info"];
    let mut job = Run::new(2).sidecars(2).options(options).start(worker);
    let sidecar = job.sidecar(0, DEADLINE);
    job.worker(0, DEADLINE);
    job.worker(1, DEADLINE);
    sidecar.signal(Signal::SIGKILL);
    let ended = job.wait(DEADLINE);
    assert!(ended.code.is_some_and(|code| code != 0), "{ended}");
    assert!(ended.stderr.contains("sidecar 0"), "{ended}");
}

#[test]
fn mistakes_are_refused_before_anything_starts() {
    let directory = tempfile::tempdir().expect("a directory can be made");
    let profile = file(directory.path(), "bad.toml");
    fs::write(&profile, "[tuning]\nchunk_size = 4096\n").expect("ours");
    for (options, reason) in [
        (["--autotune-bayes-opt-max-samples", "0"], "it must be a whole number from 1 to 256"),
        (["--autotune-gaussian-process-noise=-1", "--verbose"], "it must be from 0 to 1"),
        (["--chunk-bytes", "5000"], "a chunk of 5000 bytes is not possible"),
        (["--tuning", &profile], "[tuning] has no key chunk_size; is chunk-bytes meant?"),
        (["--tuning", "/no/such/profile.toml"], "cannot read the profile /no/such/profile.toml"),
    ] {
        let ended = Run::new(1).options(options).start(["true"]).wait(DEADLINE);
        assert_eq!(ended.code, Some(64), "{options:?}: {ended}");
        assert!(ended.stderr.contains(reason), "{options:?}: {ended}");
    }
    let options = ["--autotune", "--autotune-log-file", "/no/such/directory/log.csv"];
    let ended = Run::new(1).options(options).start(["true"]).wait(DEADLINE);
    assert!(ended.code.is_some_and(|code| code != 0), "{ended}");
    assert!(ended.stderr.contains("cannot write the autotune log /no/such/directory/log.csv"), "{ended}");
}

#[test]
fn a_command_that_ends_before_the_search_gives_no_profile() {
    let directory = tempfile::tempdir().expect("a directory can be made");
    let profile = file(directory.path(), "none.toml");
    let ended = Run::tune(1).options(["--output", &profile]).start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(69), "{ended}");
    assert!(ended.stderr.contains("the search has no sample") && ended.stderr.contains("RONDE-E703"), "{ended}");
    assert!(!Path::new(&profile).exists(), "a search that failed leaves a profile");
    let elsewhere = Run::tune(1).options(["--output", "/no/such/profile.toml"]).start(["true"]).wait(DEADLINE);
    assert!(elsewhere.stderr.contains("cannot write the profile /no/such/profile.toml"), "{elsewhere}");
}

/// A short search of the built-in worker on two sidecars.
const SHORT: [&str; 6] = ["--samples", "2", "--warmup-samples", "0", "--steps-per-sample", "1"];

#[test]
fn a_search_over_a_transport_that_fails_does_not_lose_the_one_that_succeeded() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let profile = file(directory.path(), "found.toml");
    // The workers of the second job fail.
    let worker = r#"mkdir "$0.$RONDE_RANK" || exit 7; exec "$1" tune-worker --steps 100 --tensors 16384,65536"#;
    let (seen, ronde) = (file(directory.path(), "seen"), ronde_binary());
    let ended = Run::tune(2)
        .sidecars(2)
        .options(SHORT)
        .options(["--transports", "tls,quic", "--output", &profile])
        .start(["sh", "-c", worker, &seen, ronde.to_str().context("a path of text")?])
        .wait(DEADLINE);
    ensure!(ended.code == Some(0), "{ended}");
    ensure!(ended.stdout.contains("tls: ") && ended.stdout.contains("the search over quic failed: "), "{ended}");
    ensure!(fs::read_to_string(&profile)?.contains("transport = \"tls\""), "{ended}");
    Ok(())
}

#[test]
fn the_default_transport_is_compared_with_the_others_and_not_named_where_it_wins() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let profile = file(directory.path(), "found.toml");
    let ended = Run::tune(2)
        .sidecars(2)
        .options(SHORT)
        .options(["--tensors", "16384,65536", "--output", &profile])
        .start(Vec::<String>::new())
        // For each transport a job.
        .wait(3 * DEADLINE);
    ensure!(ended.code == Some(0), "{ended}");
    let mut rates = Vec::new();
    for transport in ["auto", "tls", "quic"] {
        let log = fs::read_to_string(directory.path().join(format!("found.{transport}.csv")))?;
        ensure!(log.lines().count() == 4, "a head, two samples and the outcome: {log}");
        let begin = format!("{transport}: ");
        ensure!(ended.stdout.lines().any(|line| line.starts_with(&begin)), "no line for {transport}: {ended}");
        let outcome = log.lines().next_back().and_then(|row| row.rsplit(',').next()).context("a score")?;
        rates.push((outcome.parse::<f64>()?, transport));
    }
    let best = rates.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).context("three rates")?.1;
    let text = fs::read_to_string(&profile)?;
    let named = text.lines().find_map(|line| line.strip_prefix("transport = "));
    let expected = (best != "auto").then(|| format!("\"{best}\""));
    ensure!(named.map(str::to_owned) == expected, "{best} won: {text}");
    Ok(())
}

#[test]
fn a_job_of_one_sidecar_is_searched_once_and_its_profile_has_only_what_acts_there() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let profile = file(directory.path(), "found.toml");
    // The number of sidecars follows from the slots.
    let ended = Run::tune(2)
        .options(["--hosts", "localhost:2,127.0.0.1:2", "--tensors", "16384,65536", "--output", &profile])
        .options(SHORT)
        .start(Vec::<String>::new())
        .wait(DEADLINE);
    ensure!(ended.code == Some(0), "{ended}");
    ensure!(ended.stdout.contains("one sidecar: ") && !ended.stdout.contains("quic"), "{ended}");
    let text = fs::read_to_string(&profile)?;
    ensure!(text.contains("local-lanes = "), "{text}");
    for key in ["\nlanes", "eager-bytes", "hierarchical-allreduce", "transport", "[cost]"] {
        ensure!(!text.contains(key), "{key} has no effect: {text}");
    }
    Ok(())
}

#[test]
fn the_log_of_an_earlier_search_is_not_taken_for_the_one_of_this() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (profile, log) = (file(directory.path(), "found.toml"), file(directory.path(), "found.tls.csv"));
    let head = "hierarchical_allreduce,tensor_fusion_threshold,chunk_bytes,lanes,eager_bytes,alpha_us,beta_us_per_byte,\
                gamma_us_per_byte,score\n";
    fs::write(&log, head.to_owned() + &"1,1048576,4096,1,4096,60,1e-3,1e-4,100\n".repeat(2))?;
    let ended = Run::tune(1).options(["--transports", "tls", "--output", &profile]).start(["true"]).wait(DEADLINE);
    ensure!(ended.code == Some(69), "{ended}");
    ensure!(!Path::new(&profile).exists(), "{ended}");
    Ok(())
}

#[test]
fn a_signal_ends_the_search_with_its_job() {
    let directory = tempfile::tempdir().expect("a directory can be made");
    let profile = file(directory.path(), "none.toml");
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let mut job = Run::tune(1).options(["--output", &profile]).start(["sleep", "1000"]);
        job.worker(0, DEADLINE);
        job.signal(signal);
        job.wait_for_nothing_left(DEADLINE);
        let ended = job.wait(DEADLINE);
        assert_eq!(ended.code, Some(code), "{ended}");
        assert!(!ended.stderr.contains("RONDE-E703"), "a signal is no failure of the search: {ended}");
    }
}

/// The job of a search is a child in a group of its own, which no terminal and no supervisor would end.
#[test]
fn a_search_that_is_killed_leaves_no_job() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut job = Run::tune(1).in_directory(directory.path()).start(["sleep", "1000"]);
    job.worker(0, DEADLINE);
    job.signal(Signal::SIGKILL);
    job.wait_for_nothing_left(DEADLINE);
}

#[test]
fn a_signal_ends_a_measurement_with_its_job_and_its_files() {
    let directory = tempfile::tempdir().expect("a directory can be made");
    // Other files, such as flight records, stay.
    let is_of_measurement = |name: &str| name.starts_with("ronde-calibration-");
    let names = || fs::read_dir(directory.path()).expect("ours").flatten().map(|entry| entry.file_name());
    let files = || names().filter(|name| name.to_str().is_some_and(is_of_measurement)).count();
    // A busy machine may notice the measurement when it is over.
    for _ in 0..5 {
        let run = Run::new(2).sidecars(2).options(["--calibrate"]).env("TMPDIR", directory.path());
        let mut job = run.start(["echo", "ran"]);
        job.wait_for("the folder of the measurement, or the job after it", DEADLINE, |job| {
            (files() > 0 || job.has_line(|line| line.ends_with("<stdout>:ran"))).then_some(())
        });
        job.signal(Signal::SIGINT);
        job.wait_for_nothing_left(DEADLINE);
        let ended = job.wait(DEADLINE);
        assert_eq!(files(), 0, "{ended}");
        if !ended.stdout.contains("ran") {
            return assert_eq!(ended.code, Some(130), "{ended}");
        }
    }
    panic!("the signal never ended a measurement");
}

#[test]
fn input_is_for_the_job_and_not_for_the_measurement_before_it() -> Result<()> {
    let runtime_dir = tempfile::tempdir()?;
    let mut child = Command::new("timeout")
        .args(["--kill-after=5", "240"])
        .arg(ronde_binary())
        .args(["run", "-np", "2", "--sidecars", "2", "--calibrate", "--stdin", "0", "cat"])
        .env("HOROVOD_START_TIMEOUT", "120")
        .env("XDG_RUNTIME_DIR", runtime_dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    child.stdin.take().context("a pipe")?.write_all(b"typed\n")?;
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && text.contains("typed"), "{}: {text}", output.status);
    Ok(())
}
