//! [`Members`]: what the ranks of a set know about each other, and the communicator of those on this host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_gpu::nccl::{Communicator, Nccl, UniqueId};
use ronde_gpu::{Context, GpuError};
use ronde_wire::{Collective, DType, Detail, Rank, Request, SetId, Shape, TensorName};

use super::agreement::{Agreed, REPORT_BYTES, Report, agree};
use super::finish::FINISH_TIMEOUT;
use super::layout::Layout;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::operation::{Label, Operation};
use crate::options::GpuLevels;
use crate::session::{Input, Session};

/// A set whose operations may have two levels.
pub(super) struct Members {
    set: SetId,
    choice: GpuLevels,
    context: Arc<Context>,
    nccl: Option<Arc<Nccl>>,
    stage: Stage,
    /// The set's ranks and this rank's position, and the shard group, once they are known.
    place: (usize, usize),
    group: Option<SetId>,
}

enum Stage {
    /// For all ranks' reports.
    Reporting(Box<InFlight>),
    /// For the communicator's id, and for the number of the shard group.
    Linking {
        layout: Layout,
        ids: Box<InFlight>,
        adding: Option<Box<InFlight>>,
    },
    Ready(Ready),
    /// Operations have one level.
    One,
    /// It is over with two levels: each operation fails for this reason.
    Failed(Error),
}

/// A set that has agreed.
pub(super) struct Ready {
    pub(super) layout: Layout,
    /// The shard group's process set, if there are several hosts.
    pub(super) group: Option<SetId>,
    id: UniqueId,
    communicator: Option<Communicator>,
    /// When the communicator last completed something.
    pub(super) progress: Instant,
}

/// What an operation can do.
pub(super) enum State<'a> {
    Pending,
    Ready(&'a mut Ready),
    One,
    Failed(Error),
}

impl Members {
    /// Begins to find out about the ranks of a set.
    pub(super) fn begin(
        session: &Arc<Session>,
        set: SetId,
        context: &Arc<Context>,
        nccl: Result<Arc<Nccl>, GpuError>,
        choice: GpuLevels,
    ) -> Self {
        let stage = first_stage(session, set, context, nccl.as_ref()).unwrap_or_else(Stage::Failed);
        Self { set, choice, context: Arc::clone(context), nccl: nccl.ok(), stage, place: (0, 0), group: None }
    }

