use std::os::unix::ffi::OsStringExt;

use clap::{CommandFactory, FromArgMatches};

use super::*;
use crate::{Cli, Command as Subcommand};

fn words(line: &str) -> Vec<OsString> {
    line.split(' ').map(OsString::from).collect()
}

fn environment(variables: &[(&str, &str)]) -> BTreeMap<String, OsString> {
    variables.iter().map(|(name, value)| ((*name).to_owned(), OsString::from(value))).collect()
}

/// The arguments of `run` for a command line, variables, and a file.
fn run(line: &str, variables: &[(&str, &str)], text: &str) -> Result<ronde_launcher::run::RunArgs, String> {
    run_with_notices(line, variables, text).map(|(args, _)| args)
}

/// The same with the notices about options that have no effect.
fn run_with_notices(
    line: &str,
    variables: &[(&str, &str)],
    text: &str,
) -> Result<(ronde_launcher::run::RunArgs, Vec<String>), String> {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), text).expect("it is ours");
    let path = file.path().display().to_string();
    let environment = environment(&[&[(CONFIG_VARIABLE, path.as_str())], variables].concat());
    let arguments = arguments::normalise(&Cli::command(), words(line));
    let (cli, notices) = layered(Cli::command(), &arguments, &environment)
        .map_err(|mistakes| mistakes.to_string().replace(&path, "r.toml"))?;
    cli.clone().debug_assert();
    let matches = cli.try_get_matches_from(arguments).map_err(|error| error.to_string())?;
    match Cli::from_arg_matches(&matches).map_err(|error| error.to_string())?.command {
        Subcommand::Run(args) => Ok((*args, notices.iter().map(|text| text.replace(&path, "r.toml")).collect())),
        _ => panic!("{line:?} is not `run`"),
    }
}

const FILE: &str = "[run]\nnum-proc = 2\nstart-timeout = 7\nverbose = true\nexport = ['A=1', 'B']\n";

#[test]
fn the_strongest_source_wins() {
    let of = |line: &str, variables: &[(&str, &str)], text: &str| {
        run(line, variables, text).expect("good").num_proc.expect("a number")
    };
    let variable = [("RONDE_RUN_NUM_PROC", "3")];
    assert_eq!(of("ronde run -np 4 sh", &variable, FILE), 4);
    assert_eq!(of("ronde run sh", &variable, FILE), 3);
    assert_eq!(of("ronde run sh", &[], FILE), 2);
    assert_eq!(run("ronde run sh", &[], "").expect("the launcher checks it").num_proc, None);
}

#[test]
fn horovods_variables_rank_between_rondes_variables_and_the_file() {
    let of = |variables: &[(&str, &str)], text: &str| {
        run("ronde run -np 1 sh", variables, text).expect("good").start_timeout.unwrap_or(30)
    };
    let horovod = ("HOROVOD_START_TIMEOUT", "20");
    assert_eq!(of(&[horovod, ("RONDE_RUN_START_TIMEOUT", "21")], FILE), 21);
    assert_eq!(of(&[horovod], FILE), 20);
    assert_eq!(of(&[], FILE), 7);
    assert_eq!(of(&[], ""), 30);
}

#[test]
fn switches_and_lists_come_from_everywhere() {
    let args = run("ronde run sh", &[], FILE).expect("good");
    assert!(args.verbose);
    assert_eq!(format!("{args:?}").matches("Export").count(), 2, "{args:?}");
    assert!(!run("ronde run sh", &[("RONDE_RUN_VERBOSE", "no")], FILE).expect("good").verbose);
    assert!(run("ronde run --verbose sh", &[("RONDE_RUN_VERBOSE", "0")], FILE).expect("good").verbose);
}

