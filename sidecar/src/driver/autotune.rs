//! The log of the search for better settings: a line for people and, if a file is named, a row in it, for each sample.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use anyhow::{Context, anyhow};
use ronde_bootstrap::codes::Code;
use ronde_engine::{AutotuneSample, AutotuneStage, CostModel, Knobs};

use super::Driver;

/// The file of the search, if one is named. Its columns begin with Horovod's, so that scripts for those can read it.
///
/// A thread writes it: a file system that does not answer, or a FIFO that nobody reads, must not block the control thread.
#[derive(Debug, Default)]
pub(crate) struct AutotuneLog {
    path: Option<PathBuf>,
    /// The cost model whose alpha the search changes: its relation to the rest selects algorithms.
    cost: CostModel,
    writer: Option<Writer>,
}

impl AutotuneLog {
    /// Makes the file on the sidecar that begins as the coordinator. Another one that becomes it appends to its file of that
    /// path.
    ///
    /// # Errors
    /// When the file cannot be made, or does not open for [`OPENING_TIMEOUT`].
    pub(crate) fn create(path: Option<&Path>, cost: CostModel, is_coordinator: bool) -> anyhow::Result<Self> {
        Self::create_within(OPENING_TIMEOUT, path, cost, is_coordinator)
    }

    fn create_within(
        timeout: Duration,
        path: Option<&Path>,
        cost: CostModel,
        is_coordinator: bool,
    ) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self::default()) };
        let mut log = Self { path: Some(path.to_path_buf()), cost, writer: None };
        if is_coordinator {
            let created = Writer::opened(path, timeout);
            let created = created.with_context(|| {
                format!("cannot write the autotune log {}; give a path that can be written", path.display())
            });
            log.writer = Some(created.context(Code::AutotuneLog)?);
        }
        Ok(log)
    }

    /// Appends a row. After a failure, which is logged, nothing more is written.
    fn append(&mut self, sample: &AutotuneSample) {
        let Some(path) = &self.path else { return };
        let text = row(sample, self.cost);
        let sent = match &self.writer {
            Some(writer) => writer.write(text),
            None => Writer::start(path, continued, None).map_err(|error| error.to_string()).and_then(|writer| {
                let sent = writer.write(text);
                self.writer = Some(writer);
                sent
            }),
        };
        if let Err(error) = sent {
            tracing::warn!(%error, path = %path.display(), "{WRITES_END}");
            (self.path, self.writer) = (None, None);
        }
    }
}

/// A thread that opens a file and writes rows to it.
#[derive(Debug)]
struct Writer {
    rows: SyncSender<String>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl Writer {
    /// Makes a file, within this time.
    fn opened(path: &Path, timeout: Duration) -> anyhow::Result<Self> {
        let (sender, outcome) = sync_channel(1);
        let writer = Self::start(path, created, Some(sender))?;
        match outcome.recv_timeout(timeout) {
            Ok(opened) => opened.map(|()| writer).map_err(anyhow::Error::from),
            Err(RecvTimeoutError::Disconnected) => Err(anyhow!("its thread has ended")),
            Err(RecvTimeoutError::Timeout) => Err(anyhow!(
                "it does not open for {} s: its file system does not answer, or it is a FIFO that nobody reads",
                timeout.as_secs_f64()
            )),
        }
    }

    /// Starts the thread, which sends how opening went to `outcome`, or logs a failure where nobody waits for it.
    fn start(
        path: &Path,
        open: impl FnOnce(&Path) -> std::io::Result<File> + Send + 'static,
        outcome: Option<SyncSender<std::io::Result<()>>>,
    ) -> std::io::Result<Self> {
        let (rows, received) = sync_channel(ROWS_MAX);
        let (ending, ended) = sync_channel(0);
        let path = path.to_path_buf();
        let write = move || {
            // Dropped at the end of the thread.
            let _ending: SyncSender<()> = ending;
            let written = match (open(&path), outcome) {
                (Ok(file), None) => write_rows(file, &received),
                (Ok(file), Some(outcome)) => {
                    drop(outcome.send(Ok(())));
                    write_rows(file, &received)
                }
                (Err(error), None) => Err(error),
                (Err(error), Some(outcome)) => {
                    drop(outcome.send(Err(error)));
                    Ok(())
                }
            };
            if let Err(error) = written {
                tracing::warn!(%error, path = %path.display(), "{WRITES_END}");
            }
        };
        std::thread::Builder::new().name("autotune-log".to_owned()).spawn(write)?;
        Ok(Self { rows, ended })
    }

    /// Passes a row to the thread.
    fn write(&self, row: String) -> Result<(), String> {
        match self.rows.try_send(row) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => Err(format!("{ROWS_MAX} rows wait for its file system, which is too slow")),
            Err(TrySendError::Disconnected(_)) => Err("an earlier row could not be written".to_owned()),
        }
    }
}

