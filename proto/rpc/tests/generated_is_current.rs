//! The committed generated code matches the proto files; builds need neither protoc nor a build script.
//!
//! After a change of a file in `ronde/v1`: `RONDE_REGENERATE=1 cargo test -p ronde-rpc --test generated_is_current`.

use std::fs;
use std::path::Path;

#[test]
fn generated_code_matches_the_proto_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = tempfile::tempdir().expect("a temporary directory");
    generate(root, target.path());
    let fresh = fs::read_to_string(target.path().join(FILE)).expect("the generator writes one file");
    let committed_path = root.join("src/generated").join(FILE);
    if std::env::var_os("RONDE_REGENERATE").is_some() {
        fs::write(&committed_path, &fresh).expect("src/generated is writable");
    }
    let committed = fs::read_to_string(&committed_path).unwrap_or_default();
    let differs = committed.lines().zip(fresh.lines()).position(|(a, b)| a != b);
    assert!(
        committed == fresh,
        "src/generated/{FILE} does not match the proto files (first difference in line {differs:?}, counted from 0); run \
         RONDE_REGENERATE=1 cargo test -p ronde-rpc --test generated_is_current"
    );
}

fn generate(root: &Path, target: &Path) {
    let descriptors =
        protox::compile(["ronde/v1/ronde.proto", "ronde/v1/web.proto"], [root]).expect("the proto files compile");
    tonic_prost_build::configure()
        .build_client(true)
        .build_server(true)
        // Clients get existing channels; WebAssembly cannot open the channels of tonic.
        .build_transport(false)
        .bytes(".")
        .out_dir(target)
        .compile_fds(descriptors)
        .expect("the descriptors give code");
}

const FILE: &str = "ronde.v1.rs";
