//! Tests the client against a fake sidecar in the same thread, whose messages the test sends.

use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use ronde_rpc::v1::ronde_web_server::{RondeWeb, RondeWebServer};
use ronde_rpc::v1::{client_message, server_message};
use ronde_rpc::{v1, web};
use tokio::sync::mpsc;
use tokio::task::LocalSet;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::channel::Channel;
use super::{Client, Options};
use crate::error::Error;
use crate::operation::Operation;
use crate::tensor::TensorRef;

const TOKEN: [u8; 32] = [3; 32];
const SESSION: &[u8] = &[5; 16];

/// The test's side of the fake sidecar.
struct Sidecar {
    send: mpsc::Sender<Result<v1::ServerMessage, Status>>,
    received: mpsc::Receiver<v1::ClientMessage>,
    broken_calls: Arc<AtomicU32>,
}

type Outgoing = mpsc::Receiver<Result<v1::ServerMessage, Status>>;

#[derive(Clone)]
struct Fake {
    /// `None` once the rank is claimed.
    outgoing: Arc<Mutex<Option<Outgoing>>>,
    to_test: mpsc::Sender<v1::ClientMessage>,
    last: Arc<AtomicU32>,
    broken_calls: Arc<AtomicU32>,
}

#[tonic::async_trait]
impl RondeWeb for Fake {
    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Result<Response<v1::Description>, Status> {
        Err(Status::unimplemented("not tested"))
    }

    async fn status(&self, request: Request<v1::StatusRequest>) -> Result<Response<v1::StatusAnswer>, Status> {
        check_token(&request)?;
        Ok(Response::new(v1::StatusAnswer { json: "{\"job\":\"night\"}".to_owned() }))
    }

    type OpenStream = Pin<Box<dyn Stream<Item = Result<v1::ServerMessage, Status>> + Send>>;

    async fn open(&self, request: Request<v1::Claim>) -> Result<Response<Self::OpenStream>, Status> {
        check_token(&request)?;
        let outgoing = self.outgoing.lock().expect("no panic").take();
        let outgoing = outgoing.ok_or_else(|| Status::already_exists("rank 1 is claimed by a live session"))?;
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }

    async fn say(&self, request: Request<v1::SayRequest>) -> Result<Response<v1::SayAnswer>, Status> {
        check_token(&request)?;
        let v1::SayRequest { session_token, number, messages } = request.into_inner();
        assert_eq!(session_token, SESSION);
        let last = u64::from(self.last.load(Ordering::Relaxed));
        assert!(number == last + 1 || number == last, "calls are numbered");
        if number > last {
            self.last.fetch_add(1, Ordering::Relaxed);
            for message in messages {
                assert!(self.to_test.send(message).await.is_ok(), "the test listens");
            }
        }
        // The answer is lost, not the call.
        match self.broken_calls.load(Ordering::Relaxed) {
            0 => Ok(Response::new(v1::SayAnswer {})),
            left => {
                self.broken_calls.store(left - 1, Ordering::Relaxed);
                Err(Status::unavailable("the connection broke"))
            }
        }
    }
}

fn check_token<T>(request: &Request<T>) -> Result<(), Status> {
    let given = request.metadata().get("authorization").and_then(|value| web::token_in(value.as_bytes()));
    let known = given.is_some_and(|token| token.as_bytes() == TOKEN);
    if known { Ok(()) } else { Err(Status::unauthenticated("unknown token")) }
}

fn pair() -> (Channel, Sidecar) {
    let ((send, outgoing), (to_test, received)) = (mpsc::channel(64), mpsc::channel(4_096));
    let broken_calls: Arc<AtomicU32> = Arc::default();
    let outgoing = Arc::new(Mutex::new(Some(outgoing)));
    let fake = Fake { outgoing, to_test, last: Arc::default(), broken_calls: Arc::clone(&broken_calls) };
    (Channel::new(RondeWebServer::new(fake)), Sidecar { send, received, broken_calls })
}

impl Sidecar {
    async fn send(&self, message: server_message::Message) {
        let message = v1::ServerMessage { message: Some(message) };
        assert!(self.send.send(Ok(message)).await.is_ok(), "the client listens");
    }

