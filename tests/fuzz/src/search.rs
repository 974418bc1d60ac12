//! Searches for an input at which a decoder fails, and shortens it.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::mutate::mutated;
use crate::outcome::Outcome;

/// An input at which a decoder fails.
#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) input: Vec<u8>,
    /// The message of the panic.
    pub(crate) message: String,
    /// How to reproduce it.
    pub(crate) at: String,
}

/// Inputs with different outcomes.
#[derive(Default)]
struct Pool {
    inputs: Vec<Vec<u8>>,
    kinds: BTreeSet<u64>,
}

impl Pool {
    fn take(&mut self, input: Vec<u8>, outcome: &Outcome) {
        // With unbounded kinds of words, more inputs would only displace the others.
        if self.inputs.len() < INPUTS_MAX && self.kinds.insert(outcome.kind) {
            self.inputs.push(input);
        }
    }
}

/// A target and the inputs that are worth mutating.
pub(crate) struct Search<D> {
    name: &'static str,
    seed: u64,
    decode: D,
    random: Rng,
    /// Decoded inputs.
    good: Pool,
    /// Refused inputs.
    bad: Pool,
    read: u64,
}

impl<D: Fn(&[u8]) -> Outcome> Search<D> {
    pub(crate) fn new(name: &'static str, seed: u64, decode: D) -> Self {
        // Other targets use other mutations.
        let random = Rng::with_seed(name.bytes().fold(seed, |seed, byte| seed.rotate_left(8) ^ u64::from(byte)));
        Self { name, seed, decode, random, good: Pool::default(), bad: Pool::default(), read: 0 }
    }

    /// Decodes the valid encodings.
    pub(crate) fn take_seeds(&mut self, seeds: Vec<Vec<u8>>) -> Result<(), Finding> {
        assert!(!seeds.is_empty(), "target {} has no seeds", self.name);
        for (number, seed) in seeds.into_iter().enumerate() {
            let outcome = self.check(&seed, || format!("seed {number}"))?;
            if !outcome.is_read() {
                let message = format!("what an encoder wrote is refused: {}", outcome.words());
                return Err(Finding { input: seed, message, at: format!("seed {number}") });
            }
            self.good.kinds.insert(outcome.kind);
            self.good.inputs.push(seed);
        }
        Ok(())
    }

    /// Decodes inputs found earlier.
    pub(crate) fn replay(&mut self, kept: Vec<(String, Vec<u8>)>) -> Result<(), Finding> {
        for (file, input) in kept {
            let outcome = self.check(&input, || file)?;
            self.take(input, &outcome);
        }
        Ok(())
    }

    fn take(&mut self, input: Vec<u8>, outcome: &Outcome) {
        if outcome.is_read() { &mut self.good } else { &mut self.bad }.take(input, outcome);
    }

    /// Decodes mutated inputs for a time.
    pub(crate) fn run(&mut self, time: Duration) -> Result<(), Finding> {
        let begin = Instant::now();
        let (mut runs, mut reports) = (0_u64, 1);
        while begin.elapsed() < time {
            for _ in 0..RUNS_PER_CHECK {
                runs += 1;
                self.once(runs)?;
            }
            if begin.elapsed() >= reports * PROGRESS {
                reports += 1;
                self.print_progress(runs, begin.elapsed());
            }
        }
        self.print_progress(runs, begin.elapsed());
        Ok(())
    }

    fn once(&mut self, run: u64) -> Result<(), Finding> {
        let (good, bad) = (&self.good.inputs, &self.bad.inputs);
        // Decoded inputs lead further than refused ones.
        let from = if bad.is_empty() || self.random.u8(..4) > 0 { good } else { bad };
        let (one, other) = (self.random.usize(..from.len()), self.random.usize(..good.len()));
        let input = mutated(&mut self.random, &from[one], &good[other]);
        let seed = self.seed;
        let outcome = self.check(&input, || format!("RONDE_FUZZ_SEED={seed} run {run}"))?;
        self.read += u64::from(outcome.is_read());
        self.take(input, &outcome);
        Ok(())
    }

