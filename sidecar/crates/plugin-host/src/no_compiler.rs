//! The replacement of the compiler in a build without the feature `compiler`: it refuses every module.

use std::path::Path;

use wasmtime::{Config, Engine, Module};

use crate::error::{HostError, LoadError};

#[expect(clippy::unnecessary_wraps, reason = "the compiler's can fail")]
pub(crate) fn configure(_: &mut Config, _: Option<&Path>) -> Result<(), HostError> {
    Ok(())
}

pub(crate) fn compile(_: &Engine, _: &[u8]) -> Result<Module, LoadError> {
    Err(LoadError::NoCompiler)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_the_compiler_refuses_modules_with_the_reason() {
        let mut config = Config::new();
        configure(&mut config, None).expect("there is nothing to configure");
        let engine = Engine::new(&config).expect("an engine");
        let refused = compile(&engine, b"\0asm\x01\0\0\0").expect_err("an empty module");
        assert!(matches!(refused, LoadError::NoCompiler) && refused.to_string().contains("`make build`"), "{refused}");
    }
}
