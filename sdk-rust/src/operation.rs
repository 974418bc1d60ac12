//! What is asked for: [`Operation`] and how it is named.

use ronde_wire::{Collective, DType, Rank, ReduceOp, Request, SetId, Shape, TensorName};

use crate::error::Error;
use crate::tensor::{TensorRef, checked_shape};

/// The options of an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllReduceOptions {
    /// How elements are combined.
    pub op: ReduceOp,
    /// Multiplies every contribution before the reduction; finite and not 0.
    pub prescale: f64,
    /// Multiplies the result; finite and not 0.
    pub postscale: f64,
    /// The process set.
    pub set: SetId,
}

impl Default for AllReduceOptions {
    /// The average over all ranks.
    fn default() -> Self {
        Self { op: ReduceOp::Average, prescale: 1.0, postscale: 1.0, set: SetId::WORLD }
    }
}

/// One collective on one tensor, without the tensor's bytes.
#[derive(Clone, Debug)]
pub struct Operation<'a> {
    /// What the ranks know it by, together with the kind of collective; `None` for a number.
    pub name: Option<&'a str>,
    /// What to do.
    pub collective: Collective,
    /// The type of the elements.
    pub dtype: DType,
    /// The shape of this rank's contribution.
    pub shape: &'a [u64],
    /// Multiplies the contribution; 1 for operations that reduce nothing.
    pub prescale: f64,
    /// Multiplies the result; 1 for operations that reduce nothing.
    pub postscale: f64,
    /// The process set.
    pub set: SetId,
}

impl<'a> Operation<'a> {
    /// Any collective on all ranks, without scaling.
    #[must_use]
    pub fn new(name: Option<&'a str>, collective: Collective, dtype: DType, shape: &'a [u64]) -> Self {
        Self { name, collective, dtype, shape, prescale: 1.0, postscale: 1.0, set: SetId::WORLD }
    }

    /// An all-reduce.
    #[must_use]
    pub fn allreduce(name: Option<&'a str>, tensor: TensorRef<'a>, options: AllReduceOptions) -> Self {
        let AllReduceOptions { op, prescale, postscale, set } = options;
        let operation = Self::new(name, Collective::AllReduce { op }, tensor.dtype, tensor.shape);
        Self { prescale, postscale, set, ..operation }
    }

    /// An all-gather.
    #[must_use]
    pub fn allgather(name: Option<&'a str>, tensor: TensorRef<'a>) -> Self {
        Self::new(name, Collective::AllGather, tensor.dtype, tensor.shape)
    }

    /// A broadcast from `root`.
    #[must_use]
    pub fn broadcast(name: Option<&'a str>, tensor: TensorRef<'a>, root: u32) -> Self {
        Self::new(name, Collective::Broadcast { root: Rank(root) }, tensor.dtype, tensor.shape)
    }

    /// A barrier.
    #[must_use]
    pub fn barrier(name: Option<&'a str>) -> Self {
        Self::new(name, Collective::Barrier, DType::U8, &[0])
    }

    /// Checks it against the length of its input.
    pub(crate) fn draft(&self, bytes: usize) -> Result<Draft, Error> {
        for (field, given) in [("prescale", self.prescale), ("postscale", self.postscale)] {
            if !given.is_finite() || given == 0.0 {
                return Err(Error::argument(format!(
                    "{field} is {given}, but must be finite and not zero; 1 means no scaling"
                )));
            }
        }
        let shape = checked_shape(self.dtype, self.shape, bytes)?;
        Ok(Draft {
            name: self.name.map(|name| full_name(&self.collective, name)).transpose()?,
            set: self.set,
            collective: self.collective.clone(),
            dtype: self.dtype,
            shape,
            prescale: self.prescale,
            postscale: self.postscale,
        })
    }
}

/// An operation in order, that may still lack its number.
#[derive(Debug)]
pub(crate) struct Draft {
    name: Option<TensorName>,
    set: SetId,
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    shape: Shape,
    prescale: f64,
    postscale: f64,
}

impl Draft {
    /// The kind of which it takes a number, when it has no name.
    pub(crate) fn number_of(&self) -> Option<Kind> {
        self.name.is_none().then(|| Kind::of(&self.collective))
    }

    /// The request, with the next number for a name when it has none. The number is taken by [`Counters::advance`].
    pub(crate) fn into_request(self, counters: &Counters) -> Result<Request, Error> {
        let Self { name, set, collective, dtype, shape, prescale, postscale } = self;
        let name = match name {
            Some(name) => name,
            None => full_name(&collective, &format!("noname.{}", counters.next(Kind::of(&collective))))?,
        };
        Ok(Request { prescale, postscale, ..Request::new(set, name, collective, dtype, shape) })
    }
}

/// `allreduce.<name>`: each kind of collective has names of its own.
fn full_name(collective: &Collective, name: &str) -> Result<TensorName, Error> {
    let kind = collective.name().to_ascii_lowercase();
    TensorName::new(format!("{kind}.{name}")).map_err(|error| Error::argument(error.to_string()))
}

/// Numbers for operations without a name. One for each kind of collective, so that an operation that only some ranks name
/// does not shift the numbers of the others.
#[derive(Debug, Default)]
pub(crate) struct Counters([u64; KINDS]);

impl Counters {
    /// The number of the next operation of a kind.
    pub(crate) fn next(&self, kind: Kind) -> u64 {
        self.0[kind.0]
    }

    /// The next number of a kind is taken.
    pub(crate) fn advance(&mut self, kind: Kind) {
        self.0[kind.0] += 1;
    }
}

/// What is counted by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind(usize);

impl Kind {
    fn of(collective: &Collective) -> Self {
        Self(match collective {
            Collective::AllReduce { .. } => 0,
            Collective::AllGather => 1,
            Collective::Broadcast { .. } => 2,
            Collective::Barrier => 3,
            _ => 4,
        })
    }
}

/// Kinds that are counted: the four that this client has methods for, and all others.
const KINDS: usize = 5;
