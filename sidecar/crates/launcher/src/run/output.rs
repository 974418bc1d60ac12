//! The output of workers: with prefixes on the launcher's own output, and unchanged in files.
//!
//! One thread writes, so that lines are never interleaved and a blocked terminal blocks only this thread. Its queue is
//! bounded: backpressure reaches the agents, and then their workers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::logs;
use ronde_bootstrap::terminal::has_sequences;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::console::{Console, Drawing, Kind};
use crate::envelope::Stream;

/// The handle of the thread that writes.
pub(super) struct Printer {
    queue: mpsc::Sender<Item>,
    done: oneshot::Receiver<()>,
    broken: watch::Receiver<Option<String>>,
    block: PendingBlock,
    form: Arc<Form>,
}

/// The block that names why a job failed, until it is written. It must come even if the queue is full, or if the thread is
/// blocked because nobody reads the workers' output.
#[derive(Clone, Default)]
pub(super) struct PendingBlock(Arc<Mutex<Option<String>>>);

impl PendingBlock {
    pub(super) fn put(&self, text: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }

    /// Takes it; there is one that writes it.
    fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Writes the block to standard error if the thread that writes has not, for a bounded time.
    pub(super) async fn write_past_the_queue(self, patience: Duration) {
        let Some(text) = self.take() else { return };
        let (finished, done) = oneshot::channel();
        // Standard error may be blocked as well. A thread of the runtime would then keep the process.
        let write = move || {
            let _ = write_to(Stream::Stderr, &text);
            let _ = finished.send(());
        };
        if thread::Builder::new().name("block".to_owned()).spawn(write).is_ok() {
            let _ = timeout(patience, done).await;
        }
    }
}

/// The format of lines.
pub(super) struct Form {
    /// Whether lines of workers begin with the time.
    pub(super) timestamps: bool,
    /// What lines and directories of workers are called.
    pub(super) label: Label,
    /// The job, when lines of sidecars and the launcher are JSON.
    pub(super) json_of_job: Option<String>,
    /// The worker that reads the launcher's input, whose prompts are shown.
    pub(super) reader: Option<u32>,
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
    /// Why the sidecar with this index could not go on.
    Fatal(u32, String),
    /// A notice of the launcher.
    Notice(String),
    /// The block that waits to be written.
    Block,
    /// Standard error of the command of `--starter`, unchanged.
    Passed(String),
    /// The user has entered a line at the terminal.
    Entered,
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
        let (block, form) = (PendingBlock::default(), Arc::new(form));
        let mut screen = Screen::new(block.clone(), Arc::clone(&form));
        thread::Builder::new()
            .name("output".to_owned())
            .spawn(move || {
                print_all(items, files, &mut screen, &break_sender);
                // Fails only when nothing waits for it.
                let _ = finished.send(());
            })
            .context("cannot start the thread that writes")?;
        Ok(Self { queue, done, broken, block, form })
    }

    /// Returns a sender for output.
    pub(super) fn sender(&self) -> mpsc::Sender<Item> {
        self.queue.clone()
    }

    /// Prints a notice to the user; gives up when the output is blocked.
    pub(super) async fn notice(&self, text: impl Into<String>) {
        let _ = timeout(NOTICE_WAIT, self.queue.send(Item::Notice(text.into()))).await;
    }

    /// Prints why a sidecar could not go on. Returns false if the output is blocked.
    pub(super) async fn fatal(&self, sidecar: u32, reason: String) -> bool {
        timeout(NOTICE_WAIT, self.queue.send(Item::Fatal(sidecar, reason))).await.is_ok()
    }

    /// Prints the block that names why the job failed. If the output is blocked, [`PendingBlock::write_past_the_queue`]
    /// does it at the end.
    pub(super) async fn block(&self, text: impl Into<String>) {
        self.block.put(self.form.notice(&text.into()));
        let _ = timeout(NOTICE_WAIT, self.queue.send(Item::Block)).await;
    }

    /// Returns the block, for the time after [`Printer::finish`].
    pub(super) fn pending_block(&self) -> PendingBlock {
        self.block.clone()
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

    /// Waits until all is written, and returns the reason if something could not be. All other senders must be gone.
    pub(super) async fn finish(self) -> Option<String> {
        drop(self.queue);
        // The thread ends in any case.
        let _ = self.done.await;
        self.broken.borrow().clone()
    }
}

