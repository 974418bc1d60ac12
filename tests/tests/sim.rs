//! The simulated cluster: many seeds without planted bugs, some of them with a hostile sidecar that sends messages of
//! every kind, and twenty-three planted bugs that must be caught.
//!
//! `RONDE_SIM_SEEDS=10000` runs more seeds; a failing one prints the command that replays it.

use ronde_tests::sim::{Counts, ElasticBug, Options, Property, Results, Saboteur, run, run_elastic};
use ronde_wire::Control;

/// Seeds of an ordinary run.
const SEEDS: u64 = 500;
/// Seeds within which a planted bug must be caught often.
const SABOTAGE_SEEDS: u64 = 40;
/// The same for bugs that only show when a schedule is invalidated at a certain moment.
const SCHEDULE_SEEDS: u64 = 160;
/// A planted bug that is caught in fewer of them counts as not caught.
const CAUGHT_MIN: usize = 5;

/// The situations that the seeds must meet together.
const MET: [&str; 51] = [
    "absurd",
    "adasum",
    "add set",
    "form set",
    "find set",
    "all-gather",
    "all-reduce",
    "all-to-all",
    "barrier",
    "broadcast",
    "cancelled operations",
    "clipped mean",
    "codec by a plugin",
    "coded all-reduce",
    "gather",
    "group",
    "hostile messages refused",
    "hostile refusals of sets",
    "hostile requests for sets",
    "in an added set",
    "join",
    "join failed",
    "join in a set",
    "median",
    "message",
    "mismatch",
    "nonsense",
    "not with join",
    "plugin failed",
    "plugin failed on a member",
    "reduce",
    "reduce-scatter",
    "reduction by a plugin",
    "refused",
    "remove set",
    "removed",
    "scatter",
    "scheduled operations",
    "schedules",
    "committed",
    "stalled",
    "the same name twice",
    "too large",
    "announced again",
    "with joined ranks",
    "withdrawn",
    "invalidated for a worker exit",
    "invalidated for a refusal",
    "invalidated for another request",
    "invalidated for the order",
    "invalidated for other settings",
];

#[test]
fn no_seed_violates_a_property() {
    let seeds = std::env::var("RONDE_SIM_SEEDS").map_or(SEEDS, |text| text.parse().expect("a number of seeds"));
    let (mut early, mut fused, mut piped, mut failures, mut epochs, mut tuned) = (0, 0, 0, 0, 0, 0);
    let mut met = Counts::new();
    for seed in 0..seeds {
        match run(seed, &Options::default()) {
            Ok(report) => {
                early += report.early_chunks;
                fused += report.fused;
                piped += report.piped;
                tuned += report.tuned;
                failures += report.failures;
                epochs += report.epochs;
                for (what, count) in report.met {
                    *met.entry(what).or_default() += count;
                }
            }
            Err(failed) => panic!("{failed}"),
        }
    }
    // The runs are useful only if they meet these situations.
    let counts = [early, fused, piped, failures, tuned];
    assert!(
        counts.iter().all(|count| *count > 0),
        "early chunks, fused tensors, long operations, failures, samples of searches: {counts:?}"
    );
    for what in MET.iter().chain(Control::KINDS) {
        assert!(met.get(*what).is_some_and(|count| *count > 0), "no {what} among {met:?}");
    }
    assert!(epochs as u64 > seeds, "{epochs} epochs in {seeds} runs");
}

/// Sums of floats depend on the order of addition; it must not depend on delays, lanes, fusion or other operations.
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
    assert!(compared > 100, "{compared} results are too few for a comparison");
}

#[test]
fn a_lost_response_is_caught() {
    // A rank waits forever, or a later operation reveals the gap.
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
    // The waiter waits forever, or the epoch ends without its answer.
    caught(Saboteur::ForgottenWaiter, &[Property::Liveness, Property::Answered]);
}

#[test]
fn a_tuning_chosen_locally_is_caught() {
    for text in caught(Saboteur::LocalTuning, &[Property::NoBug]) {
        assert!(text.contains("the digest of the plan's inputs differs"), "caught by another check: {text}");
    }
}

#[test]
fn garbage_of_a_joined_rank_is_caught() {
    caught(Saboteur::JoinedGarbage, &[Property::Result]);
}

#[test]
fn swapped_blocks_are_caught() {
    caught(Saboteur::SwappedBlocks, &[Property::Result]);
}

#[test]
fn a_message_under_another_tag_or_turn_is_caught() {
    caught(Saboteur::CrossedMessages, &[Property::Result]);
}

#[test]
fn the_result_of_another_rank_is_caught() {
    caught(Saboteur::ForeignResult, &[Property::Result]);
}

#[test]
fn an_owner_that_keeps_unrounded_values_is_caught() {
    caught(Saboteur::UnroundedOwner, &[Property::Result]);
}

