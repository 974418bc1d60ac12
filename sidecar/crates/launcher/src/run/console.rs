//! How the output of workers appears on the console: progress bars, prompts, whole lines. Pure: it makes texts to write.
//!
//! Progress bars write their lines again, nested ones several of them ([`Rows`]). Many ranks share one console, so the
//! launcher draws these lines itself. In a terminal those of each rank are below all other lines, and are drawn again at
//! each update. In a file or a pipe a line that is written again is printed when it is complete, and its state at most
//! once per [`UPDATE_INTERVAL`], so that a log shows progress and does not fill up.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::envelope::Stream;
use crate::rows::{Rows, without_controls};

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
    /// The sources whose lines are not complete.
    live: BTreeMap<Source, Live>,
    /// How many of them are drawn.
    drawn: usize,
    /// Whose line is not complete.
    open: Option<Source>,
}

#[derive(Debug)]
struct Live {
    rows: Rows,
    /// The prefix of the source's last text, which has the time if lines have it.
    prefix: String,
    printed: Instant,
}

impl Live {
    fn new(now: Instant) -> Self {
        Self { rows: Rows::default(), prefix: String::new(), printed: now }
    }

    /// The rows that have changed since they were last printed.
    fn new_lines(&mut self) -> String {
        let prefix = &self.prefix;
        self.rows.take_new().iter().map(|row| format!("{prefix}{row}\n")).collect()
    }

