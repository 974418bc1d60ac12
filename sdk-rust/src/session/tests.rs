use ronde_rpc::convert::SESSION_TOKEN_BYTES;

use super::*;

/// A session whose sidecar reads nothing, and the messages to it.
pub(crate) fn unread_session(messages: usize) -> (Arc<Session>, mpsc::Receiver<v1::ClientMessage>) {
    let claimed = Claimed {
        session_token: [0; SESSION_TOKEN_BYTES],
        protocol: 1,
        heartbeat_ms: 1_000,
        peer_timeout_ms: 10_000,
        arena_bytes_max: 1 << 20,
        inline_bytes_max: 1 << 20,
        pending_max: 10,
        ring_bytes: 0,
        device_bytes_max: 0,
    };
    let (outgoing, unread) = mpsc::channel(messages);
    let own = (PathBuf::new(), Rank(0));
    let session = Session::new(own, outgoing, claimed, (None, None), Recorder::new(None), SessionOptions::default());
    (Arc::new(session), unread)
}

/// An operation that is held, as one whose input is on its way from a device.
fn held(session: &Arc<Session>, operation: &Operation<'_>) -> (RequestId, Promise<ResultData>) {
    let mut draft = session.draft(operation).expect("open");
    let request = draft.request.take().expect("a draft has a request");
    let resources =
        Resources { notify_flag: NotifyFlag::new(true), input: None, output: None, flight: Flight::begin() };
    let (id, promise) = session.pending.insert_held(&request, resources).expect("room");
    session.line.lock().push(id, Order::of(&request.collective), None);
    (id, promise)
}

fn unsent() -> Unsent {
    Unsent { plugin: None, place: Place::None, site: None, input: None }
}

/// The input of a held request arrives.
fn arrive(session: &Session, id: RequestId) {
    session.line.lock().fill(id, unsent());
    session.send_waiting();
}

/// The messages to the sidecar since the last call, in short.
fn sent(unread: &mut mpsc::Receiver<v1::ClientMessage>) -> Vec<String> {
    let messages = std::iter::from_fn(|| unread.try_recv().ok()).filter_map(|message| message.message);
    let text = |message| match message {
        Message::Submit(submit) => format!("submit {}", submit.request),
        Message::Withdraw(withdrawal) => format!("withdraw {}", withdrawal.request),
        Message::Abstain(abstention) => format!("abstain: {}", abstention.reason),
        other => format!("{other:?}"),
    };
    messages.map(text).collect()
}

#[test]
fn withdrawing_a_held_request_notifies_the_other_ranks_at_once() {
    let (session, mut unread) = unread_session(8);
    let (id, promise) = held(&session, &Operation::barrier(None));
    session.withdraw(id, "its handle was dropped");
    assert_eq!(sent(&mut unread), ["abstain: its handle was dropped"]);
    assert!(promise.take().is_some_and(|outcome| outcome.is_err()), "its waiter is gone");
    arrive(&session, id);
    assert!(session.pending.fail_held(id, &Error::Closed).is_none(), "nobody is notified twice");
    assert!(sent(&mut unread).is_empty(), "it is not sent any more");
}

#[test]
fn a_request_that_is_withdrawn_while_it_is_sent_is_withdrawn_afterwards() {
    let (session, mut unread) = unread_session(8);
    let (id, _promise) = held(&session, &Operation::barrier(None));
    assert!(session.pending.begin_send(id, |_| ()).is_some());
    session.withdraw(id, "its handle was dropped");
    assert!(sent(&mut unread).is_empty(), "the sidecar does not know it yet");
    let message = session.pending.end_send(id).expect("its waiter left while it was being sent");
    assert!(matches!(message, Message::Withdraw(v1::Withdraw { request, .. }) if request == id.0));
    let (id, _promise) = held(&session, &Operation::barrier(None));
    arrive(&session, id);
    session.withdraw(id, "later");
    assert_eq!(sent(&mut unread), [format!("submit {}", id.0), format!("withdraw {}", id.0)]);
}

#[test]
fn a_held_request_is_not_sent_when_the_session_is_over() {
    let (session, mut unread) = unread_session(8);
    let (id, promise) = held(&session, &Operation::barrier(None));
    session.end(&Error::Closed);
    assert!(matches!(promise.take(), Some(Err(Error::Closed))));
    arrive(&session, id);
    assert!(sent(&mut unread).is_empty());
}

#[test]
fn a_result_that_cannot_be_mapped_has_the_reason_of_the_end() {
    let (session, _unread) = unread_session(8);
    let refused = || Error::Protocol { reason: "there is no result segment 7".to_owned() };
    assert!(matches!(session.reason_of(refused()), Error::Protocol { .. }));
    session.end(&Error::Closed);
    assert!(matches!(session.reason_of(refused()), Error::Closed));
}

#[test]
fn the_waiter_of_a_held_request_gets_its_error() {
    let (session, _unread) = unread_session(8);
    let (id, promise) = held(&session, &Operation::barrier(None));
    let (_, resources) = session.pending.fail_held(id, &Error::argument("the copy failed")).expect("it was pending");
    assert!(resources.notify_flag.is_set(), "no thread waits, so the completion is to be counted");
    let error = promise.take().expect("an answer").expect_err("it failed");
    assert_eq!(error.to_string(), "the copy failed");
}

#[test]
fn a_join_waits_for_held_requests_and_admits_later_ones_after_it() {
    let (session, mut unread) = unread_session(8);
    let (first, _one) = held(&session, &Operation::barrier(None));
    let (second, _two) = held(&session, &Operation::barrier(None));
    let _join = session.submit_from(&Operation::join()).expect("it is queued");
    let _later = session.submit_from(&Operation::barrier(None)).expect("it is queued");
    arrive(&session, second);
    assert_eq!(sent(&mut unread), [format!("submit {}", second.0)]);
    session.withdraw(first, "its handle was dropped");
    let (join, later) = (second.0 + 1, second.0 + 2);
    let after = ["abstain: its handle was dropped".to_owned(), format!("submit {join}"), format!("submit {later}")];
    assert_eq!(sent(&mut unread), after);
}

#[test]
fn a_removal_waits_for_held_requests_and_other_operations_do_not() {
    let (session, mut unread) = unread_session(8);
    let (first, _one) = held(&session, &Operation::barrier(None));
    let barrier = session.submit_from(&Operation::barrier(None)).expect("open");
    assert_eq!(sent(&mut unread), [format!("submit {}", first.0 + 1)]);
    let removal = session.submit_from(&Operation::remove_process_set(SetId(3))).expect("it is queued");
    assert!(sent(&mut unread).is_empty());
    arrive(&session, first);
    assert_eq!(sent(&mut unread), [format!("submit {}", first.0), format!("submit {}", first.0 + 2)]);
    drop((barrier, removal));
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