#[test]
fn the_stronger_source_decides_between_exclusive_options() {
    let hosts = |line: &str, variables: &[(&str, &str)], text: &str| {
        run(line, variables, text).map(|args| format!("{args:?}").replace(' ', ""))
    };
    let file = "[run]\nnum-proc = 1\nhostfile = 'f'";
    assert!(hosts("ronde run -H a:1 sh", &[], file).expect("good").contains("hosts:Some(\"a:1\"),hostfile:None"));
    let variable = [("RONDE_RUN_HOSTS", "b:1")];
    assert!(hosts("ronde run sh", &variable, file).expect("good").contains("hosts:Some(\"b:1\"),hostfile:None"));
    assert!(
        hosts("ronde run --hostfile g sh", &variable, file).expect("good").contains("hosts:None,hostfile:Some(\"g\")")
    );
    let both = "[run]\nnum-proc = 1\nhostfile = 'f'\nhosts = 'a:1'";
    assert!(hosts("ronde run sh", &[], both).is_err_and(|error| error.contains("set only one of both")));
    let discovered = hosts("ronde run --host-discovery-script s sh", &variable, file).expect("good");
    assert!(discovered.contains("hosts:None,hostfile:None"), "{discovered}");
    assert!(
        hosts("ronde run -H a:1 --hostfile g sh", &[], "").is_err_and(|error| error.contains("cannot be used with"))
    );
}

#[test]
fn of_options_that_exclude_each_other_the_stronger_source_counts_and_the_other_one_is_named() {
    let in_file = "[run]\nnum-proc = 2\nmin-np = 1\nstarter = true\n";
    for (line, variables, text, found) in [
        ("--stdin 0", &[("RONDE_RUN_MIN_NP", "1")][..], "", &["RONDE_RUN_MIN_NP has no effect: --stdin"][..]),
        (
            "--starter",
            &[("RONDE_RUN_OUTPUT_FILENAME", "d")],
            "",
            &["RONDE_RUN_OUTPUT_FILENAME has no effect: --starter"],
        ),
        (
            "--starter",
            &[("RONDE_RUN_PREFIX_OUTPUT_WITH_TIMESTAMP", "1")],
            "[run]\noutput-filename = 'd'",
            &[
                "RONDE_RUN_PREFIX_OUTPUT_WITH_TIMESTAMP has no effect: --starter",
                "output-filename (r.toml:2) has no effect: --starter",
            ],
        ),
        ("--min-np 1", &[("RONDE_RUN_CALIBRATE", "1")], "", &["RONDE_RUN_CALIBRATE has no effect: --min-np"]),
        (
            "--stdin 0",
            &[],
            in_file,
            &["min-np (r.toml:3) has no effect: --stdin", "starter (r.toml:4) has no effect: --stdin"],
        ),
        (
            "-np 2",
            &[("RONDE_RUN_STDIN", "1")],
            in_file,
            &["min-np (r.toml:3) has no effect: RONDE_RUN_STDIN", "starter (r.toml:4) has no effect: RONDE_RUN_STDIN"],
        ),
        // What is removed removes nothing itself.
        (
            "--stdin 0",
            &[("RONDE_RUN_STARTER", "1")],
            "[run]\noutput-filename = 'd'",
            &["RONDE_RUN_STARTER has no effect: --stdin"],
        ),
        ("--host-discovery-script s", &[("RONDE_RUN_HOSTS", "a:1")], "[run]\nhostfile = 'f'", &[]),
        ("--min-np 1", &[("RONDE_RUN_CALIBRATE", "0"), ("RONDE_RUN_STARTER", "no")], "", &[]),
    ] {
        let (_, notices) = run_with_notices(&format!("ronde run {line} sh"), variables, text).expect(line);
        let notices: Vec<String> = notices.iter().map(|notice| notice.replace("it cannot be used with ", "")).collect();
        assert_eq!(notices, found, "{line} {variables:?} {text}");
    }
    let args = run("ronde run --stdin 0 -np 1 sh", &[("RONDE_RUN_MIN_NP", "1")], "").expect("it runs");
    assert!(format!("{args:?}").contains("min_np: None"), "{args:?}");
    let args = run("ronde run --stdin 0 sh", &[("RONDE_RUN_STARTER", "1")], "[run]\noutput-filename = 'd'");
    assert!(args.is_ok_and(|args| format!("{args:?}").contains("output_filename: Some")), "nothing excludes it");
}

