//! Shape functions: what a graph knows of an output before it runs.

#![allow(unsafe_code, reason = "C functions with handles of TensorFlow, which live as long as the call")]

use std::ffi::c_int;

use super::abi::{Api, Code, Failed, Opaque, Status, api, set_status};

/// A handle of a shape.
struct Shape {
    api: &'static Api,
    raw: Opaque,
}

impl Shape {
    fn new(api: &'static Api) -> Self {
        // SAFETY: takes nothing; deleted by `drop`.
        Self { api, raw: unsafe { (api.TF_NewShapeHandle)() } }
    }
}

impl Drop for Shape {
    fn drop(&mut self) {
        // SAFETY: made by TensorFlow for this call, deleted here only.
        unsafe { (self.api.TF_DeleteShapeHandle)(self.raw) }
    }
}

/// The context of one inference.
struct Inference {
    api: &'static Api,
    context: Opaque,
}

impl Inference {
    fn inputs(&self) -> c_int {
        // SAFETY: the context is alive during the call of a shape function.
        c_int::try_from(unsafe { (self.api.TF_ShapeInferenceContextNumInputs)(self.context) }).unwrap_or_default()
    }

    fn input(&self, index: c_int) -> Result<Shape, String> {
        let (shape, status) = (Shape::new(self.api), Status::new(self.api));
        // SAFETY: context, handle and status are alive.
        unsafe { (self.api.TF_ShapeInferenceContextGetInput)(self.context, index, shape.raw, status.raw()) };
        status.check().map(|()| shape)
    }

    fn set_output(&self, index: c_int, shape: &Shape) -> Result<(), String> {
        let status = Status::new(self.api);
        // SAFETY: as for `input`.
        unsafe { (self.api.TF_ShapeInferenceContextSetOutput)(self.context, index, shape.raw, status.raw()) };
        status.check()
    }

    /// A vector of unknown length.
    fn vector(&self) -> Shape {
        // TensorFlow converts the length to a signed number, of which -1 is an unknown one.
        // SAFETY: the context is alive.
        let raw = unsafe { (self.api.TF_ShapeInferenceContextVectorFromSize)(self.context, usize::MAX) };
        Shape { api: self.api, raw }
    }

    fn scalar(&self) -> Shape {
        // SAFETY: the context is alive.
        Shape { api: self.api, raw: unsafe { (self.api.TF_ShapeInferenceContextScalar)(self.context) } }
    }

    /// The shape with an unknown number of rows. Fails for a scalar.
    fn with_unknown_rows(&self, shape: &Shape) -> Result<Shape, String> {
        let (api, context) = (self.api, self.context);
        let (checked, row, result) = (Shape::new(api), Shape::new(api), Shape::new(api));
        let (status, rows) = (Status::new(api), self.vector());
        // SAFETY: all handles, the context and the status are alive.
        unsafe {
            (api.TF_ShapeInferenceContextWithRankAtLeast)(context, shape.raw, 1, checked.raw, status.raw());
            status.check()?;
            (api.TF_ShapeInferenceContextSubshape)(context, checked.raw, 1, i64::MAX, row.raw, status.raw());
            status.check()?;
            (api.TF_ShapeInferenceContextConcatenateShapes)(context, rows.raw, row.raw, result.raw, status.raw());
        }
        status.check().map(|()| result)
    }
}

/// Runs an inference, and reports its failure.
fn infer(context: Opaque, status: Opaque, run: impl FnOnce(&Inference) -> Result<(), String>) {
    // Registered after the functions were found.
    let Some(api) = api() else { return };
    if let Err(text) = run(&Inference { api, context }) {
        set_status(api, status, &Failed::new(Code::InvalidArgument, text));
    }
}

/// Outputs have the shapes of the inputs.
///
/// # Safety
/// TensorFlow calls it, with a context and a status that live as long as the call.
pub(super) unsafe extern "C" fn same(context: Opaque, status: Opaque) {
    infer(context, status, |inference| {
        (0..inference.inputs()).try_for_each(|index| inference.set_output(index, &inference.input(index)?))
    });
}

/// Outputs have the shapes of the inputs with other numbers of rows.
///
/// # Safety
/// TensorFlow calls it, with a context and a status that live as long as the call.
pub(super) unsafe extern "C" fn other_rows(context: Opaque, status: Opaque) {
    infer(context, status, |inference| {
        (0..inference.inputs())
            .try_for_each(|index| inference.set_output(index, &inference.with_unknown_rows(&inference.input(index)?)?))
    });
}

/// The first input with another number of rows, and a vector.
///
/// # Safety
/// TensorFlow calls it, with a context and a status that live as long as the call.
pub(super) unsafe extern "C" fn other_rows_and_vector(context: Opaque, status: Opaque) {
    infer(context, status, |inference| {
        inference.set_output(0, &inference.with_unknown_rows(&inference.input(0)?)?)?;
        inference.set_output(1, &inference.vector())
    });
}

/// A scalar.
///
/// # Safety
/// TensorFlow calls it, with a context and a status that live as long as the call.
pub(super) unsafe extern "C" fn scalar(context: Opaque, status: Opaque) {
    infer(context, status, |inference| inference.set_output(0, &inference.scalar()));
}

/// No outputs.
///
/// # Safety
/// TensorFlow calls it, with a context and a status that live as long as the call.
pub(super) unsafe extern "C" fn nothing(_: Opaque, _: Opaque) {}
