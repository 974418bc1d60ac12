//! Finds the plugins that come with ronde.

use std::path::{Path, PathBuf};

/// Names another folder.
const FOLDER_VARIABLE: &str = "RONDE_PLUGINS";

/// Returns the module of a shipped plugin, if there is one of this name.
pub fn find(name: &str) -> Option<PathBuf> {
    let file = format!("{name}.wasm");
    // A name must not be a path.
    let plain = Path::new(&file).components().count() == 1 && !name.contains('/');
    folders().into_iter().map(|folder| folder.join(&file)).find(|path| plain && path.is_file())
}

/// Returns the folders to search: that of RONDE_PLUGINS, else those where builds and installations put plugins.
pub fn folders() -> Vec<PathBuf> {
    match std::env::var_os(FOLDER_VARIABLE).filter(|folder| !folder.is_empty()) {
        Some(folder) => vec![PathBuf::from(folder)],
        None => std::env::current_exe().map_or_else(|_| Vec::new(), |program| beside(&program)),
    }
}

/// The folders next to the program and one level up: a build's, and an installation's with `bin` and `share`.
fn beside(program: &Path) -> Vec<PathBuf> {
    let folder = program.parent().unwrap_or(Path::new("."));
    let above = folder.parent().unwrap_or(folder);
    vec![folder.join("plugins"), above.join("plugins"), above.join("share/ronde/plugins")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_and_installations_have_their_places() {
        let folders = beside(Path::new("/src/target/debug/ronde"));
        assert_eq!(folders[1], Path::new("/src/target/plugins"));
        let folders = beside(Path::new("/venv/bin/ronde"));
        assert_eq!(folders[2], Path::new("/venv/share/ronde/plugins"));
    }

    #[test]
    fn a_plugin_name_must_not_be_a_path() {
        assert_eq!(find("../bin/ronde"), None);
        assert_eq!(find(""), None);
    }
}