fn print_all(
    mut items: mpsc::Receiver<Item>,
    mut files: Option<RankFiles>,
    screen: &mut Screen,
    broken: &watch::Sender<Option<String>>,
) {
    let note = |result: io::Result<()>| {
        if let Err(error) = result {
            broken.send_if_modified(|reason| reason.replace(error.to_string()).is_none());
        }
    };
    while let Some(item) = items.blocking_recv() {
        let console = screen.write(&item);
        let filed = match (&mut files, &item) {
            (Some(files), Item::Output { worker, stream, text }) => files.write(*worker, *stream, text),
            _ => Ok(()),
        };
        let flushed = match &mut files {
            Some(files) if items.is_empty() => files.flush(),
            _ => Ok(()),
        };
        note(console.and(filed).and(flushed));
    }
    // The queue was full when it came.
    note(screen.write(&Item::Block));
    note(screen.finish());
}

/// The launcher's standard output and standard error. If they are one terminal, or one of them is, it has the live lines.
struct Screen {
    /// Of standard output and of standard error: each has the live lines of what is written to it, unless both are terminals.
    consoles: [Console; 2],
    are_terminals: [bool; 2],
    block: PendingBlock,
    form: Arc<Form>,
}

impl Screen {
    fn new(block: PendingBlock, form: Arc<Form>) -> Self {
        let are_terminals = [has_sequences(&io::stdout()), has_sequences(&io::stderr())];
        let consoles = are_terminals.map(|is| Console::new(kind(is), form.reader));
        Self { consoles, are_terminals, block, form }
    }

    fn write(&mut self, item: &Item) -> io::Result<()> {
        match item {
            Item::Output { worker, stream, text } => {
                let time = if self.form.timestamps { logs::now() } else { String::new() };
                let prefix = format!("{time}{}", self.form.label.prefix(*worker, *stream));
                let console = self.console(*stream);
                let drawing = console.output((*worker, *stream), &prefix, text, Instant::now());
                self.draw(*stream, &drawing)
            }
            Item::Log { sidecar, text } => {
                let lines = self.form.log(*sidecar, text);
                self.notice(&lines)
            }
            Item::Fatal(sidecar, reason) => {
                let lines = self.form.fatal(*sidecar, reason);
                self.notice(&lines)
            }
            Item::Notice(text) => {
                let lines = self.form.notice(text);
                self.notice(&lines)
            }
            Item::Passed(text) => self.notice(text),
            Item::Block => self.block.take().map_or(Ok(()), |text| self.notice(&text)),
            Item::Entered => {
                self.consoles.iter_mut().for_each(Console::entered);
                Ok(())
            }
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        let stdout = self.console(Stream::Stdout).finish();
        let stderr = self.console(Stream::Stderr).finish();
        self.draw(Stream::Stdout, &stdout).and(self.draw(Stream::Stderr, &stderr))
    }

    fn notice(&mut self, text: &str) -> io::Result<()> {
        // Lines of standard output that are not complete come before it, too.
        let stdout = if self.share() { Ok(()) } else { self.finish_stdout() };
        let drawing = self.console(Stream::Stderr).notice(text);
        stdout.and(self.draw(Stream::Stderr, &drawing))
    }

    fn finish_stdout(&mut self) -> io::Result<()> {
        let drawing = self.consoles[0].finish();
        self.draw(Stream::Stdout, &drawing)
    }

    /// Whether both streams are terminals, which are one in practice, and share the live lines.
    fn share(&self) -> bool {
        self.are_terminals == [true, true]
    }

    fn console(&mut self, stream: Stream) -> &mut Console {
        let index = usize::from(self.share() || stream == Stream::Stderr);
        let console = &mut self.consoles[index];
        console.resize(kind(self.are_terminals[index]));
        console
    }

    /// Lines of standard output are written there, and the live lines of a common terminal around them to standard error.
    fn draw(&self, stream: Stream, Drawing { clear, lines, draw }: &Drawing) -> io::Result<()> {
        if stream == Stream::Stdout && self.share() {
            write_to(Stream::Stderr, clear)?;
            write_to(Stream::Stdout, lines)?;
            return write_to(Stream::Stderr, draw);
        }
        write_to(stream, &format!("{clear}{lines}{draw}"))
    }
}

fn write_to(stream: Stream, text: &str) -> io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    match stream {
        Stream::Stdout => {
            let mut stdout = io::stdout().lock();
            // A prompt has no end of line, at which standard output would be flushed.
            stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
        }
        Stream::Stderr => io::stderr().lock().write_all(text.as_bytes()),
    }
}

