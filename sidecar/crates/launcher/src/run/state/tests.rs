use ronde_bootstrap::messages::TokenFile;

use super::super::hosts::parse_list;
use super::*;

fn state() -> State {
    let placement = Placement::new(4, &parse_list("a:2,b:2").expect("valid"), None).expect("fits");
    State::new(placement, "train")
}

fn hello(version: &str) -> Event {
    let (version, hostname) = (version.to_owned(), "h".to_owned());
    Event::Message(FromAgent::Hello { version, hostname, interfaces: vec![], port: 1 })
}

fn exited(rank: u32, status: Status) -> Event {
    Event::Message(FromAgent::WorkerExited { worker: rank, status })
}

fn drained(rank: u32, line: &str) -> Event {
    Event::Message(FromAgent::WorkerDrained { worker: rank, stderr_tail: vec![line.to_owned()] })
}

#[test]
fn the_first_failing_worker_is_the_culprit_whatever_follows() {
    let mut state = state();
    for rank in 0..4 {
        let started = Event::Message(FromAgent::WorkerStarted { worker: rank, pid: 1 });
        state.handle_event(rank as usize / 2, started).expect("its own rank");
    }
    state.handle_event(1, exited(3, Status::Signal(9))).expect("its last lines follow");
    state.handle_event(0, exited(0, Status::Code(1))).expect("it follows");
    let gone = Event::Message(FromAgent::SidecarExited { sidecar: 0, status: Status::Code(1) });
    state.handle_event(0, gone).expect("it follows");
    assert!(!state.worker_failure_is_complete());
    state.handle_event(1, drained(3, "bye")).expect("expected");
    assert!(state.worker_failure_is_complete());
    let failure = state.worker_failure().expect("a worker failed").to_string();
    assert!(
        failure.starts_with("rank 3 on host b was killed by signal 9 (SIGKILL); unless somebody sent that signal"),
        "{failure}"
    );
    assert!(failure.ends_with("\nlast lines of its stderr:\n  bye"), "{failure}");
    assert!(!state.workers_ended());
    state.handle_event(0, drained(0, "")).expect("expected");
    for rank in 1..3 {
        state.handle_event(rank as usize / 2, exited(rank, Status::Code(0))).expect("expected");
        state.handle_event(rank as usize / 2, drained(rank, "")).expect("expected");
    }
    assert!(state.workers_ended());
}

#[test]
fn the_first_worker_that_left_and_then_failed_is_the_culprit() {
    let left = |sidecar, rank| {
        Event::Message(FromAgent::Sidecar { sidecar, line: FromSidecar::Left { worker: rank, operations: None } })
    };
    let mut state = state();
    state.handle_event(0, left(0, 0)).expect("its own rank");
    state.handle_event(0, left(0, 1)).expect("its own rank");
    state.handle_event(1, left(1, 3)).expect("its own rank");
    state.handle_event(1, exited(3, Status::Code(1))).expect("its last lines follow");
    state.handle_event(1, drained(3, "rank 1 has left")).expect("expected");
    assert!(!state.worker_failure_is_complete(), "ranks 0 and 1 left before and may be about to fail");
    state.handle_event(0, exited(0, Status::Code(0))).expect("expected");
    state.handle_event(0, exited(1, Status::Code(2))).expect("expected");
    state.handle_event(0, drained(1, "my fault")).expect("expected");
    assert!(state.worker_failure_is_complete());
    let failure = state.worker_failure().expect("a worker failed").to_string();
    assert_eq!(failure, "rank 1 on host a exited with code 2\nlast lines of its stderr:\n  my fault");
    let later = Event::Message(FromAgent::Refused { reason: "no room".to_owned() });
    assert!(state.handle_event(0, later).is_ok(), "nothing counts behind the first failure");
}

#[test]
fn the_latest_end_of_a_session_counts() {
    let left = |sidecar, rank| {
        Event::Message(FromAgent::Sidecar { sidecar, line: FromSidecar::Left { worker: rank, operations: None } })
    };
    let mut state = state();
    // The order in which they leave the first epoch says nothing about the second, in which rank 1 is at fault.
    for rank in [0, 1, 3, 1, 0, 3] {
        state.handle_event(rank as usize / 2, left(rank / 2, rank)).expect("its own rank");
    }
    state.handle_event(1, exited(3, Status::Code(1))).expect("its last lines follow");
    state.handle_event(0, exited(0, Status::Code(1))).expect("it follows");
    state.handle_event(0, exited(1, Status::Code(2))).expect("it follows");
    state.handle_event(0, drained(1, "my fault")).expect("expected");
    assert!(state.worker_failure_is_complete());
    let failure = state.worker_failure().expect("a worker failed").to_string();
    assert_eq!(failure, "rank 1 on host a exited with code 2\nlast lines of its stderr:\n  my fault");
}

