//! Whether a wait may keep its core for a moment.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;

/// The cores of this machine, and what wants to run on them.
#[derive(Debug)]
pub(crate) struct Cores {
    count: usize,
    /// `None` where the system does not tell how many threads run: then no core is ever free.
    load: Option<File>,
}

impl Cores {
    pub(crate) fn new() -> Self {
        let count = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self { count, load: File::open("/proc/loadavg").ok() }
    }

    /// Whether there are more cores than threads that want to run now, the caller among them: one is left for the sidecar,
    /// which would otherwise wait for the core that the caller keeps. Threads of the whole machine count, also where this
    /// process may use a part of its cores only: in doubt no core is free.
    pub(crate) fn one_is_free(&self) -> bool {
        let mut text = [0; LOAD_BYTES_MAX];
        let Some(Ok(read)) = self.load.as_ref().map(|load| load.read_at(&mut text, 0)) else { return false };
        running(&text[..read]).is_some_and(|running| running < self.count)
    }
}

/// The number of threads that run or want to: of "0.20 0.18 0.12 1/80 11206" it is 1.
fn running(load: &[u8]) -> Option<usize> {
    let fourth = load.split(|byte| *byte == b' ').nth(3)?;
    let running = fourth.split(|byte| *byte == b'/').next()?;
    std::str::from_utf8(running).ok()?.parse().ok()
}

/// Three numbers with two places, two counts and a process number.
const LOAD_BYTES_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_of_running_threads_is_found() {
        assert_eq!(running(b"0.20 0.18 0.12 1/80 11206\n"), Some(1));
        assert_eq!(running(b"120.20 90.18 80.12 130/4080 11206\n"), Some(130));
        for other in [&b""[..], b"0.20 0.18 0.12", b"0.20 0.18 0.12 x/80 1", b"a b c \xff/1"] {
            assert_eq!(running(other), None, "{other:?}");
        }
    }

    #[test]
    fn more_threads_than_cores_leave_none_free() {
        let cores = |count| Cores { count, ..Cores::new() };
        assert!(!cores(1).one_is_free(), "this test runs");
        assert!(cores(usize::MAX).one_is_free());
        assert!(!Cores { count: usize::MAX, load: None }.one_is_free());
    }
}
