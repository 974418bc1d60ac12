//! [`Work`]: performs operations in device memory by calls of NCCL and copies, each until it has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_gpu::nccl::collective::{Collective, ElementType, Reduction};
use ronde_gpu::nccl::{Buffers, LocalCommunicators, Step};
use ronde_gpu::{DeviceSpan, GpuError, Transfers};
use ronde_shm::SharedSlot;
use ronde_wire::Rank;

use super::path::LocalReduction;
use super::split::Split;
use crate::operation::lanes::GpuStats;
use crate::operation::memory::{Destination, OperationMemory, TensorMemory};
use crate::session::gpus::{DevicePart, Gpus};
use crate::session::request::Input;

/// Ends collectives with a reason. It is called while they run.
pub(super) type Check<'a> = &'a mut dyn FnMut() -> Result<(), String>;

/// What performs operations.
pub(super) struct Work {
    gpus: Arc<Gpus>,
    transfers: Transfers,
    timeout: Duration,
    /// Of the sets of GPUs used last, the newest at the end.
    communicators: Vec<(Vec<u32>, LocalCommunicators)>,
    pub(super) stats: GpuStats,
}

/// A result on the host, and where it goes.
pub(super) enum StagedResult {
    /// All of it to each of these.
    Whole(SharedSlot, Vec<DevicePart>),
    /// A part to each of these, and the rest to all. Then NCCL gathers the parts.
    Parts { slot: SharedSlot, split: Split, targets: Vec<DeviceSpan>, dtype: ElementType },
}

/// The tensors of an operation on the host, and the results that go to devices later.
pub(super) type Staged = (Vec<TensorMemory>, Vec<StagedResult>);

/// A copy between device memory and a slot from an offset on.
struct HostCopy {
    device: DeviceSpan,
    slot: SharedSlot,
    offset: usize,
}

#[derive(Clone, Copy)]
enum Direction {
    ToHost,
    ToDevice,
}

impl Work {
    /// Work with these GPUs. A collective, and the copies of an operation, may take `timeout`.
    pub(super) fn new(gpus: Arc<Gpus>, host_bytes_max: u64, timeout: Duration) -> Result<Self, GpuError> {
        let (communicators, stats) = Default::default();
        Ok(Self { gpus, transfers: Transfers::new(host_bytes_max)?, timeout, communicators, stats })
    }

