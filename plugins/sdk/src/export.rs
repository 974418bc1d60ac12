//! The macro that makes a WebAssembly module of a plugin.

/// Makes a WebAssembly module of a codec, a reducer or both: the manifest, the buffers, and the functions that the host
/// calls. In native builds it defines the struct of parameters only. Use it once, at the root of a crate.
///
/// ```text
/// ronde_plugin::export! {
///     name: "topk",                                   // a-z, 0-9 and '-'; the version is the package's
///     about: "One line.",
///     codec: TopK { dtypes: [float32], state_bytes: 4, lossless: false, elementwise: false },
///     reducer: Mean { dtypes: [float32, float64], shape: "n-ary", commutative: true, measures: 0 },
///     parameters: Settings {                          // becomes a struct with these fields
///         ratio: float { default: 0.01, min: 0.0001, max: 1.0, about: "…" },          // f64
///         seed: int { default: 0, min: 0, max: 4294967295, about: "…" },              // i64
///         mode: choice { default: "fast", choices: ["fast", "exact"], about: "…" },   // Choice
///         feedback: bool { default: true, about: "…" },                               // bool
///     },
///     limits: { memory_bytes: 1048576, call_ms: 20, ranks: 64 },
///     buffers: { input: 65536, output: 65536, state: 65536, measures: 0 },            // bytes
/// }
/// ```
///
/// Texts must not contain quotes, backslashes or control characters. `codec` or `reducer` may be omitted.
///
/// Types have the names that users see: `uint8`, `int8`, `uint16`, `int16`, `int32`, `int64`, `float16`, `bfloat16`,
/// `float32`, `float64`, `bool`. Numbers are written without underscores, because they become part of a text.
///
/// The buffers determine the largest span of a codec: `input` and `output` hold its values and its encoding, `state`
/// its state. 64 KiB of values stay cached and make the overhead of a call negligible.
#[macro_export]
macro_rules! export {
    (
        name: $name:literal,
        about: $about:literal,
        $(codec: $codec:ident {
            dtypes: [$($codec_dtype:ident),+ $(,)?],
            state_bytes: $state_bytes:literal,
            lossless: $lossless:literal,
            elementwise: $elementwise:literal $(,)?
        },)?
        $(reducer: $reducer:ident {
            dtypes: [$($reducer_dtype:ident),+ $(,)?],
            shape: $shape:literal,
            commutative: $commutative:literal,
            measures: $measured:literal $(,)?
        },)?
        parameters: $parameters:ident {
            $($parameter:ident: $kind:ident { default: $default:literal, $($rest:tt)* }),* $(,)?
        },
        limits: { memory_bytes: $memory_bytes:literal, call_ms: $call_ms:literal, ranks: $ranks:literal $(,)? },
        buffers: {
            input: $input:literal, output: $output:literal, state: $state:literal, measures: $measures:literal $(,)?
        } $(,)?
    ) => {
        /// The parameters of this plugin.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $parameters {
            $(
                #[doc = $crate::__about!($($rest)*)]
                pub $parameter: $crate::__parameter_type!($kind),
            )*
        }

        impl ::core::default::Default for $parameters {
            fn default() -> Self {
                Self { $($parameter: $crate::__default!($kind, $default, $($rest)*),)* }
            }
        }

        impl $crate::parameters::Parameters for $parameters {
            const COUNT: usize = <[&str]>::len(&[$(stringify!($parameter)),*]);

            #[allow(unused_mut, unused_variables, reason = "there may be no parameters")]
            fn read(block: &[[u8; 8]]) -> Self {
                let mut values = block.iter().copied();
                Self { $($parameter: $crate::parameters::Parameter::read(values.next().unwrap_or_default()),)* }
            }
        }

        const _: () = {
            assert!($crate::manifest::is_plain($about), "`about` has a quote, a backslash or a control character");
            $(assert!(
                $crate::manifest::is_plain($crate::__about!($($rest)*)),
                "`about` of a parameter has a quote, a backslash or a control character"
            );)*
        };

        /// The manifest of this plugin, stored as a section of the module.
        pub const MANIFEST: &str = {
            const PARTS: &[&str] = &[
                concat!("{\"abi\":1,\"name\":\"", $name, "\",\"version\":\"", env!("CARGO_PKG_VERSION"), "\",\"about\":\""),
                $about,
                "\",\"kinds\":{",
                $(
                    ",",
                    "\"codec\":{\"dtypes\":[",
                    $(",", concat!("\"", stringify!($codec_dtype), "\""),)+
                    concat!("],\"state_bytes\":", $state_bytes),
                    concat!(",\"lossless\":", $lossless, ",\"elementwise\":", $elementwise, "}"),
                )?
                $(
                    ",",
                    "\"reducer\":{\"dtypes\":[",
                    $(",", concat!("\"", stringify!($reducer_dtype), "\""),)+
                    concat!("],\"shape\":\"", $shape, "\",\"commutative\":", $commutative),
                    concat!(",\"measures\":", $measured, "}"),
                )?
                "},\"parameters\":[",
                $(
                    ",",
                    concat!("{\"name\":\"", stringify!($parameter), "\",\"type\":\"", stringify!($kind), "\","),
                    $crate::__parameter_json!($default, $($rest)*),
                    "}",
                )*
                concat!("],\"limits\":{\"memory_bytes\":", $memory_bytes, ",\"call_ms\":", $call_ms),
                concat!(",\"ranks\":", $ranks, "}}"),
            ];
            const BYTES: [u8; $crate::manifest::length(PARTS)] = $crate::manifest::joined(PARTS);
            $crate::manifest::text(&BYTES)
        };

        #[cfg(target_arch = "wasm32")]
        const _: () = {
            #[used]
            #[unsafe(link_section = "ronde.manifest")]
            static SECTION: [u8; MANIFEST.len()] = *$crate::manifest::bytes(MANIFEST);

            static PLACE: $crate::support::Place = $crate::support::Place::new();
            static PARAMETERS: $crate::support::Buffer<
                { 8 * <$parameters as $crate::parameters::Parameters>::COUNT },
            > = $crate::support::Buffer::new();
            static INPUT: $crate::support::Buffer<$input> = $crate::support::Buffer::new();
            static OUTPUT: $crate::support::Buffer<$output> = $crate::support::Buffer::new();
            static STATE: $crate::support::Buffer<$state> = $crate::support::Buffer::new();
            static MEASURES: $crate::support::Buffer<$measures> = $crate::support::Buffer::new();
            $(static CODEC: $crate::support::Slot<$codec> = $crate::support::Slot::new();)?
            $(static REDUCER: $crate::support::Slot<$reducer> = $crate::support::Slot::new();)?

            #[unsafe(no_mangle)]
            extern "C" fn ronde_abi() -> i32 {
                $crate::abi::VERSION as i32
            }

            #[unsafe(no_mangle)]
            extern "C" fn ronde_place() -> i32 {
                let buffers = $crate::support::Buffers {
                    parameters: PARAMETERS.place(),
                    input: INPUT.place(),
                    output: OUTPUT.place(),
                    state: STATE.place(),
                    measures: MEASURES.place(),
                    place: &PLACE,
                };
                buffers.describe()
            }

            #[unsafe(no_mangle)]
            extern "C" fn ronde_configure() -> i32 {
                let parameters: $parameters = PARAMETERS.with(|block| $crate::support::parameters(block));
                let configured = Ok(0);
                $(let configured = configured.and_then(|_| $crate::support::configure::<$codec>(&CODEC, &parameters));)?
                $(let configured = configured.and_then(|_| $crate::support::configure::<$reducer>(&REDUCER, &parameters));)?
                $crate::support::outcome(configured)
            }

            $($crate::__codec_functions! { $codec, $state_bytes, $($codec_dtype)+ })?
            $($crate::__reducer_functions! { $reducer, $shape, $($reducer_dtype)+ })?
        };
    };
}

