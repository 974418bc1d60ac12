use ronde_rpc::convert::SESSION_TOKEN_BYTES;

use super::*;

/// A session whose sidecar reads nothing, and the messages to it.
fn unread_session(messages: usize) -> (Arc<Session>, mpsc::Receiver<v1::ClientMessage>) {
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
    let (outgoing, unread) = mpsc::channel(messages);
    let own = (PathBuf::new(), Rank(0));
    let session = Session::new(own, outgoing, claimed, (None, None), Recorder::new(None), SessionOptions::default());
    (Arc::new(session), unread)
}

/// A request that is held, and the promise of its result.
fn held(session: &Arc<Session>) -> (RequestId, Promise<ResultData>) {
    let mut draft = session.draft(&Operation::barrier(None)).expect("open");
    let request = draft.request.take().expect("a draft has a request");
    let resources = Resources { notify_flag: NotifyFlag::new(true), input: None, output: None };
    session.pending.insert_held(&request, resources).expect("room")
}

#[test]
fn a_held_request_is_withdrawn_in_silence_until_it_is_sent() {
    let (session, mut unread) = unread_session(8);
    let (id, promise) = held(&session);
    assert!(session.pending.fill(id, |_| ()), "somebody waits");
    session.withdraw(id, "its handle was dropped");
    assert!(unread.try_recv().is_err(), "the sidecar does not know it yet");
    let message = session.pending.release_held(id).expect("its waiter left while it was being sent");
    assert!(matches!(message, Message::Withdraw(v1::Withdraw { request, .. }) if request == id.0));
    drop(promise);
    let (id, _promise) = held(&session);
    assert!(session.pending.release_held(id).is_none(), "somebody waits");
    session.withdraw(id, "later");
    assert!(unread.try_recv().is_ok(), "it has been sent, so the sidecar is told");
}

#[test]
fn a_held_request_without_a_waiter_or_a_session_is_not_sent() {
    let (session, _unread) = unread_session(8);
    let (id, _promise) = held(&session);
    session.withdraw(id, "its handle was dropped");
    assert!(!session.pending.fill(id, |_| unreachable!("nobody waits")));
    assert!(session.pending.fail_held(id, &Error::Closed).is_none(), "it is removed");
    let (id, promise) = held(&session);
    session.end(&Error::Closed);
    assert!(matches!(promise.take(), Some(Err(Error::Closed))));
    assert!(!session.pending.fill(id, |_| unreachable!("the session is over")));
}

#[test]
fn the_waiter_of_a_held_request_receives_its_failure() {
    let (session, _unread) = unread_session(8);
    let (id, promise) = held(&session);
    let resources = session.pending.fail_held(id, &Error::argument("the copy failed")).expect("it was pending");
    assert!(resources.notify_flag.is_set(), "no thread waits, so the completion is to be counted");
    let error = promise.take().expect("an answer").expect_err("it failed");
    assert_eq!(error.to_string(), "the copy failed");
}

#[test]
fn a_full_queue_ends_the_session_when_other_ranks_depend_on_the_message() {
    let (session, _unread) = unread_session(2);
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