    pub(super) fn state(&mut self) -> State<'_> {
        match &mut self.stage {
            Stage::Reporting(_) | Stage::Linking { .. } => State::Pending,
            Stage::Ready(ready) => State::Ready(ready),
            Stage::One => State::One,
            Stage::Failed(error) => State::Failed(error.clone()),
        }
    }

    /// The number of the set's ranks, and this rank's position.
    pub(super) fn place(&self) -> (usize, usize) {
        self.place
    }

    /// The shard group's process set, also after a failure.
    pub(super) fn group(&self) -> Option<SetId> {
        self.group
    }

    /// The device of its communicator.
    pub(super) fn device(&self) -> u32 {
        self.context.ordinal()
    }

    /// Continues as far as possible without waiting. Returns whether something changed.
    pub(super) fn advance(&mut self, session: &Arc<Session>) -> bool {
        let stage = match &mut self.stage {
            Stage::Reporting(reports) if reports.poll() => self.compare(session),
            Stage::Linking { ids, adding, .. } if ids.poll() && adding.as_ref().is_none_or(|adding| adding.poll()) => {
                self.link()
            }
            _ => return false,
        };
        self.stage = stage.unwrap_or_else(Stage::Failed);
        true
    }

    /// Compares all reports.
    fn compare(&mut self, session: &Arc<Session>) -> Result<Stage, Error> {
        let Stage::Reporting(reports) = &mut self.stage else { return Ok(Stage::One) };
        let bytes = taken(reports)?;
        let reports: Vec<_> = bytes.chunks(REPORT_BYTES).map(Report::decode).collect();
        let me = session.pending.me();
        let layout = match agree(me, &ranks_of(session, self.set)?, &reports) {
            Agreed::Two(layout) => layout,
            Agreed::Cannot(reason) if self.choice == GpuLevels::Two => {
                return Err(GpuError::Unavailable { reason }.into());
            }
            Agreed::Cannot(reason) => {
                tracing::warn!(target: "ronde", set = self.set.0, reason, "collectives on GPUs have one level");
                return Ok(Stage::One);
            }
            Agreed::One(reason) => {
                tracing::info!(target: "ronde", set = self.set.0, reason, "collectives on GPUs have one level");
                return Ok(Stage::One);
            }
        };
        let id = match &self.nccl {
            Some(nccl) if layout.leader() == me => UniqueId::new(nccl)?.0.to_vec(),
            _ => Vec::new(),
        };
        let rows = (id.len() / ID_BYTES) as u64;
        let ids = gather(session, self.set, "ronde.gpu_levels.ids", &[rows, ID_BYTES as u64], &id)?;
        let adding = if layout.hosts() > 1 { Some(Box::new(add_group(session, self.set, &layout)?)) } else { None };
        Ok(Stage::Linking { layout, ids: Box::new(ids), adding })
    }

    /// Takes the id of this host and the number of the shard group.
    fn link(&mut self) -> Result<Stage, Error> {
        let Stage::Linking { layout, ids, adding, .. } = &mut self.stage else { return Ok(Stage::One) };
        let layout = layout.clone();
        let bytes = taken(ids)?;
        let found = bytes.chunks_exact(ID_BYTES).nth(layout.host_by_leader());
        let id = found.and_then(|id| id.try_into().ok()).map(UniqueId).ok_or_else(|| Error::Protocol {
            reason: format!("{} bytes of ids for {} hosts", bytes.len(), layout.hosts()),
        })?;
        let group = match adding {
            None => None,
            Some(adding) => {
                adding.wait_timeout(Duration::ZERO);
                match adding.take()?.detail {
                    Detail::Set(set) => Some(set),
                    other => return Err(Error::Protocol { reason: format!("a set without its number: {other:?}") }),
                }
            }
        };
        (self.place, self.group) = ((layout.ranks(), layout.position()), group);
        Ok(Stage::Ready(Ready { layout, group, id, communicator: None, progress: Instant::now() }))
    }

    /// The communicator, which the first call makes: it waits for the other ranks of the host.
    pub(super) fn communicator(&mut self, session: &Session) -> Result<&mut Communicator, Error> {
        let Stage::Ready(ready) = &mut self.stage else { return Err(Error::Closed) };
        let Some(nccl) = &self.nccl else { return Err(Error::Closed) };
        if ready.communicator.is_none() {
            let (index, local) = (ready.layout.index, ready.layout.local());
            let place = (u32::try_from(index).unwrap_or(u32::MAX), u32::try_from(local).unwrap_or(u32::MAX));
            ready.communicator = Some(joined(session, Communicator::begin(nccl, &self.context, ready.id, place)?)?);
            ready.progress = Instant::now();
        }
        ready.communicator.as_mut().ok_or(Error::Closed)
    }

    /// Leaves the communicator in order: the other ranks may not have seen the end of the last collective,
    /// which an abort would fail.
    pub(super) fn leave(&mut self, error: &Error) {
        let before = std::mem::replace(&mut self.stage, Stage::Failed(error.clone()));
        if let Stage::Ready(Ready { communicator: Some(communicator), .. }) = before
            && let Err(error) = communicator.finish(Instant::now() + LEAVE_TIMEOUT)
        {
            tracing::debug!(target: "ronde", %error, "an NCCL communicator was not left in order");
        }
    }

    /// Ends two levels in this set: the communicator is aborted, and each operation fails. The first reason stays.
    pub(super) fn fail(&mut self, error: &Error) {
        if !matches!(self.stage, Stage::Failed(_)) {
            let before = std::mem::replace(&mut self.stage, Stage::Failed(error.clone()));
            if let Stage::Ready(Ready { communicator: Some(mut communicator), .. }) = before {
                communicator.end(&error.to_string());
            }
        }
    }
}

