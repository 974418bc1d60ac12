//! Compares documents that are generated from the code with the code, and regenerates them on request.

use std::path::Path;

/// Fails when `docs/<name>` differs from `expected`; with RONDE_REGENERATE set, writes it instead.
pub(crate) fn hold(name: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    if std::fs::read_to_string(&path).is_ok_and(|shown| shown == expected) {
        return;
    }
    assert!(
        std::env::var_os("RONDE_REGENERATE").is_some(),
        "\n\ndocs/{name} differs from the code.\nRun `RONDE_REGENERATE=1 cargo test -p ronde-sidecar the_document` and review the difference.\n"
    );
    std::fs::write(&path, expected).expect("the document can be written");
}
