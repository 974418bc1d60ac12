//! Which users' processes may be workers of this sidecar, and of which ranks. The kernel reports the user at the other end
//! of a Unix socket.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use ronde_wire::Rank;

use crate::session::command::Access;

/// An entry of `--worker-uids`: `UID`, or `RANK=UID`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkerUid {
    /// The rank that is reserved for the user; `None` for a user of any rank that is not reserved.
    rank: Option<Rank>,
    uid: u32,
}

impl FromStr for WorkerUid {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number =
            |text: &str| text.parse::<u32>().map_err(|_| format!("{text:?} is no number; write UID or RANK=UID"));
        match text.split_once('=') {
            Some((rank, uid)) => Ok(Self { rank: Some(Rank(number(rank)?)), uid: number(uid)? }),
            None => Ok(Self { rank: None, uid: number(text)? }),
        }
    }
}

/// The users of a sidecar's workers.
#[derive(Clone, Debug)]
pub(crate) struct WorkerUids {
    /// The users that may connect.
    all: BTreeSet<u32>,
    /// The users that may claim ranks without an entry in `reserved`, the sidecar's own among them.
    of_any_rank: BTreeSet<u32>,
    reserved: BTreeMap<Rank, BTreeSet<u32>>,
}

impl WorkerUids {
    /// Collects the users of the ranks that are served here.
    pub(crate) fn new(own: u32, entries: &[WorkerUid], served: &[Rank]) -> Self {
        let (mut of_any_rank, mut reserved) = (BTreeSet::from([own]), BTreeMap::<Rank, BTreeSet<u32>>::new());
        for WorkerUid { rank, uid } in entries {
            match rank {
                None => drop(of_any_rank.insert(*uid)),
                Some(rank) if served.contains(rank) => drop(reserved.entry(*rank).or_default().insert(*uid)),
                Some(_) => {}
            }
        }
        let all = of_any_rank.iter().chain(reserved.values().flatten()).copied().collect();
        Self { all, of_any_rank, reserved }
    }

    /// Returns the users that may connect.
    pub(crate) fn all(&self) -> &BTreeSet<u32> {
        &self.all
    }

    /// Whether processes of other users than the sidecar's own may be workers.
    pub(crate) fn has_others(&self) -> bool {
        self.all.len() > 1
    }

    /// Returns the one user whose processes may claim a rank, if there is only one by an entry of its own.
    pub(crate) fn owner(&self, rank: Rank) -> Option<u32> {
        let uids = self.reserved.get(&rank)?;
        uids.first().copied().filter(|_| uids.len() == 1)
    }

    /// Checks whether a user may connect.
    ///
    /// # Errors
    /// The text for the worker.
    pub(crate) fn check(&self, uid: u32) -> Result<(), String> {
        match self.all.contains(&uid) {
            true => Ok(()),
            false => Err(format!("uid {uid} may not use this sidecar; allowed are {:?}", self.all)),
        }
    }

    /// Checks whether a worker may claim a rank, besides its token.
    ///
    /// # Errors
    /// The text for the worker.
    pub(crate) fn check_claim(&self, rank: Rank, access: Access) -> Result<(), String> {
        match (access, self.reserved.get(&rank)) {
            // Without a uid, the token alone decides.
            (Access::Web, None) => Ok(()),
            (Access::Web, Some(uids)) => Err(format!(
                "{rank} is reserved for the users {uids:?} (--worker-uids), and over gRPC-Web the kernel reports no user; connect to the sidecar's socket"
            )),
            (Access::Socket { uid }, Some(uids)) if !uids.contains(&uid) => Err(format!(
                "{rank} is reserved for the users {uids:?} (--worker-uids), and this worker is a process of uid {uid}"
            )),
            (Access::Socket { uid }, None) if !self.of_any_rank.contains(&uid) => Err(format!(
                "uid {uid} may claim only the ranks that --worker-uids reserves for it, and {rank} is not among them"
            )),
            (Access::Socket { .. }, _) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uids(entries: &[&str]) -> WorkerUids {
        let entries: Vec<WorkerUid> = entries.iter().map(|entry| entry.parse().expect("an entry")).collect();
        WorkerUids::new(5, &entries, &[Rank(0), Rank(1), Rank(2)])
    }

    fn claims(uids: &WorkerUids, uid: u32) -> Vec<u32> {
        (0..3).filter(|rank| uids.check_claim(Rank(*rank), Access::Socket { uid }).is_ok()).collect()
    }

    #[test]
    fn a_reserved_rank_is_claimed_by_its_users_only() {
        let uids = uids(&["10", "0=20", "1=30", "1=31", "9=40"]);
        let of = [5, 10, 20, 30, 31].map(|uid| claims(&uids, uid));
        assert_eq!(of, [vec![2], vec![2], vec![0], vec![1], vec![1]]);
        assert_eq!([0, 1, 2].map(|rank| uids.owner(Rank(rank))), [Some(20), None, None]);
        assert!([5, 10, 20, 30, 31].iter().all(|uid| uids.check(*uid).is_ok()));
        assert!(
            uids.check(40).is_err_and(|text| text.contains("uid 40 may not use this sidecar")),
            "rank 9 is elsewhere"
        );
        assert!(uids.check_claim(Rank(2), Access::Web).is_ok() && uids.check_claim(Rank(1), Access::Web).is_err());
    }

    #[test]
    fn without_entries_only_the_sidecars_own_user_comes() {
        let uids = uids(&[]);
        assert!(!uids.has_others() && claims(&uids, 5) == [0, 1, 2] && claims(&uids, 6).is_empty());
    }

    #[test]
    fn an_entry_that_is_no_number_is_explained() {
        for text in ["", "root", "0=", "=5", "0=1=2", "-1"] {
            let error = text.parse::<WorkerUid>().expect_err("it is no entry");
            assert!(error.contains("write UID or RANK=UID"), "{text:?}: {error}");
        }
    }
}
