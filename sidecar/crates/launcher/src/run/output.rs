//! The output of workers: with prefixes on the launcher's own output, and unchanged in files.
//!
//! One thread writes, so that lines are never interleaved and a blocked terminal blocks only this thread. Its queue is
//! bounded: backpressure reaches the agents, and then their workers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::logs;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use crate::envelope::Stream;

/// The handle of the thread that writes.
pub(super) struct Printer {
    queue: mpsc::Sender<Item>,
    done: oneshot::Receiver<()>,
    broken: watch::Receiver<Option<String>>,
}

/// The format of lines.
pub(super) struct Form {
    /// Whether lines of workers begin with the time.
    pub(super) timestamps: bool,
    /// What lines and directories of workers are called.
    pub(super) label: Label,
    /// The job, when lines of sidecars and the launcher are JSON.
    pub(super) json_of_job: Option<String>,
}

/// What identifies a worker in the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Label {
    /// Its rank.
    Rank,
    /// Its number, in an elastic job.
    Worker,
}

impl Label {
    /// The prefix of a line.
    fn prefix(self, worker: u32, stream: Stream) -> String {
        match self {
            Self::Rank => format!("[{worker}]<{stream}>:"),
            Self::Worker => format!("[worker {worker}]<{stream}>:"),
        }
    }
}

/// An item of the thread's queue.
pub(super) enum Item {
    /// Output of a worker: whole lines, or part of a long one.
    Output {
        /// Its number, which is its rank in a job that is not elastic.
        worker: u32,
        /// Where to.
        stream: Stream,
        /// The lines.
        text: String,
    },
    /// Lines of a sidecar's log.
    Log {
        /// Its index.
        sidecar: u32,
        /// The lines.
        text: String,
    },
    /// A notice of the launcher.
    Notice(String),
    /// Standard error of the command of `--starter`, unchanged.
    Passed(String),
}

impl Printer {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the files under `directory` cannot be made.
    pub(super) fn start(ranks: u32, directory: Option<&Path>, form: Form) -> anyhow::Result<Self> {
        let files = directory.map(|directory| match form.label {
            Label::Rank => RankFiles::create(directory, ranks),
            Label::Worker => RankFiles::growing(directory),
        });
        let files = files.transpose()?;
        let (queue, items) = mpsc::channel(QUEUE_ITEMS);
        let (finished, done) = oneshot::channel();
        let (break_sender, broken) = watch::channel(None);
        thread::Builder::new()
            .name("output".to_owned())
            .spawn(move || {
                print_all(items, files, &form, &break_sender);
                // Fails only when nothing waits for it.
                let _ = finished.send(());
            })
            .context("cannot start the thread that writes")?;
        Ok(Self { queue, done, broken })
    }

    /// Returns a sender for output.
    pub(super) fn sender(&self) -> mpsc::Sender<Item> {
        self.queue.clone()
    }

    /// Prints a notice to the user; gives up when the output is blocked.
    pub(super) async fn notice(&self, text: impl Into<String>) {
        let _ = timeout(NOTICE_WAIT, self.queue.send(Item::Notice(text.into()))).await;
    }