#[test]
fn a_lost_host_does_not_keep_the_end_waiting() {
    let mut state = state();
    state.handle_event(1, hello(env!("CARGO_PKG_VERSION"))).expect("the same version");
    state.handle_event(1, Event::Message(FromAgent::WorkerStarted { worker: 2, pid: 1 })).expect("its own rank");
    assert!(!state.workers_ended());
    state.handle_event(1, Event::RemoteShellOutput("Connection reset".into())).expect("words are kept");
    state.hosts[1].remote = true;
    let failure = state.handle_event(1, Event::Closed(Status::Code(255))).expect_err("the host is lost").to_string();
    assert!(
        failure.starts_with("the connection to host b (ranks 2-3) was lost: the remote shell exited with code 255"),
        "{failure}"
    );
    assert!(failure.ends_with("  Connection reset"), "{failure}");
    assert!(state.workers_ended());
    assert!(state.sidecars_ended(), "none was started");
    state.sidecars.iter_mut().for_each(|sidecar| sidecar.started = true);
    assert!(!state.sidecars_ended(), "the other host's runs");
    assert!(!state.links_closed(2) && state.links_closed(0));
}

#[test]
fn every_start_step_names_the_hosts_and_ranks_that_are_missing() {
    let mut state = state();
    state.handle_event(0, hello(env!("CARGO_PKG_VERSION"))).expect("the same version");
    let names = |missing: Vec<Missing>| missing.into_iter().map(|one| (one.host, one.placed)).collect::<Vec<_>>();
    assert_eq!(names(state.missing(Step::Hosts)), [("b".to_owned(), 2..4)]);
    assert_eq!(names(state.missing(Step::Bound)), [("a".to_owned(), 0..2), ("b".to_owned(), 2..4)]);
    state.handle_event(1, Event::Message(FromAgent::WorkerStarted { worker: 2, pid: 1 })).expect("its own rank");
    assert_eq!(names(state.missing(Step::Workers)), [("a".to_owned(), 0..2), ("b".to_owned(), 3..4)]);
}

#[test]
fn another_version_is_refused() {
    let failure = state().handle_event(1, hello("9.9.9")).expect_err("another version").to_string();
    assert!(failure.contains("host b runs ronde 9.9.9"), "{failure}");
}

#[test]
fn an_agent_that_breaks_the_protocol_ends_the_job_by_the_name_of_its_host() {
    let violation = Event::Violation("sent a second greeting".to_owned());
    let failure = state().handle_event(1, violation).expect_err("the job ends").to_string();
    assert_eq!(failure, "host b: it sent a second greeting; see that host");
}

#[test]
fn a_sidecar_must_have_made_the_tokens_of_its_ranks() {
    let serving = |ranks: &[u32]| {
        let token_files =
            ranks.iter().map(|rank| TokenFile { worker: *rank, path: format!("/t{rank}").into() }).collect();
        let admin = "127.0.0.1:1".parse().expect("valid");
        let line = FromSidecar::Serving { job: "j".into(), socket_dir: "/s".into(), token_files, admin, web: None };
        Event::Message(FromAgent::Sidecar { sidecar: 1, line })
    };
    let mut good = state();
    good.handle_event(1, serving(&[3, 2])).expect("its ranks");
    let files = &good.sidecars[1].serving.as_ref().expect("it serves").token_files;
    assert_eq!(files, &["/t2", "/t3"].map(PathBuf::from));
    assert!(matches!(state().handle_event(1, serving(&[2])), Err(Failure::Fatal { .. })));
}

/// A line from a sidecar.
fn from_sidecar(sidecar: u32, line: FromSidecar) -> Event {
    Event::Message(FromAgent::Sidecar { sidecar, line })
}

