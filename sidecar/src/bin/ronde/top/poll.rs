//! Requests the status pages of all sidecars, each within a bound.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};

use ronde_bootstrap::codes::{Code, coded};
use ronde_bootstrap::directory;
use ronde_wire::Failure;

use super::model::Sample;
use super::page::Page;
use crate::status::{address_in, address_of, ask_all, directories, fetch};

/// The sidecars that are sampled.
pub(super) enum Targets {
    /// These.
    Addresses(Vec<SocketAddr>),
    /// The one with this directory.
    Directory(PathBuf),
    /// All below this one.
    Below(PathBuf),
}

impl Targets {
    /// The given ones, else those that `ronde status` would show.
    pub(super) fn new(socket: Option<PathBuf>, urls: &[String]) -> anyhow::Result<Self> {
        if !urls.is_empty() {
            let mut addresses: Vec<SocketAddr> = Vec::new();
            for url in urls {
                let address = address_of(url)?;
                // A sidecar that is named twice is one row.
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
            return Ok(Self::Addresses(addresses));
        }
        let socket = socket.or_else(|| std::env::var_os("RONDE_SOCKET").map(PathBuf::from));
        Ok(socket.map_or_else(|| Self::Below(directory::default_base()), Self::Directory))
    }

    fn addresses(&self) -> anyhow::Result<Vec<SocketAddr>> {
        match self {
            Self::Addresses(addresses) => Ok(addresses.clone()),
            Self::Directory(directory) => Ok(vec![address_in(directory)?]),
            // A sidecar that ends meanwhile has removed its directory.
            Self::Below(base) => Ok(directories(base)?.iter().filter_map(|found| address_in(found).ok()).collect()),
        }
    }
}

/// Samples all sidecars at once.
pub(super) fn sample(targets: &Targets) -> Sample {
    let is_search = matches!(targets, Targets::Below(_));
    let mut addresses = match targets.addresses() {
        Ok(addresses) => addresses,
        Err(error) => {
            return Sample { answers: Vec::new(), problem: Some(coded(&error, Code::NoSidecarFound)), is_search };
        }
    };
    let count = addresses.len();
    addresses.truncate(SIDECARS_MAX);
    let problem = (count > SIDECARS_MAX).then(|| {
        format!("{count} sidecars are found, and {SIDECARS_MAX} of them are shown; name the ones to show with --url")
    });
    let answer = |(address, answer): (&SocketAddr, anyhow::Result<Page>)| {
        (address.to_string(), answer.map(Box::new).map_err(|error| Failure::line(&format!("{error:#}"))))
    };
    let answers = addresses.iter().zip(ask_all(&addresses, page)).map(answer).collect();
    Sample { answers, problem, is_search }
}

fn page(address: SocketAddr) -> anyhow::Result<Page> {
    let body = fetch(address, WITHIN)?;
    let other = || format!("the answer of {address} is not a status page of this version");
    let page: Page = serde_json::from_str(&body).with_context(other)?;
    // Other fields have defaults.
    ensure!(!page.job.is_empty(), "{}: it names no job", other());
    page.check().with_context(other)?;
    Ok(page)
}

/// A thread that takes one sample each time that it is asked to, so that keys are never waited for.
pub(super) struct Poller {
    requests: SyncSender<()>,
    samples: Receiver<Sample>,
    is_asked: bool,
}

impl Poller {
    /// Starts the thread. It ends with this process.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub(super) fn start(targets: Targets) -> anyhow::Result<Self> {
        let (requests, asked) = sync_channel(1);
        let (answers, samples) = sync_channel(1);
        let serve = move || {
            while asked.recv().is_ok() && answers.send(sample(&targets)).is_ok() {}
        };
        let named = std::thread::Builder::new().name("poll".to_owned());
        named.spawn(serve).context("no thread can be started that asks the sidecars")?;
        Ok(Self { requests, samples, is_asked: false })
    }

    /// Asks for a sample, unless one is on its way.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(super) fn ask(&mut self) -> anyhow::Result<()> {
        if !self.is_asked {
            self.requests.send(()).map_err(|_| ended())?;
            self.is_asked = true;
        }
        Ok(())
    }

    /// Takes the sample that was asked for, once it is there.
    ///
    /// # Errors
    /// When the thread has ended.
    pub(super) fn answer(&mut self) -> anyhow::Result<Option<Sample>> {
        match self.samples.try_recv() {
            Ok(sample) => {
                self.is_asked = false;
                Ok(Some(sample))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err(ended()),
        }
    }
}