/// Defines the functions of a codec.
#[doc(hidden)]
#[macro_export]
macro_rules! __codec_functions {
    ($codec:ident, $state_bytes:literal, $($dtype:ident)+) => {
        const _: () = assert!(
            ::core::mem::size_of::<<$codec as $crate::Codec>::State>() == $state_bytes,
            "state_bytes is not the size of Codec::State"
        );

        #[unsafe(no_mangle)]
        extern "C" fn ronde_bound(elements: i32) -> i32 {
            $crate::support::outcome(CODEC.with(|codec| $crate::support::bound(codec, elements)))
        }

        #[unsafe(no_mangle)]
        extern "C" fn ronde_encode() -> i32 {
            let call = PLACE.call();
            $crate::support::outcome(CODEC.with(|codec| INPUT.with(|input| STATE.with(|state| OUTPUT.with(|output| {
                $(if call.dtype == <$crate::__element!($dtype) as $crate::Element>::DTYPE.number() {
                    return $crate::support::encode::<$crate::__element!($dtype), _>(codec, &call, input, state, output);
                })+
                Err($crate::support::OTHER_DTYPE)
            })))))
        }

        #[unsafe(no_mangle)]
        extern "C" fn ronde_decode() -> i32 {
            let call = PLACE.call();
            $crate::support::outcome(CODEC.with(|codec| INPUT.with(|input| OUTPUT.with(|output| {
                $(if call.dtype == <$crate::__element!($dtype) as $crate::Element>::DTYPE.number() {
                    return $crate::support::decode::<$crate::__element!($dtype), _>(codec, &call, input, output);
                })+
                Err($crate::support::OTHER_DTYPE)
            }))))
        }
    };
}

