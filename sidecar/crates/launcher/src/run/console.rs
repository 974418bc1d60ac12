//! How the output of workers appears on the console: progress bars, prompts, whole lines. Pure: it makes texts to write.
//!
//! A carriage return moves a program's cursor to the begin of its line, to write the line again, as progress bars do. Many
//! ranks share one console, so the launcher draws these lines itself. In a terminal each rank has one line below all others,
//! which is drawn again at each update. In a file or a pipe a line that is written again is printed when it is complete, and
//! its state at most once per [`UPDATE_INTERVAL`], so that a log shows progress and does not fill up.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::envelope::Stream;

/// What a console is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A terminal of this size.
    Terminal {
        /// Characters in a line.
        columns: usize,
        /// Lines.
        rows: usize,
    },
    /// A file or a pipe.
    Pipe,
}

/// Who wrote a text: a worker and its stream.
pub(super) type Source = (u32, Stream);

/// What is to be written: first to the terminal's live lines, then the lines, then the live lines again.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Drawing {
    /// Clears the live lines.
    pub(super) clear: String,
    /// Whole lines, or the begin of one that waits for input.
    pub(super) lines: String,
    /// Draws the live lines.
    pub(super) draw: String,
}

/// The state of the console.
pub(super) struct Console {
    kind: Kind,
    /// The worker that reads the launcher's input, whose incomplete lines are prompts.
    reader: Option<u32>,
    /// Lines that their source writes again and again.
    live: BTreeMap<Source, Live>,
    /// How many of them are drawn.
    drawn: usize,
    /// Whose line is not complete.
    open: Option<Source>,
}

#[derive(Debug)]
struct Live {
    line: String,
    printed: Instant,
    /// Whether the line has changed since.
    is_new: bool,
}

impl Console {
    /// An empty console.
    pub(super) fn new(kind: Kind, reader: Option<u32>) -> Self {
        Self { kind, reader, live: BTreeMap::new(), drawn: 0, open: None }
    }

    /// Takes the new size of the terminal.
    pub(super) fn resize(&mut self, kind: Kind) {
        self.kind = kind;
    }

    /// A text of a worker, each of whose lines begins with `prefix`.
    pub(super) fn output(&mut self, source: Source, prefix: &str, text: &str, now: Instant) -> Drawing {
        let mut lines = self.begin(source);
        let is_reader = self.reader == Some(source.0);
        for piece in pieces(text) {
            match piece {
                Piece::Line(line) => {
                    match self.live.remove(&source).filter(|_| line.is_empty()) {
                        // The end of a line whose last state came before.
                        Some(live) if live.is_new => lines.push_str(&(live.line + "\n")),
                        Some(_) => {}
                        None => {
                            self.push(&mut lines, source, prefix, line);
                            lines.push('\n');
                        }
                    }
                    self.open = None;
                }
                Piece::Again(line) => lines.push_str(&self.update(source, prefix, line, now)),
                Piece::Begun(line) => {
                    self.push(&mut lines, source, prefix, line);
                    // A long line comes in pieces; they are lines of the console, since other ranks write between them.
                    if is_reader { self.open = Some(source) } else { lines.push('\n') }
                }
            }
        }
        self.drawing(lines)
    }

    /// Whole lines that are not of a worker. Lines that are written again and again are printed before them.
    pub(super) fn notice(&mut self, text: &str) -> Drawing {
        let begun = self.complete();
        let lines = begun + &self.commit() + text;
        self.drawing(lines)
    }

    /// The user has entered a line, which a terminal has ended.
    pub(super) fn entered(&mut self) {
        self.open = None;
    }

    /// The last states of lines that were not completed.
    pub(super) fn finish(&mut self) -> Drawing {
        self.notice("")
    }

    fn push(&self, lines: &mut String, source: Source, prefix: &str, line: &str) {
        if self.open != Some(source) {
            lines.push_str(prefix);
        }
        lines.push_str(line);
    }

    /// Ends the incomplete line of another source.
    fn begin(&mut self, source: Source) -> String {
        if self.open == Some(source) { String::new() } else { self.complete() }
    }

    fn complete(&mut self) -> String {
        self.open.take().map_or_else(String::new, |_| "\n".to_owned())
    }