    /// Accepts the claim and begins the epoch.
    async fn begin(&self) {
        let claimed = v1::Claimed {
            session_token: SESSION.into(),
            protocol: 1,
            heartbeat_ms: 250,
            peer_timeout_ms: 5_000,
            arena_bytes_max: 1 << 20,
            inline_bytes_max: 1 << 10,
            pending_max: 3,
            ring_bytes: 0,
            device_bytes_max: 0,
        };
        self.send(server_message::Message::Claimed(claimed)).await;
        let began = v1::EpochBegan {
            epoch: 1,
            rank: 1,
            size: 2,
            local_size: 1,
            cross_size: 2,
            cross_rank: 1,
            ..Default::default()
        };
        self.send(server_message::Message::EpochBegan(began)).await;
    }

    /// The next message except heartbeats.
    async fn next(&mut self) -> client_message::Message {
        loop {
            let received = self.received.recv().await.and_then(|message| message.message).expect("the client sends");
            if !matches!(received, client_message::Message::Heartbeat(_)) {
                return received;
            }
        }
    }

    async fn next_submit(&mut self) -> v1::Submit {
        match self.next().await {
            client_message::Message::Submit(submit) => submit,
            other => panic!("{other:?}"),
        }
    }

    /// Completes an all-reduce of two ranks with equal tensors.
    async fn double(&mut self) {
        let submit = self.next_submit().await;
        let Some(v1::place::Place::Inline(data)) = submit.input.and_then(|place| place.place) else {
            panic!("not inline");
        };
        let floats = data.chunks_exact(4).map(|float| f32::from_le_bytes(float.try_into().expect("four bytes")));
        let doubled: Vec<u8> = floats.flat_map(|float| (2.0 * float).to_le_bytes()).collect();
        for part in doubled.chunks(4) {
            self.send(server_message::Message::ResultPart(v1::ResultPart {
                request: submit.request,
                data: part.to_vec().into(),
            }))
            .await;
        }
        let completed =
            v1::Completed { request: submit.request, shape: submit.shape, dtype: submit.dtype, ..Default::default() };
        self.send(server_message::Message::Completed(completed)).await;
    }
}

fn options() -> Options {
    Options::new("http://127.0.0.1:7600/", "night", 1, &TOKEN).expect("good ones")
}

/// A client in an epoch, and its sidecar.
async fn connected() -> (Client, Sidecar) {
    let (channel, sidecar) = pair();
    let (client, ()) = tokio::join!(Client::connect_over(channel, options()), sidecar.begin());
    (client.expect("connected"), sidecar)
}

async fn in_thread(test: impl Future<Output = ()>) {
    LocalSet::new().run_until(test).await;
}

