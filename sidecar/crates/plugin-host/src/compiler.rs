//! Compiles modules and keeps the results in a private folder.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

use wasmtime::{Cache, CacheConfig, Config, Engine, Module};

use crate::error::{HostError, LoadError};

/// Sets how an engine compiles, so that results have the same bits everywhere, and the folder for compiled modules.
pub(crate) fn configure(engine: &mut Config, cache_dir: Option<&Path>) -> Result<(), HostError> {
    engine.cranelift_nan_canonicalization(true);
    if let Some(path) = cache_dir {
        engine.cache(Some(cache(path)?));
    }
    Ok(())
}

/// Compiles a module.
pub(crate) fn compile(engine: &Engine, bytes: &[u8]) -> Result<Module, LoadError> {
    Module::from_binary(engine, bytes).map_err(|error| LoadError::Compile(format!("{error:#}")))
}

/// Opens a cache in a folder that only this user can write to, because its contents are executed unchecked.
fn cache(path: &Path) -> Result<Cache, HostError> {
    let refused = |problem: String| HostError::Cache { path: path.to_owned(), problem };
    if !path.is_absolute() {
        return Err(refused("it is not an absolute path".to_owned()));
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| refused(format!("it cannot be created: {error}")))?;
    let metadata = fs::symlink_metadata(path).map_err(|error| refused(error.to_string()))?;
    if !metadata.is_dir() {
        return Err(refused("it is no folder".to_owned()));
    }
    let own = nix::unistd::geteuid().as_raw();
    if metadata.uid() != own {
        return Err(refused(format!("it belongs to user {}, but this process is of user {own}", metadata.uid())));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(refused(format!("its mode is {mode:o}, but others must have no access: 700")));
    }
    // The canonical path: symbolic links on the way cannot be redirected later.
    let path = path.canonicalize().map_err(|error| refused(error.to_string()))?;
    path.ancestors().skip(1).try_for_each(|above| check_ancestor(above, own).map_err(&refused))?;
    let mut config = CacheConfig::new();
    config.with_directory(path);
    Cache::new(config).map_err(|error| refused(format!("{error:#}")))
}

/// Checks that nobody else can replace what is in this folder: it belongs to this user or to root, and others may not
/// write to it unless it has the sticky bit, as `/tmp` has.
fn check_ancestor(folder: &Path, own: u32) -> Result<(), String> {
    let named = |problem: String| format!("its parent folder {} {problem}", folder.display());
    let metadata = fs::metadata(folder).map_err(|error| named(format!("cannot be read: {error}")))?;
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if owner != own && owner != ROOT {
        return Err(named(format!("belongs to user {owner}, who could replace it")));
    }
    if mode & OTHERS_WRITE != 0 && mode & STICKY == 0 {
        return Err(named(format!("has mode {mode:o}, so that others could replace it")));
    }
    Ok(())
}

const ROOT: u32 = 0;
/// The mode bits that let group and others write.
const OTHERS_WRITE: u32 = 0o022;
/// The sticky bit: users can remove only their own files from the folder.
const STICKY: u32 = 0o1000;
