//! Texts for ranks, sidecars and durations in messages to users.

use std::fmt::Write as _;

use ronde_wire::{Rank, SidecarIndex, World};

/// "rank 3", "ranks 0-3, 7" or "no rank"; long lists are truncated.
pub(crate) fn ranks(ranks: &[Rank]) -> String {
    match ranks {
        [] => "no rank".to_owned(),
        [one] => one.to_string(),
        many => format!("ranks {}", rank_numbers(many)),
    }
}

/// "sidecar 2 (ranks 4-7)".
pub(crate) fn sidecar(world: &World, sidecar: SidecarIndex) -> String {
    format!("{sidecar} ({})", ranks(&world.ranks_of(sidecar)))
}

/// "5.0 seconds".
pub(crate) fn seconds(ms: u64) -> String {
    format!("{}.{} seconds", ms / 1_000, ms % 1_000 / 100)
}

/// "0-3, 7" of ascending ranks.
pub(crate) fn rank_numbers(ranks: &[Rank]) -> String {
    let mut text = String::new();
    let mut rest = ranks;
    let mut runs = 0;
    while let Some((first, _)) = rest.split_first() {
        if runs == RUNS_MAX {
            let _ = write!(text, " and {} more", rest.len());
            break;
        }
        let run = rest.iter().zip(u64::from(first.0)..).take_while(|(rank, next)| u64::from(rank.0) == *next).count();
        let last = rest[run - 1];
        text.push_str(if runs == 0 { "" } else { ", " });
        let _ = if run == 1 { write!(text, "{}", first.0) } else { write!(text, "{}-{}", first.0, last.0) };
        rest = &rest[run..];
        runs += 1;
    }
    text
}

/// The text with its first letter capitalised.
pub(crate) fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Runs of ranks named in one list.
const RUNS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_ranks_are_contracted_and_long_lists_truncated() {
        let of = |numbers: &[u32]| numbers.iter().copied().map(Rank).collect::<Vec<_>>();
        assert_eq!(ranks(&of(&[])), "no rank");
        assert_eq!(ranks(&of(&[5])), "rank 5");
        assert_eq!(ranks(&of(&[0, 1, 2, 7, 9, 10])), "ranks 0-2, 7, 9-10");
        assert_eq!(rank_numbers(&of(&[u32::MAX])), "4294967295");
        let odd: Vec<Rank> = (0..40).map(|n| Rank(2 * n + 1)).collect();
        assert!(ranks(&odd).ends_with("29, 31 and 24 more"), "{}", ranks(&odd));
        assert_eq!(seconds(5_049), "5.0 seconds");
    }
}
