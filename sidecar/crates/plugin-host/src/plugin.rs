//! A loaded plugin: compiled, tried once, identified by its digest.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use wasmtime::InstancePre;

use crate::error::{Fault, FaultKind};
use crate::guest::{Guest, State};
use crate::instance::Instance;
use crate::manifest::{Manifest, Parameters};
use crate::module::Inspection;
use crate::ticker::Ticker;
use crate::trust::KeyId;

/// A loaded plugin, shared by all users.
pub struct Plugin {
    label: Arc<str>,
    inspection: Inspection,
    signer: Option<KeyId>,
    module: InstancePre<State>,
    ticker: Arc<Ticker>,
    /// Number of faults that disable it; 0 disables never.
    disable_after: u32,
    faults: Mutex<Faults>,
    disabled: OnceLock<FaultKind>,
}

/// The operation that calls belong to. If an operation fails on several threads, that counts as one fault.
pub type Operation = (u64, u64);

/// The faults that count towards disabling a plugin.
#[derive(Default)]
struct Faults {
    count: u32,
    /// The operations whose faults were counted. There are fewer than `disable_after` of them.
    operations: Vec<Operation>,
}

impl Plugin {
    pub(crate) fn new(
        inspection: Inspection,
        signer: Option<KeyId>,
        module: InstancePre<State>,
        ticker: Arc<Ticker>,
        disable_after: u32,
    ) -> Self {
        let label = inspection.manifest.label().into();
        let (faults, disabled) = (Mutex::default(), OnceLock::new());
        Self { label, inspection, signer, module, ticker, disable_after, faults, disabled }
    }

    /// `name@version`.
    #[must_use]
    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.manifest().name
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.manifest().version
    }

    /// SHA-256 of the file, which sidecars compare.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.inspection.digest
    }

    /// What it says about itself.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.inspection.manifest
    }

    /// The properties of its module.
    #[must_use]
    pub fn inspection(&self) -> &Inspection {
        &self.inspection
    }

    /// The key that signed it, if there was a signature.
    #[must_use]
    pub fn signer(&self) -> Option<KeyId> {
        self.signer
    }

    /// Why the plugin is disabled, if it is.
    #[must_use]
    pub fn disabled(&self) -> Option<String> {
        self.disabled.get().map(ToString::to_string)
    }

    /// Starts an instance with these parameters. One thread at a time uses it, for many calls.
    ///
    /// # Errors
    /// [`Fault`] if the plugin does not start, rejects the parameters, or is disabled.
    pub fn instance(self: &Arc<Self>, parameters: &Parameters) -> Result<Instance, Fault> {
        Instance::start(Arc::clone(self), parameters, None)
    }

    /// Like [`Self::instance`], for an operation: all failures within it count as one fault.
    ///
    /// # Errors
    /// Those of [`Self::instance`].
    pub fn instance_for(self: &Arc<Self>, operation: Operation, parameters: &Parameters) -> Result<Instance, Fault> {
        Instance::start(Arc::clone(self), parameters, Some(operation))
    }

    /// Starts the module.
    pub(crate) fn start(&self, parameters: &Parameters, operation: Option<Operation>) -> Result<Guest, Fault> {
        self.check_enabled().map_err(|kind| self.fault(operation, kind, Vec::new()))?;
        if !parameters.fit(self.manifest()) {
            let kind = FaultKind::Refused("these parameters are those of another plugin".to_owned());
            return Err(self.fault(operation, kind, Vec::new()));
        }
        let guest = Guest::start(&self.module, self.manifest(), &self.ticker, parameters);
        guest.map_err(|(kind, log)| self.fault(operation, kind, log))
    }

    /// Returns an error if the plugin is disabled.
    pub(crate) fn check_enabled(&self) -> Result<(), FaultKind> {
        self.disabled.get().map_or(Ok(()), |reason| Err(reason.clone()))
    }

    /// Creates a fault and counts it, once per operation.
    pub(crate) fn fault(&self, operation: Option<Operation>, kind: FaultKind, log: Vec<String>) -> Fault {
        if kind.is_misbehaviour() && self.disable_after > 0 {
            let faults = self.count(operation);
            if faults >= self.disable_after {
                let reason = FaultKind::Disabled { faults, last: kind.to_string() };
                if self.disabled.set(reason).is_ok() {
                    tracing::warn!(plugin = %self.label, faults, "the plugin is disabled: {kind}");
                }
            }
        }
        Fault { plugin: Arc::clone(&self.label), kind, log }
    }

    /// The number of faults including this one.
    fn count(&self, operation: Option<Operation>) -> u32 {
        // Nothing panics while this lock is held.
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = operation.is_some_and(|operation| faults.operations.contains(&operation));
        if !counted && faults.count < self.disable_after {
            faults.count += 1;
            faults.operations.extend(operation);
        }
        faults.count
    }
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin").field("label", &self.label).field("disabled", &self.disabled).finish_non_exhaustive()
    }
}
