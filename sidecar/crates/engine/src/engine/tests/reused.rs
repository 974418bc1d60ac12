//! Tests of reused ids: another set gets the id of a removed one.

use ronde_wire::{Collective, Control, DType, Detail, Rank, Request, SetId};

use super::cluster::{Cluster, request, sum};

/// An operation may still be in flight at one sidecar when the first member has reported it as done and the set is
/// removed. A new set with the same id must not match its names.
#[test]
fn a_set_id_is_free_when_the_operations_of_its_set_are_done_everywhere() {
    let mut cluster = Cluster::with_sets(&[0, 0, 1, 2], &[&[0, 2, 3]]).started();
    cluster.executes = false;
    let in_set = |set| Request { set: SetId(set), ..sum("t", &[4]) };
    let under_way = [0, 2, 3].map(|rank| (rank, cluster.submit(rank, in_set(1))));
    cluster.run();
    cluster.execute(0);
    learned(&mut cluster, Collective::RemoveSet { set: SetId(1) }, 1);
    learned(&mut cluster, Collective::AddSet { ranks: vec![Rank(2), Rank(3)] }, 2);
    let again = [2, 3].map(|rank| (rank, cluster.submit(rank, in_set(2))));
    cluster.run();
    cluster.execute_all();
    assert!(under_way.iter().chain(&again).all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
    learned(&mut cluster, Collective::AddSet { ranks: vec![Rank(0), Rank(2)] }, 1);
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

/// This holds even when a sidecar acknowledges a removal too early.
#[test]
fn an_operation_of_a_new_set_goes_to_its_own_members() {
    let mut cluster = Cluster::with_sets(&[0, 1, 2], &[&[1, 2]]).started();
    cluster.executes = false;
    let in_set = |tensor| Request { set: SetId(1), ..sum(tensor, &[4]) };
    for rank in [1, 2] {
        cluster.submit(rank, in_set("old"));
    }
    cluster.run();
    learned(&mut cluster, Collective::RemoveSet { set: SetId(1) }, 1);
    for sidecar in [1, 2] {
        cluster.control(0, sidecar, (1, 0), Control::SetForgotten { set: SetId(1) });
    }
    learned(&mut cluster, Collective::AddSet { ranks: vec![Rank(0), Rank(2)] }, 1);
    cluster.executes = true;
    let new = [0, 2].map(|rank| (rank, cluster.submit(rank, in_set("new"))));
    cluster.run();
    assert!(new.iter().all(|(rank, request)| cluster.outcome(*rank, *request).is_ok()));
    assert_eq!(cluster.admitted.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 2]);
    assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
}

fn learned(cluster: &mut Cluster, collective: Collective, set: u32) {
    let what = Request { dtype: DType::U8, ..request("arrange", collective, &[0]) };
    let requests = cluster.submit_all(&what);
    cluster.run();
    for (rank, request) in (0..).zip(requests) {
        let done = cluster.outcome(rank, request).as_ref().expect("a result");
        assert_eq!(done.detail, Detail::Set(SetId(set)));
    }
}