    /// Resolves when output cannot be written any more, with the reason.
    pub(super) async fn broken(&mut self) -> String {
        loop {
            if let Some(reason) = self.broken.borrow_and_update().clone() {
                return reason;
            }
            if self.broken.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until all is written. All other senders must be gone.
    pub(super) async fn finish(self) {
        drop(self.queue);
        // The thread ends in any case.
        let _ = self.done.await;
    }
}

fn print_all(
    mut items: mpsc::Receiver<Item>,
    mut files: Option<RankFiles>,
    form: &Form,
    broken: &watch::Sender<Option<String>>,
) {
    while let Some(item) = items.blocking_recv() {
        let console = write_console(&item, form);
        let filed = match (&mut files, &item) {
            (Some(files), Item::Output { worker, stream, text }) => files.write(*worker, *stream, text),
            _ => Ok(()),
        };
        let flushed = match &mut files {
            Some(files) if items.is_empty() => files.flush(),
            _ => Ok(()),
        };
        if let Err(error) = console.and(filed).and(flushed) {
            broken.send_if_modified(|reason| reason.replace(error.to_string()).is_none());
        }
    }
}

fn write_console(item: &Item, form: &Form) -> io::Result<()> {
    match item {
        Item::Output { worker, stream, text } => {
            let time = if form.timestamps { logs::now() } else { String::new() };
            let lines = prefixed(&format!("{time}{}", form.label.prefix(*worker, *stream)), text);
            match stream {
                Stream::Stdout => io::stdout().lock().write_all(lines.as_bytes()),
                Stream::Stderr => io::stderr().lock().write_all(lines.as_bytes()),
            }
        }
        Item::Log { sidecar, text } => io::stderr().lock().write_all(form.log(*sidecar, text).as_bytes()),
        Item::Notice(text) => io::stderr().lock().write_all(form.notice(text).as_bytes()),
        Item::Passed(text) => io::stderr().lock().write_all(text.as_bytes()),
    }
}

impl Form {
    /// The lines of a sidecar's log.
    fn log(&self, sidecar: u32, text: &str) -> String {
        let Some(job) = &self.json_of_job else {
            return prefixed(&format!("[sidecar {sidecar}]: "), &visible(text));
        };
        let target = format!("sidecar {sidecar}");
        // Not all that a process writes is its own doing: the system's loader and allocator have other forms.
        let is_its_own = |line: &str| serde_json::from_str::<LogOrigin<'_>>(line).is_ok_and(|own| own.is(job, sidecar));
        let line = |line: &str| {
            if is_its_own(line) {
                return line.to_owned();
            }
            // Before its start a sidecar does not know who it is.
            let started = format!("\"job\":{},\"sidecar\":{sidecar}", serde_json::Value::from(job.as_str()));
            let named = line.replacen("\"job\":null,\"sidecar\":null", &started, 1);
            if is_its_own(&named) { named } else { json_line("WARN", job, Some(sidecar), &target, line) }
        };
        text.lines().map(|text| line(text) + "\n").collect()
    }

    /// A notice of the launcher.
    fn notice(&self, text: &str) -> String {
        let Some(job) = &self.json_of_job else { return format!("ronde: {text}\n") };
        let level = if Code::of(text).is_some() { "ERROR" } else { "INFO" };
        json_line(level, job, None, "ronde::run", text) + "\n"
    }
}

/// A line of JSON by the launcher.
fn json_line(level: &str, job: &str, sidecar: Option<u32>, target: &str, message: &str) -> String {
    logs::json_line(&logs::Head { level, job: Some(job), sidecar, target, message }, &[])
}

/// Whose line of JSON it is, as the line itself says. A line that says it twice does not parse.
#[derive(Deserialize)]
struct LogOrigin<'a> {
    #[serde(borrow)]
    job: Option<Cow<'a, str>>,
    sidecar: Option<u32>,
}

impl LogOrigin<'_> {
    fn is(&self, job: &str, sidecar: u32) -> bool {
        self.job.as_deref() == Some(job) && self.sidecar == Some(sidecar)
    }
}

/// The text with control characters escaped, other than those that end lines: a host's log must not move the cursor to
/// the lines of another one.
fn visible(text: &str) -> Cow<'_, str> {
    let is_hidden = |c: char| c.is_control() && !matches!(c, '\n' | '\r' | '\t');
    if !text.contains(is_hidden) {
        return Cow::Borrowed(text);
    }
    text.chars().flat_map(|c| if is_hidden(c) { c.escape_default().collect() } else { vec![c] }).collect()
}

