use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ronde_bootstrap::messages::{Summary, TokenFile};

use super::super::hosts::parse_list;
use super::*;
use crate::envelope::{Status, Stream};

/// Ranks 0 and 1 with sidecar 0 on the first host, ranks 2 and 3 with sidecar 1 on the second.
fn scope(host: usize) -> Scope {
    let placement = Placement::new(4, &parse_list("a:2,b:2").expect("valid"), None).expect("fits");
    Scope { greeted: true, ..Scope::new(&placement, host) }
}

fn hello(interfaces: Vec<InterfaceAddress>) -> FromAgent {
    FromAgent::Hello { version: "1".into(), hostname: "h".into(), interfaces, port: 1 }
}

fn interface(name: &str) -> InterfaceAddress {
    InterfaceAddress { interface: name.to_owned(), address: IpAddr::V4(Ipv4Addr::LOCALHOST), prefix_length: 8 }
}

fn line(sidecar: u32, line: FromSidecar) -> FromAgent {
    FromAgent::Sidecar { sidecar, line }
}

fn serving(paths: &[&str]) -> FromSidecar {
    let token_files = paths.iter().map(|path| TokenFile { worker: 2, path: (*path).into() }).collect();
    let admin = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    FromSidecar::Serving { job: "j".into(), socket_dir: "/run".into(), token_files, admin, web: None }
}

fn bound(request_bytes: usize, lanes: usize) -> FromSidecar {
    let control = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let certificate_request = "x".repeat(request_bytes);
    FromSidecar::Bound { certificate_request, control, lanes: vec![control; lanes], version: "1".into() }
}

/// Every message about a rank, with the message of a sidecar about one.
fn about_rank(rank: u32) -> Vec<FromAgent> {
    let sidecar = 1;
    vec![
        FromAgent::WorkerStarted { worker: rank, pid: 7 },
        FromAgent::Output { worker: rank, stream: Stream::Stdout, text: "hello\n".into() },
        FromAgent::WorkerExited { worker: rank, status: Status::Code(0) },
        FromAgent::WorkerDrained { worker: rank, stderr_tail: vec!["bye".into()] },
        line(sidecar, FromSidecar::Attached { worker: rank }),
        line(sidecar, FromSidecar::Left { worker: rank, operations: None }),
        line(sidecar, FromSidecar::Noted { worker: rank, last_call: None }),
    ]
}

/// Every message about a sidecar.
fn about_sidecar(sidecar: u32) -> Vec<FromAgent> {
    vec![
        FromAgent::SidecarLog { sidecar, text: "a line\n".into() },
        FromAgent::SidecarExited { sidecar, status: Status::Code(1) },
        line(sidecar, bound(500, 1)),
        line(sidecar, serving(&["/t2", "/t3"])),
        line(sidecar, FromSidecar::Recorded { path: "/records/a.flight.json".into() }),
        line(sidecar, FromSidecar::Ended { summary: Summary::default() }),
        line(sidecar, FromSidecar::Fatal { reason: "the disk is full".into() }),
    ]
}

#[test]
fn an_agent_speaks_for_the_ranks_and_sidecars_of_its_host_only() {
    for message in [2, 3].into_iter().flat_map(about_rank).chain(about_sidecar(1)) {
        let text = format!("{message:?}");
        assert_eq!(scope(1).accept(message).map(|message| format!("{message:?}")), Ok(text));
    }
    for (rank, message) in
        [0, 1, 4, u32::MAX].into_iter().flat_map(|rank| about_rank(rank).into_iter().map(move |m| (rank, m)))
    {
        let text = format!("{message:?}");
        let violation = scope(1).accept(message).expect_err(&text);
        assert_eq!(violation, format!("sent a message about rank {rank}, which does not run there"), "{text}");
    }
    for (sidecar, message) in
        [0, 2, u32::MAX].into_iter().flat_map(|at| about_sidecar(at).into_iter().map(move |m| (at, m)))
    {
        let text = format!("{message:?}");
        let violation = scope(1).accept(message).expect_err(&text);
        assert_eq!(violation, format!("sent a message about sidecar {sidecar}, which does not run there"), "{text}");
    }
}