fn with_addresses() -> State {
    let mut state = state();
    for (host, name) in state.hosts.iter_mut().zip(["10.0.0.1", "10.0.0.2"]) {
        let at = |interface: &str, address: &str| InterfaceAddress {
            interface: interface.to_owned(),
            address: address.parse().expect("an address"),
            prefix_length: 24,
        };
        host.addresses = vec![at("eth0", name), at("docker0", "172.17.0.1")];
    }
    let control = "10.0.0.1:7400".parse().expect("an address");
    state.sidecars[0].bound = Some(Bound { certificate_request: String::new(), control, lanes: Vec::new() });
    state
}

#[test]
fn links_are_missing_until_both_ends_report_them() {
    let mut state = with_addresses();
    let missing = |state: &State| state.missing(Step::Linked).into_iter().map(|one| one.awaited).collect::<Vec<_>>();
    assert_eq!(missing(&state), ["sidecar 1 has not asked for a link to the others"]);
    state.handle_event(1, from_sidecar(1, FromSidecar::Dialling { peer: 0 })).expect("its own line");
    let awaited = missing(&state).concat();
    let words = "sidecar 1 does not reach sidecar 0 on host a at 10.0.0.1:7400 (eth0), 172.17.0.1:7400 (docker0);";
    assert!(awaited.starts_with(words), "{awaited}");
    let linked = |peer, address: &str| FromSidecar::Linked { peer, address: address.parse().expect("an address") };
    state.handle_event(1, from_sidecar(1, linked(0, "10.0.0.1"))).expect("its own line");
    assert_eq!(missing(&state).len(), 1, "the other end has not said where it found this one");
    assert_eq!(super::routes::chosen(&state.placement, &state, false).len(), 1);
    state.handle_event(0, from_sidecar(0, linked(1, "10.9.9.9"))).expect("its own line");
    assert_eq!(missing(&state), Vec::<String>::new());
    assert_eq!(
        super::routes::chosen(&state.placement, &state, false),
        [
            "sidecar 0 (a) at 10.0.0.1 over eth0; not used: 172.17.0.1 docker0",
            "sidecar 1 (b) at 10.9.9.9, which is not its own; not used: 10.0.0.2 eth0, 172.17.0.1 docker0",
        ]
    );
}

#[test]
fn ranks_that_have_not_joined_are_listed_in_ranges() {
    let mut state = state();
    assert!(!state.some_attached());
    state.handle_event(0, from_sidecar(0, FromSidecar::Attached { worker: 0 })).expect("its own line");
    assert!(state.some_attached());
    state.handle_event(0, exited(1, Status::Code(0))).expect("expected");
    let missing: Vec<_> = state.missing(Step::Attached).into_iter().map(|one| (one.host, one.placed)).collect();
    assert_eq!(missing, [("a".to_owned(), 1..2), ("b".to_owned(), 2..4)]);
    for rank in 1..4 {
        let sidecar = rank / 2;
        state
            .handle_event(sidecar as usize, from_sidecar(sidecar, FromSidecar::Attached { worker: rank }))
            .expect("its own line");
    }
    assert_eq!(state.missing(Step::Attached), []);
}

fn left(rank: u32) -> Event {
    from_sidecar(rank / 2, FromSidecar::Left { worker: rank, operations: None })
}

/// A rank fails with an error of ronde, and all that is known of it has arrived.
fn fails(state: &mut State, rank: u32, line: &str) {
    let host = rank as usize / 2;
    for event in [left(rank), exited(rank, Status::Code(1)), drained(rank, line)] {
        state.handle_event(host, event).expect("its own rank");
    }
}

#[test]
fn a_rank_that_fails_long_after_it_has_left_is_the_culprit() {
    let mut state = state();
    state.handle_event(0, left(1)).expect("its own rank");
    fails(&mut state, 3, "ronde.errors.ShutDownError: rank 1 has left [RONDE-E305]");
    assert!(!state.worker_failure_is_complete(), "rank 1 may be about to fail");
    assert!(matches!(state.worker_failure(), Some(Failure::LeftEarly { rank: 1, status: None, .. })));
    state.handle_event(0, exited(1, Status::Code(4))).expect("its own rank");
    state.handle_event(0, drained(1, "ValueError: slowly")).expect("its own rank");
    let failure = state.worker_failure().expect("a worker failed").to_string();
    assert_eq!(failure, "rank 1 on host a exited with code 4\nlast lines of its stderr:\n  ValueError: slowly");
}

