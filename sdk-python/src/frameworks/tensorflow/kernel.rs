//! Kernels: the attributes of a node, and the start of its operation when the graph reaches it.

#![allow(unsafe_code, reason = "functions that TensorFlow calls with pointers of its own and of ours")]

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use ronde::{ReduceOp, SetId};

use super::abi::{Api, Code, Compute, Create, Delete, Failed, Opaque, Status, Tensor, api};
use super::done::{Call, LAYOUT, end_in_place, has_expected_layout};
use super::{in_flight, self_test};
use crate::arguments::reduce_op_of;

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    AllReduce,
    AllReduceMany,
    GroupedAllReduce,
    AllGather,
    GroupedAllGather,
    Broadcast,
    BroadcastMany,
    AllToAll,
    ReduceScatter,
    GroupedReduceScatter,
    Barrier,
    Join,
    Rank,
    Size,
    LocalRank,
    LocalSize,
    Included,
    SelfTest,
}

impl Kind {
    const ALL: [Self; 18] = [
        Self::AllReduce,
        Self::AllReduceMany,
        Self::GroupedAllReduce,
        Self::AllGather,
        Self::GroupedAllGather,
        Self::Broadcast,
        Self::BroadcastMany,
        Self::AllToAll,
        Self::ReduceScatter,
        Self::GroupedReduceScatter,
        Self::Barrier,
        Self::Join,
        Self::Rank,
        Self::Size,
        Self::LocalRank,
        Self::LocalSize,
        Self::Included,
        Self::SelfTest,
    ];

    fn reduces(self) -> bool {
        matches!(
            self,
            Self::AllReduce
                | Self::AllReduceMany
                | Self::GroupedAllReduce
                | Self::ReduceScatter
                | Self::GroupedReduceScatter
        )
    }

    fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::BroadcastMany)
    }

    fn has_name(self) -> bool {
        !matches!(
            self,
            Self::Join | Self::Rank | Self::Size | Self::LocalRank | Self::LocalSize | Self::Included | Self::SelfTest
        )
    }

    fn has_set(self) -> bool {
        self.has_name() || matches!(self, Self::Join | Self::Size | Self::Included)
    }
}

/// The attributes of a node.
#[derive(Debug)]
pub(super) struct Spec {
    pub(super) kind: Kind,
    /// The name by which ranks match the operation; `None` for a number.
    pub(super) name: Option<String>,
    pub(super) set: SetId,
    pub(super) op: ReduceOp,
    pub(super) prescale: f64,
    pub(super) postscale: f64,
    pub(super) root: u32,
}

struct Kernel {
    spec: Arc<Spec>,
}

/// The functions that TensorFlow calls for kernels of a kind.
pub(super) fn functions(kind: Kind) -> (Create, Compute, Delete) {
    let create: Create = match kind {
        Kind::AllReduce => create::<{ Kind::AllReduce as usize }>,
        Kind::AllReduceMany => create::<{ Kind::AllReduceMany as usize }>,
        Kind::GroupedAllReduce => create::<{ Kind::GroupedAllReduce as usize }>,
        Kind::AllGather => create::<{ Kind::AllGather as usize }>,
        Kind::GroupedAllGather => create::<{ Kind::GroupedAllGather as usize }>,
        Kind::Broadcast => create::<{ Kind::Broadcast as usize }>,
        Kind::BroadcastMany => create::<{ Kind::BroadcastMany as usize }>,
        Kind::AllToAll => create::<{ Kind::AllToAll as usize }>,
        Kind::ReduceScatter => create::<{ Kind::ReduceScatter as usize }>,
        Kind::GroupedReduceScatter => create::<{ Kind::GroupedReduceScatter as usize }>,
        Kind::Barrier => create::<{ Kind::Barrier as usize }>,
        Kind::Join => create::<{ Kind::Join as usize }>,
        Kind::Rank => create::<{ Kind::Rank as usize }>,
        Kind::Size => create::<{ Kind::Size as usize }>,
        Kind::LocalRank => create::<{ Kind::LocalRank as usize }>,
        Kind::LocalSize => create::<{ Kind::LocalSize as usize }>,
        Kind::Included => create::<{ Kind::Included as usize }>,
        Kind::SelfTest => create::<{ Kind::SelfTest as usize }>,
    };
    (create, compute, delete)
}

/// Makes a kernel of a kind from the attributes of a node.
///
/// # Safety
/// TensorFlow calls it, with a construction that lives as long as the call.
unsafe extern "C" fn create<const KIND: usize>(construction: Opaque) -> *mut c_void {
    // Kernels exist only after the functions were found.
    let Some(api) = api() else { return null_mut() };
    match (Attributes { api, construction }).spec(Kind::ALL[KIND]) {
        Ok(spec) => Box::into_raw(Box::new(Kernel { spec: Arc::new(spec) })).cast(),
        Err(reason) => {
            let status = Status::new(api);
            status.set(&Failed::new(Code::InvalidArgument, reason));
            // SAFETY: construction and status are alive. TensorFlow calls no other function of a kernel that failed.
            unsafe { (api.TF_OpKernelConstruction_Failure)(construction, status.raw()) };
            null_mut()
        }
    }
}

