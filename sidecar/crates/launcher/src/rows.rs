//! The lines of a stream as a terminal shows them, although progress bars write their lines again. Pure.
//!
//! A carriage return, or a control sequence that moves the cursor up, lets a program write a line again. [`Rows`]
//! follows the cursor, and so knows which lines are complete and what the others show now. Colors stay in the text, and
//! each line ends its own. For a console all other control characters and sequences are dropped: many streams share it,
//! and none may move the cursor to the lines of another, or color them.

mod colors;

use std::collections::VecDeque;

use self::colors::{Colors, RESET};

/// The last rows of a terminal that has this stream alone.
///
/// A row is complete when the cursor has left it for a new one. A program that has moved the cursor up, as nested
/// progress bars do, will do it again. So the rows that it has used stay incomplete until it writes a plain line.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    /// Those that can still change, from the top; never empty.
    rows: VecDeque<Row>,
    /// The row of the cursor.
    at: usize,
    /// How many rows stay incomplete.
    height: usize,
    /// Whether the next text replaces that of the row, because the cursor is at its begin.
    replaces: bool,
    /// Whether the row is one that is written again: the cursor has returned to its begin, or moved up to it.
    is_live: bool,
    /// Whether a carriage return was the last thing, other than colors. With a line feed it ends a plain line.
    is_returned: bool,
    /// Whether the row was written to since the cursor came to it.
    is_written: bool,
    /// The colors of the next text.
    colors: Colors,
    /// Whether control characters and sequences that are not followed stay in the text.
    keeps_controls: bool,
}

#[derive(Clone, Debug, Default)]
struct Row {
    text: String,
    /// Whether the text has changed since it was last taken.
    is_new: bool,
    /// Whether the row ever had text.
    is_begun: bool,
    /// Whether colors are in effect at the end of the text.
    is_colored: bool,
    /// Whether it was written to after the cursor had returned to its begin, or moved up to it.
    is_rewritten: bool,
}

/// A line that is complete, or taken before its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// The text, which colors nothing after it.
    pub(crate) text: String,
    /// Whether it replaces what its row had before.
    pub(crate) is_rewritten: bool,
}

impl Row {
    fn clear(&mut self) {
        self.text.clear();
        (self.is_new, self.is_colored) = (false, false);
    }

    /// Cuts the text to [`BAR_BYTES_MAX`], or before a control sequence of which a part would stay.
    fn cut(&mut self) {
        if self.text.len() <= BAR_BYTES_MAX {
            return;
        }
        let end = self.text.floor_char_boundary(BAR_BYTES_MAX);
        let is_cut = |at: &usize| at + sequence(&self.text[*at..]).len() > end;
        let last = self.text[..end].rfind('\x1b').filter(is_cut);
        self.text.truncate(last.unwrap_or(end));
        // What ended the colors may be gone.
        self.is_colored |= self.text.contains('\x1b');
    }

    fn into_line(self) -> Line {
        let text = if self.is_colored { self.text + RESET } else { self.text };
        Line { text, is_rewritten: self.is_rewritten }
    }
}

impl Default for Rows {
    fn default() -> Self {
        Self {
            rows: VecDeque::from([Row::default()]),
            at: 0,
            height: 1,
            replaces: true,
            is_live: false,
            is_returned: false,
            is_written: false,
            colors: Colors::default(),
            keeps_controls: false,
        }
    }
}

impl Rows {
    /// Adds a text; passes each line that is now complete to `complete`, unless its text was taken before.
    pub(crate) fn write(&mut self, text: &str, mut complete: impl FnMut(Line)) {
        let mut rest = text;
        while !rest.is_empty() {
            let plain = rest.find(|c: char| c.is_control() && c != '\t').unwrap_or(rest.len());
            let (plain, control) = rest.split_at(plain);
            self.put(plain);
            let length = match control.chars().next() {
                Some('\x1b') => {
                    let sequence = sequence(control);
                    if !self.obey(sequence) && self.keeps_controls {
                        self.put(sequence);
                    }
                    sequence.len()
                }
                Some(c) => {
                    match c {
                        '\n' => self.line_feed(&mut complete),
                        '\r' => self.carriage_return(),
                        _ if self.keeps_controls => self.put(&control[..c.len_utf8()]),
                        _ => {}
                    }
                    c.len_utf8()
                }
                None => 0,
            };
            rest = &control[length..];
        }
    }