    /// Notes the new state of a line; returns what a pipe gets of it now. A line of spaces is one that was wiped out.
    fn update(&mut self, source: Source, prefix: &str, state: &str, now: Instant) -> String {
        if state.trim().is_empty() {
            self.live.remove(&source);
            return String::new();
        }
        let line = format!("{prefix}{state}");
        let is_pipe = self.kind == Kind::Pipe;
        let live = self.live.entry(source).or_insert_with(|| Live { line: String::new(), printed: now, is_new: true });
        live.line = line;
        live.is_new = true;
        if !is_pipe || now.saturating_duration_since(live.printed) < UPDATE_INTERVAL {
            return String::new();
        }
        (live.printed, live.is_new) = (now, false);
        format!("{}\n", live.line)
    }

    fn commit(&mut self) -> String {
        let live = std::mem::take(&mut self.live).into_values().filter(|live| live.is_new);
        live.map(|live| live.line + "\n").collect()
    }

    fn drawing(&mut self, lines: String) -> Drawing {
        let Kind::Terminal { columns, rows } = self.kind else { return Drawing { lines, ..Drawing::default() } };
        let clear = if self.drawn > 0 { format!("\x1b[{}A\r\x1b[J", self.drawn) } else { String::new() };
        // Below a prompt nothing is drawn: the cursor waits there.
        let room = if self.open.is_some() { 0 } else { rows.saturating_sub(ROWS_LEFT) };
        let width = columns.saturating_sub(1).max(1);
        let shown: Vec<String> = self.live.values().take(room).map(|live| fitted(&live.line, width) + "\n").collect();
        self.drawn = shown.len();
        Drawing { clear, lines, draw: shown.concat() }
    }
}

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
enum Piece<'a> {
    /// A whole line, in its last state.
    Line(&'a str),
    /// A state of a line that will be written again.
    Again(&'a str),
    /// The begin of a line.
    Begun(&'a str),
}

/// Splits a text into lines. Of the states of a line that are in the text, the last one that is not empty counts.
fn pieces(text: &str) -> impl Iterator<Item = Piece<'_>> {
    text.split_inclusive('\n').filter_map(|line| {
        let (line, is_whole) = line.strip_suffix('\n').map_or((line, false), |line| (line, true));
        let is_again = line.contains('\r');
        let state = line.split('\r').rfind(|state| !state.is_empty()).unwrap_or_default();
        match (is_whole, is_again) {
            (true, _) => Some(Piece::Line(state)),
            (false, true) => (!state.is_empty()).then_some(Piece::Again(state)),
            (false, false) => Some(Piece::Begun(state)),
        }
    })
}

/// The line without sequences that move the cursor, cut to the width.
fn fitted(line: &str, width: usize) -> String {
    let (mut fits, mut used, mut rest) = (String::new(), 0, line.chars());
    while let Some(c) = rest.next() {
        if c == '\x1b' {
            skip_sequence(&mut rest);
            continue;
        }
        // Characters of East Asia and pictures take two columns.
        let columns = if c.is_control() {
            0
        } else if c >= WIDE {
            2
        } else {
            1
        };
        if used + columns > width {
            break;
        }
        if columns > 0 {
            fits.push(c);
            used += columns;
        }
    }
    fits
}

/// Skips a control sequence up to its last character, a letter.
fn skip_sequence(rest: &mut std::str::Chars<'_>) {
    if rest.clone().next() == Some('[') {
        let _ = rest.find(char::is_ascii_alphabetic);
    }
}

/// How often the state of a line that is written again and again is printed to a pipe.
const UPDATE_INTERVAL: Duration = Duration::from_secs(10);
/// Lines of a terminal that are kept for other output.
const ROWS_LEFT: usize = 4;
/// The first block of wide characters. Bars are made of narrower ones, such as U+2588.
const WIDE: char = '\u{2e80}';

#[cfg(test)]
mod tests {
    use super::*;

    const TERMINAL: Kind = Kind::Terminal { columns: 20, rows: 24 };

    fn both(kind: Kind, reader: Option<u32>) -> (Console, Instant) {
        (Console::new(kind, reader), Instant::now())
    }

    fn written(drawing: Drawing) -> String {
        drawing.clear + &drawing.lines + &drawing.draw
    }

    #[test]
    fn each_line_is_prefixed_and_ended() {
        let (mut console, now) = both(Kind::Pipe, None);
        let lines = |text| Console::new(Kind::Pipe, None).output((0, Stream::Stdout), "p:", text, now).lines;
        assert_eq!(lines("one\n\ntwo\n"), "p:one\np:\np:two\n");
        assert_eq!(lines("10 %\r20 %\r\nend\n"), "p:20 %\np:end\n", "the last state of a line");
        assert_eq!(console.output((0, Stream::Stdout), "p:", "part", now).lines, "p:part\n");
    }

    #[test]
    fn a_line_of_the_reader_keeps_its_last_state_and_a_wiped_one_leaves_nothing() {
        let (mut console, now) = both(Kind::Pipe, Some(0));
        let mut of = |text| written(console.output((0, Stream::Stderr), "[0]", text, now));
        assert_eq!(of("\r100 %"), "");
        assert_eq!(of("\n"), "[0]100 %\n", "its end comes as a text of its own");
        assert_eq!(of("\n"), "[0]\n");
        assert_eq!(of("\r50 %"), "");
        assert_eq!(of("\r     \r"), "");
        assert_eq!(of("\rsaved\n"), "[0]saved\n");
        assert_eq!(written(console.finish()), "");
    }

    #[test]
    fn a_terminal_has_one_line_for_each_rank_that_is_drawn_again() {
        let (mut console, now) = both(TERMINAL, None);
        let mut of = |rank, text| written(console.output((rank, Stream::Stderr), &format!("[{rank}]"), text, now));
        assert_eq!(of(0, "\r10 %\r"), "[0]10 %\n");
        assert_eq!(of(1, "5 %\r"), "\x1b[1A\r\x1b[J[0]10 %\n[1]5 %\n");
        assert_eq!(of(0, "\r20 %\r"), "\x1b[2A\r\x1b[J[0]20 %\n[1]5 %\n");
        assert_eq!(of(1, "saved\n"), "\x1b[2A\r\x1b[J[1]saved\n[0]20 %\n", "a line goes above");
        assert_eq!(of(0, "100 %\n"), "\x1b[1A\r\x1b[J[0]100 %\n", "the last state stays");
        assert_eq!(of(0, "more\n"), "[0]more\n");
    }

    #[test]
    fn a_pipe_has_the_last_state_and_one_in_ten_seconds() {
        let (mut console, now) = both(Kind::Pipe, None);
        let mut at = |seconds, text| {
            written(console.output((0, Stream::Stderr), "[0]", text, now + Duration::from_secs(seconds)))
        };
        assert_eq!(at(0, "1 %\r"), "");
        assert_eq!(at(5, "2 %\r"), "");
        assert_eq!(at(11, "3 %\r"), "[0]3 %\n");
        assert_eq!(at(12, "4 %\r"), "");
        assert_eq!(at(13, "100 %\nend\n"), "[0]100 %\n[0]end\n");
        assert_eq!(at(14, "1 %\r"), "");
        assert_eq!(written(console.finish()), "[0]1 %\n", "a rank that was killed has left it so");
        assert_eq!(written(console.finish()), "");
    }

    #[test]
    fn a_notice_stands_below_the_last_states() {
        let (mut console, now) = both(TERMINAL, None);
        console.output((0, Stream::Stderr), "[0]", "10 %\r", now);
        assert_eq!(written(console.notice("ronde: why\n")), "\x1b[1A\r\x1b[J[0]10 %\nronde: why\n");
    }

    #[test]
    fn an_incomplete_line_of_the_reader_is_shown_and_continued() {
        let (mut console, now) = both(TERMINAL, Some(1));
        let out = |console: &mut Console, rank, text| {
            written(console.output((rank, Stream::Stdout), &format!("[{rank}]"), text, now))
        };
        assert_eq!(out(&mut console, 1, "> train.py\n(Pdb) "), "[1]> train.py\n[1](Pdb) ");
        console.entered();
        assert_eq!(out(&mut console, 1, "3\n(Pdb) "), "[1]3\n[1](Pdb) ");
        assert_eq!(out(&mut console, 0, "ready\n"), "\n[0]ready\n", "another rank begins a line of its own");
        assert_eq!(out(&mut console, 1, "more"), "[1]more");
        assert_eq!(out(&mut console, 1, " text\n"), " text\n");
    }

    #[test]
    fn live_lines_fit_the_terminal() {
        let (mut console, now) = both(Kind::Terminal { columns: 8, rows: 6 }, None);
        for rank in 0..4 {
            console.output((rank, Stream::Stderr), "", "\x1b[A\x1b[31m123456789\x1b[0m\r", now);
        }
        let last = written(console.output((0, Stream::Stderr), "", "é█é█é█é█é█\r", now));
        assert_eq!(last, "\x1b[2A\r\x1b[Jé█é█é█é\n1234567\n", "as many as there is room for");
        assert_eq!(fitted("日本語", 5), "日本");
        assert_eq!(fitted("a\tb\x1b", 5), "ab");
    }
}