#[tokio::test(start_paused = true)]
async fn a_tensor_and_its_result_travel_inside_messages() {
    in_thread(async {
        let (client, mut sidecar) = connected().await;
        assert_eq!((client.rank(), client.size(), client.view().cross_size), (1, 2, 2));
        let shape = [3];
        let tensor = TensorRef::of(&shape, &[1.0_f32, 2.0, 4.0]).expect("a tensor");
        let (sum, ()) = tokio::join!(client.allreduce("t", tensor, ronde_wire::ReduceOp::Sum), sidecar.double());
        assert_eq!(sum.expect("a result").to_vec::<f32>().expect("floats"), [2.0, 4.0, 8.0]);
        assert_eq!(client.status().await.expect("a page"), "{\"job\":\"night\"}");
        let end = async {
            assert!(matches!(sidecar.next().await, client_message::Message::Goodbye(_)));
            drop(sidecar);
        };
        tokio::join!(client.close(), end);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_answer_is_lost_is_retried_and_takes_effect_once() {
    in_thread(async {
        let (client, mut sidecar) = connected().await;
        sidecar.broken_calls.store(2, Ordering::Relaxed);
        let (first, second) = (client.barrier("a"), client.barrier("b"));
        let answer = async {
            for name in ["barrier.a", "barrier.b"] {
                let submit = sidecar.next_submit().await;
                assert_eq!(submit.name, name);
                let (request, dtype) = (submit.request, v1::DType::DtypeU8.into());
                sidecar
                    .send(server_message::Message::Completed(v1::Completed {
                        request,
                        dtype,
                        shape: vec![0],
                        ..Default::default()
                    }))
                    .await;
            }
        };
        let (first, second, ()) = tokio::join!(first, second, answer);
        first.and(second).expect("both pass");
        // One answer too many is lost: the session ends, and the error names the sidecar.
        sidecar.broken_calls.store(3, Ordering::Relaxed);
        let error = client.barrier("c").await.expect_err("no message arrives");
        assert!(error.to_string().contains("http://127.0.0.1:7600 is gone: the connection broke"), "{error}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_silent_sidecar_ends_the_session() {
    in_thread(async {
        let (client, _sidecar) = connected().await;
        let error = client.barrier(None).await.expect_err("no answer");
        assert!(error.to_string().contains("silent for 5.0 s, the peer timeout"), "{error}");
        assert!(client.over().is_some());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_epoch_reaches_every_waiter_and_the_close_message_is_still_sent() {
    in_thread(async {
        let (client, mut sidecar) = connected().await;
        let waiting = client.barrier("w");
        let ending = async {
            sidecar.next_submit().await;
            let failure =
                v1::Failure { cause: 3, rank: Some(0), reason: "rank 0 is gone".to_owned(), ..Default::default() };
            sidecar
                .send(server_message::Message::EpochEnded(v1::EpochEnded { epoch: 1, failure: Some(failure) }))
                .await;
        };
        let (waited, ()) = tokio::join!(waiting, ending);
        assert!(waited.expect_err("over").to_string().contains("rank 0 is gone"));
        assert!(client.barrier("x").await.expect_err("over").to_string().contains("rank 0 is gone"));
        drop(client);
        assert!(matches!(sidecar.next().await, client_message::Message::Goodbye(_)));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_operation_rejected_by_a_limit_is_reported_to_the_other_ranks() {
    in_thread(async {
        let (client, mut sidecar) = connected().await;
        let shape = [300];
        let large = TensorRef::of(&shape, &[0.0_f32; 300]).expect("a tensor");
        let error = client.broadcast("large", large, 0).await.expect_err("over 1 KiB");
        assert!(matches!(&error, Error::Limit { reason } if reason.contains("inline_bytes_max = 1024")), "{error}");
        match sidecar.next().await {
            client_message::Message::Abstain(abstain) => assert_eq!(abstain.name, "broadcast.large"),
            other => panic!("{other:?}"),
        }
        let handles = client.submit_group("g", &[Operation::barrier(None), Operation::barrier(None)]).await;
        drop(handles.expect("two are admitted"));
        let submitted = [sidecar.next_submit().await.request, sidecar.next_submit().await.request];
        for request in submitted {
            match sidecar.next().await {
                client_message::Message::Withdraw(withdraw) => assert_eq!(withdraw.request, request),
                other => panic!("{other:?}"),
            }
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_rejected_claim_and_a_late_rank_are_named_in_the_error() {
    in_thread(async {
        let (channel, _sidecar) = pair();
        let unauthenticated = Options::new("http://127.0.0.1:7600", "night", 1, &[4; 32]).expect("good ones");
        let error = Client::connect_over(channel.clone(), unauthenticated).await.expect_err("another token");
        assert!(
            matches!(&error, Error::WebClaim { rank: 1, reason, .. } if reason.contains("unknown token")),
            "{error}"
        );
        // The first claim gets no answer; the second one finds the rank claimed.
        let error = Client::connect_over(channel.clone(), options()).await.expect_err("no answer");
        assert!(error.to_string().contains("no answer within 10 s"), "{error}");
        let error = Client::connect_over(channel, options()).await.expect_err("held");
        assert!(error.to_string().contains("claimed by a live session"), "{error}");

        let (channel, sidecar) = pair();
        let mut late = options();
        late.start_timeout = std::time::Duration::from_secs(1);
        let sending = async {
            let claimed = v1::Claimed {
                session_token: SESSION.into(),
                protocol: 1,
                heartbeat_ms: 250,
                peer_timeout_ms: 5_000,
                pending_max: 1,
                ..Default::default()
            };
            sidecar.send(server_message::Message::Claimed(claimed)).await;
            sidecar
                .send(server_message::Message::Notice(v1::Notice {
                    text: "rank 0 has not attached".to_owned(),
                    ..Default::default()
                }))
                .await;
        };
        let (error, ()) = tokio::join!(Client::connect_over(channel, late), sending);
        let error = error.expect_err("no epoch");
        assert!(matches!(&error, Error::Start { missing, .. } if missing == "rank 0 has not attached"), "{error}");
    })
    .await;
}

#[test]
fn options_report_every_problem() {
    let Err(Error::Settings { problems }) = Options::new("127.0.0.1:7600", "Night!", 4_096, &[0; 31]) else {
        panic!("not refused");
    };
    for (problem, words) in problems.iter().zip(["the URL", "the rank is 4096", "the job", "31 bytes"]) {
        assert!(problem.contains(words), "{problems:?}");
    }
    assert_eq!(problems.len(), 4);
    assert!(!format!("{:?}", options()).contains("3, 3"), "the token is not shown");
}