fn ended() -> anyhow::Error {
    anyhow!("the thread that asks the sidecars has ended; please report this").context(Code::Bug)
}

/// How long a sidecar may take to answer.
const WITHIN: Duration = Duration::from_secs(2);
/// The sidecars that are asked.
const SIDECARS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::closed_port::closed_port;

    /// A server that answers with this body.
    fn serve(body: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // A client for which this is too late has closed the connection.
                let _ = answer(stream.expect("it connects"), body);
            }
        });
        address
    }

    fn answer(mut stream: TcpStream, body: &str) -> std::io::Result<()> {
        let mut request = Vec::new();
        // To its end: the kernel resets a connection that is closed with unread bytes, and the client loses the answer.
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte)?;
            request.push(byte[0]);
        }
        stream.write_all(format!("HTTP/1.1 200 OK\r\n\r\n{body}").as_bytes())
    }

    /// Samples until the answers fit, a few times: a busy machine makes servers late.
    fn sample_until(targets: &Targets, fits: impl Fn(&Sample) -> bool) -> Sample {
        let mut samples = std::iter::repeat_with(|| sample(targets)).take(10);
        samples.find(|sample| fits(sample)).expect("the servers answer")
    }

    #[test]
    fn each_sidecar_has_its_page_or_a_reason() {
        let (_bound, closed) = closed_port();
        let pages = [serve(r#"{"job":"night","epoch":2,"later":[]}"#), serve("[]"), closed];
        let words = "is not a status page of this version";
        let fits = |sample: &Sample| {
            let [(_, Ok(_)), (_, Err(other)), _] = &sample.answers[..] else { return false };
            other.contains(words)
        };
        let sample = sample_until(&Targets::Addresses(pages.into()), fits);
        let [(_, good), (_, other), (_, gone)] = &sample.answers[..] else { panic!("{sample:?}") };
        let page = good.as_ref().expect("a page");
        assert_eq!((page.job.as_str(), page.epoch, page.world_size), ("night", 2, 0));
        assert!(other.as_ref().expect_err("a list").contains(words), "{other:?}");
        assert!(gone.as_ref().expect_err("nobody listens").contains("no sidecar answers at 127.0.0.1:"), "{gone:?}");
    }

    #[test]
    fn a_sidecar_that_is_named_twice_is_asked_once() {
        let urls = ["http://127.0.0.1:9", "127.0.0.1:8", "http://127.0.0.1:9/status"].map(str::to_owned);
        let Ok(Targets::Addresses(addresses)) = Targets::new(None, &urls) else { panic!("{urls:?}") };
        assert_eq!(addresses.iter().map(SocketAddr::port).collect::<Vec<_>>(), [9, 8]);
    }

    #[test]
    fn a_directory_without_sidecars_is_a_problem_and_not_the_end() {
        let base = tempfile::tempdir().expect("a directory can be made");
        let targets = Targets::Below(base.path().to_owned());
        assert!(sample(&targets).problem.expect("nothing is there").contains("no sidecar is found below"));
        let address = serve(r#"{"job":"night"}"#);
        let directory = base.path().join("ronde-job-0-1");
        std::fs::create_dir(&directory).expect("ours");
        std::fs::write(directory.join("admin"), format!("{address}\n")).expect("ours");
        // It is found once it is there.
        sample_until(&targets, |sample| sample.answers[0].1.is_ok());
    }

    #[test]
    fn too_many_sidecars_are_cut_with_a_message() {
        let (_bound, closed) = closed_port();
        let sample = sample(&Targets::Addresses(vec![closed; SIDECARS_MAX + 1]));
        assert_eq!(sample.answers.len(), SIDECARS_MAX);
        assert!(sample.problem.expect("a sentence").starts_with("257 sidecars are found, and 256 of them"));
    }

    #[test]
    fn a_poller_takes_one_sample_at_a_time() {
        let mut poller = Poller::start(Targets::Addresses(vec![serve(r#"{"job":"night"}"#)])).expect("a thread");
        let deadline = std::time::Instant::now() + WITHIN * 30;
        loop {
            poller.ask().expect("it runs");
            poller.ask().expect("it runs");
            let sample = loop {
                if let Some(sample) = poller.answer().expect("it runs") {
                    break sample;
                }
                assert!(std::time::Instant::now() < deadline, "no sample came");
                std::thread::sleep(Duration::from_millis(1));
            };
            assert!(poller.answer().expect("it runs").is_none(), "it was asked once");
            if sample.answers[0].1.is_ok() {
                return;
            }
            // A busy machine makes the server late.
            assert!(std::time::Instant::now() < deadline, "{sample:?}");
        }
    }
}