#[test]
fn a_sidecar_speaks_for_its_own_ranks_only_even_where_its_host_has_others() {
    let placement = Placement::new(4, &parse_list("a:4").expect("valid"), Some(2)).expect("fits");
    let mut scope = Scope { greeted: true, ..Scope::new(&placement, 0) };
    assert!(scope.accept(line(1, FromSidecar::Attached { worker: 2 })).is_ok());
    let violation = scope.accept(line(1, FromSidecar::Attached { worker: 1 })).expect_err("rank 1 is sidecar 0's");
    assert_eq!(violation, "sent a message about rank 1, which does not run there");
}

#[test]
fn links_lead_to_other_sidecars_of_the_job() {
    let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
    for peer in [1, 2, u32::MAX] {
        for message in [FromSidecar::Dialling { peer }, FromSidecar::Linked { peer, address }] {
            let violation = scope(1).accept(line(1, message)).expect_err("no such link");
            assert_eq!(violation, format!("sent a message about a link of sidecar 1 to sidecar {peer}"));
        }
    }
    assert!(scope(1).accept(line(1, FromSidecar::Dialling { peer: 0 })).is_ok());
}

#[test]
fn the_greeting_comes_first_and_once() {
    let placement = Placement::new(4, &parse_list("a:2,b:2").expect("valid"), None).expect("fits");
    let mut scope = Scope::new(&placement, 1);
    assert!(scope.accept(hello(vec![interface("eth0")])).is_ok());
    assert_eq!(scope.accept(hello(Vec::new())).expect_err("a second one"), "sent a second greeting");
    let started = FromAgent::WorkerStarted { worker: 2, pid: 7 };
    assert_eq!(Scope::new(&placement, 1).accept(started).expect_err("no greeting"), "sent no greeting first");
}

#[test]
fn lists_and_texts_are_bounded() {
    let output = |bytes| FromAgent::Output { worker: 2, stream: Stream::Stderr, text: "x".repeat(bytes) };
    let log = |bytes| FromAgent::SidecarLog { sidecar: 1, text: "x".repeat(bytes) };
    let tail = |lines, bytes| FromAgent::WorkerDrained { worker: 2, stderr_tail: vec!["x".repeat(bytes); lines] };
    let summary = |ranks| Summary { last_to_be_ready: vec![0; ranks], ..Summary::default() };
    let ended = |ranks| line(1, FromSidecar::Ended { summary: summary(ranks) });
    let path = "x".repeat(PATH_BYTES_MAX + 1);
    let cases = [
        (output(TEXT_BYTES_MAX), output(TEXT_BYTES_MAX + 1)),
        (log(TEXT_BYTES_MAX), log(TEXT_BYTES_MAX + 1)),
        (tail(TAIL_LINES, TAIL_LINE_BYTES), tail(TAIL_LINES + 1, 1)),
        (tail(1, 1), tail(1, TAIL_LINE_BYTES + 1)),
        (ended(4), ended(5)),
        (line(1, bound(REQUEST_BYTES_MAX, LANES_MAX)), line(1, bound(REQUEST_BYTES_MAX + 1, 1))),
        (line(1, bound(1, 1)), line(1, bound(1, LANES_MAX + 1))),
        (line(1, serving(&["/t2", "/t3"])), line(1, serving(&["/t2", "/t3", "/t4"]))),
        (line(1, serving(&["/t2"])), line(1, serving(&[&path]))),
    ];
    for (good, bad) in cases {
        assert!(scope(1).accept(good).is_ok());
        let violation = scope(1).accept(bad).expect_err("too long");
        assert!(violation.starts_with("sent a ") && violation.contains(", which is more than "), "{violation}");
    }
    let first = |interfaces| Scope { greeted: false, ..scope(1) }.accept(hello(interfaces));
    assert!(first(vec![interface("eth0"); INTERFACES_MAX]).is_ok());
    assert!(first(vec![interface("eth0"); INTERFACES_MAX + 1]).is_err());
    assert!(first(vec![interface(&"x".repeat(INTERFACE_NAME_BYTES_MAX + 1))]).is_err());
    assert!(first(vec![interface("eth0\nrank 0 on host a failed")]).is_err());
    assert_eq!(scope(1).accept(line(1, serving(&["/t\0"]))).expect_err("a null byte"), "sent a path with a null byte");
}

