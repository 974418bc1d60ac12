use ronde_rpc::convert::SESSION_TOKEN_BYTES;

use super::*;

#[test]
fn a_full_queue_ends_the_session_when_other_ranks_depend_on_the_message() {
    let claimed = Claimed {
        session_token: [0; SESSION_TOKEN_BYTES],
        protocol: 1,
        heartbeat_ms: 1_000,
        peer_timeout_ms: 10_000,
        arena_bytes_max: 1 << 20,
        inline_bytes_max: 1 << 20,
        pending_max: 10,
        ring_bytes: 0,
    };
    let (outgoing, _unread) = mpsc::channel(2);
    let session = Arc::new(Session::new(
        (PathBuf::new(), Rank(0)),
        outgoing,
        claimed,
        (None, None),
        Recorder::new(None),
        SessionOptions::default(),
    ));
    let barrier = Operation::barrier(None);
    let submitted = session.submit_from(&barrier).expect("room");
    drop(session.draft(&barrier).expect("open"));
    assert!(session.pending.over().is_none(), "there was room to abstain");
    let rejected = session.submit_from(&barrier).expect_err("full");
    let over = session.pending.over().expect("the abstention could not be sent");
    for error in [rejected, over] {
        assert!(error.to_string().contains("2 messages wait for the sidecar, which does not read"), "{error}");
    }
    assert!(submitted.poll(), "it has failed with the session");
}
