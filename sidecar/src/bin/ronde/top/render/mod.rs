//! Draws the view into a frame. Pure: the same model gives the same cells.

use ratatui::Frame;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph, Row, Sparkline, Table, Wrap};

use super::job::{Job, Tone};
use super::model::{Model, View};
use crate::status::{bytes, duration};
use sections::Section;

mod sections;
#[cfg(test)]
mod tests;

/// Draws the whole view.
pub(super) fn render(frame: &mut Frame<'_>, model: &Model) {
    let job = model.shown();
    let mut rest = frame.area();
    let is_tall = rest.height >= TALL;
    let (tone, verdict) = job.verdict();
    if rest.height >= HEADED {
        frame.render_widget(Paragraph::new(title(model, &job)), take(&mut rest, 1));
    }
    let wrapped = verdict.chars().count().div_ceil(usize::from(rest.width.max(1)));
    let lines = if is_tall { u16::try_from(wrapped).unwrap_or(u16::MAX).clamp(1, VERDICT_LINES_MAX) } else { 1 };
    let verdict = Paragraph::new(verdict).style(style(tone).add_modifier(Modifier::BOLD)).wrap(Wrap { trim: true });
    frame.render_widget(verdict, take(&mut rest, lines));
    if model.interactive && is_tall {
        frame.render_widget(Paragraph::new(tabs(model)), take(&mut rest, 1));
        let foot = take_last(&mut rest, 1);
        let keys = if model.jobs().len() > 1 { format!("{KEYS}  n next job") } else { KEYS.to_owned() };
        frame.render_widget(Paragraph::new(keys).style(dim()), foot);
    }
    if let Some(problem) = &model.problem {
        let problem = Paragraph::new(problem.as_str()).style(style(Tone::Waits)).wrap(Wrap { trim: true });
        frame.render_widget(problem, take(&mut rest, if is_tall { 2 } else { 1 }));
    }
    if model.sidecars.is_empty() {
        let words = if model.sampled { "A job's sidecars appear here once it runs." } else { "Looking for sidecars." };
        frame.render_widget(Paragraph::new(words), rest);
    } else {
        body(frame, rest, model, &job);
    }
    if model.help {
        help(frame);
    }
}

fn body(frame: &mut Frame<'_>, mut rest: Rect, model: &Model, job: &Job<'_>) {
    if rest.height >= DETAILED
        && let Some(lines) = sections::detail(model, job)
    {
        let area = take_last(&mut rest, u16::try_from(lines.len()).unwrap_or(u16::MAX) + 1);
        let lines: Vec<Line<'_>> = std::iter::once(rule("Selected", area.width)).chain(lines).collect();
        frame.render_widget(Paragraph::new(lines), area);
    }
    let cursor = Some(model.cursor()).filter(|_| model.interactive);
    match model.view {
        View::Overview => overview(frame, rest, job, cursor),
        View::Ranks => draw(frame, rest, &sections::ranks(job), cursor),
        View::Links => draw(frame, rest, &sections::links(job, rest.width), cursor),
        View::Waits => waits(frame, rest, job, cursor),
        View::Engine => {
            stack(frame, rest, &[sections::engine(job), sections::plugins(job), sections::members(job)], None);
        }
    }
}

/// Everything that is worth a line; side by side where there is room.
fn overview(frame: &mut Frame<'_>, area: Rect, job: &Job<'_>, cursor: Option<usize>) {
    // A frame that is printed has the rates of one moment.
    let plot = cursor.filter(|_| area.height >= TALL * 2).map(|_| area.height / 4);
    let gap = 3;
    let is_wide = area.width >= WIDE;
    let width = if is_wide { (area.width - gap) / 2 } else { area.width };
    let first = [sections::sidecars(job, width), sections::links(job, width)];
    let second = [sections::waits(job), sections::stragglers(job), sections::engine(job)];
    if is_wide {
        let mut left = Rect { width, ..area };
        let right = Rect { x: area.x + width + gap, width: area.width - width - gap, ..area };
        if let Some(lines) = plot {
            throughput(frame, take_last(&mut left, lines), job);
        }
        stack(frame, left, &first, cursor);
        stack(frame, right, &second, None);
        return;
    }
    let [sidecars, links] = first;
    let [waits, stragglers, engine] = second;
    stack(frame, area, &[sidecars, waits, stragglers, links, engine], cursor);
}