    /// The incomplete rows that have text, from the top.
    pub(crate) fn shown(&self) -> impl Iterator<Item = &str> {
        self.rows.iter().map(|row| row.text.as_str()).filter(|text| !is_blank(text))
    }

    /// Takes the cursor's row if it is the begin of a plain line, which will not be written again, or longer than any
    /// progress bar. With `also_rewritten`, also if it is written again.
    pub(crate) fn take_begun(&mut self, also_rewritten: bool) -> Option<Line> {
        let is_plain = !self.is_rewritten() || also_rewritten || self.rows[self.at].text.len() > BAR_BYTES_MAX;
        if !self.is_written || !is_plain {
            return None;
        }
        self.arrive(false);
        Some(std::mem::take(&mut self.rows[self.at]).into_line())
    }

    /// The incomplete rows that have changed since this was last called, from the top.
    pub(crate) fn take_new(&mut self) -> Vec<String> {
        let is_new = |row: &mut Row| std::mem::take(&mut row.is_new) && !is_blank(&row.text);
        self.rows.iter_mut().filter_map(|row| is_new(row).then(|| row.clone().into_line().text)).collect()
    }

    /// Removes all text. The cursor stays in its row.
    pub(crate) fn clear(&mut self) {
        self.rows.iter_mut().for_each(Row::clear);
        (self.replaces, self.is_written) = (true, false);
    }

    /// Drops the rows, as if the stream began now. The colors stay in effect.
    pub(crate) fn restart(&mut self) {
        let colors = std::mem::take(&mut self.colors);
        *self = Self { colors, keeps_controls: self.keeps_controls, ..Self::default() };
    }

    /// Cuts the texts of all rows to so many bytes.
    pub(crate) fn cut(&mut self, bytes_max: usize) {
        self.rows.iter_mut().for_each(|row| row.text.truncate(row.text.floor_char_boundary(bytes_max)));
    }

    /// Whether this can be replaced by a new one without any effect.
    pub(crate) fn is_idle(&self) -> bool {
        let is_begun = self.is_rewritten() || self.rows.iter().any(|row| row.is_begun);
        self.height == 1 && !is_begun && self.colors.is_empty()
    }

    /// Whether the row is one that is written again, unless a line feed comes next.
    fn is_rewritten(&self) -> bool {
        self.is_live || self.is_returned
    }

    fn put(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        self.is_live |= std::mem::take(&mut self.is_returned);
        let row = &mut self.rows[self.at];
        if std::mem::take(&mut self.replaces) {
            row.text = self.colors.to_string();
            if self.keeps_controls {
                // A list of lines has no colors that go on from one to the next.
                self.colors = Colors::default();
            }
        }
        row.text.push_str(text);
        row.is_colored = !self.colors.is_empty();
        row.is_rewritten |= self.is_live;
        (row.is_new, row.is_begun, self.is_written) = (true, true, true);
    }

    fn line_feed(&mut self, complete: &mut impl FnMut(Line)) {
        self.is_returned = false;
        let row = &mut self.rows[self.at];
        if !row.is_begun && self.height == 1 {
            row.is_new = true;
        }
        let is_plain = !self.is_live && (self.is_written || self.height == 1);
        self.leave();
        if self.at + 1 == self.rows.len() {
            if is_plain {
                self.height = 1;
            }
            self.rows.push_back(Row::default());
        }
        self.at += 1;
        self.arrive(false);
        while self.rows.len() > self.height {
            self.at -= 1;
            if let Some(row) = self.rows.pop_front().filter(|row| row.is_new) {
                complete(row.into_line());
            }
        }
        if let Some(above) = self.at.checked_sub(1)
            && self.rows[above].text.len() > BAR_BYTES_MAX
        {
            // No bar is so long: it is a line that a program writes above its bars.
            let row = std::mem::take(&mut self.rows[above]);
            if row.is_new {
                complete(row.into_line());
            }
        }
    }

    fn carriage_return(&mut self) {
        (self.is_returned, self.replaces) = (true, true);
    }

