//! Text of other processes and of files: the lines of `mem.sock`, identities, secrets.

use ronde_fuzz::{Outcome, fuzz};
use ronde_shm::{MemReply, MemRequest};
use ronde_transport::{JobSecret, SpiffeId};

/// Both directions of `mem.sock`: each decoded line has one encoding.
#[test]
fn fuzz_lines_of_shared_memory() {
    const TOKEN: &str = "000102030405060708090a0b0c0d0e0f";
    let requests = [format!("ATTACH {TOKEN} 3 4096"), format!("RESULT {TOKEN} 0"), format!("RING {TOKEN} 262144")];
    let replies = ["OK", "OK 4096", "ERR there is no such session"].map(str::to_owned);
    let seeds = requests.into_iter().chain(replies).map(String::into_bytes).collect();
    fuzz("lines_of_shared_memory", seeds, |bytes| {
        let Ok(line) = std::str::from_utf8(bytes) else { return Outcome::refused(&"no text") };
        let (request, reply) = (MemRequest::parse(line), MemReply::parse(line));
        assert!(request.is_err() || reply.is_err(), "both a request and a reply");
        match (request, reply) {
            (Ok(request), _) => {
                assert_eq!(request.to_line(), format!("{line}\n"));
                Outcome::read(&request)
            }
            (Err(_), Ok(reply)) => {
                assert_eq!(reply.to_line(), format!("{line}\n"));
                Outcome::read(&reply)
            }
            (Err(one), Err(other)) => Outcome::refused(&format!("{one}; {other}")),
        }
    });
}

/// The one name in a certificate, and the file with a job's secret, which errors do not repeat.
#[test]
fn fuzz_lines_of_identity() {
    let header = JobSecret::generate().expect("randomness").to_text().lines().next().expect("a header").to_owned();
    let secret = format!("{header}\n{}\n", "0123456789abcdef".repeat(4));
    let ids = ["spiffe://cluster.local/job/night-run_1/sidecar/17", "spiffe://d/job/j/sidecar/0"];
    let seeds = ids.iter().map(|id| id.as_bytes().to_vec()).chain([secret.into_bytes()]).collect();
    fuzz("lines_of_identity", seeds, |bytes| {
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
    });
}
