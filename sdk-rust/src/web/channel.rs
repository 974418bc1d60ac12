//! [`Caller`]: makes gRPC-Web calls with the rank's token.

use ronde_rpc::v1::ronde_web_client::RondeWebClient;
use ronde_rpc::{RankToken, web};
use ronde_wire::limits;
use tonic::metadata::{Ascii, MetadataValue};

use crate::error::Error;

/// The platform's `fetch`.
#[cfg(target_arch = "wasm32")]
pub(super) type Channel = tonic_web_wasm_client::Client;
/// A service instead of a sidecar, for tests.
#[cfg(not(target_arch = "wasm32"))]
pub(super) type Channel = tower::util::BoxCloneService<
    tonic::codegen::http::Request<tonic::body::Body>,
    tonic::codegen::http::Response<tonic::body::Body>,
    std::convert::Infallible,
>;

/// Makes calls for a rank.
#[derive(Clone)]
pub(super) struct Caller {
    client: RondeWebClient<Channel>,
    authorization: MetadataValue<Ascii>,
}

impl Caller {
    pub(super) fn new(channel: Channel, token: &RankToken) -> Result<Self, Error> {
        let client = RondeWebClient::new(channel)
            .max_decoding_message_size(limits::WEB_BODY_BYTES_MAX + STATUS_BYTES_MAX)
            .max_encoding_message_size(limits::WEB_BODY_BYTES_MAX);
        // Cannot fail: the token is written in digits.
        let mut authorization: MetadataValue<Ascii> =
            web::bearer(token).parse().map_err(|_| Error::argument("the token cannot be sent in an HTTP header"))?;
        authorization.set_sensitive(true);
        Ok(Self { client, authorization })
    }

    /// A client, and a request with the token.
    pub(super) fn call<T>(&self, message: T) -> (RondeWebClient<Channel>, tonic::Request<T>) {
        let mut request = tonic::Request::new(message);
        request.metadata_mut().insert("authorization", self.authorization.clone());
        (self.client.clone(), request)
    }
}

/// A status page lists every operation that waits, and every rank of a large job.
const STATUS_BYTES_MAX: usize = 16 << 20;
