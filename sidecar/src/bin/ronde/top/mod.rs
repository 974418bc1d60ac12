//! `ronde top`: a view of running jobs in a terminal.
//!
//! | file | what it does |
//! |---|---|
//! | `page.rs`, `rates.rs` | a status page as types, and what changes in a second |
//! | `model.rs`, `job.rs` | pure: the state of the view, what samples and keys change, and what the sidecars say together |
//! | `render/` | pure: draws the state into a frame |
//! | `screen.rs`, `poll.rs` | adapters: the terminal with its keys, and the sidecars' admin pages |

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;

use ronde_bootstrap::codes::{Code, error_with_code};
use ronde_bootstrap::exit::{answer, fail, fail_with};
use ronde_bootstrap::numbers::whole;
use ronde_bootstrap::terminal::has_sequences;

use model::{Model, View, update};
use poll::Targets;

#[cfg(test)]
mod fixtures;
mod job;
mod model;
mod page;
mod poll;
mod rates;
mod render;
mod screen;

/// Arguments of `ronde top`.
#[derive(Args, Debug)]
#[command(long_about = ABOUT, after_help = EXAMPLES)]
pub(super) struct TopArgs {
    /// The directory with a sidecar's sockets. [default: RONDE_SOCKET, else all of this user's jobs on this host]
    #[arg(long, value_name = "DIR", conflicts_with = "urls")]
    socket: Option<PathBuf>,
    /// The address of a sidecar's admin pages; again for another sidecar of the job.
    #[arg(long = "url", value_name = "http://HOST:PORT")]
    urls: Vec<String>,
    /// The time between two samples, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = whole::<u64>(1..=60))]
    interval: u64,
    /// What is shown first.
    #[arg(long, value_enum, default_value_t = View::Overview)]
    view: View,
    /// Print one frame as text, after one interval, and end. Needs no terminal.
    #[arg(long)]
    once: bool,
}

/// Shows jobs until the user quits.
pub(super) fn main(args: &TopArgs) -> ExitCode {
    let is_terminal = std::io::stdin().is_terminal() && has_sequences(&std::io::stdout());
    if !args.once && !is_terminal {
        return fail(Code::CommandLine, NO_TERMINAL);
    }
    let targets = match Targets::new(args.socket.clone(), &args.urls) {
        Ok(targets) => targets,
        Err(error) => return fail_with(&error, Code::StatusUnreachable),
    };
    let interval = Duration::from_secs(args.interval);
    if args.once {
        return match once(&targets, args.view, interval) {
            Ok(text) => answer(&text),
            Err(error) => fail_with(&error, Code::StatusUnreachable),
        };
    }
    let shown = screen::watch(Model::new(args.view, true), targets, interval);
    shown.unwrap_or_else(|error| fail_with(&error, Code::CommandLine))
}

/// One frame as text, once the rates are known.
fn once(targets: &Targets, view: View, interval: Duration) -> anyhow::Result<String> {
    let mut model = Model::new(view, false);
    let began = Instant::now();
    let first = poll::sample(targets);
    if !first.answers.iter().any(|(_, answer)| answer.is_ok()) {
        let reason = first.answers.into_iter().find_map(|(_, answer)| answer.err()).or(first.problem);
        let reason = reason.unwrap_or_else(|| "no sidecar is found".to_owned());
        return Err(error_with_code(reason, Code::StatusUnreachable));
    }
    update(&mut model, first, began.elapsed());
    std::thread::sleep(interval);
    update(&mut model, poll::sample(targets), began.elapsed());
    Ok(text(&model, columns()))
}

/// The width of a frame that is printed: of the terminal, else of `COLUMNS`.
fn columns() -> u16 {
    let of_terminal = || std::io::stdout().is_terminal().then(ratatui::crossterm::terminal::size)?.ok();
    let given = || std::env::var("COLUMNS").ok()?.parse().ok();
    let found = of_terminal().map(|(columns, _)| columns).or_else(given);
    found.unwrap_or(COLUMNS).clamp(20, 500)
}

/// The frame without colors, as long as its contents.
fn text(model: &Model, columns: u16) -> String {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(columns, LINES_MAX));
    let Ok(frame) = terminal.draw(|frame| render::render(frame, model));
    let lines = lines(frame.buffer);
    let end = lines.iter().rposition(|line| !line.is_empty()).map_or(0, |last| last + 1);
    lines[..end].iter().map(|line| format!("{line}\n")).collect()
}

/// The symbols of a buffer, line by line.
fn lines(buffer: &Buffer) -> Vec<String> {
    let width = usize::from(buffer.area.width).max(1);
    let line = |cells: &[ratatui::buffer::Cell]| cells.iter().map(ratatui::buffer::Cell::symbol).collect::<String>();
    buffer.content.chunks(width).map(|cells| line(cells).trim_end().to_owned()).collect()
}

const COLUMNS: u16 = 100;
/// The most lines of a frame that is printed.
const LINES_MAX: u16 = 2_000;
const NO_TERMINAL: &str = "`ronde top` draws on a terminal and reads its keys, and standard input or output is none, or TERM is dumb; use \
    `ronde status --watch` for text that goes on, or `ronde top --once` for one frame";

const ABOUT: &str = "Show running jobs in this terminal: sidecars, ranks, links, and which ranks are missing.

Without --socket and --url it shows all of this user's jobs on this host, also those that start later. The sidecar of
rank 0, the coordinator, knows which ranks are late; if it runs on another host, pass its admin page with --url. In the
view, `?` lists the keys.";

const EXAMPLES: &str = "Examples:
  ronde top
  ronde top --url http://127.0.0.1:41234 --once --view ranks";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_that_is_printed_is_as_long_as_its_contents() {
        let mut model = fixtures::model(View::Overview);
        model.interactive = false;
        let text = text(&model, 100);
        assert!(text.starts_with("job night: 4 ranks, epoch 2, up 61 s"), "{text}");
        assert!(!text.contains('\x1b') && !text.ends_with("\n\n"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(!text.contains("q quit"), "there is no key to press: {text}");
    }

    #[test]
    fn a_frame_has_a_row_for_each_of_many_ranks() {
        let mut model = fixtures::model(View::Ranks);
        model.interactive = false;
        let page = model.sidecars[0].page.as_mut().expect("a page");
        page.placement = (0..512).map(|rank| rank / 8).collect();
        let text = text(&model, 100);
        assert!(text.contains("\n511    63 ") && !text.contains("of 512)"), "{text}");
    }
}