/// Starts a kernel.
///
/// # Safety
/// TensorFlow calls it, with a kernel of `create`, its context, and the callback that ends it.
unsafe extern "C" fn compute(kernel: *mut c_void, context: Opaque, done: *mut c_void) {
    let Some(api) = api() else { return };
    // SAFETY: made by `create`, and TensorFlow keeps it while it runs.
    let Some(kernel) = (unsafe { kernel.cast::<Kernel>().as_ref() }) else { return };
    // SAFETY: both are those of this call.
    if !unsafe { has_expected_layout(done) } {
        let failed = Failed::new(Code::FailedPrecondition, LAYOUT);
        // SAFETY: as above.
        unsafe { end_in_place(api, context, done, &failed) };
        return;
    }
    // SAFETY: both are those of this call, and the callback has the layout.
    let call = unsafe { Call::take(api, context, done) };
    if kernel.spec.kind == Kind::SelfTest {
        self_test::answer_later(call);
    } else {
        in_flight::start(&kernel.spec, call);
    }
}

/// Drops a kernel.
///
/// # Safety
/// TensorFlow calls it once, with a kernel of `create` or null.
unsafe extern "C" fn delete(kernel: *mut c_void) {
    if !kernel.is_null() {
        // SAFETY: made by `create`, deleted once.
        drop(unsafe { Box::from_raw(kernel.cast::<Kernel>()) });
    }
}

/// What a running kernel reads and writes.
impl Call {
    /// The inputs.
    pub(super) fn inputs(&self) -> Result<Vec<Tensor>, String> {
        // SAFETY: the call has not ended, so its context is alive.
        let count = unsafe { (self.api().TF_NumInputs)(self.context()) };
        // SAFETY: as above.
        (0..count).map(|index| unsafe { Tensor::input(self.api(), self.context(), index) }).collect()
    }

    /// Memory for an output, of TensorFlow's number of a type.
    pub(super) fn output(&self, (index, dtype): (c_int, c_int), shape: &[u64], bytes: usize) -> Result<Tensor, String> {
        // SAFETY: as above.
        unsafe { Tensor::output(self.api(), self.context(), (index, dtype), shape, bytes) }
    }

    /// The loop of the graph and the number of its iteration; `None` outside of loops.
    ///
    /// TensorFlow identifies a loop inside another one by a hash of names and of the outer iteration, which is the same on
    /// all ranks.
    pub(super) fn iteration(&self) -> Option<(u64, i64)> {
        // SAFETY: as above, for both.
        let (frame, iteration) =
            unsafe { ((self.api().TF_GetFrameId)(self.context()), (self.api().TF_GetIterId)(self.context())) };
        // The graph itself is number 0; the eager executor has none.
        (frame != 0 && frame != u64::MAX).then_some((frame, iteration))
    }
}

/// The attributes of a node that is constructed.
struct Attributes {
    api: &'static Api,
    construction: Opaque,
}

impl Attributes {
    fn spec(&self, kind: Kind) -> Result<Spec, String> {
        let number = |has: bool, name: &CStr| if has { self.int(name) } else { Ok(0) };
        let scale = |name: &CStr| if kind.reduces() { self.scale(name) } else { Ok(1.0) };
        let op = number(kind.reduces(), c"reduce_op")?;
        let name = if kind.has_name() { self.string(c"tensor_name")? } else { String::new() };
        Ok(Spec {
            kind,
            name: (!name.is_empty()).then_some(name),
            set: SetId(unsigned("process_set_id", number(kind.has_set(), c"process_set_id")?)?),
            op: reduce_op_of(op).ok_or_else(|| format!("reduce_op {op} is unknown"))?,
            prescale: scale(c"prescale_factor")?,
            postscale: scale(c"postscale_factor")?,
            root: unsigned("root_rank", number(kind.has_root(), c"root_rank")?)?,
        })
    }

    fn int(&self, name: &CStr) -> Result<i64, String> {
        let (status, mut value) = (Status::new(self.api), 0);
        // SAFETY: the construction is alive during the call of `create`.
        unsafe {
            (self.api.TF_OpKernelConstruction_GetAttrInt64)(
                self.construction,
                name.as_ptr(),
                &raw mut value,
                status.raw(),
            );
        }
        status.check().map(|()| value)
    }

    fn scale(&self, name: &CStr) -> Result<f64, String> {
        let text = self.string(name)?;
        text.parse().map_err(|error| format!("{} {text:?}: {error}", name.to_string_lossy()))
    }

    fn string(&self, name: &CStr) -> Result<String, String> {
        let (status, mut items, mut length) = (Status::new(self.api), 0, 0);
        // SAFETY: as for `int`.
        unsafe {
            (self.api.TF_OpKernelConstruction_GetAttrSize)(
                self.construction,
                name.as_ptr(),
                &raw mut items,
                &raw mut length,
                status.raw(),
            );
        }
        status.check()?;
        // TensorFlow writes no NUL.
        let mut text = vec![0_u8; usize::try_from(length).unwrap_or_default()];
        // SAFETY: as for `int`; the buffer has the length that is given.
        unsafe {
            (self.api.TF_OpKernelConstruction_GetAttrString)(
                self.construction,
                name.as_ptr(),
                text.as_mut_ptr().cast(),
                text.len(),
                status.raw(),
            );
        }
        status.check()?;
        let text = CString::new(text).map_err(|_| format!("{} contains a NUL", name.to_string_lossy()))?;
        text.into_string().map_err(|_| format!("{} is not UTF-8", name.to_string_lossy()))
    }
}

fn unsigned(name: &str, value: i64) -> Result<u32, String> {
    u32::try_from(value).map_err(|_| format!("{name} is {value}; give a number from 0"))
}