impl Drop for AutotuneLog {
    /// Waits a moment for the last rows, of which the very last has the outcome.
    fn drop(&mut self) {
        if let Some(Writer { rows, ended }) = self.writer.take() {
            drop(rows);
            // Disconnected as soon as the thread has ended. A file system that does not answer delays the end by this time at most.
            let _ = ended.recv_timeout(CLOSING_TIMEOUT);
        }
    }
}

fn write_rows(mut file: File, rows: &Receiver<String>) -> std::io::Result<()> {
    while let Ok(row) = rows.recv() {
        file.write_all(row.as_bytes())?;
    }
    Ok(())
}

const WRITES_END: &str = "the autotune log cannot be written; the search continues without it";
/// A start waits for the file so long.
const OPENING_TIMEOUT: Duration = Duration::from_secs(10);
/// The end of the sidecar waits for the last rows so long.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(2);
/// Rows that wait for the thread. A row follows another after many steps.
const ROWS_MAX: usize = 16;

impl Driver {
    /// Logs a sample.
    pub(super) fn autotuned(&mut self, sample: &AutotuneSample) {
        if sample.stage != AutotuneStage::WarmUp {
            self.autotune.append(sample);
        }
        let text = text(sample);
        match sample.stage {
            // Also at the default level: the user has asked for the outcome.
            AutotuneStage::Finished => tracing::warn!("{text}"),
            AutotuneStage::WarmUp | AutotuneStage::Searching => tracing::info!("{text}"),
        }
    }
}

/// Makes a file, or empties it.
fn created(path: &Path) -> std::io::Result<File> {
    let mut file = File::create(path)?;
    file.write_all(HEAD.as_bytes())?;
    Ok(file)
}

/// Opens a file that an earlier coordinator may have begun.
fn continued(path: &Path) -> std::io::Result<File> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    if file.metadata()?.len() == 0 {
        file.write_all(HEAD.as_bytes())?;
    }
    Ok(file)
}

fn text(sample: &AutotuneSample) -> String {
    let AutotuneSample { knobs, score, gain, samples, .. } = sample;
    let Knobs { fusion_threshold_bytes, lanes, eager_bytes, hierarchical_allreduce, alpha_us, .. } = knobs;
    let chunk = knobs.chunk_bytes.map_or_else(|| "any".to_owned(), |bytes| bytes.to_string());
    let values = format!(
        "fusion threshold {fusion_threshold_bytes} bytes, chunk {chunk} bytes, lanes {lanes}, eager up to {eager_bytes} \
         bytes, hierarchical {hierarchical_allreduce}, alpha {alpha_us:.1} us: {score:.1} MB/s"
    );
    match sample.stage {
        AutotuneStage::WarmUp => format!("autotune warms up: {values}"),
        AutotuneStage::Searching => format!("autotune, sample {samples}: {values}"),
        AutotuneStage::Finished => {
            format!(
                "autotune is finished after {samples} samples; these settings stay: {values}, {gain:.2} times the start"
            )
        }
    }
}

/// A row: columns of Horovod that mean nothing here have the values that they always have.
fn row(sample: &AutotuneSample, CostModel { beta_us_per_byte, gamma_us_per_byte, .. }: CostModel) -> String {
    let Knobs { fusion_threshold_bytes, chunk_bytes, lanes, eager_bytes, hierarchical_allreduce, alpha_us } =
        sample.knobs;
    let (hierarchical, chunk_bytes) = (u8::from(hierarchical_allreduce), chunk_bytes.unwrap_or(0));
    format!(
        "{hierarchical},0,0,1,0,{fusion_threshold_bytes},{chunk_bytes},{lanes},{eager_bytes},{alpha_us:.3},\
         {beta_us_per_byte:.6e},{gamma_us_per_byte:.6e},{:.4}\n",
        sample.score
    )
}