fn waits(frame: &mut Frame<'_>, area: Rect, job: &Job<'_>, cursor: Option<usize>) {
    let both = [sections::waits(job), sections::requests(job)];
    let lines = allot(usize::from(area.height), &both);
    let mut rest = area;
    let boundary = job.waits().len();
    let selected = [cursor.filter(|row| *row < boundary), cursor.and_then(|row| row.checked_sub(boundary))];
    for ((section, lines), selected) in both.iter().zip(lines).zip(selected) {
        draw(frame, take(&mut rest, lines), section, selected);
    }
}

/// Draws sections below each other; the first one has the selection.
fn stack(frame: &mut Frame<'_>, area: Rect, all: &[Section<'_>], cursor: Option<usize>) {
    let mut rest = area;
    for (index, (section, lines)) in all.iter().zip(allot(usize::from(area.height), all)).enumerate() {
        draw(frame, take(&mut rest, lines), section, cursor.filter(|_| index == 0));
    }
}

/// Divides the lines: each section gets its title and first row while there are lines, the rest goes to the first ones.
fn allot(height: usize, all: &[Section<'_>]) -> Vec<u16> {
    let mut left = height;
    let mut take = |most: usize| {
        let taken = most.min(left);
        left -= taken;
        taken
    };
    let least: Vec<usize> = all.iter().map(|section| take(section.lines().min(LEAST))).collect();
    let lines = all.iter().zip(least).map(|(section, least)| least + take(section.lines().saturating_sub(least)));
    lines.map(|lines| u16::try_from(lines).unwrap_or(u16::MAX)).collect()
}

fn draw(frame: &mut Frame<'_>, area: Rect, section: &Section<'_>, cursor: Option<usize>) {
    let mut rest = area;
    let heads = 1 + u16::from(!section.header.is_empty() && !section.rows.is_empty());
    let room = usize::from(area.height.saturating_sub(heads));
    let first = first_row(section.rows.len(), room, cursor.unwrap_or(0));
    let last = section.rows.len().min(first + room);
    let title = if last - first < section.rows.len() && room > 0 {
        format!("{} ({} to {last} of {})", section.title, first + 1, section.rows.len())
    } else {
        section.title.clone()
    };
    frame.render_widget(Paragraph::new(rule(&title, area.width)), take(&mut rest, 1));
    if section.rows.is_empty() {
        frame.render_widget(Paragraph::new(section.empty.as_str()).style(dim()).wrap(Wrap { trim: true }), rest);
        return;
    }
    let shown = section.rows.iter().enumerate().skip(first).take(room);
    let shown = shown.map(|(index, row)| {
        let is_selected = cursor == Some(index);
        if is_selected { row.clone().style(Style::new().add_modifier(Modifier::REVERSED)) } else { row.clone() }
    });
    let mut table = Table::new(shown, section.widths.clone()).column_spacing(2);
    if !section.header.is_empty() {
        table = table.header(Row::new(section.header.clone()).style(dim()));
    }
    frame.render_widget(table, rest);
}

/// The first row that is shown, so that the selected one is in the middle where possible.
fn first_row(rows: usize, room: usize, cursor: usize) -> usize {
    cursor.saturating_sub(room / 2).min(rows.saturating_sub(room))
}

/// Bytes a second that the ranks of all sidecars have contributed to operations.
fn throughput(frame: &mut Frame<'_>, area: Rect, job: &Job<'_>) {
    let mut rest = area;
    let longest = job.sidecars.iter().map(|watched| watched.history.len()).max().unwrap_or(0);
    let at = |back: usize| -> u64 {
        let of = |history: &std::collections::VecDeque<u64>| Some(*history.get(history.len().checked_sub(back)?)?);
        job.sidecars.iter().filter_map(|watched| of(&watched.history)).fold(0, u64::saturating_add)
    };
    let sums: Vec<u64> = (1..=longest.min(usize::from(area.width))).rev().map(at).collect();
    let top = super::rates::number(sums.iter().copied().max().unwrap_or(0));
    let words = format!("Bytes that ranks have contributed to operations; the top is {}/s", bytes(top));
    frame.render_widget(Paragraph::new(rule(&words, area.width)), take(&mut rest, 1));
    frame.render_widget(Sparkline::default().data(sums).style(Style::new().fg(Color::Cyan)), rest);
}

fn title<'a>(model: &Model, job: &Job<'_>) -> Line<'a> {
    let mut words = match job.head {
        None => "ronde top".to_owned(),
        Some(page) => format!(
            "job {}: {} ranks, epoch {}, up {}, transport {}, ronde {}",
            page.job,
            page.world_size,
            page.epoch,
            duration(page.up_ms),
            page.transport,
            page.version
        ),
    };
    if let jobs @ 2.. = model.jobs().len() {
        let other = jobs - 1;
        words.push_str(&format!("; {other} other job{}", if other == 1 { "" } else { "s" }));
    }
    let paused = if model.paused { "  paused" } else { "" };
    Line::from(vec![Span::raw(words), Span::styled(paused, style(Tone::Waits))])
}