#[test]
fn options_of_one_source_that_exclude_each_other_are_refused() {
    for (variables, text, found) in [
        (
            &[("RONDE_RUN_MIN_NP", "1"), ("RONDE_RUN_STDIN", "0")][..],
            "",
            "RONDE_RUN_STDIN: it cannot be used with RONDE_RUN_MIN_NP",
        ),
        (
            &[],
            "[run]\nplugin-digest = 'a'\nplugin-key = 'k'\n",
            "r.toml:2: plugin-digest cannot be used with plugin-key (r.toml:3)",
        ),
        (
            &[("RONDE_RUN_HOSTS", "a:1"), ("RONDE_RUN_HOSTFILE", "f")],
            "",
            "RONDE_RUN_HOSTFILE: it cannot be used with RONDE_RUN_HOSTS",
        ),
        (&[], "[run]\nhostfile = 'f'\nhosts = 'a:1'", "r.toml:2: hostfile cannot be used with hosts (r.toml:3)"),
    ] {
        let error = run("ronde run -np 2 sh", variables, text).expect_err(found);
        let found = format!("{found}; set only one of both");
        assert_eq!(error.lines().skip(1).map(str::trim).collect::<Vec<_>>(), [found], "{variables:?} {text}");
    }
}

#[test]
fn options_of_sidecars_conflict_on_the_command_line_only() {
    for (line, variables) in [
        ("--bootstrap", &[("RONDE_SIDECAR_LOCAL_RANKS", "2"), ("RONDE_SIDECAR_CERTS", "d")][..]),
        ("--local-ranks 2", &[("RONDE_SIDECAR_CERTS", "d"), ("RONDE_SIDECAR_PEERS", "a:1")]),
        ("--local-ranks 1", &[("RONDE_SIDECAR_ADMIN_LISTEN", "127.0.0.1:1"), ("RONDE_SIDECAR_SOCKET_DIR", "s")]),
        ("--socket-dir s", &[("RONDE_SIDECAR_RUNTIME_DIR", "r")]),
        ("--listen 127.0.0.1", &[("RONDE_SIDECAR_NETWORK_INTERFACES", "lo")]),
        ("--certs d", &[("RONDE_SIDECAR_SOCKET_DIR", "s"), ("RONDE_SIDECAR_RUNTIME_DIR", "r")]),
    ] {
        let arguments = words(&format!("ronde sidecar {line}"));
        let (cli, notices) = layered(Cli::command(), &arguments, &environment(variables)).expect(line);
        assert!(notices.is_empty(), "{line}: {notices:?}");
        let matches = cli.try_get_matches_from(&arguments).expect(line);
        let Subcommand::Sidecar(args) = Cli::from_arg_matches(&matches).expect(line).command else {
            panic!("{line} is not `sidecar`");
        };
        let args = format!("{args:?}");
        for (name, _) in variables {
            let id = name.trim_start_matches("RONDE_SIDECAR_").to_ascii_lowercase();
            let is_dropped = ["None", "[]"].iter().any(|empty| args.contains(&format!("{id}: {empty}")));
            assert!(args.contains(&format!("{id}: ")) && !is_dropped, "{line}: {id} is dropped: {args}");
        }
    }
}

#[test]
fn all_mistakes_are_reported_together_with_their_places() {
    let text = "[run]\nnum_proc = 2\nlanes = 99\nverbose = 'yes'\nexport = true\nbogus = 1\n\n[sidecar]\npeer-timeout = 'soon'\n\n[other]\nx = 1\n";
    let error = run("ronde run -np 1 sh", &[("RONDE_RUN_ARENA_MB", "0"), ("HOROVOD_START_TIMEOUT", "never")], text);
    let error = error.expect_err("nine mistakes");
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(lines[0], "9 mistakes in the configuration");
    assert!(
        lines[1].starts_with("  r.toml:2") && lines[6].starts_with("  r.toml:9"),
        "in the order of the file\n{error}"
    );
    for (place, what) in [
        ("r.toml:2", "[run] has no key num_proc; is num-proc meant?"),
        ("r.toml:3", "lanes: invalid value '99' for '--lanes <N>'"),
        ("r.toml:4", "verbose: it takes true or false, not a string"),
        ("r.toml:5", "export: it takes a list, not true or false"),
        ("r.toml:6", "[run] has no key bogus"),
        ("r.toml:9", "peer-timeout: invalid value 'soon'"),
        ("r.toml:11", "there is no table [other]; there are [run] and [sidecar]"),
        ("RONDE_RUN_ARENA_MB", "invalid value '0'"),
        ("HOROVOD_START_TIMEOUT", "invalid value 'never'"),
    ] {
        assert!(
            lines.iter().any(|line| line.trim_start().starts_with(&format!("{place}: {what}"))),
            "{place}: {what}\n{error}"
        );
    }
}

