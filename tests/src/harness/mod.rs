//! `ronde run` as users start it: real launchers, agents, sidecars and workers, watched through `/proc`.
//!
//! ```no_run
//! use ronde_tests::harness::{DEADLINE, Run};
//!
//! let ended = Run::new(4).sidecars(2).start(["sh", "-c", "echo $RANK"]).wait(DEADLINE);
//! assert_eq!(ended.code, Some(0), "{ended}");
//! ```
//!
//! Whatever a test starts carries a mark in its environment, by which it is found, counted and, at the end of the test,
//! killed: nothing else is touched.

use std::path::PathBuf;
use std::time::Duration;

mod executable;
mod process;
mod remote;
mod run;

pub use executable::{copy_executable, write_executable};
pub use process::{Process, marked};
pub use remote::RemoteShell;
pub use run::{Ended, Job, Run};

/// How long a test waits for what should come at once: generous, since machines that run tests are busy.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Runs a job with a start timeout of `first` seconds, and with a doubled one while the job ends before it is where the test
/// wants it: a busy machine takes longer for the steps before. Returns the last attempt with its timeout.
pub fn with_start_timeouts<T>(first: u64, attempt: impl Fn(&str) -> T, is_reached: impl Fn(&T) -> bool) -> (T, String) {
    let mut seconds = first;
    loop {
        let timeout = seconds.to_string();
        let attempted = attempt(&timeout);
        if is_reached(&attempted) || seconds * 2 > START_TIMEOUT_MAX {
            return (attempted, timeout);
        }
        seconds *= 2;
    }
}

/// Less than [`DEADLINE`] by the time that ending a job takes.
const START_TIMEOUT_MAX: u64 = 80;

/// The binary under test: `RONDE_BIN`, or `ronde` in the target directory of the running test.
///
/// # Panics
/// When there is none; the message explains how to build it.
#[must_use]
pub fn ronde_binary() -> PathBuf {
    let beside = || Some(std::env::current_exe().ok()?.parent()?.parent()?.join("ronde"));
    let path = std::env::var_os("RONDE_BIN").map(PathBuf::from).or_else(beside).unwrap_or_default();
    assert!(
        path.is_file(),
        "there is no ronde binary at {}; build it with `cargo build -p ronde-sidecar`, or name one in RONDE_BIN",
        path.display()
    );
    path
}
