//! The methods of the service `ronde.v1.RondeWeb`.

use std::sync::Arc;
use std::time::Duration;

use ronde_rpc::v1;
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::ronde_web_server::RondeWeb;
use ronde_wire::Rank;
use tokio::time::timeout;
use tonic::{Request, Response, Status};

use super::gate::Caller;
use super::sessions::{MessageStream, Sessions, inbox};
use crate::admin::Pages;
use crate::session::command::Access;
use crate::session::service::Service;

/// The implementation of the service.
#[derive(Clone)]
pub(super) struct Calls {
    service: Arc<Service>,
    pages: Pages,
    sessions: Sessions,
}

impl Calls {
    /// Creates the service from the sessions of a gRPC service and the admin pages.
    pub(super) fn new(service: Arc<Service>, pages: Pages) -> Self {
        Self { service, pages, sessions: Sessions::default() }
    }

    /// Returns the open sessions.
    pub(super) fn sessions(&self) -> &Sessions {
        &self.sessions
    }
}

#[tonic::async_trait]
impl RondeWeb for Calls {
    async fn describe(&self, request: Request<v1::DescribeRequest>) -> Result<Response<v1::Description>, Status> {
        caller(&request)?;
        Ok(Response::new(self.service.description.clone()))
    }

    async fn status(&self, request: Request<v1::StatusRequest>) -> Result<Response<v1::StatusAnswer>, Status> {
        caller(&request)?;
        let page = timeout(STATUS_TIMEOUT, self.pages.status()).await;
        let page =
            page.map_err(|_| Status::unavailable("the sidecar's control thread does not answer; see its log"))?;
        let page = page.ok_or_else(|| Status::unavailable("the sidecar is ending"))?;
        let json = serde_json::to_string(&page).map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(v1::StatusAnswer { json }))
    }

    type OpenStream = MessageStream;

    async fn open(&self, request: Request<v1::Claim>) -> Result<Response<MessageStream>, Status> {
        let rank = caller(&request)?;
        let claim = request.into_inner();
        if claim.worker != rank.0 {
            return Err(Status::permission_denied(format!(
                "the call carries the token of {rank}, but claims worker {}; call with the token of the rank",
                claim.worker
            )));
        }
        let (inbox, incoming) = inbox();
        // The channel is new: there is room.
        let _ = inbox.try_send(Ok(vec![v1::ClientMessage { message: Some(client_message::Message::Claim(claim)) }]));
        let outgoing = self.service.open_session(Access::Web, Box::pin(incoming), None);
        Ok(Response::new(MessageStream::new(&self.sessions, rank, inbox, outgoing)))
    }

    async fn say(&self, request: Request<v1::SayRequest>) -> Result<Response<v1::SayAnswer>, Status> {
        let rank = caller(&request)?;
        let v1::SayRequest { session_token, number, messages } = request.into_inner();
        let session = self.sessions.of(&session_token, rank)?;
        match timeout(RECEIVE_TIMEOUT, session.receive(number, messages)).await {
            Ok(received) => received.map(|()| Response::new(v1::SayAnswer {})),
            Err(_) => Err(Status::unavailable("the sidecar's control thread accepts no messages; see its log")),
        }
    }
}

/// Returns the rank whose token the head carried.
fn caller<T>(request: &Request<T>) -> Result<Rank, Status> {
    let caller = request.extensions().get::<Caller>();
    caller.map(|Caller(rank)| *rank).ok_or_else(|| Status::unauthenticated("the call has not passed the gate"))
}

/// How long the control thread and the lanes may take to report their state.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the control thread may take to accept messages.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(5);