    fn print_progress(&self, runs: u64, time: Duration) {
        println!(
            "fuzz: {}: {runs} runs, {:.0} a second, {} read; {} inputs to change that are read, {} that are refused",
            self.name,
            runs as f64 / time.as_secs_f64(),
            self.read,
            self.good.inputs.len(),
            self.bad.inputs.len()
        );
    }

    /// Returns the outcome of an input; on a failure, the shortest input that fails.
    fn check(&self, input: &[u8], at: impl FnOnce() -> String) -> Result<Outcome, Finding> {
        attempt(&self.decode, input).map_err(|message| {
            let (input, message) = self.shortened(input.to_vec(), message);
            Finding { input, message, at: at() }
        })
    }

    /// Removes chunks, large ones first, as long as the rest fails, too.
    fn shortened(&self, mut input: Vec<u8>, mut message: String) -> (Vec<u8>, String) {
        let (begin, mut piece) = (Instant::now(), input.len());
        while piece > 0 {
            let mut at = 0;
            while at < input.len() && begin.elapsed() < SHORTENING {
                let end = (at + piece).min(input.len());
                let shorter = [&input[..at], &input[end..]].concat();
                match attempt(&self.decode, &shorter) {
                    Ok(_) => at = end,
                    Err(words) => (input, message) = (shorter, words),
                }
            }
            piece /= 2;
        }
        (input, message)
    }
}

/// Returns the outcome of an input, or the message of the panic.
fn attempt(decode: &impl Fn(&[u8]) -> Outcome, input: &[u8]) -> Result<Outcome, String> {
    keep_panics_to_ourselves();
    PANIC.with(|place| place.set(Some(String::new())));
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| decode(input)));
    let message = PANIC.with(Cell::take).unwrap_or_default();
    outcome.map_err(|_| message)
}

thread_local! {
    /// While a decoder runs: the message of its panic.
    static PANIC: Cell<Option<String>> = const { Cell::new(None) };
}

/// Suppresses the output of the hundreds of panics while shortening. Panics of other threads are shown as usual.
fn keep_panics_to_ourselves() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| match PANIC.take() {
            Some(_) => PANIC.set(Some(info.to_string())),
            None => usual(info),
        }));
    });
}

const RUNS_PER_CHECK: usize = 16;
/// The limit of decoded inputs, and of refused ones.
const INPUTS_MAX: usize = 500;
const PROGRESS: Duration = Duration::from_secs(10);
const SHORTENING: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;

    /// Panics where a careless decoder might: at a length that it trusts.
    fn careless(bytes: &[u8]) -> Outcome {
        let Some(([length], rest)) = bytes.split_first_chunk() else { return Outcome::refused(&"nothing") };
        Outcome::read(&rest[..usize::from(*length)].is_empty())
    }

    fn seeds() -> Vec<Vec<u8>> {
        vec![vec![3, 1, 2, 3], vec![0]]
    }

    #[test]
    fn a_bug_is_found_and_shortened() {
        let mut search = Search::new("careless", 1, careless);
        search.take_seeds(seeds()).expect("right");
        let finding = search.run(Duration::from_secs(60)).expect_err("a bug");
        assert_eq!(finding.input.len(), 1, "{finding:?}");
        assert!(finding.message.contains("out of range"), "{finding:?}");
        assert!(finding.at.starts_with("RONDE_FUZZ_SEED=1 run "), "{finding:?}");
    }

    #[test]
    fn the_same_seed_gives_the_same_run() {
        let found = |seed| {
            let mut search = Search::new("careless", seed, careless);
            search.take_seeds(seeds()).expect("right");
            search.run(Duration::from_secs(60)).expect_err("a bug").at
        };
        assert_eq!(found(5), found(5));
    }

    #[test]
    fn inputs_found_earlier_are_tried_first() {
        let mut search = Search::new("careless", 1, careless);
        let finding = search.replay(vec![("a file".to_owned(), vec![9])]).expect_err("a bug");
        assert_eq!((finding.at.as_str(), finding.input), ("a file", vec![9]));
    }

    #[test]
    fn a_seed_has_to_be_right() {
        let finding = Search::new("careless", 1, careless).take_seeds(vec![Vec::new()]).expect_err("nothing");
        assert!(finding.message.contains("what an encoder wrote is refused"), "{finding:?}");
    }
}