/// Defines the functions of a reducer.
#[doc(hidden)]
#[macro_export]
macro_rules! __reducer_functions {
    ($reducer:ident, $shape:literal, $($dtype:ident)+) => {
        const ADAPTIVE: bool = $crate::parameters::equal($shape.as_bytes(), b"adaptive");

        #[unsafe(no_mangle)]
        extern "C" fn ronde_reduce() -> i32 {
            let call = PLACE.call();
            $crate::support::outcome(REDUCER.with(|reducer| INPUT.with(|input| MEASURES.with(|measures| OUTPUT.with(|output| {
                $(if call.dtype == <$crate::__element!($dtype) as $crate::Element>::DTYPE.number() {
                    return $crate::support::reduce::<$crate::__element!($dtype), _>(
                        reducer, &call, ADAPTIVE, input, measures, output,
                    );
                })+
                Err($crate::support::OTHER_DTYPE)
            })))))
        }

        #[unsafe(no_mangle)]
        extern "C" fn ronde_measure() -> i32 {
            let call = PLACE.call();
            $crate::support::outcome(REDUCER.with(|reducer| INPUT.with(|input| MEASURES.with(|measures| {
                $(if call.dtype == <$crate::__element!($dtype) as $crate::Element>::DTYPE.number() {
                    return $crate::support::measure::<$crate::__element!($dtype), _>(reducer, &call, input, measures);
                })+
                Err($crate::support::OTHER_DTYPE)
            }))))
        }

        #[unsafe(no_mangle)]
        extern "C" fn ronde_conclude() -> i32 {
            let call = PLACE.call();
            $crate::support::outcome(REDUCER.with(|reducer| {
                MEASURES.with(|measures| $crate::support::conclude(reducer, &call, ADAPTIVE, measures))
            }))
        }
    };
}

/// The Rust type of an element type's name.
#[doc(hidden)]
#[macro_export]
macro_rules! __element {
    (uint8) => {
        u8
    };
    (int8) => {
        i8
    };
    (uint16) => {
        u16
    };
    (int16) => {
        i16
    };
    (int32) => {
        i32
    };
    (int64) => {
        i64
    };
    (float16) => {
        $crate::F16
    };
    (bfloat16) => {
        $crate::Bf16
    };
    (float32) => {
        f32
    };
    (float64) => {
        f64
    };
    (bool) => {
        $crate::Bool
    };
}

/// The Rust type of a parameter's kind.
#[doc(hidden)]
#[macro_export]
macro_rules! __parameter_type {
    (float) => {
        f64
    };
    (int) => {
        i64
    };
    (bool) => {
        bool
    };
    (choice) => {
        $crate::parameters::Choice
    };
}

/// The default of a parameter.
#[doc(hidden)]
#[macro_export]
macro_rules! __default {
    (choice, $default:literal, choices: [$($choice:literal),+ $(,)?], $($rest:tt)*) => {
        const { $crate::parameters::Choice::of($default, &[$($choice),+]) }
    };
    ($kind:ident, $default:literal, $($rest:tt)*) => { $default };
}

/// The description of a parameter.
#[doc(hidden)]
#[macro_export]
macro_rules! __about {
    (min: $min:literal, max: $max:literal, about: $about:literal $(,)?) => {
        $about
    };
    (choices: [$($choice:literal),+ $(,)?], about: $about:literal $(,)?) => {
        $about
    };
    (about: $about:literal $(,)?) => {
        $about
    };
}

/// The rest of a parameter's JSON in the manifest.
#[doc(hidden)]
#[macro_export]
macro_rules! __parameter_json {
    ($default:literal, min: $min:literal, max: $max:literal, about: $about:literal $(,)?) => {
        concat!("\"default\":", $default, ",\"min\":", $min, ",\"max\":", $max, ",\"about\":\"", $about, "\"")
    };
    ($default:literal, choices: [$first:literal $(, $choice:literal)* $(,)?], about: $about:literal $(,)?) => {
        concat!(
            "\"default\":\"", $default, "\",\"choices\":[\"", $first, "\"" $(, ",\"", $choice, "\"")*,
            "],\"about\":\"", $about, "\""
        )
    };
    ($default:literal, about: $about:literal $(,)?) => {
        concat!("\"default\":", $default, ",\"about\":\"", $about, "\"")
    };
}
