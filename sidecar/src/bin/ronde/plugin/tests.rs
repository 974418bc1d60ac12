//! Tests that need no module. tests/product/test_plugins.py runs the commands with real ones.

use clap::Parser;
use ronde_bootstrap::codes::coded;

use super::*;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: PluginCommand,
}

fn parsed(words: &[&str]) -> Result<PluginCommand, String> {
    let words = ["ronde"].iter().chain(words);
    Cli::try_parse_from(words).map(|cli| cli.command).map_err(|error| error.to_string())
}

#[test]
fn a_new_package_is_written_once() {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let directory = folder.path().join("own");
    let words = ["new", "my-own", "--directory", directory.to_str().expect("a plain path"), "--sdk", "/no/such/sdk"];
    let Ok(PluginCommand::New(args)) = parsed(&words) else { panic!("not `new`") };
    let text = new::perform(&args).expect("nothing is there yet");
    assert!(text.contains("ronde plugin test my-own.wasm"), "{text}");
    let manifest = std::fs::read_to_string(directory.join("Cargo.toml")).expect("it was written");
    assert!(manifest.contains("name = \"my-own\"") && manifest.contains("{ path = \"/no/such/sdk\" }"), "{manifest}");
    let source = std::fs::read_to_string(directory.join("src/lib.rs")).expect("it was written");
    assert!(source.contains("name: \"my-own\"") && !source.contains("{{"), "{source}");
    let error = new::perform(&args).expect_err("it is there now");
    assert!(coded(&error, Code::PluginFile).ends_with("choose another --directory [RONDE-E802]"), "{error:#}");
}

#[test]
fn names_are_those_of_packages_and_plugins() {
    for name in ["a", "top-k2", &"a".repeat(64)] {
        assert!(parsed(&["new", name]).is_ok(), "{name}");
    }
    for name in ["", "2k", "-k", "Top", "a_b", "a/b", &"a".repeat(65)] {
        assert!(parsed(&["new", name]).is_err(), "{name}");
    }
}

#[test]
fn parameters_are_names_and_values() {
    let Ok(PluginCommand::Test(args)) = parsed(&["test", "a.wasm", "--set", "ratio=0.5", "--set", "mode = a=b"]) else {
        panic!("not `test`")
    };
    let set = format!("{args:?}");
    assert!(set.contains("(\"ratio\", Text(\"0.5\"))") && set.contains("(\"mode\", Text(\"a=b\"))"), "{set}");
    let error = parsed(&["test", "a.wasm", "--set", "ratio"]).expect_err("there is no value");
    assert!(error.contains("is not NAME=VALUE"), "{error}");
}

#[test]
fn keys_and_digests_are_policies_of_their_own() {
    assert!(parsed(&["check", "a.wasm", "--key", "a.pub", "--key", "b.pub"]).is_ok());
    assert!(parsed(&["check", "a.wasm", "--key", "a.pub", "--digest", "00"]).is_err());
}

#[test]
fn the_module_is_found_among_the_messages_of_cargo() {
    let artefact = r#"{"reason":"compiler-artifact","filenames":["/t/libx.rlib","/t/x.wasm"]}"#;
    assert_eq!(build::module(artefact), Some(PathBuf::from("/t/x.wasm")));
    for other in
        ["", "text", r#"{"reason":"build-finished"}"#, r#"{"reason":"compiler-artifact","filenames":["a.rlib"]}"#]
    {
        assert_eq!(build::module(other), None, "{other}");
    }
}

#[test]
fn a_module_is_called_what_its_plugin_is_called() {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("odd.wasm")).expect("a folder can be made");
    assert_eq!(build::destination(folder.path(), "own"), path("own.wasm"));
    assert_eq!(build::destination(&path("plugins"), "own"), path("plugins/own.wasm"));
    assert_eq!(build::destination(&path("own-1.wasm"), "own"), path("own-1.wasm"));
    assert_eq!(build::destination(&path("odd.wasm"), "own"), path("odd.wasm/own.wasm"));
}

#[test]
fn thousands_are_separated() {
    let shown = [0, 999, 1_000, 24_872, 1_234_567].map(grouped);
    assert_eq!(shown, ["0", "999", "1,000", "24,872", "1,234,567"]);
}
