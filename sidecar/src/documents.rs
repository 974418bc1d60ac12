//! Documents that are made from the code: a test compares them, and writes them when asked to.

use std::path::Path;

/// Fails when `docs/<name>` is not `expected`; writes it instead when RONDE_REGENERATE is set.
pub(crate) fn hold(name: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    if std::fs::read_to_string(&path).is_ok_and(|shown| shown == expected) {
        return;
    }
    assert!(
        std::env::var_os("RONDE_REGENERATE").is_some(),
        "\n\ndocs/{name} is not what the code says.\nRun `RONDE_REGENERATE=1 cargo test -p ronde-sidecar the_document` and look at the difference.\n"
    );
    std::fs::write(&path, expected).expect("the document can be written");
}