#[test]
fn variables_of_no_option_are_named_with_the_nearest_right_one() {
    let variables =
        ["NUM_PROCS", "NP", "BOGUS", "CONFIG", "PORT", "WEB_PORT"].map(|name| (format!("RONDE_RUN_{name}"), "7"));
    let variables = variables.each_ref().map(|(name, value)| (name.as_str(), *value));
    let error = run("ronde run -np 1 sh", &variables, "").expect_err("six mistakes");
    for line in [
        "RONDE_RUN_CONFIG: no option of `ronde run` has this variable; is RONDE_CONFIG meant?",
        "RONDE_RUN_PORT: no option of `ronde run` has this variable; is RONDE_RUN_PORTS meant?",
        "RONDE_RUN_WEB_PORT: no option of `ronde run` has this variable",
        "RONDE_RUN_NUM_PROCS: no option of `ronde run` has this variable; is RONDE_RUN_NUM_PROC meant?",
        "RONDE_RUN_NP: no option of `ronde run` has this variable; is RONDE_RUN_NUM_PROC meant?",
        "RONDE_RUN_BOGUS: no option of `ronde run` has this variable",
    ] {
        assert!(error.lines().any(|found| found.trim_start() == line), "{line}\n{error}");
    }
    let of_kubernetes = [
        ("RONDE_RUN_SERVICE_HOST", "10.0.0.1"),
        ("RONDE_RUN_PORT_80_TCP_PORT", "80"),
        ("RONDE_RUN_WEB_PORT", "tcp://10.0.0.1:80"),
        ("RONDE_RUN_WEB_PORT_80_TCP_ADDR", "10.0.0.1"),
    ];
    run("ronde run -np 1 sh", &of_kubernetes, "").expect("a service may have this name");
}

#[test]
fn processes_for_each_host_and_a_number_of_processes_exclude_each_other() {
    let given = |line: &str, variables: &[(&str, &str)]| {
        run(line, variables, "").map(|args| format!("{args:?}").replace(' ', ""))
    };
    let both = "ronde run --nproc-per-node 2 -H a:4 sh";
    let args = given(both, &[("RONDE_RUN_NUM_PROC", "1")]).expect("the command line is stronger");
    assert!(args.contains("num_proc:None") && args.contains("nproc_per_node:Some(2)"), "{args}");
    assert!(
        given("ronde run --nproc-per-node 2 -np 1 sh", &[]).is_err_and(|error| error.contains("cannot be used with"))
    );
}

#[test]
fn keys_outside_of_a_table_are_named_with_their_place() {
    let error = run("ronde run -np 1 sh", &[], "np = 2\nlane = 2\nbogus = 1\n").expect_err("three mistakes");
    for line in [
        "r.toml:1: np is outside of a table; is num-proc below [run]",
        "r.toml:2: lane is outside of a table; is lanes below [run], or lanes below [sidecar] meant?",
        "r.toml:3: bogus is outside of a table; write keys below [run] or [sidecar]",
    ] {
        assert!(error.lines().any(|found| found.trim_start().starts_with(line)), "{line}\n{error}");
    }
}

#[test]
fn broken_toml_and_missing_files_are_mistakes_with_a_place() {
    let error = run("ronde run -np 1 sh", &[], "[run]\nlanes = \nhosts = 'a:1\n").expect_err("broken twice");
    assert!(error.contains("r.toml:2: ") && error.contains("r.toml:3: "), "{error}");
    let arguments = words("ronde run --config /nowhere/ronde.toml -np 1 sh");
    let error =
        layered(Cli::command(), &arguments, &environment(&[])).map(drop).expect_err("it is not there").to_string();
    assert!(error.contains("/nowhere/ronde.toml: it cannot be read: No such file"), "{error}");
    let empty = environment(&[(CONFIG_VARIABLE, "")]);
    let error = layered(Cli::command(), &words("ronde run -np 1 sh"), &empty).map(drop).expect_err("empty").to_string();
    assert!(error.ends_with("--config or RONDE_CONFIG: it is empty; name a file, or leave it out"), "{error}");
}

