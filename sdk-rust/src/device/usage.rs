//! [`DeviceUses`]: how a session uses its GPUs, which it reports to the sidecar for status and metrics.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ronde_rpc::v1;
use ronde_rpc::v1::client_message::Message;

use crate::session::Session;

/// The figures of each GPU.
#[derive(Debug, Default)]
pub(crate) struct DeviceUses(Mutex<BTreeMap<u32, DeviceUse>>);

/// The figures of one GPU.
#[derive(Debug, Default)]
struct DeviceUse {
    used: v1::GpuUse,
    /// Whether they have changed since they were reported.
    is_new: bool,
}

/// How the contribution of an operation travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// The worker copies it to shared memory.
    Copied,
    /// NCCL reduces it within the host.
    Two,
    /// The sidecar gets it in device memory.
    Shared,
}

impl DeviceUses {
    /// Counts a contribution from a GPU. `address` finds where that is on the bus, until it is known.
    pub(super) fn count(&self, ordinal: u32, address: impl FnOnce() -> Option<String>, (level, bytes): (Level, u64)) {
        // Asked of the driver, which may take a while, before the lock is held: other threads count meanwhile.
        let is_unknown = self.lock().get(&ordinal).is_none_or(|entry| entry.used.gpu.is_empty());
        let found = if is_unknown { address() } else { None };
        let mut uses = self.lock();
        let entry = uses.entry(ordinal).or_default();
        if let Some(found) = found {
            entry.used.gpu = found;
        }
        let used = match level {
            Level::Copied => &mut entry.used.copied,
            Level::Two => &mut entry.used.two_levels,
            Level::Shared => &mut entry.used.shared,
        };
        let used = used.get_or_insert_default();
        used.operations += 1;
        used.bytes = used.bytes.saturating_add(bytes);
        entry.is_new = true;
    }

    /// Notes the version of NCCL that the worker uses on a GPU.
    pub(super) fn note_nccl(&self, ordinal: u32, version: u32) {
        self.lock().entry(ordinal).or_default().used.nccl_version = version;
    }

    /// The figures that have changed since the last call. A GPU without an address has none.
    pub(crate) fn take_changes(&self) -> Vec<v1::GpuUse> {
        let mut uses = self.lock();
        let changed = uses.values_mut().filter(|entry| entry.is_new && !entry.used.gpu.is_empty());
        changed
            .map(|entry| {
                entry.is_new = false;
                entry.used.clone()
            })
            .collect()
    }

    /// Has the figures of a GPU reported again, as they were not sent.
    pub(crate) fn not_sent(&self, gpu: &str) {
        self.lock().values_mut().filter(|entry| entry.used.gpu == gpu).for_each(|entry| entry.is_new = true);
    }

    /// Ignores poisoning: a panic elsewhere leaves figures of which one is not counted.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, DeviceUse>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Reports to the sidecar how this session uses GPUs, if that has changed.
    pub(crate) fn report_gpus(&self) {
        for used in self.devices.take_uses() {
            let gpu = used.gpu.clone();
            // Fails when the stream has ended, or the sidecar does not read: it is reported again.
            if self.send_on_stream(Message::GpuUse(used)).is_err() {
                self.devices.uses_not_sent(&gpu);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_changed_is_reported_once() {
        let uses = DeviceUses::default();
        let address = |text: &str| Some(text.to_owned());
        uses.count(1, || address("0000:02:00.0"), (Level::Two, 100));
        uses.count(1, || panic!("it is known"), (Level::Two, 50));
        uses.count(1, || panic!("it is known"), (Level::Copied, 7));
        uses.note_nccl(1, 22_304);
        uses.count(0, || None, (Level::Shared, 9));
        let level = |operations, bytes| Some(v1::GpuLevelUse { operations, bytes });
        let expected = v1::GpuUse {
            gpu: "0000:02:00.0".to_owned(),
            copied: level(1, 7),
            two_levels: level(2, 150),
            shared: None,
            nccl_version: 22_304,
        };
        assert_eq!(uses.take_changes(), [expected]);
        assert_eq!(uses.take_changes(), []);
        uses.not_sent("0000:02:00.0");
        assert_eq!(uses.take_changes().len(), 1);
        let without_the_lock = || {
            assert!(uses.0.try_lock().is_ok(), "the driver is asked while other threads can count");
            address("0000:01:00.0")
        };
        uses.count(0, without_the_lock, (Level::Shared, 1));
        let changes = uses.take_changes();
        assert_eq!(changes.len(), 1);
        assert_eq!(changes[0].shared, level(2, 10));
    }
}
