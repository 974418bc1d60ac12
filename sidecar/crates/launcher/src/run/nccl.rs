//! The variables by which NCCL uses ronde's net plugin (`--nccl-net`).

use std::path::{Path, PathBuf};

use anyhow::Context;

use super::environment::Export;

/// The variables of workers whose NCCL sends over their sidecars and in no other way. `lookup` reads the launcher's
/// environment.
///
/// # Errors
/// When the plugin is not installed, with the places that were searched.
pub(super) fn exports(ronde: &Path, lookup: impl Fn(&str) -> Option<String>) -> anyhow::Result<Vec<Export>> {
    let files = match lookup(LIBRARY_VARIABLE).filter(|file| !file.is_empty()) {
        Some(file) => vec![PathBuf::from(file)],
        None => beside(ronde),
    };
    let found = files.iter().find(|file| file.is_file()).with_context(|| {
        let searched: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
        format!(
            "--nccl-net needs NCCL's net plugin {LIBRARY}, which is not at {}; install ronde's wheel, or name the file by \
             {LIBRARY_VARIABLE}",
            searched.join(", nor at ")
        )
    })?;
    let folder = found.parent().unwrap_or(Path::new(".")).display().to_string();
    let path = match lookup("LD_LIBRARY_PATH").filter(|path| !path.is_empty()) {
        Some(others) => format!("{folder}:{others}"),
        None => folder,
    };
    let fixed = |name: &str, value: &str| Export::value(name, value.to_owned());
    Ok(vec![
        Export::value("LD_LIBRARY_PATH", path),
        fixed("NCCL_NET_PLUGIN", "ronde"),
        // NCCL takes its own sockets, in plaintext, when a plugin fails. With a name it takes that network or fails.
        fixed("NCCL_NET", "ronde"),
        // GPUs of several hosts may share an NVLink network, which NCCL would use without any plugin.
        fixed("NCCL_MNNVL_ENABLE", "0"),
    ])
}

/// Where builds and installations put the plugin, seen from the program.
fn beside(program: &Path) -> Vec<PathBuf> {
    let folder = program.parent().unwrap_or(Path::new("."));
    let above = folder.parent().unwrap_or(folder);
    vec![above.join("nccl").join(LIBRARY), above.join("share/ronde/nccl").join(LIBRARY)]
}

/// What NCCL loads with `NCCL_NET_PLUGIN=ronde`.
const LIBRARY: &str = "libnccl-net-ronde.so";
const LIBRARY_VARIABLE: &str = "RONDE_NCCL_NET_LIBRARY";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_is_found_and_nccl_has_no_other_network() {
        let directory = tempfile::tempdir().expect("a directory");
        let ronde = directory.path().join("bin/ronde");
        let missing = exports(&ronde, |_| None).expect_err("there is none").to_string();
        assert!(missing.contains("share/ronde/nccl/libnccl-net-ronde.so; install ronde's wheel"), "{missing}");
        let folder = directory.path().join("share/ronde/nccl");
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join(LIBRARY), "").expect("a file");
        let found =
            exports(&ronde, |name| (name == "LD_LIBRARY_PATH").then(|| "/cuda".to_owned())).expect("it is there");
        let expected = [
            ("LD_LIBRARY_PATH", format!("{}:/cuda", folder.display())),
            ("NCCL_NET_PLUGIN", "ronde".to_owned()),
            ("NCCL_NET", "ronde".to_owned()),
            ("NCCL_MNNVL_ENABLE", "0".to_owned()),
        ];
        assert_eq!(found, expected.map(|(name, value)| Export::value(name, value)));
        let named = |name: &str| (name == LIBRARY_VARIABLE).then(|| "/nowhere/x.so".to_owned());
        assert!(exports(&ronde, named).is_err(), "the file that is named counts");
    }
}