const HEAD: &str = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,\
                    tensor_fusion_threshold,chunk_bytes,lanes,eager_bytes,alpha_us,beta_us_per_byte,gamma_us_per_byte,\
                    score\n";

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(stage: AutotuneStage) -> AutotuneSample {
        let knobs = Knobs {
            fusion_threshold_bytes: 1 << 20,
            chunk_bytes: None,
            lanes: 2,
            eager_bytes: 4_096,
            hierarchical_allreduce: true,
            alpha_us: 60.0,
        };
        AutotuneSample { stage, knobs, score: 123.456, gain: 1.5, samples: 7 }
    }

    #[test]
    fn a_file_has_a_head_and_a_row_for_each_sample_and_a_later_coordinator_appends() {
        let directory = tempfile::tempdir().expect("a directory can be made");
        let path = directory.path().join("log.csv");
        let mut log = AutotuneLog::create(Some(&path), CostModel::default(), true).expect("it can be written");
        log.append(&sample(AutotuneStage::Searching));
        drop(log);
        let mut later = AutotuneLog::create(Some(&path), CostModel::default(), false).expect("nothing is made");
        later.append(&sample(AutotuneStage::Finished));
        drop(later);
        let text = std::fs::read_to_string(&path).expect("it was made");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(lines[0].split(',').count(), lines[1].split(',').count());
        assert_eq!(lines[1], "1,0,0,1,0,1048576,0,2,4096,60.000,1.000000e-3,1.000000e-4,123.4560");
    }

    #[test]
    fn a_file_that_cannot_be_made_is_an_error_and_one_that_fails_later_is_not() {
        let nowhere = Some(Path::new("/no/such/directory/a.csv"));
        let error = AutotuneLog::create(nowhere, CostModel::default(), true).expect_err("no directory");
        let error = format!("{error:#}");
        assert!(error.contains("cannot write the autotune log /no/such/directory/a.csv"), "{error}");
        let mut later = AutotuneLog::create(nowhere, CostModel::default(), false).expect("not opened yet");
        // Its thread fails first; then rows are refused.
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while later.path.is_some() {
            assert!(std::time::Instant::now() < deadline, "rows are accepted that nobody writes");
            later.append(&sample(AutotuneStage::Searching));
            std::thread::yield_now();
        }
        assert!(later.writer.is_none());
    }

    fn fifo(directory: &tempfile::TempDir) -> PathBuf {
        let path = directory.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO can be made");
        path
    }

    #[test]
    fn a_fifo_that_nobody_reads_is_an_error_after_a_time() {
        let directory = tempfile::tempdir().expect("a directory can be made");
        let path = fifo(&directory);
        let error = AutotuneLog::create_within(Duration::from_millis(50), Some(&path), CostModel::default(), true);
        let error = format!("{:#}", error.expect_err("nobody reads"));
        assert!(error.contains("does not open for 0.05 s") && error.contains("a FIFO that nobody reads"), "{error}");
        // Its thread waits in vain; a reader lets it end.
        drop(OpenOptions::new().read(true).write(true).open(&path));
    }

    #[test]
    fn a_file_that_takes_no_more_rows_never_blocks() {
        let directory = tempfile::tempdir().expect("a directory can be made");
        let path = fifo(&directory);
        // It opens, and a FIFO takes some 64 KiB that nobody reads.
        let reader = OpenOptions::new().read(true).write(true).open(&path).expect("it is ours");
        let mut log = AutotuneLog::create(Some(&path), CostModel::default(), true).expect("it has a reader");
        let mut rows = 0;
        while log.path.is_some() {
            log.append(&sample(AutotuneStage::Searching));
            rows += 1;
            assert!(rows < 1_000_000, "no row is refused");
        }
        drop(reader);
    }

    #[test]
    fn the_outcome_has_its_gain() {
        let text = text(&sample(AutotuneStage::Finished));
        assert!(text.contains("finished after 7 samples") && text.contains("1.50 times the start"), "{text}");
    }
}