    /// Does what a control sequence asks for; returns whether it is one that is followed.
    fn obey(&mut self, sequence: &str) -> bool {
        let Some(text) = sequence.strip_prefix("\x1b[") else { return false };
        let Some(kind) = text.chars().next_back() else { return false };
        let parameters = text.strip_suffix(kind).unwrap_or_default();
        match kind {
            'A' | 'B' | 'E' | 'F' => match count(parameters) {
                Some(count) => self.move_by(kind, count),
                None => return false,
            },
            'J' if matches!(parameters, "" | "0") => {
                self.erase_row(false);
                self.rows.iter_mut().skip(self.at + 1).for_each(Row::clear);
            }
            'K' => self.erase_row(parameters == "2"),
            'm' if is_color(parameters) => self.color(sequence, parameters),
            _ => return false,
        }
        true
    }

    /// Moves the cursor to another row.
    fn move_by(&mut self, kind: char, count: usize) {
        let is_up = matches!(kind, 'A' | 'F');
        let at = if is_up { self.row_above(count) } else { self.at.saturating_add(count).min(self.rows.len() - 1) };
        if at != self.at {
            self.leave();
            self.rows[self.at].cut();
            self.at = at;
            self.arrive(true);
        } else if matches!(kind, 'E' | 'F') {
            self.carriage_return();
        }
    }

    /// The row so many above the cursor, or the highest one that there can be.
    fn row_above(&mut self, count: usize) -> usize {
        // Rows that were complete before the cursor moved up for the first time.
        while self.at < count && self.rows.len() < ROWS_MAX {
            self.rows.push_front(Row::default());
            self.at += 1;
        }
        self.height = self.height.max(self.rows.len());
        self.at.saturating_sub(count)
    }

    /// Erases the row after the cursor, or all of it.
    fn erase_row(&mut self, is_all: bool) {
        self.is_live |= std::mem::take(&mut self.is_returned);
        if is_all || self.replaces {
            self.rows[self.at].clear();
            self.replaces = true;
        }
    }

    fn color(&mut self, sequence: &str, parameters: &str) {
        if self.replaces || !self.keeps_controls {
            self.colors.set(parameters);
        }
        if !self.replaces {
            let row = &mut self.rows[self.at];
            row.text.push_str(sequence);
            row.is_colored = !self.colors.is_empty();
        }
    }

    /// Clears the cursor's row if a program has wiped it out with spaces, before the cursor moves to another row.
    fn leave(&mut self) {
        let is_wiped = self.is_rewritten() && self.is_written;
        let row = &mut self.rows[self.at];
        if is_wiped && is_blank(&row.text) {
            row.clear();
        }
    }

    fn arrive(&mut self, is_live: bool) {
        (self.is_live, self.is_returned, self.is_written, self.replaces) = (is_live, false, false, true);
    }
}

/// The last lines of a stream that are not blank. A line that was written again is here once, in its last state.
#[derive(Clone, Debug)]
pub(crate) struct LastLines {
    rows: Rows,
    complete: VecDeque<String>,
    lines_max: usize,
    bytes_max: usize,
}

impl LastLines {
    /// At most so many lines, each of at most so many bytes.
    pub(crate) fn of(lines_max: usize, bytes_max: usize) -> Self {
        // Those who show the lines escape what is left.
        let rows = Rows { keeps_controls: true, ..Rows::default() };
        Self { rows, complete: VecDeque::new(), lines_max, bytes_max }
    }

    /// Adds a text, whose last line may be incomplete.
    pub(crate) fn push(&mut self, text: &str) {
        let Self { rows, complete, lines_max, bytes_max } = self;
        rows.write(text, |Line { text, .. }| {
            if is_blank(&text) {
                return;
            }
            if complete.len() == *lines_max {
                complete.pop_front();
            }
            complete.push_back(text[..text.floor_char_boundary(*bytes_max)].to_owned());
        });
        rows.cut(*bytes_max);
    }

    /// The lines, oldest first.
    pub(crate) fn lines(&self) -> Vec<String> {
        let complete = self.complete.iter().map(String::as_str);
        let lines: Vec<&str> = complete.chain(self.rows.shown()).collect();
        lines[lines.len().saturating_sub(self.lines_max)..].iter().map(|line| (*line).to_owned()).collect()
    }
}

