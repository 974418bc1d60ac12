//! The callback by which an asynchronous kernel ends, moved out of the frame of the call that starts the kernel.
//!
//! TensorFlow passes a pointer to a `std::function<void()>` that is an argument by value of its own method. It dangles once
//! the kernel's function has returned, so the C API alone is of no use for a kernel that ends later. This module moves the
//! callback, by the layout of libstdc++: two words of the callee, the manager, and the invoker. A callback is movable bit by
//! bit, as libstdc++ keeps only trivially copyable callees in place. docs/adr/0030 has the reasons and the self-test.

#![allow(unsafe_code, reason = "moves an object of C++, under the layout that the module describes")]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::abi::{Api, Code, Failed, Opaque, Status};
use crate::frameworks::library::is_in_a_library;

/// A `std::function<void()>` of libstdc++.
#[repr(C)]
struct Function {
    callee: [usize; 2],
    manager: usize,
    invoker: usize,
}

/// Destroys the callee; the number is libstdc++'s.
const DESTROY: c_int = 3;
type Manager = unsafe extern "C" fn(*mut Function, *const Function, c_int) -> bool;

/// A running kernel: its context, and the callback that ends it. Dropping it ends the kernel with an error, so that no graph
/// waits for ever.
pub(super) struct Call {
    api: &'static Api,
    context: Opaque,
    /// `None` once the kernel has ended.
    done: Option<Box<Function>>,
}

// SAFETY: TensorFlow lets any thread use the context and the callback of an asynchronous kernel, one at a time. A call is used
// through `&mut` and by value.
unsafe impl Send for Call {}

impl Call {
    /// Takes over a kernel's start. The callback of the caller is empty afterwards.
    ///
    /// # Safety
    /// The arguments are those of a kernel's compute function, which has not returned, and the callback has the layout.
    pub(super) unsafe fn take(api: &'static Api, context: Opaque, done: *mut c_void) -> Self {
        let place = done.cast::<Function>();
        // SAFETY: the caller has checked the layout.
        let function = unsafe { std::ptr::read(place) };
        // SAFETY: as above. Without a manager the caller's destructor does nothing, so the callee has one owner.
        unsafe {
            (*place).manager = 0;
            (*place).invoker = 0;
        }
        Self { api, context, done: Some(Box::new(function)) }
    }

    pub(super) fn api(&self) -> &'static Api {
        self.api
    }

    pub(super) fn context(&self) -> Opaque {
        self.context
    }

    /// Ends the kernel.
    pub(super) fn end(mut self, outcome: Result<(), Failed>) {
        self.end_with(outcome);
    }

    fn end_with(&mut self, outcome: Result<(), Failed>) {
        let Some(mut done) = self.done.take() else { return };
        if let Err(failed) = outcome {
            let status = Status::new(self.api);
            status.set(&failed);
            // SAFETY: the kernel has not ended, so its context is alive.
            unsafe { (self.api.TF_OpKernelContext_Failure)(self.context, status.raw()) };
        }
        let place: *mut Function = &raw mut *done;
        // SAFETY: the callback has been moved here whole and is called once.
        unsafe { (self.api.TF_RunAsyncOpKernelDoneCallback)(place.cast()) };
        if done.manager != 0 {
            // SAFETY: the manager is that of the callback, by the layout; the callee is destroyed once.
            unsafe { std::mem::transmute::<usize, Manager>(done.manager)(place, place, DESTROY) };
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.end_with(Err(Failed::new(Code::Internal, "the operation was dropped before its end")));
    }
}

/// Why a kernel refuses to move a callback.
pub(super) const LAYOUT: &str = "ronde: the callback of this TensorFlow does not have the layout of libstdc++'s std::function, \
    so asynchronous operations cannot end. Install a release of TensorFlow that docs/TENSORFLOW.md lists";

/// Addresses that are known to be in libraries; 0 for none. A process has a few: those of the eager executor and of graphs.
static KNOWN: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];

/// Whether a callback looks as this module assumes: its manager and its invoker are in a library, and its callee is there.
///
/// # Safety
/// The pointer is the callback of a kernel's compute function, which has not returned.
pub(super) unsafe fn has_expected_layout(done: *const c_void) -> bool {
    // SAFETY: a `std::function` has at least four words in all of the known libraries.
    let Function { callee, manager, invoker } = unsafe { std::ptr::read(done.cast::<Function>()) };
    callee[0] != 0 && manager != invoker && is_code(manager) && is_code(invoker)
}

fn is_code(address: usize) -> bool {
    if address == 0 || KNOWN.iter().any(|known| known.load(Ordering::Relaxed) == address) {
        return address != 0;
    }
    let is_code = is_in_a_library(address);
    if let Some(free) = KNOWN.iter().find(|known| known.load(Ordering::Relaxed) == 0).filter(|_| is_code) {
        // Another thread may take the place; then an address is checked again.
        free.store(address, Ordering::Relaxed);
    }
    is_code
}

/// Ends a kernel inside its compute function, without moving the callback.
///
/// # Safety
/// The arguments are those of a kernel's compute function, which has not returned.
pub(super) unsafe fn end_in_place(api: &'static Api, context: Opaque, done: *mut c_void, failed: &Failed) {
    let status = Status::new(api);
    status.set(failed);
    // SAFETY: the context and the callback are alive, and the callback is called once.
    unsafe {
        (api.TF_OpKernelContext_Failure)(context, status.raw());
        (api.TF_RunAsyncOpKernelDoneCallback)(done);
    }
}
