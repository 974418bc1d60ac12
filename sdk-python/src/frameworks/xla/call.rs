//! Makes operations of calls.

use ronde::blocking::{Client, Handle};
use ronde::{Collective, DType, Label, Operation, SetId, TensorRef};

use super::failure;
use super::ffi::{Call, Failure, Tensor};
use crate::address::{Source, Target};
use crate::arguments::{Arguments, Options};
use crate::frameworks::status::Code;

/// Where a result goes.
pub(super) struct ResultBuffer {
    shape: Vec<u64>,
    pub(super) target: Target,
}

impl ResultBuffer {
    /// The shape, in elements of ronde's type.
    pub(super) fn shape(&self) -> &[u64] {
        &self.shape
    }
}

/// Submits the operations of a call: one for each argument, as a group if there are several. The arguments' bytes are copied
/// before this returns.
pub(super) fn submit(client: &Client, call: &Call<'_>) -> Result<(Vec<Handle>, Vec<ResultBuffer>), Failure> {
    let arguments = arguments(call)?;
    let collective = arguments.collective(call.text("kind")?).map_err(|_| unknown("kind or op"))?;
    let options = arguments.options().map_err(|_| unknown("codec"))?;
    let types = carriers(call.text("types")?)?;
    let inputs = call.arguments().into_iter().zip(&types).map(|(tensor, carrier)| input(tensor, *carrier));
    let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
    let results = call.results().into_iter().zip(&types).map(|(tensor, carrier)| result(tensor, *carrier));
    let results = results.collect::<Result<Vec<_>, _>>()?;
    let set = u32::try_from(call.integer("set")?).map_err(|_| unknown("set"))?;
    check_ranks(client, call, set)?;
    let label = Label { name: Some(call.text("name")?), set: SetId(set) };
    let site = Some(call.text("site")?).filter(|site| !site.is_empty());
    let request = Request { label, collective, options, site };
    let handles = match inputs.as_slice() {
        [] => client.submit_from(&request.of(None)).map(|handle| vec![handle]),
        [Input { dtype, shape, source }] => source.with(|bytes| {
            let tensor = TensorRef { dtype: *dtype, shape, bytes };
            client.submit_from(&request.of(Some(tensor))).map(|handle| vec![handle])
        }),
        several => {
            let sources: Vec<&Source> = several.iter().map(|input| &input.source).collect();
            Source::with_all(&sources, |contents| {
                let tensors = several.iter().zip(contents).map(|(input, bytes)| {
                    request.of(Some(TensorRef { dtype: input.dtype, shape: &input.shape, bytes }))
                });
                client.submit_group_from(label, &tensors.collect::<Vec<_>>())
            })
        }
    };
    Ok((handles.map_err(|error| failure(&error))?, results))
}

/// Checks that this process has the rank for which the program was compiled, and for a set of all ranks their number. A
/// program that depends on neither has rank -1.
fn check_ranks(client: &Client, call: &Call<'_>, set: u32) -> Result<(), Failure> {
    let (rank, size) = (call.integer("rank")?, call.integer("size")?);
    let (rank_now, size_now) = (i64::from(client.rank()), i64::from(client.size()));
    if rank == ANY || (rank == rank_now && (set != SetId::WORLD.0 || size == size_now)) {
        return Ok(());
    }
    let text = format!(
        "a program that was compiled for rank {rank} in a set of {size} runs as rank {rank_now} of {size_now}: its shapes \
         and gradients depend on both. Compile it again after ronde.jax.init()"
    );
    Err(Failure { code: Code::FailedPrecondition, text })
}

const ANY: i64 = -1;

/// What the operations of a call have in common.
struct Request<'call> {
    label: Label<'call>,
    collective: Collective,
    options: Options,
    site: Option<&'call str>,
}

impl Request<'_> {
    /// The operation on this tensor.
    fn of<'a>(&'a self, tensor: Option<TensorRef<'a>>) -> Operation<'a> {
        let operation = self.options.apply(Operation::new(self.label, self.collective.clone(), tensor)).notify();
        match &self.site {
            Some(site) => operation.at(site),
            None => operation,
        }
    }
}

fn arguments(call: &Call<'_>) -> Result<Arguments, Failure> {
    let splits = call.text("splits")?.split(',').filter(|part| !part.is_empty());
    let splits = splits.map(str::parse).collect::<Result<Vec<u64>, _>>().map_err(|_| unknown("splits"))?;
    Ok(Arguments {
        op: call.integer("op")?,
        prescale: Some(call.float("prescale")?),
        postscale: Some(call.float("postscale")?),
        codec: call.text("codec")?.to_owned(),
        root: u32::try_from(call.integer("root")?).map_err(|_| unknown("root"))?,
        splits,
        ..Arguments::default()
    })
}

/// How elements travel: the type, and how many elements of it each element of XLA's becomes.
type Carrier = (DType, u64);

/// Parses types such as `float32,float32*2`.
fn carriers(text: &str) -> Result<Vec<Carrier>, Failure> {
    let carrier = |part: &str| {
        let (name, factor) = part.split_once('*').unwrap_or((part, "1"));
        Some((DType::from_name(name)?, factor.parse().ok()?))
    };
    let parts = text.split(',').filter(|part| !part.is_empty());
    parts.map(|part| carrier(part).ok_or_else(|| unknown("type"))).collect()
}

struct Input {
    dtype: DType,
    shape: Vec<u64>,
    source: Source,
}

fn input(tensor: Tensor, carrier: Carrier) -> Result<Input, Failure> {
    let address = tensor.address;
    let (shape, bytes) = extent(tensor.shape, carrier)?;
    let source = Source::new(address, bytes).map_err(|_| unknown("argument's address"))?;
    Ok(Input { dtype: carrier.0, shape, source })
}

fn result(tensor: Tensor, carrier: Carrier) -> Result<ResultBuffer, Failure> {
    let address = tensor.address;
    let (shape, bytes) = extent(tensor.shape, carrier)?;
    let target = Target::new(address, bytes).map_err(|_| unknown("result's address"))?;
    Ok(ResultBuffer { shape, target })
}

/// Returns the shape in elements that travel, and the number of bytes.
fn extent(mut shape: Vec<u64>, (dtype, factor): Carrier) -> Result<(Vec<u64>, usize), Failure> {
    if factor != 1 {
        shape.push(factor);
    }
    let elements = shape.iter().try_fold(1_u64, |product, size| product.checked_mul(*size));
    let bytes = elements.and_then(|elements| usize::try_from(elements).ok()?.checked_mul(dtype.size_bytes()));
    Ok((shape, bytes.ok_or_else(|| unknown("shape"))?))
}

fn unknown(what: &str) -> Failure {
    let text =
        format!("a compiled program calls ronde with a {what} that this release does not have; compile it again");
    Failure { code: Code::InvalidArgument, text }
}