#[test]
fn a_number_with_too_many_digits_is_explained_by_the_range() {
    for number in ["18446744073709551616", "0xfffffffffffffffff", "-9223372036854775809"] {
        let error = run("ronde run sh", &[], &format!("[run]\nnum-proc = {number}\n")).expect_err("too large");
        let text =
            format!("num-proc: invalid value '{number}' for '--num-proc <N>': it must be a whole number from 1 to");
        assert!(error.contains(&text), "{error}");
    }
}

#[test]
fn a_value_that_is_none_of_some_words_is_answered_with_them() {
    let error = run("ronde run -np 1 sh", &[("HOROVOD_LOG_LEVEL", "loud")], "[run]\nlog-format = 'xml'\n");
    let error = error.expect_err("neither is known");
    for line in [
        "HOROVOD_LOG_LEVEL: invalid value 'loud' for '--log-level <LEVEL>' [possible values: error, warn, info, debug, trace]",
        "r.toml:2: log-format: invalid value 'xml' for '--log-format <FORMAT>' [possible values: text, json]",
    ] {
        assert!(error.lines().any(|found| found.trim_start() == line), "{line}\n{error}");
    }
}

#[test]
fn a_variable_that_is_not_unicode_is_a_mistake_or_names_a_file() {
    let mut environment = environment(&[]);
    let value = OsString::from_vec(b"/tmp/\xff".to_vec());
    for name in ["RONDE_RUN_OUTPUT_FILENAME", "HOROVOD_TIMELINE", CONFIG_VARIABLE] {
        environment.insert(name.to_owned(), value.clone());
    }
    let error = layered(Cli::command(), &words("ronde run -np 1 sh"), &environment).map(drop).expect_err("three");
    let error = error.to_string();
    for place in ["RONDE_RUN_OUTPUT_FILENAME: its value is not valid UTF-8", "HOROVOD_TIMELINE: its value is not"] {
        assert!(error.contains(place), "{error}");
    }
    assert!(error.contains("/tmp/\u{fffd}: it cannot be read: No such file"), "the file is asked for: {error}");
    environment.retain(|name, _| name == "HOROVOD_TIMELINE");
    layered(Cli::command(), &words("ronde sidecar"), &environment).expect("a sidecar does not read it");
}

#[test]
fn options_of_the_worker_cannot_be_set_in_the_file() {
    let arguments = words("ronde run -np 1 python train.py --config /nowhere/ronde.toml -H b:1");
    layered(Cli::command(), &arguments, &environment(&[])).expect("the file is the worker's");
}

#[test]
fn variables_of_other_subcommands_do_not_matter() {
    let environment = environment(&[("RONDE_SIDECAR_LANES", "many")]);
    layered(Cli::command(), &words("ronde run -np 1 sh"), &environment).expect("they are the sidecar's");
    assert!(layered(Cli::command(), &words("ronde sidecar"), &environment).is_err());
}

#[test]
fn no_text_makes_it_panic() {
    use proptest::prelude::*;
    proptest!(|(text in "[\\[\\]a-z0-9=\"'\\n .,{}#_-]{0,80}")| {
        let _ = file::parse(&Cli::command(), "f", &text, &mut Mistakes::default());
        let _ = file::parse(&Cli::command(), "f", &format!("[run]\nlanes = {text}"), &mut Mistakes::default());
    });
}

