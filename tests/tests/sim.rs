//! The simulated cluster: many seeds without faults of ours, and six planted bugs that must be caught.
//!
//! `RONDE_SIM_SEEDS=10000` runs more seeds; a failing one prints the command that replays it.

use ronde_tests::sim::{Options, Property, Results, Saboteur, run};

/// Seeds of an ordinary run.
const SEEDS: u64 = 600;
/// Seeds within which a planted bug must be caught often.
const SABOTAGE_SEEDS: u64 = 40;
/// A planted bug that is caught in fewer of them is as good as not caught.
const CAUGHT_MIN: usize = 5;

#[test]
fn no_seed_violates_a_property() {
    let seeds = std::env::var("RONDE_SIM_SEEDS").map_or(SEEDS, |text| text.parse().expect("a number of seeds"));
    let (mut early, mut fused, mut piped, mut failures, mut epochs) = (0, 0, 0, 0, 0);
    for seed in 0..seeds {
        match run(seed, &Options::default()) {
            Ok(report) => {
                early += report.early_chunks;
                fused += report.fused;
                piped += report.piped;
                failures += report.failures;
                epochs += report.epochs;
            }
            Err(failed) => panic!("{failed}"),
        }
    }
    // The runs are worth something only if they meet what they are made for.
    let met = [early, fused, piped, failures];
    assert!(met.iter().all(|count| *count > 0), "early chunks, fused tensors, long operations, failures: {met:?}");
    assert!(epochs as u64 > seeds, "{epochs} epochs in {seeds} runs");
}

/// Sums of floats depend on the order of addition; it must not depend on delays, lanes, fusion or what else travels.
#[test]
fn the_same_bits_whatever_the_timing_and_the_buckets() {
    let mut compared = 0;
    for seed in 0..60 {
        let results = |variant| -> Results {
            let options = Options { floats_variant: Some(variant), ..Options::default() };
            run(seed, &options).unwrap_or_else(|failed| panic!("{failed}")).results
        };
        let first = results(0);
        for variant in 1..4 {
            assert!(first == results(variant), "seed {seed}: variants 0 and {variant} differ in some bits");
        }
        compared += first.len();
    }
    assert!(compared > 100, "{compared} results are too few to say anything");
}

#[test]
fn a_lost_response_is_caught() {
    // Somebody waits for ever, or a later operation shows the gap.
    caught(Saboteur::LostResponse, &[Property::Liveness, Property::Protocol]);
}

#[test]
fn a_double_count_is_caught() {
    caught(Saboteur::DoubleCount, &[Property::Result]);
}

#[test]
fn operations_of_two_sets_in_different_orders_are_caught() {
    caught(Saboteur::CrossedOrders, &[Property::OneOrder]);
}

#[test]
fn a_stale_epoch_is_caught() {
    caught(Saboteur::StaleEpoch, &[Property::CurrentEpoch]);
}

#[test]
fn a_forgotten_waiter_is_caught() {
    // The waiter waits for ever, or the epoch ends without its answer.
    caught(Saboteur::ForgottenWaiter, &[Property::Liveness, Property::Answered]);
}

#[test]
fn a_tuning_chosen_locally_is_caught() {
    for text in caught(Saboteur::LocalTuning, &[Property::NoBug]) {
        assert!(text.contains("the digest of the plan's inputs differs"), "caught by another check: {text}");
    }
}

/// Runs sabotaged seeds: whatever is caught must be caught by the check that is there for it, and often enough. Gives what
/// was said.
fn caught(saboteur: Saboteur, by: &[Property]) -> Vec<String> {
    let options = Options { saboteur: Some(saboteur), ..Options::default() };
    let mut texts = Vec::new();
    for seed in 0..SABOTAGE_SEEDS {
        if let Err(failed) = run(seed, &options) {
            assert!(by.contains(&failed.violated.property), "caught by another check: {failed}");
            assert!(failed.to_string().contains(&format!("--seed {seed} --trace --saboteur {saboteur:?}")), "{failed}");
            texts.push(failed.violated.text);
        }
    }
    assert!(texts.len() >= CAUGHT_MIN, "{saboteur:?} is caught in {} of {SABOTAGE_SEEDS} seeds only", texts.len());
    texts
}