/// The text without control sequences and control characters, except tabs.
pub(crate) fn without_controls(text: &str) -> String {
    let (mut plain, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(|c: char| c.is_control() && c != '\t') {
        let (before, control) = rest.split_at(at);
        plain.push_str(before);
        let length = match control.chars().next() {
            Some(c) if c != '\x1b' => c.len_utf8(),
            _ => sequence(control).len(),
        };
        rest = &control[length..];
    }
    plain + rest
}

/// Whether a text has nothing but colors and spaces.
fn is_blank(text: &str) -> bool {
    let mut rest = text.trim_start();
    while rest.starts_with("\x1b[") {
        let sequence = sequence(rest);
        if !sequence.ends_with('m') {
            return false;
        }
        rest = rest[sequence.len()..].trim_start();
    }
    rest.is_empty()
}

/// How many rows a sequence moves the cursor, if its parameters are valid.
fn count(parameters: &str) -> Option<usize> {
    let is_number = parameters.bytes().all(|byte| byte.is_ascii_digit());
    match parameters {
        "" => Some(1),
        // One that is too large for an integer.
        _ if is_number => Some(parameters.parse().map_or(ROWS_MAX, |count: usize| count.clamp(1, ROWS_MAX))),
        _ => None,
    }
}

/// Whether a sequence that ends in `m` sets colors: others set modes of the terminal.
fn is_color(parameters: &str) -> bool {
    parameters.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b';' | b':'))
}

/// The control sequence with which a text begins.
fn sequence(text: &str) -> &str {
    let after = |start: usize, is_inside: fn(char) -> bool| {
        text[start..].find(|c| !is_inside(c)).map_or(text.len(), |length| start + length)
    };
    let one_of = |at: usize, last: fn(char) -> bool| at + usize::from(text[at..].starts_with(last));
    let end = match text.chars().nth(1) {
        Some('[') => one_of(after(2, |c| matches!(c, ' '..='?')), |c| matches!(c, '@'..='~')),
        // A title or a link, up to BEL or ESC and a backslash.
        Some(']' | 'P' | '^' | '_') => match after(2, |c| !c.is_control()) {
            end if text[end..].starts_with("\x1b\\") => end + 2,
            end => one_of(end, |c| c == '\x07'),
        },
        _ => one_of(after(1, |c| matches!(c, ' '..='/')), |c| matches!(c, '0'..='~')),
    };
    &text[..end]
}

