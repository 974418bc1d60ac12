//! The targets of tests/tests/fuzz, from the same files.

#![forbid(unsafe_code)]

#[path = "../../tests/fuzz/codecs.rs"]
mod codecs;
#[path = "../../tests/fuzz/engines.rs"]
mod engines;
#[path = "../../tests/fuzz/lines.rs"]
mod lines;
#[path = "../../tests/fuzz/messages.rs"]
mod messages;
#[path = "../../tests/fuzz/pair.rs"]
mod pair;
#[path = "../../tests/fuzz/web.rs"]
mod web;
#[path = "../../tests/fuzz/wire.rs"]
mod wire;

use ronde_fuzz::Target;

macro_rules! targets {
    ($($module:ident::$name:ident)+) => {
        $(
            /// The target of this name.
            #[must_use]
            pub fn $name() -> Target {
                $module::$name()
            }
        )+

        /// All targets.
        #[must_use]
        pub fn all() -> Vec<Target> {
            vec![$($name()),+]
        }
    };
}

targets! {
    codecs::codecs_of_kernels
    codecs::codecs_of_plugins
    engines::engines_chunks
    engines::engines_control
    lines::lines_of_shared_memory
    messages::messages_of_sidecars
    messages::messages_of_workers
    web::web_bodies
    web::web_tokens
    wire::wire_control
    wire::wire_frames
    wire::wire_hello
}

/// The program of a target.
#[macro_export]
macro_rules! program {
    ($name:ident) => {
        thread_local! {
            static TARGET: ronde_fuzz::Target = ronde_cargo_fuzz::$name();
        }
        libfuzzer_sys::fuzz_target!(|bytes: &[u8]| TARGET.with(|target| drop((target.decode)(bytes))));
    };
}