fn kind(is_terminal: bool) -> Kind {
    if !is_terminal {
        return Kind::Pipe;
    }
    let size = terminal_size::terminal_size().map(|(columns, rows)| (usize::from(columns.0), usize::from(rows.0)));
    let (columns, rows) = size.filter(|(columns, rows)| *columns > 0 && *rows > 0).unwrap_or(TERMINAL_SIZE);
    Kind::Terminal { columns, rows }
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

    /// Why a sidecar could not go on: one record, or the lines of a log.
    fn fatal(&self, sidecar: u32, reason: &str) -> String {
        match &self.json_of_job {
            Some(job) => json_line("ERROR", job, Some(sidecar), &format!("sidecar {sidecar}"), reason) + "\n",
            None => self.log(sidecar, reason),
        }
    }

    /// A notice of the launcher.
    pub(super) fn notice(&self, text: &str) -> String {
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
    lines.flat_map(|line| line.split('\r')).map(|line| format!("{prefix}{line}\n")).collect()
}

/// Two files for each worker: what it wrote, except that bytes that are not UTF-8 are replaced.
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
/// The size of a terminal that does not tell it.
const TERMINAL_SIZE: (usize, usize) = (80, 24);
const NOTICE_WAIT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_json_every_line_but_the_workers_is_an_object() {
        let form = Form { timestamps: false, label: Label::Rank, json_of_job: Some("run-1".to_owned()), reader: None };
        let lines = form.log(3, "{\"job\":\"run-1\",\"sidecar\":3}\nstack overflow\n")
            + &form.notice("ended [RONDE-E301]\nlast lines");
        let lines: Vec<serde_json::Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert!(lines.len() == 3 && lines.iter().all(|line| line["job"] == "run-1"), "{lines:?}");
        assert_eq!((&lines[1]["target"], &lines[1]["message"]), (&"sidecar 3".into(), &"stack overflow".into()));
        assert_eq!((&lines[2]["level"], &lines[2]["target"]), (&"ERROR".into(), &"ronde::run".into()));
        let text = Form { timestamps: false, label: Label::Rank, json_of_job: None, reader: None };
        assert_eq!(text.log(3, "a\nb\n") + &text.notice("c"), "[sidecar 3]: a\n[sidecar 3]: b\nronde: c\n");
    }

    #[test]
    fn why_a_sidecar_could_not_go_on_is_one_record() {
        let form = Form { timestamps: false, label: Label::Rank, json_of_job: Some("run-1".to_owned()), reader: None };
        let line: serde_json::Value = serde_json::from_str(&form.fatal(3, "a port is taken\nsee `ss`")).expect("JSON");
        assert_eq!((&line["level"], &line["sidecar"]), (&"ERROR".into(), &3.into()));
        assert_eq!(line["message"], "a port is taken\nsee `ss`");
        let text = Form { json_of_job: None, ..form };
        assert_eq!(text.fatal(3, "a port is taken\nsee `ss`"), "[sidecar 3]: a port is taken\n[sidecar 3]: see `ss`\n");
    }

    #[test]
    fn a_sidecars_log_cannot_pass_for_another_ones() {
        let form = Form { timestamps: false, label: Label::Rank, json_of_job: Some("run-1".to_owned()), reader: None };
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
        let text = Form { timestamps: false, label: Label::Rank, json_of_job: None, reader: None };
        assert_eq!(
            text.log(3, "a\tb\r[0]<stdout>:c\x1b[2Ad\n"),
            "[sidecar 3]: a\tb\n[sidecar 3]: [0]<stdout>:c\\u{1b}[2Ad\n"
        );
    }

    fn plain() -> Arc<Form> {
        Arc::new(Form { timestamps: false, label: Label::Rank, json_of_job: None, reader: None })
    }

    #[test]
    fn the_block_that_names_the_cause_is_printed_once() {
        let block = PendingBlock::default();
        let (queue, items) = mpsc::channel(2);
        let (broken, _) = watch::channel(None);
        let mut screen = Screen::new(block.clone(), plain());
        block.put("ronde: why (in a test)\n".to_owned());
        queue.try_send(Item::Block).expect("room");
        drop(queue);
        print_all(items, None, &mut screen, &broken);
        assert_eq!(block.take(), None, "the thread has printed it");
        let (queue, items) = mpsc::channel(1);
        block.put("ronde: why, at the end (in a test)\n".to_owned());
        drop(queue);
        print_all(items, None, &mut screen, &broken);
        assert_eq!(block.take(), None, "it is printed when nothing follows");
    }

    #[tokio::test]
    async fn the_block_outlives_a_full_queue() {
        let (queue, _unread) = mpsc::channel(1);
        queue.try_send(Item::Entered).expect("room");
        let (_, done) = oneshot::channel();
        let (_, broken) = watch::channel(None);
        let printer = Printer { queue, done, broken, block: PendingBlock::default(), form: plain() };
        printer.block("why [RONDE-E301]").await;
        assert_eq!(printer.pending_block().take().as_deref(), Some("ronde: why [RONDE-E301]\n"));
        printer.block("why, past the queue (in a test)").await;
        printer.pending_block().write_past_the_queue(Duration::from_secs(5)).await;
        assert_eq!(printer.pending_block().take(), None, "it is written");
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
