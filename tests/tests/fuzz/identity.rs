//! Text of certificates and of files: identities, secrets.

use ronde_fuzz::{Outcome, Target};
use ronde_transport::{JobSecret, SpiffeId};

/// The one name in a certificate, and the file with a job's secret, which errors do not repeat.
pub(crate) fn lines_of_identity() -> Target {
    let header = JobSecret::generate().expect("randomness").to_text().lines().next().expect("a header").to_owned();
    let secret = format!("{header}\n{}\n", "0123456789abcdef".repeat(4));
    let ids = ["spiffe://cluster.local/job/night-run_1/sidecar/17", "spiffe://d/job/j/sidecar/0"];
    let seeds = ids.iter().map(|id| id.as_bytes().to_vec()).chain([secret.into_bytes()]).collect();
    Target::new("lines_of_identity", seeds, move |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return Outcome::refused(&"no text") };
        if let Ok(id) = text.parse::<SpiffeId>() {
            assert_eq!(id.to_string(), text, "an id has one spelling");
            return Outcome::read(&id);
        }
        match JobSecret::from_text(text) {
            Ok(secret) => {
                let digits = |text: &str| text.split_once('\n').map(|(_, digits)| digits.trim().to_ascii_lowercase());
                assert_eq!(digits(&secret.to_text()), digits(text));
                Outcome::read(&"a secret")
            }
            Err(error) => {
                let text = error.to_string();
                let digits = text.lines().nth(1).unwrap_or_default();
                let is_secret = digits.len() >= 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
                assert!(!is_secret || !text.contains(digits), "the error repeats the secret");
                Outcome::refused(&text)
            }
        }
    })
}

#[test]
fn fuzz_lines_of_identity() {
    lines_of_identity().run();
}
