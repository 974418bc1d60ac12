//! Checks the rules of this project that a test can check. Each failure names the rule, the place, the reason and the
//! fix. CONTRIBUTING.md lists the other rules.

#![forbid(unsafe_code)]

#[path = "tidy/cargo_fuzz.rs"]
mod cargo_fuzz;
#[path = "tidy/claims.rs"]
mod claims;
#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/layers.rs"]
mod layers;
#[path = "tidy/licences.rs"]
mod licences;
#[path = "tidy/limits_table.rs"]
mod limits_table;
#[path = "tidy/packages.rs"]
mod packages;
#[path = "tidy/purity.rs"]
mod purity;
#[path = "tidy/retired_texts.rs"]
mod retired_texts;
#[path = "tidy/retired_words.rs"]
mod retired_words;
#[path = "tidy/sidecar_modules.rs"]
mod sidecar_modules;
#[path = "tidy/sizes.rs"]
mod sizes;
#[path = "tidy/source.rs"]
mod source;
#[path = "tidy/streams.rs"]
mod streams;
#[path = "tidy/top_level.rs"]
mod top_level;
#[path = "tidy/unsafe_code.rs"]
mod unsafe_code;
#[path = "tidy/words.rs"]
mod words;

/// Fails with all offences against a rule at once, and why the rule is there.
fn hold(rule: &str, why: &str, offences: &[String]) {
    assert!(offences.is_empty(), "\n\n{rule}\n{why}\n\n  {}\n\n", offences.join("\n  "));
}