#[test]
fn an_announcement_that_means_an_older_request_is_caught() {
    // Ranks that agree are reported as mismatched; where one of them was to differ, another one is blamed; where all
    // are mistaken for each other, the order is not what was submitted. Another request may have another size, so that
    // its contribution does not fit.
    let properties = [Property::Agreement, Property::Culprit, Property::NoBug, Property::Protocol];
    caught(Saboteur::StaleAnnouncement, &properties);
}

#[test]
fn a_set_that_is_gone_before_an_order_is_caught() {
    // The operation has failed there or cannot be admitted, or the coordinator learns that the set is unknown.
    caught(Saboteur::EarlyRemoval, &[Property::Agreement, Property::NoBug, Property::Protocol]);
}

#[test]
fn a_group_that_is_ordered_twice_is_caught() {
    for text in caught(Saboteur::ReleasedTwice, &[Property::NoBug]) {
        assert!(text.contains("already") || text.contains("not asked for"), "caught by another check: {text}");
    }
}

#[test]
fn a_relay_that_does_not_forward_a_message_is_caught() {
    caught(Saboteur::DeafBranch, &[Property::Liveness, Property::Protocol]);
}

#[test]
fn a_relay_that_does_not_report_a_lost_sidecar_is_caught() {
    caught(Saboteur::ForgottenLoss, &[Property::InTime]);
}

#[test]
fn a_sidecar_that_speaks_as_another_is_caught() {
    for text in caught(Saboteur::BorrowedName, &[Property::Protocol]) {
        assert!(text.contains("is not below it in the tree"), "caught by another check: {text}");
    }
}

#[test]
fn a_completion_that_is_not_reported_when_a_schedule_is_invalidated_is_caught() {
    // A rank with a result submits the next operation, while others are still at the one before.
    caught(Saboteur::ForgottenCompletion, &[Property::Result, Property::Agreement, Property::Liveness]);
}

#[test]
fn a_schedule_that_is_not_dropped_alike_is_caught() {
    // A sidecar performs an operation that the others do not, with them or alone.
    let properties = [Property::Result, Property::Agreement, Property::Liveness, Property::Bounds];
    caught(Saboteur::LateCancel, &properties);
}

#[test]
fn chunks_of_what_was_dropped_are_caught() {
    caught(Saboteur::KeptChunks, &[Property::Protocol, Property::Result, Property::Liveness]);
}

#[test]
fn a_schedule_under_other_numbers_is_caught() {
    caught(Saboteur::ShiftedSchedule, &[Property::OneOrder, Property::Protocol, Property::Liveness]);
}

#[test]
fn an_operation_that_only_some_members_commit_is_caught() {
    // It is committed for one, or that one waits for what the others have dropped.
    caught(Saboteur::SpoiltCommit, &[Property::Committed, Property::Agreement, Property::Liveness]);
}

#[test]
fn codec_state_kept_from_a_failed_operation_is_caught() {
    for text in caught(Saboteur::KeptFailure, &[Property::Committed]) {
        assert!(text.contains("was encoded"), "caught by another check: {text}");
    }
}

/// Runs sabotaged seeds: the right check must catch the bug, and often enough. Returns the texts of the violations.
fn caught(saboteur: Saboteur, by: &[Property]) -> Vec<String> {
    let options = Options { saboteur: Some(saboteur), ..Options::default() };
    let mut texts = Vec::new();
    let seeds = if saboteur.schedules() { SCHEDULE_SEEDS } else { SABOTAGE_SEEDS };
    for seed in 0..seeds {
        if let Err(failed) = run(seed, &options) {
            assert!(by.contains(&failed.violated.property), "caught by another check: {failed}");
            assert!(failed.to_string().contains(&format!("--seed {seed} --trace --saboteur {saboteur:?}")), "{failed}");
            texts.push(failed.violated.text);
        }
    }
    assert!(texts.len() >= CAUGHT_MIN, "{saboteur:?} is caught in {} of {seeds} seeds only", texts.len());
    texts
}

/// Elastic jobs under random crashes, cuts and additions.
#[test]
fn elastic_jobs_survive_losses_and_additions() {
    let (mut changes, mut crashes, mut notices) = (0, (0, 0), 0);
    for seed in 0..150 {
        let report = run_elastic(seed, None, false).unwrap_or_else(|failed| panic!("{failed}"));
        changes += report.memberships;
        notices += report.notices;
        crashes = (crashes.0 + report.crashes.0, crashes.1 + report.crashes.1);
    }
    assert!(
        changes > 500 && crashes.0 > 100 && crashes.1 > 50 && notices > 20,
        "{changes} memberships, {crashes:?} crashes, {notices} notices"
    );
}

#[test]
fn planted_bugs_of_memberships_are_caught() {
    for bug in ElasticBug::ALL {
        let caught = (0..200).find(|seed| run_elastic(*seed, Some(bug), false).is_err());
        assert!(caught.is_some(), "{bug:?} is not caught");
    }
}
