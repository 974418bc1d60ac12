//! Text of other processes: the lines of `mem.sock`.

use ronde_fuzz::{Outcome, Target};
use ronde_shm::{MemReply, MemRequest};

/// Both directions of `mem.sock`: each decoded line has one encoding.
pub(crate) fn lines_of_shared_memory() -> Target {
    const TOKEN: &str = "000102030405060708090a0b0c0d0e0f";
    let requests = [format!("ATTACH {TOKEN} 3 4096"), format!("RESULT {TOKEN} 0"), format!("RING {TOKEN} 262144")];
    let replies = ["OK", "OK 4096", "ERR there is no such session"].map(str::to_owned);
    let seeds = requests.into_iter().chain(replies).map(String::into_bytes).collect();
    Target::new("lines_of_shared_memory", seeds, move |bytes| {
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
    })
}

#[test]
fn fuzz_lines_of_shared_memory() {
    lines_of_shared_memory().run();
}