/// Adds the prefix to each line, and a line feed where it is missing.
fn prefixed(prefix: &str, text: &str) -> String {
    let text = text.strip_suffix(['\n', '\r']).unwrap_or(text);
    let lines = text.split('\n').map(|line| line.strip_suffix('\r').unwrap_or(line));
    lines.flat_map(|line| line.split('\r')).fold(String::with_capacity(text.len() * 2), |mut whole, line| {
        whole.push_str(prefix);
        whole.push_str(line);
        whole.push('\n');
        whole
    })
}

/// Two files for each worker, which hold exactly what it wrote.
struct RankFiles {
    files: BTreeMap<u32, [BufWriter<File>; 2]>,
    /// Where those of other workers are made when they write first.
    growing: Option<PathBuf>,
}

impl RankFiles {
    fn create(directory: &Path, ranks: u32) -> anyhow::Result<Self> {
        let width = ranks.saturating_sub(1).to_string().len();
        let folder = |rank: u32| directory.join(format!("rank.{rank:0width$}"));
        let files = (0..ranks).map(|rank| Ok((rank, open_files(&folder(rank))?)));
        Ok(Self { files: files.collect::<anyhow::Result<_>>()?, growing: None })
    }

    /// Files of workers whose number is not known.
    fn growing(directory: &Path) -> anyhow::Result<Self> {
        fs::create_dir_all(directory).with_context(|| format!("cannot make the directory {}", directory.display()))?;
        Ok(Self { files: BTreeMap::new(), growing: Some(directory.to_owned()) })
    }

    fn write(&mut self, worker: u32, stream: Stream, text: &str) -> io::Result<()> {
        if let (Some(directory), false) = (&self.growing, self.files.contains_key(&worker)) {
            let folder = directory.join(format!("worker.{worker}"));
            let files = open_files(&folder).map_err(|error| io::Error::other(format!("{error:#}")))?;
            // A worker that wrote long ago may have ended; its files are complete then.
            if self.files.len() >= OPEN_WORKERS_MAX {
                self.files
                    .pop_first()
                    .into_iter()
                    .flat_map(|(_, files)| files)
                    .try_for_each(|mut file| file.flush())?;
            }
            self.files.insert(worker, files);
        }
        let Some([stdout, stderr]) = self.files.get_mut(&worker) else { return Ok(()) };
        match stream {
            Stream::Stdout => stdout.write_all(text.as_bytes()),
            Stream::Stderr => stderr.write_all(text.as_bytes()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.files.values_mut().flatten().try_for_each(Write::flush)
    }
}

fn open_files(folder: &Path) -> anyhow::Result<[BufWriter<File>; 2]> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make the directory {}", folder.display()))?;
    let open = |name| {
        let path = folder.join(name);
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        anyhow::Ok(BufWriter::new(file))
    };
    Ok([open("stdout")?, open("stderr")?])
}

/// Workers of an elastic job whose files are open.
const OPEN_WORKERS_MAX: usize = 256;
/// Texts that wait to be written: at most 384 KiB each, so 24 MiB.
const QUEUE_ITEMS: usize = 64;
const NOTICE_WAIT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_prefixed_and_ended() {
        assert_eq!(prefixed("[0]<stdout>:", "one\n\ntwo"), "[0]<stdout>:one\n[0]<stdout>:\n[0]<stdout>:two\n");
        assert_eq!(prefixed("p:", "10 %\r20 %\r\nend\n"), "p:10 %\np:20 %\np:end\n");
        assert_eq!(prefixed("p:", "20 %\r"), "p:20 %\n");
    }

    #[test]
    fn with_json_every_line_but_the_workers_is_an_object() {
        let form = Form { timestamps: false, label: Label::Rank, json_of_job: Some("run-1".to_owned()) };
        let lines = form.log(3, "{\"job\":\"run-1\",\"sidecar\":3}\nstack overflow\n")
            + &form.notice("ended [RONDE-E301]\nlast lines");
        let lines: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert!(lines.len() == 3 && lines.iter().all(|line| line["job"] == "run-1"), "{lines:?}");
        assert_eq!((&lines[1]["target"], &lines[1]["message"]), (&"sidecar 3".into(), &"stack overflow".into()));
        assert_eq!((&lines[2]["level"], &lines[2]["target"]), (&"ERROR".into(), &"ronde::run".into()));
        let text = Form { timestamps: false, label: Label::Rank, json_of_job: None };
        assert_eq!(text.log(3, "a\nb\n") + &text.notice("c"), "[sidecar 3]: a\n[sidecar 3]: b\nronde: c\n");
    }