/// Waits until a communicator is usable, the session is over, or it takes too long.
fn joined(session: &Session, mut communicator: Communicator) -> Result<Communicator, Error> {
    let begun = Instant::now();
    let mut deadline = begun + JOIN_TIMEOUT;
    while !communicator.is_ready()? {
        match session.pending.over() {
            // The rank that has shut down has joined, or nothing comes of it.
            Some(error) if error.is_shutdown() => deadline = deadline.min(Instant::now() + FINISH_TIMEOUT),
            Some(error) => {
                communicator.end("the session is over");
                return Err(error);
            }
            None => {}
        }
        if Instant::now() >= deadline {
            let (ranks, seconds) = (communicator.ranks(), begun.elapsed().as_secs());
            let reason = format!("not all {ranks} ranks of this host joined it within {seconds} s");
            communicator.end(&reason);
            return Err(GpuError::Aborted { reason }.into());
        }
        std::thread::sleep(JOIN_PAUSE);
    }
    Ok(communicator)
}

fn first_stage(
    session: &Arc<Session>,
    set: SetId,
    context: &Arc<Context>,
    nccl: Result<&Arc<Nccl>, &GpuError>,
) -> Result<Stage, Error> {
    let view = session.pending.view().ok_or(Error::Closed)?;
    // All ranks know this alike.
    if !view.homogeneous || view.local_size < 2 || ranks_of(session, set)?.len() < 2 {
        tracing::info!(
            target: "ronde",
            set = set.0,
            "collectives on GPUs have one level: hosts do not have the same number of ranks, or have one"
        );
        return Ok(Stage::One);
    }
    let described = nccl.map_err(Clone::clone).and_then(|nccl| Ok((nccl.version_number(), context.info()?.bus_id)));
    let report = Report { host: view.cross_rank, device: described.map_err(|error| error.to_string()) };
    let shape = [1, REPORT_BYTES as u64];
    gather(session, set, "ronde.gpu_levels.reports", &shape, &report.encode())
        .map(|reports| Stage::Reporting(Box::new(reports)))
}

fn gather(session: &Arc<Session>, set: SetId, name: &str, dimensions: &[u64], bytes: &[u8]) -> Result<InFlight, Error> {
    let name = TensorName::new(name.to_owned()).map_err(|error| Error::argument(error.to_string()))?;
    let shape = Shape::new(dimensions.to_vec()).map_err(|error| Error::argument(error.to_string()))?;
    let request = Request::new(set, name, Collective::AllGather, DType::U8, shape);
    session.send_past_line(&request, None, Input::Bytes(bytes), None)
}

/// Forms the process set of the ranks with this rank's position on all hosts.
fn add_group(session: &Arc<Session>, set: SetId, layout: &Layout) -> Result<InFlight, Error> {
    let ranks: Vec<u32> = layout.group_ranks(layout.index).into_iter().map(|rank| rank.0).collect();
    let name = format!("ronde.gpu_levels.{}.{}", set.0, layout.index);
    let label = Label { name: Some(&name), set: SetId::WORLD };
    let operation = Operation { label, ..Operation::add_process_set_of_members(&ranks) };
    let mut draft = session.draft(&operation)?;
    let request = draft.request.take().ok_or(Error::Closed)?;
    session.send_past_line(&request, None, Input::Bytes(&[]), None)
}

fn ranks_of(session: &Session, set: SetId) -> Result<Vec<Rank>, Error> {
    let table = session.open()?;
    let known = table.names.ranks_of(set).map(<[Rank]>::to_vec);
    known.ok_or_else(|| Error::argument(format!("{set} does not exist any more")))
}

/// Takes the bytes of a result that is there.
fn taken(in_flight: &mut InFlight) -> Result<Vec<u8>, Error> {
    in_flight.wait_timeout(Duration::ZERO);
    in_flight.take_output()?.tensor.map(|tensor| tensor.bytes).ok_or(Error::Closed)
}

/// The bytes of a communicator's id.
const ID_BYTES: usize = 128;
/// How long the ranks of a host wait for each other to make a communicator: NCCL takes seconds on large hosts.
const JOIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long leaving it may take before it is aborted.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
const JOIN_PAUSE: Duration = Duration::from_micros(500);