#[test]
fn texts_of_an_agent_cannot_pass_for_other_lines() {
    let forged = "no room\n[0]<stdout>:forged\r\x1b[2Ahidden";
    let safe = |message| format!("{:?}", scope(1).accept(message).expect("bounded"));
    let notice = FromAgent::Notice { text: r"host b: no room\n[0]<stdout>:forged\r\u{1b}[2Ahidden".into() };
    assert_eq!(safe(FromAgent::Notice { text: forged.into() }), format!("{notice:?}"));
    let quoted = || "no room\n  [0]<stdout>:forged\\r\\u{1b}[2Ahidden".to_owned();
    let refused = FromAgent::Refused { reason: quoted() };
    assert_eq!(safe(FromAgent::Refused { reason: forged.into() }), format!("{refused:?}"));
    let fatal = line(1, FromSidecar::Fatal { reason: quoted() });
    assert_eq!(safe(line(1, FromSidecar::Fatal { reason: forged.into() })), format!("{fatal:?}"));
    let noted = |last_call: &str| line(1, FromSidecar::Noted { worker: 2, last_call: Some(last_call.into()) });
    assert_eq!(safe(noted("allreduce\n[0]")), format!("{:?}", noted(r"allreduce\n[0]")));
}

#[test]
fn an_elastic_jobs_host_speaks_for_what_was_started_there() {
    let rights = Rights::default();
    let mut elastic = Scope { greeted: true, ..Scope::elastic("b".into(), rights.clone(), Duration::from_secs(9)) };
    let prepared = |worker| {
        let token_files = vec![TokenFile { worker, path: "/t".into() }];
        line(7, FromSidecar::Prepared { membership: 2, token_files })
    };
    let violation = elastic.accept(line(7, FromSidecar::Entered { membership: 2 })).expect_err("it is not there yet");
    assert_eq!(violation, "sent a message about sidecar 7, which does not run there");
    rights.add_sidecar(7);
    rights.add_worker(7, 20);
    rights.add_worker(8, 21);
    assert!(elastic.accept(line(7, FromSidecar::Entered { membership: 2 })).is_ok());
    assert!(
        elastic.accept(prepared(20)).is_ok() && elastic.accept(line(7, FromSidecar::Attached { worker: 20 })).is_ok()
    );
    let seated = |worker| line(7, FromSidecar::Seated { worker, membership: 2 });
    assert!(elastic.accept(seated(20)).is_ok());
    for message in [
        prepared(21),
        seated(21),
        line(7, FromSidecar::Attached { worker: 21 }),
        line(7, FromSidecar::Left { worker: 21, operations: None }),
    ] {
        let violation = elastic.accept(message).expect_err("worker 21 is sidecar 8's");
        assert_eq!(violation, "sent a message about worker 21, which does not run there");
    }
    let violation = elastic.accept(FromAgent::WorkerStarted { worker: 0, pid: 7 }).expect_err("another host's");
    assert_eq!(violation, "sent a message about worker 0, which does not run there");
    let fixed = self::scope(1).accept(line(1, FromSidecar::Entered { membership: 2 })).expect_err("not elastic");
    assert!(fixed.ends_with("but the job is not elastic"), "{fixed}");
}