#[test]
fn the_end_of_a_rank_that_was_stopped_is_no_cause() {
    let mut state = state();
    state.handle_event(0, left(1)).expect("its own rank");
    fails(&mut state, 3, "ronde.errors.ShutDownError: rank 1 has left [RONDE-E305]");
    state.note_end();
    state.handle_event(0, exited(1, Status::Signal(15))).expect("its own rank");
    state.handle_event(0, drained(1, "saving the model")).expect("its own rank");
    let gone = Event::Message(FromAgent::SidecarExited { sidecar: 0, status: Status::Code(1) });
    state.handle_event(0, gone).expect("it follows");
    let failure = state.worker_failure().expect("a worker failed").to_string();
    assert!(failure.starts_with("rank 1 on host a left the job while others had operations; its process still ran"));
    assert!(failure.ends_with("\nlast lines of its stderr:\n  saving the model"), "{failure}");
}

#[test]
fn the_reason_of_sidecars_is_printed_once_and_another_one_is_not_lost() {
    let fatal = |reason: &str| FromSidecar::Fatal { reason: reason.to_owned() };
    let mut alike = state();
    let failure = alike.handle_event(0, from_sidecar(0, fatal("no plugin [RONDE-E801]"))).expect_err("the job ends");
    alike.handle_event(1, from_sidecar(1, fatal("no plugin [RONDE-E801]"))).expect_err("so does this one");
    assert_eq!(alike.other_fatal_reasons(Some(&failure)), (Vec::new(), 0));
    assert_eq!(alike.other_fatal_reasons(None), (vec![(0, "no plugin [RONDE-E801]".to_owned())], 0));
    assert_eq!(alike.sidecars[1].log.lines(), ["no plugin [RONDE-E801]"]);
    alike.handle_event(1, from_sidecar(1, fatal("a port is taken\nsee `ss`"))).expect_err("so does this one");
    assert_eq!(alike.other_fatal_reasons(Some(&failure)), (vec![(1, "a port is taken\nsee `ss`".to_owned())], 0));
    let closed = "the launcher closed its end; `ronde sidecar` is started by `ronde run` [RONDE-E407]";
    for (is_ending, printed) in [(false, vec![(1, closed.to_owned())]), (true, Vec::new())] {
        let mut starting = state();
        if is_ending {
            starting.note_end();
        }
        starting.handle_event(1, from_sidecar(1, fatal(closed))).expect_err("it has not started");
        assert_eq!(starting.other_fatal_reasons(None), (printed, 0));
    }
    // More sidecars than are listed, each with its own reason.
    let mut apart = state();
    apart.sidecars = (0..40)
        .map(|number| SidecarState { fatal: Some(format!("reason {number}")), ..SidecarState::default() })
        .collect();
    let (reasons, more) = apart.other_fatal_reasons(None);
    assert_eq!((reasons.len(), more), (32, 8));
}

#[test]
fn a_rank_that_has_lost_a_sidecar_is_not_blamed_once_that_is_known() {
    const LOST: &str = "ronde.errors.PeerLostError: sidecar 1 is gone [RONDE-E401]";
    let mut by_sidecar = state();
    fails(&mut by_sidecar, 0, LOST);
    by_sidecar.handle_event(0, from_sidecar(0, FromSidecar::Noted { worker: 0, last_call: None })).expect("its own");
    assert!(!by_sidecar.worker_failure_is_complete(), "which sidecar ended is not known yet");
    let gone = Event::Message(FromAgent::SidecarExited { sidecar: 1, status: Status::Signal(9) });
    by_sidecar.handle_event(1, gone).expect("it follows");
    assert!(by_sidecar.worker_failure_is_complete());
    let failure = by_sidecar.worker_failure().expect("known").to_string();
    assert!(failure.starts_with("sidecar 1 on host b, which serves ranks 2-3, was killed by signal 9"), "{failure}");

    let mut by_host = state();
    by_host.handle_event(1, hello(env!("CARGO_PKG_VERSION"))).expect("the same version");
    fails(&mut by_host, 0, LOST);
    by_host.handle_event(1, Event::Closed(Status::Code(255))).expect("it follows");
    let failure = by_host.worker_failure().expect("known");
    assert!(failure.to_string().starts_with("the connection to host b (ranks 2-3) was lost"), "{failure}");
    assert_eq!(by_host.consequences(&failure), "\n1 rank ended because of that, with exit code 1");
}
