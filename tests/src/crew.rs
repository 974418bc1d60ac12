//! A job of real sidecars whose workers are clients in threads of the test: every rank runs the same closure.

use anyhow::{Context, Result, ensure};
use ronde::blocking::Client;
use ronde::{Error, JobName, Options, Rank, ReduceOp, Ring, Tensor, TensorRef, Transfer};

use crate::cluster::{Cluster, PATIENCE, Plan};

/// The clients of all ranks of a job.
#[derive(Debug)]
pub struct Crew {
    /// By rank. Declared first: sessions end before their sidecars.
    pub clients: Vec<Client>,
    /// The sidecars.
    pub cluster: Cluster,
}

/// How tensors and messages travel between clients and sidecars.
#[derive(Clone, Copy, Debug)]
pub struct DataPath(pub Transfer, pub Ring);

/// With a ring where the transfer allows one.
impl From<Transfer> for DataPath {
    fn from(transfer: Transfer) -> Self {
        Self(transfer, Ring::Auto)
    }
}

/// All data paths: a ring and shared memory, gRPC and shared memory, gRPC alone.
pub const DATA_PATHS: [DataPath; 3] = [
    DataPath(Transfer::Arena, Ring::Auto),
    DataPath(Transfer::Arena, Ring::Off),
    DataPath(Transfer::Inline, Ring::Auto),
];

impl Crew {
    /// Starts the sidecars of a plan and connects all ranks. An operation that takes longer than [`PATIENCE`] fails.
    ///
    /// # Errors
    /// What did not start, with its output.
    pub fn start(plan: Plan<'_>, path: impl Into<DataPath>) -> Result<Self> {
        let DataPath(transfer, ring) = path.into();
        let cluster = plan.sidecars("")?;
        let mut all = Vec::new();
        for rank in cluster.ranks() {
            let socket_dir = cluster.sidecar_of(rank).socket_dir()?;
            let mut options = Options::new(socket_dir, JobName::new(cluster.job.as_str())?, Rank(rank));
            (options.transfer, options.ring) = (transfer, ring);
            options.operation_timeout = Some(PATIENCE);
            all.push(options);
        }
        let clients = std::thread::scope(|scope| {
            let threads: Vec<_> =
                all.into_iter().map(|options| scope.spawn(move || Client::connect(options))).collect();
            threads.into_iter().map(|thread| thread.join().expect("connecting does not panic")).collect()
        });
        let clients: Result<Vec<Client>, Error> = clients;
        Ok(Self { clients: clients?, cluster })
    }

    /// Runs the same closure on every rank concurrently; returns the results by rank.
    ///
    /// # Panics
    /// When a rank's closure panics.
    pub fn each<T: Send>(&self, work: impl Fn(&Client) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = self.clients.iter().map(|client| scope.spawn(move || work(client))).collect();
            threads.into_iter().map(|thread| thread.join().expect("the work of a rank does not panic")).collect()
        })
    }

    /// [`Crew::each`] for closures that must not fail.
    ///
    /// # Errors
    /// The first rank's, with its number.
    pub fn all<T: Send>(&self, work: impl Fn(&Client) -> Result<T> + Sync) -> Result<Vec<T>> {
        let outcomes = (0..).zip(self.each(work));
        outcomes.map(|(rank, outcome): (u32, _)| outcome.with_context(|| format!("rank {rank}"))).collect()
    }

    /// Checks that every rank fails with the same text, which contains these words, and that the next operation works.
    ///
    /// # Errors
    /// When a rank does not fail, fails with another text, or the next operation does not work.
    pub fn check_fails<T: Send>(&self, words: &str, work: impl Fn(&Client) -> Result<T, Error> + Sync) -> Result<()> {
        self.check_each_fails(&vec![words; self.clients.len()], work)
    }

    /// Checks that each rank fails with its own words, and that the next operation works.
    ///
    /// # Errors
    /// Those of [`Crew::check_fails`].
    pub fn check_each_fails<T: Send>(
        &self,
        words: &[&str],
        work: impl Fn(&Client) -> Result<T, Error> + Sync,
    ) -> Result<()> {
        let outcomes = self.each(work);
        for (rank, (outcome, words)) in outcomes.into_iter().zip(words).enumerate() {
            let error = outcome.err().with_context(|| format!("rank {rank} did not fail with {words:?}"))?;
            ensure!(error.to_string().contains(words), "rank {rank} lacks {words:?}, but: {error}");
            ensure!(error.is_local_to_call(), "rank {rank}: the session should go on after: {error}");
        }
        self.check_next()
    }

    /// A sum over all ranks works.
    ///
    /// # Errors
    /// When it does not.
    pub fn check_next(&self) -> Result<()> {
        let size = i64::from(self.cluster.size());
        self.all(|client| {
            let mine = numbers(&[2], |i| i64::from(client.rank()) + i)?;
            let sum = client.allreduce("next", &mine, ReduceOp::Sum)?;
            let ranks = size * (size - 1) / 2;
            ensure!(sum.to_vec::<i64>()? == [ranks, ranks + size], "{sum:?}");
            Ok(())
        })?;
        Ok(())
    }
}

/// A tensor of whole numbers as a function of their position.
///
/// # Errors
/// When the shape is none.
pub fn numbers(shape: &[u64], value: impl Fn(i64) -> i64) -> Result<Tensor, Error> {
    let count = i64::try_from(shape.iter().product::<u64>()).unwrap_or(0);
    let values: Vec<i64> = (0..count).map(value).collect();
    Tensor::of(shape, &values)
}

/// A tensor of f32 as a function of their position.
///
/// # Errors
/// When the shape is none.
pub fn floats(shape: &[u64], value: impl Fn(u16) -> f32) -> Result<Tensor, Error> {
    let count = u16::try_from(shape.iter().product::<u64>()).unwrap_or(u16::MAX);
    let values: Vec<f32> = (0..count).map(value).collect();
    Tensor::of(shape, &values)
}

/// A tensor without elements.
#[must_use]
pub fn nothing(shape: &[u64]) -> TensorRef<'_> {
    TensorRef { dtype: ronde::DType::F32, shape, bytes: &[] }
}