    /// The last states of rows, which are complete because a prompt follows: its line goes on in the next text.
    fn end_states(&mut self, is_open: &mut bool) -> String {
        let states = self.new_lines();
        self.rows.restart();
        let end = if !states.is_empty() && std::mem::take(is_open) { "\n" } else { "" };
        format!("{end}{states}")
    }
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
        let mut live = self.live.remove(&source).unwrap_or_else(|| Live::new(now));
        prefix.clone_into(&mut live.prefix);
        let mut is_open = self.open.take().is_some();
        live.rows.write(text, |line| {
            lines.push_str(&begin_of_line(prefix, &mut is_open, line.is_rewritten));
            lines.push_str(&line.text);
            lines.push('\n');
        });
        let is_reader = self.reader == Some(source.0);
        if let Some(begun) = live.rows.take_begun(is_reader && !text.contains('\r')) {
            if is_reader {
                lines.push_str(&live.end_states(&mut is_open));
            }
            lines.push_str(&begin_of_line(prefix, &mut is_open, begun.is_rewritten));
            lines.push_str(&begun.text);
            // A long line comes in pieces; they are lines of the console, since other ranks write between them.
            if is_reader { is_open = true } else { lines.push('\n') }
        }
        self.open = is_open.then_some(source);
        if self.kind == Kind::Pipe && now.saturating_duration_since(live.printed) >= UPDATE_INTERVAL {
            let new = live.new_lines();
            if !new.is_empty() {
                live.printed = now;
                lines.push_str(&self.complete());
                lines.push_str(&new);
            }
        }
        if !live.rows.is_idle() {
            self.live.insert(source, live);
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

    /// Ends the incomplete line of another source.
    fn begin(&mut self, source: Source) -> String {
        if self.open == Some(source) { String::new() } else { self.complete() }
    }

    fn complete(&mut self) -> String {
        self.open.take().map_or_else(String::new, |_| "\n".to_owned())
    }

    fn commit(&mut self) -> String {
        let mut lines = String::new();
        for live in self.live.values_mut() {
            lines.push_str(&live.new_lines());
            live.rows.clear();
        }
        lines
    }

    fn drawing(&mut self, lines: String) -> Drawing {
        let Kind::Terminal { columns, rows } = self.kind else { return Drawing { lines, ..Drawing::default() } };
        let clear = if self.drawn > 0 { format!("\x1b[{}A\r\x1b[J", self.drawn) } else { String::new() };
        // Below a prompt nothing is drawn: the cursor waits there.
        let room = if self.open.is_some() { 0 } else { rows.saturating_sub(ROWS_LEFT) };
        let width = columns.saturating_sub(1).max(1);
        let rows = self.live.values().flat_map(|live| live.rows.shown().map(move |row| (&live.prefix, row)));
        let line = |(prefix, row): (&String, &str)| fitted(&format!("{prefix}{row}"), width) + "\n";
        let shown: Vec<String> = rows.take(room).map(line).collect();
        self.drawn = shown.len();
        Drawing { clear, lines, draw: shown.concat() }
    }
}

/// What comes before the text of a line: nothing if it continues the open line, which it ends if it replaces its text.
fn begin_of_line(prefix: &str, is_open: &mut bool, is_rewritten: bool) -> String {
    match (std::mem::take(is_open), is_rewritten) {
        (true, false) => String::new(),
        (true, true) => format!("\n{prefix}"),
        (false, _) => prefix.to_owned(),
    }
}

/// The line without control sequences, cut to the width.
fn fitted(line: &str, width: usize) -> String {
    let (mut fits, mut used) = (String::new(), 0);
    for c in without_controls(line).chars() {
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

    /// What tqdm writes for a bar within another one, without its first state.
    const NESTED: &[&str] =
        &["\rstep 1", "\x1b[A", "\n\r", "step 2\x1b[A", "\rstep 2", "\n\repoch 1", "\n", "\rstep 1\x1b[A"];

    #[test]
    fn nested_bars_are_lines_of_their_own_in_a_terminal() {
        let (mut console, now) = both(TERMINAL, None);
        let mut of = |rank, text| written(console.output((rank, Stream::Stderr), &format!("[{rank}]"), text, now));
        assert_eq!(of(0, "\repoch 0\n"), "[0]epoch 0\n");
        let drawn: Vec<String> = NESTED.iter().map(|text| of(0, text)).collect();
        assert_eq!(drawn[3], "\x1b[1A\r\x1b[J[0]step 2\n");
        assert_eq!(drawn[6], "\x1b[2A\r\x1b[J[0]step 2\n[0]epoch 1\n", "the inner bar is complete");
        assert_eq!(drawn[7], "\x1b[1A\r\x1b[J[0]epoch 1\n[0]step 1\n");
        assert_eq!(of(1, "loss 1\n"), "\x1b[2A\r\x1b[J[1]loss 1\n[0]epoch 1\n[0]step 1\n");
    }

    #[test]
    fn nested_bars_do_not_fill_a_pipe() {
        let (mut console, now) = both(Kind::Pipe, None);
        let mut at =
            |seconds, text| written(console.output((0, Stream::Stderr), "", text, now + Duration::from_secs(seconds)));
        let lines: String = NESTED.iter().map(|text| at(0, text)).collect();
        assert_eq!(lines, "step 2\n", "a bar that has ended");
        assert_eq!(at(11, "\n\rstep 2\x1b[A"), "epoch 1\nstep 2\n");
        assert_eq!(at(12, "\n\rstep 3\x1b[A"), "");
        assert_eq!(written(console.notice("ronde: why\n")), "step 3\nronde: why\n");
        let after = console.output((0, Stream::Stderr), "", "\n\rstep 4\x1b[A\nValueError\n", now);
        assert_eq!(written(after), "ValueError\n");
    }

    #[test]
    fn no_line_moves_the_cursor() {
        let (mut console, now) = both(Kind::Pipe, Some(0));
        let mut of = |text| written(console.output((0, Stream::Stdout), "", text, now));
        assert_eq!(of("\x1b[2J\x1b[31mred\x1b[0m\x1b[3B\n"), "\x1b[31mred\x1b[0m\n");
        assert_eq!(of("one\x1b[Atwo\n\n"), "two\n", "which is above the first one");
        assert_eq!(of("ask\x1b[H: "), "one\nask: ");
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
    fn an_open_line_comes_after_the_states_of_bars_and_continues() {
        let texts = ["\repoch 0\n", "\rstep 1\x1b[A\r", "\repoch 1\r", "\n(Pdb) ", "more\n", "\r1 %\r", "2 %\r"];
        let of = |kind| {
            let (mut console, now) = both(kind, Some(0));
            texts.map(|text| written(console.output((0, Stream::Stdout), "[0]", text, now)))
        };
        assert_eq!(of(Kind::Pipe), ["[0]epoch 0\n", "", "", "[0]epoch 1\n[0](Pdb) ", "more\n", "", ""]);
        let drawn = of(TERMINAL);
        assert_eq!(drawn[3], "\x1b[2A\r\x1b[J[0]epoch 1\n[0](Pdb) ");
        assert_eq!(drawn[4..], ["more\n", "[0]1 %\n", "\x1b[1A\r\x1b[J[0]2 %\n"]);
    }

    #[test]
    fn a_state_does_not_go_into_an_open_line() {
        let (mut console, now) = both(Kind::Pipe, Some(0));
        let mut of = |text| written(console.output((0, Stream::Stdout), "[0]", text, now));
        assert_eq!(of("(Pdb) "), "[0](Pdb) ");
        assert_eq!(of("below\x1b[Aabove"), "\n[0]below\n[0]above");
    }

    #[test]
    fn states_of_the_reader_do_not_run_together() {
        let (mut console, now) = both(Kind::Pipe, Some(0));
        let mut at = |seconds, text| {
            written(console.output((0, Stream::Stdout), "[0]", text, now + Duration::from_secs(seconds)))
        };
        assert_eq!(
            ["\r", "10 %", "\r", "20 %", "\r30 %\n"].map(|text| at(0, text)).concat(),
            "[0]10 %\n[0]20 %\n[0]30 %\n"
        );
        assert_eq!(at(0, "(Pdb) ") + &at(0, "more\r\n"), "[0](Pdb) more\n");
        assert_eq!(at(0, "(Pdb) ") + &at(0, "\r1 %\r"), "[0](Pdb) ");
        assert_eq!(at(11, "2 %\r"), "\n[0]2 %\n", "the prompt ends before a state");
        assert_eq!(written(console.finish()), "");
    }

    #[test]
    fn colors_end_with_their_lines() {
        let (mut console, now) = both(Kind::Pipe, Some(1));
        let mut of = |rank, text| written(console.output((rank, Stream::Stdout), "", text, now));
        assert_eq!(of(0, "\x1b[31mfailed\n\x1b[0m"), "\x1b[31mfailed\x1b[0m\n");
        assert_eq!(of(0, "next\n"), "next\n");
        assert_eq!(of(0, "\x1b[1;31mone\n"), "\x1b[1;31mone\x1b[0m\n");
        assert_eq!(of(1, "\x1b[32m(Pdb) "), "\x1b[32m(Pdb) \x1b[0m");
        assert_eq!(of(1, "two\x1b[0m\n"), "\x1b[32mtwo\x1b[0m\n");
        assert_eq!(of(0, "\ntwo \x1b(B\x1b[m.\nend\n"), "\n\x1b[1;31mtwo \x1b[m.\nend\n");
        assert_eq!(of(0, "\x1b[33m\r1 %"), "");
        assert_eq!(written(console.finish()), "\x1b[33m1 %\x1b[0m\n");
    }

    #[test]
    fn lines_that_end_in_crlf_are_complete_also_after_the_cursor_has_moved() {
        let (mut console, now) = both(Kind::Pipe, None);
        let mut of = |text| written(console.output((0, Stream::Stdout), "", text, now));
        assert_eq!(of("\r\n\rone\x1b[A\rtwo\r\n\r\n"), "\ntwo\n");
        assert_eq!(of("three\r\n"), "one\nthree\n");
        assert_eq!(of("four\r") + &of("\n"), "four\n");
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