fn tabs<'a>(model: &Model) -> Line<'a> {
    let tab = |(index, view): (usize, &View)| {
        let style = if *view == model.view { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        [Span::styled(format!(" {} {} ", index + 1, view.name()), style), Span::raw(" ")]
    };
    Line::from_iter(View::ALL.iter().enumerate().flat_map(tab))
}

fn help(frame: &mut Frame<'_>) {
    let area = frame.area();
    let (width, height) = (area.width.min(HELP_WIDTH), area.height.min(u16::try_from(HELP.len()).unwrap_or(u16::MAX)));
    let area = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, area);
    let lines: Vec<Line<'_>> = HELP.iter().map(|line| Line::from(*line)).collect();
    frame.render_widget(Paragraph::new(lines).style(Style::new().add_modifier(Modifier::REVERSED)), area);
}

fn rule<'a>(title: &str, width: u16) -> Line<'a> {
    let line = "─".repeat(usize::from(width).saturating_sub(title.chars().count() + 1));
    Line::from(vec![
        Span::styled(title.to_owned(), Style::new().add_modifier(Modifier::BOLD)),
        Span::styled(format!(" {line}"), dim()),
    ])
}

/// Cuts lines from the top.
fn take(rest: &mut Rect, lines: u16) -> Rect {
    let lines = lines.min(rest.height);
    let taken = Rect { height: lines, ..*rest };
    *rest = Rect { y: rest.y + lines, height: rest.height - lines, ..*rest };
    taken
}

/// Cuts lines from the bottom.
fn take_last(rest: &mut Rect, lines: u16) -> Rect {
    let lines = lines.min(rest.height);
    rest.height -= lines;
    Rect { y: rest.y + rest.height, height: lines, ..*rest }
}

/// The color of a state; its words say the same.
fn style(tone: Tone) -> Style {
    match tone {
        Tone::Good => Style::new().fg(Color::Green),
        Tone::Waits => Style::new().fg(Color::Yellow),
        Tone::Bad => Style::new().fg(Color::Red),
        Tone::Plain => Style::new(),
    }
}

fn dim() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

/// Fills what other columns leave.
const REST: Constraint = Constraint::Fill(1);
/// The heights from which on there are a title, tabs and keys, and a pane for the selected row.
const HEADED: u16 = 4;
const TALL: u16 = 12;
const DETAILED: u16 = 14;
/// The width from which on there are two columns.
const WIDE: u16 = 150;
/// The lines of a section that all get before one gets more: title, header and a row.
const LEAST: usize = 3;
const VERDICT_LINES_MAX: u16 = 4;
const KEYS: &str = "q quit  ? help  tab or 1-5 view  arrows select  p pause  s sort";
const HELP_WIDTH: u16 = 58;
const HELP: [&str; 14] = [
    "",
    "  tab, right, left     the next view, the previous one",
    "  1 to 5               overview, ranks, links, waits, engine",
    "  up, down, k, j       select a row",
    "  page up, page down   select ten rows further",
    "  home, end            the first row, the last one",
    "  s                    sort ranks by number or waiting time",
    "  n                    the next job of this host",
    "  p                    pause, and go on",
    "  ?                    this help",
    "  q, Esc               leave the help, or end",
    "  Ctrl-C               end",
    "  A rank that others wait for most is a straggler.",
    "",
];