/// How many rows one stream may write again.
const ROWS_MAX: usize = 16;
/// The longest line that is written again.
const BAR_BYTES_MAX: usize = 4 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn both(texts: &[&str]) -> (Vec<String>, Vec<String>) {
        let (mut rows, mut complete) = (Rows::default(), Vec::new());
        for text in texts {
            rows.write(text, |line| complete.push(line.text));
        }
        (complete, rows.shown().map(str::to_owned).collect())
    }

    #[test]
    fn a_plain_line_is_complete_at_its_end_and_one_that_is_written_again_has_its_last_state() {
        let expected = (vec!["one".to_owned(), String::new(), "  20 %".to_owned()], vec!["end".to_owned()]);
        assert_eq!(both(&["one\n\n  10 %\r", "  20 %\r\n", "end"]), expected);
        assert_eq!(both(&["50 %\r    \r"]), (vec![], vec![]), "wiped out");
        assert_eq!(both(&["\r50 %\r\x1b[K", "saved\n"]).0, ["saved"]);
    }

    /// What tqdm 4.70 writes for two epochs of three batches (but one), one text for each time it flushes.
    fn nested(keeps_inner_bars: bool) -> Vec<&'static str> {
        let batches = ["\n", "\rbatch: 0/3", "\x1b[A", "\n", "\rbatch: 1/3", "\x1b[A", "\n", "\rbatch: 3/3", "\x1b[A"];
        let end: &[&str] = if keeps_inner_bars { &["\rbatch: 3/3", "\n"] } else { &["\n", "\r          ", "\x1b[A"] };
        let epoch = |state| [&[state], &batches[..], end].concat();
        [epoch("\repoch: 0/2"), epoch("\repoch: 1/2"), vec!["\repoch: 2/2", "\repoch: 2/2", "\n"]].concat()
    }

    #[test]
    fn of_nested_bars_only_those_that_end_are_complete() {
        let (complete, shown) = both(&nested(true));
        assert_eq!(complete, ["epoch: 0/2", "batch: 3/3", "batch: 3/3"]);
        assert_eq!(shown, ["epoch: 2/2"]);
        let (complete, shown) = both(&nested(false));
        assert_eq!(complete, ["epoch: 0/2"], "the cursor had not moved up yet");
        assert_eq!(shown, ["epoch: 2/2"]);
        let (complete, shown) = both(&[&nested(false)[..], &["done\n"]].concat());
        assert_eq!((complete, shown), (vec!["epoch: 0/2".into(), "epoch: 2/2".into(), "done".into()], vec![]));
    }

    #[test]
    fn rows_that_are_drawn_as_a_block_stay_incomplete() {
        let again = "\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2Ka 2\nb 2\nc 2";
        assert_eq!(both(&["a 1\n", "b 1\n", "c 1", again, again]).1, ["a 2", "b 2", "c 2"]);
    }

    #[test]
    fn colors_stay_and_what_moves_the_cursor_elsewhere_is_dropped() {
        let text =
            "\x1b[2J\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[5;5H\x1b7\x08 end\x1b(B\n\x1b]8;;a\x1b\\b\x1b[1\n\x1b[0m\n";
        assert_eq!(both(&[text]).0, ["\x1b[31mred\x1b[0m end", "b", ""]);
        assert_eq!(both(&["\r\x1b[1m1 %\x1b[0m\r\x1b[1m2 %"]).1, ["\x1b[1m2 %"]);
        assert_eq!(both(&["a\x1b[>4;2mb\x1b[?4mc\x1b[4:3md\x1b[0m\n"]).0, ["abc\x1b[4:3md\x1b[0m"], "modes");
    }

    #[test]
    fn a_text_without_controls_has_its_tabs_and_other_characters() {
        let text = "\x07\x1b[?25h\ta\x1b]0;title\x07b\u{85}\x1b[31m\u{e9}\x1b(B\r\x1b[0m c\x1b";
        assert_eq!(without_controls(text), "\tab\u{e9} c");
    }

    #[test]
    fn a_line_has_the_colors_before_it_and_ends_them() {
        let red = |text: &str| format!("\x1b[31m{text}\x1b[0m");
        assert_eq!(both(&["\x1b[31mone\n\n", "two\n\x1b[0m", "three\n"]).0, [&red("one"), "", &red("two"), "three"]);
        assert_eq!(both(&["\x1b[31mone\n\x1b[0m10 %\r", "20 %\n"]).0, [&red("one"), "20 %"]);
        assert_eq!(both(&["\x1b[31mone\n", "1\x1b[0m\r", "two\x1b[A\rthree\n\n."]).0, [&red("one"), "three"]);
        assert_eq!(both(&["\x1b[53mone\n\x1b[0m"]).0, ["\x1b[53mone\x1b[0m"]);
        assert_eq!(both(&["\x1b[31m50 %\r    \r\x1b[0m"]), (vec![], vec![]), "wiped out");
        let mut rows = Rows::default();
        rows.write("\x1b[31mone", |_| {});
        assert_eq!(rows.take_begun(false).map(|line| line.text), Some(red("one")));
        assert!(!rows.is_idle(), "the color goes on");
        rows.write("\x1b[A\rtwo", |_| {});
        assert_eq!(rows.take_new(), [red("two")]);
    }

    #[test]
    fn a_carriage_return_before_a_line_feed_makes_no_bar() {
        let lines = &["one\r\n", "two\r", "\n", "three\x1b[0m\r\x1b[0m\n", "   \r\n", "four\r\r\n"];
        let expected = ["", "up", "one", "two", "three\x1b[0m", "   ", "four"].map(str::to_owned).to_vec();
        assert_eq!(both(&[&["\n\x1b[A\rup\n"], &lines[..]].concat()), (expected, vec![]));
        assert_eq!(both(&["\r", "10 %\r"]), (vec![], vec!["10 %".into()]));
    }

    #[test]
    fn the_rows_below_can_be_erased() {
        let block = |end| both(&["a\nb\nc\x1b[2A\ra\nb\nc\x1b[2A", end]).1;
        assert_eq!(block(""), ["a", "b", "c"]);
        assert_eq!(block("\x1b[J"), Vec::<String>::new());
        assert_eq!(block("d\x1b[0J"), ["d"]);
        assert_eq!(block("\x1b[2J\x1b[1J"), ["a", "b", "c"]);
    }

    #[test]
    fn the_cursor_stays_in_the_last_row() {
        assert_eq!(both(&["foo\x1b[Bbar\n"]).0, ["foobar"]);
        assert_eq!(both(&["foo\x1b[Ebar\n"]).0, ["bar"]);
        assert_eq!(both(&["one\x1b[99999999999999999999Atwo\x1b[18446744073709551615Bthree"]).1, ["two", "three"]);
        assert_eq!(both(&["foo\x1b[?1Abar\x1b[0;1Bend"]).1, ["foobarend"], "no valid numbers");
    }

    #[test]
    fn rows_that_can_still_change_are_bounded() {
        let long = "x".repeat(10 * BAR_BYTES_MAX);
        for end in ["\x1b[A", "\x1b[F", "\n", "\x1b[B"] {
            let (mut rows, mut complete) = (Rows::default(), String::new());
            rows.write(&format!("\n\n\x1b[2A\r{long}{end}"), |line| complete.push_str(&line.text));
            let kept: usize = rows.rows.iter().map(|row| row.text.len()).sum();
            let expected = if end == "\n" { (0, long.as_str()) } else { (BAR_BYTES_MAX, "") };
            assert_eq!((kept, complete.as_str()), expected, "{end:?}");
        }
        let (complete, _) = both(&[&format!("{long}\n\r{long}\n")]);
        assert_eq!(complete, [long.as_str(), &long], "complete lines are not cut");
        let colored = format!("{}\x1b[31mend\x1b[A", "x".repeat(BAR_BYTES_MAX - 2));
        assert!(both(&[&colored]).1[0].ends_with('x'), "no part of a sequence stays");
    }

    #[test]
    fn the_begin_of_a_plain_line_can_be_taken() {
        let mut rows = Rows::default();
        let line = |text: &str, is_rewritten| Some(Line { text: text.to_owned(), is_rewritten });
        rows.write("(Pdb) ", |_| {});
        assert_eq!(rows.take_begun(false), line("(Pdb) ", false));
        assert!(rows.is_idle() && rows.take_begun(false).is_none());
        rows.write("\r10 %", |_| {});
        assert_eq!(rows.take_begun(false), None);
        assert_eq!(rows.take_begun(true), line("10 %", true));
        rows.write(&format!("\r{}", "x".repeat(BAR_BYTES_MAX + 1)), |_| {});
        assert!(rows.take_begun(false).is_some(), "nothing grows without bound");
    }

    #[test]
    fn the_last_lines_have_one_state_of_each_bar() {
        let mut last = LastLines::of(4, 100);
        last.push("Traceback\n\n");
        (0..50).for_each(|state| last.push(&format!("{state} %\r")));
        assert_eq!(last.lines(), ["Traceback", "49 %"]);
        nested(true).into_iter().for_each(|text| last.push(text));
        assert_eq!(last.lines(), ["epoch: 0/2", "batch: 3/3", "batch: 3/3", "epoch: 2/2"]);
        last.push("\x1b[2Ja\x08\x1b[0m\n");
        assert_eq!(last.lines().last().map(String::as_str), Some("\x1b[2Ja\x08\x1b[0m"));
        last.push(&"\u{e9}".repeat(100));
        assert_eq!(last.lines().last().map(String::len), Some(100));
    }

    const CONTROLS: &str = "([ab]|\n|\r|\x1b\\[|[0-9]{1,2}|[ABEFJKm;?]|\x1b\\[[0-9]{1,20}[ABEFm]|\x1b){0,40}";

    proptest! {
        #[test]
        fn the_number_of_rows_is_bounded(texts in proptest::collection::vec(CONTROLS, 0..9)) {
            let mut rows = Rows::default();
            for text in &texts {
                rows.write(text, |_| {});
                prop_assert!(rows.at < rows.rows.len() && rows.rows.len() <= rows.height && rows.height <= ROWS_MAX);
            }
        }

        #[test]
        fn plain_lines_are_complete_at_once(lines in proptest::collection::vec("[a-z\t ]{0,9}", 0..9)) {
            let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
            prop_assert_eq!(both(&[text.as_str()]), (lines, vec![]));
        }
    }
}
