//! [`Gpus`]: the GPUs that the sidecar uses, and NCCL. It imports the device memory that workers pass over mem.sock.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use ronde_gpu::nccl::Nccl;
use ronde_gpu::{Context, DeviceSegment, Driver, GpuError};
use ronde_shm::PciAddress;

/// The driver with its GPUs, each opened by the first memory that a worker passes, and NCCL.
pub(crate) struct Gpus {
    driver: Arc<Driver>,
    nccl: Arc<Nccl>,
    /// The address of each GPU, by number.
    addresses: Vec<PciAddress>,
    contexts: Mutex<Vec<Option<Arc<Context>>>>,
    /// The most bytes of device memory of one session.
    bytes_max: u64,
}

/// A part of a worker's device memory.
#[derive(Clone)]
pub(crate) struct DevicePart {
    /// The memory, imported.
    pub(crate) segment: Arc<DeviceSegment>,
    /// The offset of the first byte.
    pub(crate) offset: u64,
    /// The number of bytes.
    pub(crate) bytes: u64,
}

impl Gpus {
    /// Opens the driver and NCCL, without a context: that takes some hundred megabytes of a GPU.
    ///
    /// # Errors
    /// What is missing on this host, and what to do.
    pub(crate) fn open(bytes_max: u64) -> Result<Self, GpuError> {
        let driver = Driver::get()?;
        let nccl = Nccl::find(&[])?;
        let mut addresses = Vec::new();
        for ordinal in 0..driver.devices() {
            let bus_id = driver.info(ordinal)?.bus_id;
            addresses.push(bus_id.parse().map_err(|_| GpuError::NoDevice {
                reason: format!("GPU {ordinal} has the PCI address {bus_id:?}, which cannot be read"),
            })?);
        }
        let contexts = Mutex::new(vec![None; addresses.len()]);
        Ok(Self { driver, nccl, addresses, contexts, bytes_max })
    }

    /// NCCL.
    pub(crate) fn nccl(&self) -> &Arc<Nccl> {
        &self.nccl
    }

    /// The number of GPUs.
    pub(crate) fn count(&self) -> usize {
        self.addresses.len()
    }

    /// The most bytes of device memory of one session.
    pub(crate) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// The context of a GPU, made by the first call.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn context(&self, ordinal: u32) -> Result<Arc<Context>, GpuError> {
        // A panic elsewhere leaves the list whole: the only change is that of one entry.
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        match contexts.get_mut(ordinal as usize) {
            Some(Some(context)) => Ok(Arc::clone(context)),
            Some(none) => Ok(Arc::clone(none.insert(Context::retain(&self.driver, ordinal)?))),
            None => Context::retain(&self.driver, ordinal),
        }
    }

    /// Imports memory of a worker.
    ///
    /// # Errors
    /// Why it is refused, for the worker's user.
    pub(crate) fn import(
        &self,
        (bytes, gpu): (u64, PciAddress),
        descriptor: &OwnedFd,
    ) -> Result<DeviceSegment, String> {
        let ordinal = ordinal_of(&self.addresses, gpu)?;
        let bytes = usize::try_from(bytes).map_err(|error| error.to_string())?;
        let context = self.context(ordinal).map_err(|error| error.to_string())?;
        DeviceSegment::import(&context, descriptor.as_fd(), bytes).map_err(|error| error.to_string())
    }
}

/// The number of the GPU at an address, of those with these addresses.
fn ordinal_of(addresses: &[PciAddress], gpu: PciAddress) -> Result<u32, String> {
    let mut found = (0_u32..).zip(addresses).filter(|(_, address)| **address == gpu).map(|(ordinal, _)| ordinal);
    match (found.next(), found.next()) {
        (Some(ordinal), None) => Ok(ordinal),
        (Some(_), Some(_)) => {
            Err(format!("the GPU at {gpu} is partitioned (MIG), so its address does not name one; the worker copies"))
        }
        (None, _) => {
            Err(format!("the sidecar does not see the GPU at {gpu}; see its CUDA_VISIBLE_DEVICES and its container"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_found_by_its_address() {
        let address = |text: &str| text.parse::<PciAddress>().expect("an address");
        let seen = ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:03:00.0"].map(address);
        assert_eq!(ordinal_of(&seen, address("00000000:02:00.0")), Ok(1));
        let partitioned = ordinal_of(&seen, address("0000:03:00.0"));
        assert!(partitioned.is_err_and(|reason| reason.contains("MIG")));
        let unseen = ordinal_of(&seen, address("0000:04:00.0"));
        assert!(unseen.is_err_and(|reason| reason.contains("does not see the GPU at 0000:04:00.0")));
    }
}
