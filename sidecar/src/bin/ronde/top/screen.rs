//! The terminal: keys, signals and frames.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use ratatui::crossterm::event::{self, Event, KeyCode as Key, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use ronde_bootstrap::exit::EXIT_SIGNAL;

use super::model::{Action, Model, View, act, update};
use super::poll::{Poller, Targets};
use super::render::render;

/// Shows the view until the user or a signal ends it. The terminal is as it was before on every return, and after a panic.
///
/// # Errors
/// When the terminal cannot be used.
pub(super) fn watch(mut model: Model, targets: Targets, interval: Duration) -> anyhow::Result<ExitCode> {
    let signal = Arc::new(AtomicUsize::new(0));
    for number in [SIGTERM, SIGINT, SIGHUP] {
        let value = usize::try_from(number).unwrap_or_default();
        signal_hook::flag::register_usize(number, Arc::clone(&signal), value).context("signals cannot be handled")?;
    }
    let mut poller = Poller::start(targets)?;
    let began = Instant::now();
    let mut due = began;
    let _restored = Restored(ratatui::restore);
    // It also restores the terminal before a panic is reported, so that the report stays on the screen.
    let mut terminal = ratatui::try_init().context("this terminal cannot be drawn on")?;
    let mut is_changed = true;
    loop {
        match signal.load(Ordering::Relaxed) {
            0 => {}
            number => return Ok(ExitCode::from(EXIT_SIGNAL + u8::try_from(number).unwrap_or_default())),
        }
        if is_changed {
            terminal.draw(|frame| render(frame, &model)).context("the terminal cannot be drawn on")?;
        }
        is_changed = event::poll(TURN).context("the terminal's keys cannot be read")?;
        if is_changed {
            let read = event::read().context("the terminal's keys cannot be read")?;
            if let Some(action) = action_of(&read)
                && !act(&mut model, action)
            {
                return Ok(ExitCode::SUCCESS);
            }
        }
        if let Some(sample) = poller.answer()? {
            update(&mut model, sample, began.elapsed());
            is_changed = true;
        }
        if !model.paused && Instant::now() >= due {
            poller.ask()?;
            due = Instant::now() + interval;
        }
    }
}

/// Calls a function when it is dropped.
struct Restored<F: FnMut()>(F);

impl<F: FnMut()> Drop for Restored<F> {
    fn drop(&mut self) {
        self.0();
    }
}

fn action_of(event: &Event) -> Option<Action> {
    match event {
        Event::Key(key) if key.kind != KeyEventKind::Release => action(*key),
        _ => None,
    }
}

fn action(key: KeyEvent) -> Option<Action> {
    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
    Some(match key.code {
        Key::Char('c' | 'd') if is_control => Action::End,
        Key::Char('q') | Key::Esc => Action::Quit,
        Key::Tab | Key::Right | Key::Char('l') => Action::Next,
        Key::BackTab | Key::Left | Key::Char('h') => Action::Previous,
        Key::Char(digit @ '1'..='9') => {
            let index = usize::try_from(digit.to_digit(10)?).ok()?.checked_sub(1)?;
            Action::Show(*View::ALL.get(index)?)
        }
        Key::Up | Key::Char('k') => Action::Move(-1),
        Key::Down | Key::Char('j') => Action::Move(1),
        Key::PageUp => Action::Move(-PAGE),
        Key::PageDown => Action::Move(PAGE),
        Key::Home | Key::Char('g') => Action::First,
        Key::End | Key::Char('G') => Action::Last,
        Key::Char('p' | ' ') => Action::Pause,
        Key::Char('?') => Action::Help,
        Key::Char('s') => Action::Sort,
        Key::Char('n') => Action::NextJob,
        _ => return None,
    })
}

/// How long keys are waited for before signals and samples are polled.
const TURN: Duration = Duration::from_millis(50);
/// The rows of a page.
const PAGE: isize = 10;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn keys_do_what_the_help_lists() {
        let plain = |code| action(KeyEvent::new(code, KeyModifiers::NONE));
        let control = |character| action(KeyEvent::new(Key::Char(character), KeyModifiers::CONTROL));
        assert_eq!(control('c'), Some(Action::End));
        for (code, expected) in [
            (Key::Char('q'), Action::Quit),
            (Key::Esc, Action::Quit),
            (Key::Tab, Action::Next),
            (Key::BackTab, Action::Previous),
            (Key::Char('1'), Action::Show(View::Overview)),
            (Key::Char('5'), Action::Show(View::Engine)),
            (Key::Down, Action::Move(1)),
            (Key::PageUp, Action::Move(-10)),
            (Key::Char('p'), Action::Pause),
            (Key::Char('?'), Action::Help),
        ] {
            assert_eq!(plain(code), Some(expected), "{code:?}");
        }
        for code in [Key::Char('6'), Key::Char('c'), Key::F(1), Key::Enter] {
            assert_eq!(plain(code), None, "{code:?}");
        }
        let mut released = KeyEvent::new(Key::Char('q'), KeyModifiers::NONE);
        released.kind = KeyEventKind::Release;
        assert_eq!(action_of(&Event::Key(released)), None, "a key acts once");
        assert_eq!(action_of(&Event::Resize(80, 24)), None, "a resize only draws again");
    }

    #[test]
    fn the_terminal_is_restored_after_a_panic_too() {
        let restored = Cell::new(0);
        let fails = std::panic::AssertUnwindSafe(|| {
            let _restored = Restored(|| restored.set(restored.get() + 1));
            panic!("a fault of the view");
        });
        assert!(std::panic::catch_unwind(fails).is_err());
        assert_eq!(restored.get(), 1);
    }
}