    /// Whether slots of so many bytes together may be leased on the host now.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.transfers.has_room(bytes)
    }

    /// Reduces the tensors of local ranks, from their inputs to their outputs.
    pub(super) fn reduce(
        &mut self,
        memory: &OperationMemory,
        ranks: &[Rank],
        inside: LocalReduction,
        check: Check<'_>,
    ) -> Result<(), GpuError> {
        let LocalReduction { dtype, reduction } = inside;
        let steps = memory.tensors.iter().map(|tensor| {
            let buffers = buffers_of(tensor, ranks)?;
            Ok(buffers.map(|buffers| Step { collective: Collective::AllReduce, dtype, reduction, buffers }))
        });
        let steps = steps.filter_map(Result::transpose).collect::<Result<Vec<_>, GpuError>>()?;
        self.collectives(&steps, check)
    }

    /// Reduces the tensors of local ranks, and brings the sums to the host: in parts, each from the GPU that has it.
    pub(super) fn fetch_reduced(
        &mut self,
        memory: &OperationMemory,
        ranks: &[Rank],
        inside: LocalReduction,
        check: Check<'_>,
    ) -> Result<Staged, GpuError> {
        let (mut steps, mut copies) = (Vec::new(), Vec::new());
        let (mut tensors, mut results) = (Vec::with_capacity(memory.tensors.len()), Vec::new());
        for tensor in &memory.tensors {
            let Some(buffers) = buffers_of(tensor, ranks)? else {
                tensors.push(TensorMemory { inputs: Vec::new(), outputs: Vec::new() });
                continue;
            };
            let bytes = buffers.first().map_or(0, |first| first.target.bytes());
            let (sum, result) = (self.transfers.lease(bytes)?, self.transfers.lease(bytes)?);
            let split = Split::new(bytes, buffers.len());
            steps.extend(first_phase(inside, split, &buffers)?);
            let targets: Vec<DeviceSpan> = buffers.into_iter().map(|buffers| buffers.target).collect();
            copies.extend(parts(split, &targets, &sum, 1)?);
            let inputs = ranks.first().map(|first| (*first, Input::Staged(sum)));
            let outputs = vec![(None, Destination::Staged(result.clone()))];
            tensors.push(TensorMemory { inputs: inputs.into_iter().collect(), outputs });
            results.push(StagedResult::Parts { slot: result, split, targets, dtype: inside.dtype });
        }
        self.collectives(&steps, check)?;
        self.copy(Direction::ToHost, copies)?;
        Ok((tensors, results))
    }

    /// Copies all contributions in device memory to the host. Leases everything before the first copy, so that a lease that
    /// fails leaves none in flight.
    pub(super) fn fetch(&mut self, memory: &OperationMemory) -> Result<Staged, GpuError> {
        let mut tensors = Vec::with_capacity(memory.tensors.len());
        let (mut results, mut copies) = (Vec::new(), Vec::new());
        for tensor in &memory.tensors {
            let inputs = tensor.inputs.iter().map(|(rank, input)| {
                let Input::Device(part) = input else { return Ok((*rank, input.clone())) };
                let slot = self.transfers.lease(bytes_of(part)?)?;
                copies.push(HostCopy { device: span(part)?, slot: slot.clone(), offset: 0 });
                Ok((*rank, Input::Staged(slot)))
            });
            let inputs = inputs.collect::<Result<_, GpuError>>()?;
            tensors.push(TensorMemory { inputs, outputs: self.staged_outputs(tensor, &mut results)? });
        }
        self.copy(Direction::ToHost, copies)?;
        Ok((tensors, results))
    }

    /// The destinations of a tensor's results with one slot on the host in place of those in device memory that get the same.
    fn staged_outputs(
        &mut self,
        tensor: &TensorMemory,
        results: &mut Vec<StagedResult>,
    ) -> Result<Vec<(Option<Rank>, Destination)>, GpuError> {
        let mut outputs: Vec<(Option<Rank>, Destination)> = Vec::new();
        let mut made: Vec<(Option<Rank>, SharedSlot, Vec<DevicePart>)> = Vec::new();
        for (key, output) in &tensor.outputs {
            let Destination::Device(part, _) = output else {
                outputs.push((*key, output.clone()));
                continue;
            };
            if let Some((.., targets)) = made.iter_mut().find(|(of, ..)| of == key) {
                targets.push(part.clone());
                continue;
            }
            let slot = self.transfers.lease(bytes_of(part)?)?;
            outputs.push((*key, Destination::Staged(slot.clone())));
            made.push((*key, slot, vec![part.clone()]));
        }
        results.extend(made.into_iter().map(|(_, slot, targets)| StagedResult::Whole(slot, targets)));
        Ok(outputs)
    }

    /// Brings results to the devices.
    pub(super) fn deliver(&mut self, results: &[StagedResult], check: Check<'_>) -> Result<(), GpuError> {
        let (mut copies, mut steps) = (Vec::new(), Vec::new());
        for result in results {
            match result {
                StagedResult::Whole(slot, targets) => {
                    for target in targets {
                        copies.push(HostCopy { device: span(target)?, slot: slot.clone(), offset: 0 });
                    }
                }
                StagedResult::Parts { slot, split, targets, dtype } => {
                    copies.extend(parts(*split, targets, slot, targets.len())?);
                    steps.extend(second_phase(*split, targets, *dtype)?);
                }
            }
        }
        self.copy(Direction::ToDevice, copies)?;
        self.collectives(&steps, check)
    }

    /// Performs collectives of NCCL among the GPUs that they name, all of which name the same.
    fn collectives(&mut self, steps: &[Step], check: Check<'_>) -> Result<(), GpuError> {
        let Some(first) = steps.first() else { return Ok(()) };
        let devices: Vec<u32> = first.buffers.iter().map(|buffer| buffer.target.device()).collect();
        let deadline = Instant::now() + self.timeout;
        let mut communicators = match self.communicators.iter().position(|(of, _)| *of == devices) {
            Some(known) => self.communicators.remove(known).1,
            None => self.join(&devices, deadline, check)?,
        };
        let performed = communicators.perform(steps, deadline, check);
        if communicators.are_aborted() {
            // The next operation of these GPUs makes others.
            self.stats.aborted += 1;
        } else {
            if self.communicators.len() >= COMMUNICATORS_MAX {
                self.communicators.remove(0);
            }
            self.communicators.push((devices, communicators));
        }
        performed?;
        let contributed = steps.iter().flat_map(|step| &step.buffers).map(|buffers| buffers.source.bytes() as u64);
        self.stats.bytes += contributed.sum::<u64>();
        Ok(())
    }

    /// Makes communicators of these GPUs.
    fn join(&mut self, devices: &[u32], deadline: Instant, check: Check<'_>) -> Result<LocalCommunicators, GpuError> {
        let contexts = devices.iter().map(|device| self.gpus.context(*device)).collect::<Result<Vec<_>, _>>()?;
        let joined = LocalCommunicators::join(self.gpus.nccl(), &contexts, deadline, check);
        joined.inspect_err(|_| self.stats.aborted += 1)
    }

    /// Copies between device memory and slots, and waits for all copies that were started, also when one cannot be: nothing
    /// is released while a copy uses it.
    fn copy(&mut self, direction: Direction, copies: Vec<HostCopy>) -> Result<(), GpuError> {
        let started = copies.iter().try_for_each(|HostCopy { device, slot, offset }| {
            let context = self.gpus.context(device.device())?;
            match direction {
                Direction::ToHost => self.transfers.fetch(&context, device, (slot, *offset)),
                Direction::ToDevice => self.transfers.deliver(&context, (slot, *offset), device),
            }
        });
        let ended = self.wait_for_copies();
        if ended.is_err() {
            // A device that does not end a copy may still use its memory.
            let (memory, slots): (Vec<DeviceSpan>, Vec<SharedSlot>) =
                copies.into_iter().map(|copy| (copy.device, copy.slot)).unzip();
            self.transfers.abandon(slots);
            std::mem::forget(memory);
        }
        started.and(ended)
    }

    /// Waits until all copies have ended. Nothing ends it earlier, because that takes a device no longer than the bytes need.
    fn wait_for_copies(&mut self) -> Result<(), GpuError> {
        let deadline = Instant::now() + self.timeout;
        for event in self.transfers.mark()? {
            while !event.has_occurred()? {
                if Instant::now() >= deadline {
                    let reason = format!("a copy between a GPU and the host took longer than {:?}", self.timeout);
                    return Err(GpuError::Aborted { reason });
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(())
    }
}

/// The contributions and results of local ranks; `None` for a tensor without elements, which has no results.
fn buffers_of(tensor: &TensorMemory, ranks: &[Rank]) -> Result<Option<Vec<Buffers>>, GpuError> {
    if tensor.outputs.is_empty() {
        return Ok(None);
    }
    let buffers = ranks.iter().map(|rank| {
        let (Some(Input::Device(source)), Some(target)) = (tensor.input(*rank), tensor.device_output(*rank)) else {
            return Err(lost());
        };
        Ok(Buffers { source: span(source)?, target: span(target)? })
    });
    buffers.collect::<Result<Vec<_>, GpuError>>().map(Some)
}

/// Each GPU gets the sum of its part in the place of the result, and all get that of the rest.
fn first_phase(inside: LocalReduction, split: Split, buffers: &[Buffers]) -> Result<Vec<Step>, GpuError> {
    let LocalReduction { dtype, reduction } = inside;
    let of_parts = buffers.iter().enumerate().map(|(number, Buffers { source, target })| {
        Ok(Buffers { source: source.part(split.whole())?, target: target.part(split.part(number))? })
    });
    let of_rest = buffers.iter().map(|Buffers { source, target }| {
        Ok(Buffers { source: source.part(split.rest())?, target: target.part(split.rest())? })
    });
    let parts = Step { collective: Collective::ReduceScatter, dtype, reduction, buffers: collect(of_parts)? };
    let rest = Step { collective: Collective::AllReduce, dtype, reduction, buffers: collect(of_rest)? };
    Ok(non_empty([parts, rest]))
}

/// Each GPU gets the parts of the others.
fn second_phase(split: Split, targets: &[DeviceSpan], dtype: ElementType) -> Result<Vec<Step>, GpuError> {
    let buffers = targets.iter().enumerate().map(|(number, target)| {
        Ok(Buffers { source: target.part(split.part(number))?, target: target.part(split.whole())? })
    });
    let collective = Collective::AllGather;
    Ok(non_empty([Step { collective, dtype, reduction: Reduction::NONE, buffers: collect(buffers)? }]))
}

/// The copies of the parts between a slot and the GPUs, and of the rest for the first `with_rest` GPUs.
fn parts(split: Split, targets: &[DeviceSpan], slot: &SharedSlot, with_rest: usize) -> Result<Vec<HostCopy>, GpuError> {
    let of_parts = targets.iter().enumerate().map(|(number, target)| (target, split.part(number)));
    let of_rest = targets.iter().take(with_rest).map(|target| (target, split.rest()));
    let copies = of_parts.chain(of_rest).filter(|(_, range)| !range.is_empty()).map(|(target, range)| {
        Ok(HostCopy { device: target.part(range.clone())?, slot: slot.clone(), offset: range.start })
    });
    copies.collect()
}

fn collect(buffers: impl Iterator<Item = Result<Buffers, GpuError>>) -> Result<Vec<Buffers>, GpuError> {
    buffers.collect()
}

/// The steps that have elements.
fn non_empty(steps: impl IntoIterator<Item = Step>) -> Vec<Step> {
    let has_elements = |step: &Step| step.buffers.iter().any(|buffers| buffers.target.bytes() > 0);
    steps.into_iter().filter(has_elements).collect()
}

fn bytes_of(part: &DevicePart) -> Result<usize, GpuError> {
    usize::try_from(part.bytes).map_err(|_| lost())
}

fn span(part: &DevicePart) -> Result<DeviceSpan, GpuError> {
    part.segment.part(part.offset, part.bytes)
}

/// The decision for a path promises tensors that are not there.
fn lost() -> GpuError {
    GpuError::Argument { reason: "a tensor of the operation has no device memory; this is a bug of ronde".to_owned() }
}

/// Sets of GPUs whose communicators are kept: the world's, and those of some process sets.
const COMMUNICATORS_MAX: usize = 16;
/// Between two polls of a copy, which takes about 20 us a MiB.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