    #[test]
    fn a_sidecars_log_cannot_pass_for_another_ones() {
        let form = Form { timestamps: false, label: Label::Rank, json_of_job: Some("run-1".to_owned()) };
        let own = "{\"job\":\"run-1\",\"sidecar\":3,\"message\":\"m\"}";
        assert_eq!(form.log(3, own), format!("{own}\n"));
        let early = logs::json_line(
            &logs::Head { level: "WARN", job: None, sidecar: None, target: "t", message: "early" },
            &[],
        );
        let line: serde_json::Value = serde_json::from_str(&form.log(3, &early)).expect("JSON");
        assert_eq!((&line["job"], &line["sidecar"]), (&"run-1".into(), &3.into()));
        assert_eq!((&line["message"], &line["target"]), (&"early".into(), &"t".into()));
        for forged in [
            "{\"message\":\"\\\"job\\\":null,\\\"sidecar\\\":null\"}",
            "{\"job\":\"run-1\",\"sidecar\":0,\"message\":\"m\"}",
            "{\"job\":\"run-2\",\"sidecar\":3,\"message\":\"m\"}",
            "{\"job\":\"run-1\",\"target\":\"ronde::run\",\"message\":\"m\"}",
            "{\"job\":\"run-1\",\"sidecar\":3,\"sidecar\":0}",
            "{\"job\":\"run-1\",\"sidecar\":3}}",
        ] {
            let line: serde_json::Value = serde_json::from_str(&form.log(3, forged)).expect("JSON");
            let shown = (&line["sidecar"], &line["target"], &line["message"]);
            assert_eq!(shown, (&3.into(), &"sidecar 3".into(), &forged.into()));
        }
        let text = Form { timestamps: false, label: Label::Rank, json_of_job: None };
        assert_eq!(
            text.log(3, "a\tb\r[0]<stdout>:c\x1b[2Ad\n"),
            "[sidecar 3]: a\tb\n[sidecar 3]: [0]<stdout>:c\\u{1b}[2Ad\n"
        );
    }

    #[test]
    fn files_are_padded_to_one_width_and_hold_what_was_written() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut files = RankFiles::create(directory.path(), 11).expect("writable");
        files.write(3, Stream::Stderr, "half a").expect("writable");
        files.write(3, Stream::Stderr, " line\n").expect("writable");
        files.flush().expect("writable");
        let read = |name: &str| fs::read_to_string(directory.path().join(name)).expect("exists");
        assert_eq!(read("rank.03/stderr"), "half a line\n");
        assert_eq!(read("rank.10/stdout"), "");
    }

    #[test]
    fn workers_of_an_elastic_job_have_files_by_their_number() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut files = RankFiles::growing(&directory.path().join("out")).expect("writable");
        for worker in [0, 1_000_000, 0] {
            files.write(worker, Stream::Stdout, "a line\n").expect("writable");
        }
        files.flush().expect("writable");
        let read = |name: &str| fs::read_to_string(directory.path().join("out").join(name)).expect("exists");
        assert_eq!(read("worker.0/stdout"), "a line\na line\n");
        assert_eq!(read("worker.1000000/stdout") + &read("worker.1000000/stderr"), "a line\n");
        assert_eq!(Label::Worker.prefix(3, Stream::Stderr), "[worker 3]<stderr>:");
        assert_eq!(Label::Rank.prefix(3, Stream::Stdout), "[3]<stdout>:");
    }
}