#[test]
fn the_stronger_source_decides_between_opposite_switches() {
    let of =
        |line: &str, variables: &[(&str, &str)], text: &str| format!("{:?}", run(line, variables, text).expect("good"));
    let disable = ("HOROVOD_STALL_CHECK_DISABLE", "1");
    let in_file = "[run]\nno-stall-check = true\n";
    for (line, variables, text, is_off) in [
        ("ronde run -np 1 sh", &[][..], "", false),
        ("ronde run -np 1 --no-stall-check sh", &[], "", true),
        ("ronde run -np 1 sh", &[disable], "", true),
        ("ronde run -np 1 --stall-check sh", &[disable], "", false),
        ("ronde run -np 1 sh", &[], in_file, true),
        ("ronde run -np 1 sh", &[("RONDE_RUN_STALL_CHECK", "1")], in_file, false),
    ] {
        let given = of(line, variables, text);
        assert_eq!(given.contains("no_stall_check: true"), is_off, "{line} {variables:?} {text}: {given}");
    }
}

#[test]
fn horovods_values_are_understood() {
    let of = |name: &str, value: &str| run("ronde run -np 1 sh", &[(name, value)], "").map(|args| format!("{args:?}"));
    for (word, level) in [
        ("TRACE", "Trace"),
        ("DEBUG", "Debug"),
        ("INFO", "Info"),
        ("warning", "Warn"),
        ("ERROR", "Error"),
        ("FATAL", "Error"),
    ] {
        let given = of("HOROVOD_LOG_LEVEL", word).expect("a level of Horovod");
        assert!(given.contains(&format!("log_level: Some({level})")), "{word}: {given}");
    }
    assert!(of("HOROVOD_LOG_LEVEL", "LOUD").is_err_and(|error| error.contains("HOROVOD_LOG_LEVEL")));
    for (name, value, found) in [
        ("HOROVOD_LOG_HIDE_TIME", "1", "log_without_timestamp: true"),
        ("HOROVOD_CACHE_CAPACITY", "2048", "cache_capacity: Some(2048)"),
        ("HOROVOD_THREAD_AFFINITY", "0,2", "thread_affinity: [0, 2]"),
        ("HOROVOD_TIMELINE", "/tmp/t", "timeline_filename: Some(\"/tmp/t\")"),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles: true"),
        ("HOROVOD_ELASTIC_TIMEOUT", "30", "elastic_timeout: Some(30)"),
    ] {
        let given = of(name, value).expect("a setting of Horovod");
        assert!(given.contains(found), "{name}: {given}");
    }
    for (value, is_on) in [("", false), ("0", false), ("1", true), ("2", true), (" 1 ", true), ("true", true)] {
        let given = of("HOROVOD_AUTOTUNE", value).expect("a number or a word");
        assert_eq!(given.contains("autotune: true"), is_on, "{value:?}: {given}");
    }
    let given = of("HOROVOD_AUTOTUNE_LOG", "").expect("no file");
    assert!(given.contains("log_file: None"), "{given}");
    for (name, value) in
        [("HOROVOD_CACHE_CAPACITY", "-1"), ("HOROVOD_THREAD_AFFINITY", "0,x"), ("HOROVOD_AUTOTUNE", "maybe")]
    {
        assert!(of(name, value).is_err_and(|error| error.contains(name)), "{name}={value}");
    }
}

/// A configuration file: for any text, each option gets values that clap accepts, or a mistake gives the reason.
#[test]
fn fuzz_configuration() {
    use ronde_fuzz::{Outcome, fuzz};

    let sidecar = "[sidecar]\nnetwork-interfaces = ['eth0', '10.1.0.0/16']\ntransport = 'tls'\npeer-timeout = 3\n";
    let seeds = [FILE, sidecar].map(|seed| seed.as_bytes().to_vec()).to_vec();
    let cli = Cli::command();
    fuzz("configuration", seeds, |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return Outcome::refused(&"no text") };
        let mut mistakes = Mistakes::default();
        let values = file::parse(&cli, "r.toml", text, &mut mistakes);
        for ((name, id), file::FileValue { words, .. }) in &values {
            let command = cli.find_subcommand(name).expect("a command");
            let arg = command.get_arguments().find(|arg| arg.get_id().as_str() == id).expect("an option");
            assert!(check(arg, words).is_ok(), "{name} {id} gets {words:?}, which it does not accept");
        }
        if mistakes.0.is_empty() {
            Outcome::read(&values.keys().collect::<Vec<_>>())
        } else {
            Outcome::refused(&mistakes.0.join("; "))
        }
    });
}
