//! The sidecar and the worker's token, from the environment that `ronde run` sets.

use std::fs;
use std::path::{Path, PathBuf};

use ronde_shm::WorkerToken;
use ronde_wire::limits;

use crate::error::Error;

/// Where the sidecar is, and who this process is.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The socket that takes rings.
    pub(crate) socket: PathBuf,
    /// The worker's number.
    pub(crate) worker: u32,
    /// Its token.
    pub(crate) token: WorkerToken,
    /// Capacity of each direction of a connection's ring in bytes.
    pub(crate) ring_bytes: u64,
    /// The speed that NCCL is told, in Mbit/s.
    pub(crate) speed_mbps: i32,
}

impl Settings {
    /// Reads the environment and the token file.
    pub(crate) fn from_env() -> Result<Self, Error> {
        Self::from_lookup(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    pub(crate) fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let wrong = |text: String| Error::Settings(text);
        let directory = lookup("RONDE_SOCKET").ok_or_else(|| wrong("RONDE_SOCKET is not set".to_owned()))?;
        let directory = Path::new(&directory);
        // In an elastic job the rank of a worker changes, its number does not.
        let number = lookup("RONDE_WORKER").or_else(|| lookup("RONDE_RANK"));
        let number = number.ok_or_else(|| wrong("RONDE_RANK is not set".to_owned()))?;
        let worker = number.parse().map_err(|_| wrong(format!("the worker's number is {number:?}")))?;
        let token_file = lookup("RONDE_TOKEN_FILE").map(PathBuf::from);
        let token_file = token_file.unwrap_or_else(|| directory.join(format!("rank-{worker}.token")));
        let bytes = fs::read(&token_file)
            .map_err(|error| wrong(format!("the token file {} cannot be read: {error}", token_file.display())))?;
        let token = <[u8; 32]>::try_from(&bytes[..])
            .map_err(|_| wrong(format!("the token file {} has {} bytes, not 32", token_file.display(), bytes.len())))?;
        let number_of =
            |name: &str, default: u64, least: u64, most: u64| match lookup(name) {
                None => Ok(default),
                Some(text) => text.parse().ok().filter(|value| (least..=most).contains(value)).ok_or_else(|| {
                    wrong(format!("{name} is {text:?}; it must be a whole number from {least} to {most}"))
                }),
            };
        let (least, most) = (limits::STREAM_RING_BYTES_MIN, limits::STREAM_RING_BYTES_MAX);
        let ring_bytes = number_of("RONDE_NCCL_RING_BYTES", most, least, most)?;
        if !ring_bytes.is_power_of_two() {
            return Err(wrong(format!("RONDE_NCCL_RING_BYTES is {ring_bytes}; it must be a power of two")));
        }
        let speed = number_of("RONDE_NCCL_SPEED_MBPS", SPEED_MBPS, 1, 10_000_000)?;
        Ok(Self {
            socket: directory.join("mem.sock"),
            worker,
            token: WorkerToken::from_bytes(token),
            ring_bytes,
            speed_mbps: i32::try_from(speed).unwrap_or(i32::MAX),
        })
    }
}

/// 10 Gbit/s: what one core encrypts and sends. NCCL chooses its algorithms by it.
const SPEED_MBPS: u64 = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_checked() {
        let directory = std::env::temp_dir().join(format!("ronde-nccl-settings-{}", std::process::id()));
        fs::create_dir_all(&directory).expect("a directory");
        fs::write(directory.join("rank-3.token"), [7; 32]).expect("a file");
        fs::write(directory.join("rank-4.token"), [7; 31]).expect("a file");
        let at = directory.to_str().expect("text").to_owned();
        let read = |set: &[(&str, &str)]| {
            Settings::from_lookup(|name| {
                let own = [("RONDE_SOCKET", at.as_str()), ("RONDE_RANK", "3")];
                set.iter().chain(&own).find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        let good = read(&[]).expect("all is set");
        assert_eq!((good.worker, good.ring_bytes), (3, 1 << 20));
        assert_eq!(good.socket, directory.join("mem.sock"));
        assert!(good.token == WorkerToken::from_bytes([7; 32]));
        assert_eq!(read(&[("RONDE_NCCL_RING_BYTES", "65536")]).expect("a size").ring_bytes, 65_536);
        let refused = |name, value| read(&[(name, value)]).expect_err("it is wrong").to_string();
        assert!(refused("RONDE_RANK", "x").contains("\"x\""));
        assert!(refused("RONDE_WORKER", "4").contains("has 31 bytes, not 32"), "the number goes before the rank");
        assert!(refused("RONDE_WORKER", "5").contains("cannot be read"));
        assert!(refused("RONDE_NCCL_RING_BYTES", "1").contains("from 65536 to 1048576"));
        assert!(refused("RONDE_NCCL_RING_BYTES", "65537").contains("power of two"));
        let error = Settings::from_lookup(|_| None).expect_err("nothing is set").to_string();
        assert!(error.contains("RONDE_SOCKET is not set; start the program by `ronde run --nccl-net`"), "{error}");
        fs::remove_dir_all(&directory).expect("it is there");
    }
}
