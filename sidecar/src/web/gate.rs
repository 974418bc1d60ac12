//! Classifies an HTTP request by its head, before its body is read: a call with a worker's token, a browser's CORS
//! preflight, or nothing that is answered here.

use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, AUTHORIZATION, CONNECTION,
    CONTENT_LENGTH, CONTENT_TYPE, ORIGIN, VARY, WWW_AUTHENTICATE,
};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, Response, StatusCode};
use ronde_rpc::{RankToken, web};
use ronde_wire::{Rank, limits};
use tonic::Status;
use tonic::body::Body;

/// Decides who may call.
pub(super) struct Gate {
    tokens: Vec<(Rank, RankToken)>,
    origins: Vec<String>,
}

/// The rank whose token a call carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller(pub(super) Rank);

/// A request that is accepted.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// A call, whose body is read next.
    Call(Caller),
    /// A CORS preflight of a browser.
    Preflight,
}

/// Why a request is not answered.
#[derive(Debug)]
pub(super) struct Refusal {
    /// The HTTP status.
    http: StatusCode,
    /// The gRPC status.
    status: Status,
}

impl Gate {
    /// Creates a gate for the workers of these ranks, and pages of these origins.
    pub(super) fn new(tokens: impl IntoIterator<Item = (Rank, RankToken)>, origins: Vec<String>) -> Self {
        Self { tokens: tokens.into_iter().collect(), origins }
    }

    /// The ranks that may call.
    pub(super) fn ranks(&self) -> impl Iterator<Item = Rank> {
        self.tokens.iter().map(|(rank, _)| *rank)
    }

    /// Checks a head.
    ///
    /// # Errors
    /// The first reason for which it is rejected.
    pub(super) fn judge(&self, head: &Parts) -> Result<Entry, Refusal> {
        let is_asked_by_page = self.check_origin(head)?;
        if !PATHS.contains(&head.uri.path()) {
            let reason = "this listener serves only the calls of ronde.v1.RondeWeb; see docs/WEB.md";
            return Err(Refusal::new(StatusCode::NOT_FOUND, Status::unimplemented(reason)));
        }
        let asks = head.method == Method::OPTIONS && head.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        if is_asked_by_page && asks {
            return Ok(Entry::Preflight);
        }
        if head.method != Method::POST {
            let reason = "a call is a POST";
            return Err(Refusal::new(StatusCode::METHOD_NOT_ALLOWED, Status::unimplemented(reason)));
        }
        if !is_grpc_web(head) {
            let reason =
                "a call has the content type application/grpc-web+proto; text and other protocols are not supported";
            return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Status::unimplemented(reason)));
        }
        let caller = self.caller(head)?;
        let length = head.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if length.is_some_and(|length| length > limits::WEB_BODY_BYTES_MAX as u64) {
            return Err(Refusal::too_large());
        }
        Ok(Entry::Call(caller))
    }

    /// Answers a CORS preflight.
    pub(super) fn allow(&self, head: &Parts) -> Response<Body> {
        let mut answer = Response::new(Body::empty());
        *answer.status_mut() = StatusCode::NO_CONTENT;
        let headers = answer.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("POST"));
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static(HEADERS_OF_CALLS));
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        self.open_to_page(head, answer)
    }

    /// Lets the calling page read the answer, if it may call.
    pub(super) fn open_to_page(&self, head: &Parts, mut answer: Response<Body>) -> Response<Body> {
        let origin = head.headers.get(ORIGIN).filter(|origin| self.knows_origin(origin));
        if let Some(origin) = origin {
            let headers = answer.headers_mut();
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("grpc-status,grpc-message"));
            headers.insert(VARY, HeaderValue::from_static("origin"));
        }
        answer
    }

    /// Returns the origin of the calling page, if there is one; it must be allowed.
    fn check_origin(&self, head: &Parts) -> Result<bool, Refusal> {
        let Some(origin) = head.headers.get(ORIGIN) else { return Ok(false) };
        if self.knows_origin(origin) {
            return Ok(true);
        }
        let reason = "pages of this origin may not call; --web-origin lists those that may";
        Err(Refusal::new(StatusCode::FORBIDDEN, Status::permission_denied(reason)))
    }

    fn knows_origin(&self, origin: &HeaderValue) -> bool {
        self.origins.iter().any(|known| known.as_bytes() == origin.as_bytes())
    }

    fn caller(&self, head: &Parts) -> Result<Caller, Refusal> {
        let refuse = |reason| Err(Refusal::new(StatusCode::UNAUTHORIZED, Status::unauthenticated(reason)));
        let Some(value) = head.headers.get(AUTHORIZATION) else {
            return refuse(
                "a call carries a rank's token: authorization: Bearer and the 64 hexadecimal digits of its file",
            );
        };
        let Some(token) = web::token_in(value.as_bytes()) else {
            return refuse("the authorization is not Bearer and the 64 hexadecimal digits of a rank's token file");
        };
        // Compared with all of them, so that the time reveals nothing.
        let found =
            self.tokens.iter().fold(None, |found, (rank, known)| if *known == token { Some(*rank) } else { found });
        match found {
            Some(rank) => Ok(Caller(rank)),
            None => refuse(
                "the token is of no rank of this sidecar; give the content of the file that it wrote for the rank",
            ),
        }
    }
}

impl Refusal {
    /// Builds a refusal.
    pub(super) fn new(http: StatusCode, status: Status) -> Self {
        Self { http, status }
    }

    /// Refuses a body that is too large.
    pub(super) fn too_large() -> Self {
        let reason =
            format!("a call has at most {} bytes; use shared memory for large tensors", limits::WEB_BODY_BYTES_MAX);
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, Status::resource_exhausted(reason))
    }

    /// Builds the answer: a gRPC status for gRPC clients, a line of text for others. The connection closes, because a
    /// body that may follow the head is not read.
    pub(super) fn answer(self, head: &Parts) -> Response<Body> {
        let mut answer: Response<Body> = self.status.clone().into_http();
        *answer.status_mut() = self.http;
        let content_type = if is_grpc_web(head) {
            CONTENT_TYPE_OF_CALLS
        } else {
            *answer.body_mut() = Body::new(axum::body::Body::from(format!("{}\n", self.status.message())));
            "text/plain; charset=utf-8"
        };
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
        if self.http == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        answer
    }
}

/// Returns whether a call carries messages of a session.
pub(super) fn has_session_messages(head: &Parts) -> bool {
    head.uri.path() == SESSION_MESSAGES
}

fn is_grpc_web(head: &Parts) -> bool {
    let given = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    given.is_some_and(|given| given == b"application/grpc-web" || given == CONTENT_TYPE_OF_CALLS.as_bytes())
}

const CONTENT_TYPE_OF_CALLS: &str = "application/grpc-web+proto";
/// The headers that clients of gRPC-Web send besides those that every page may send.
const HEADERS_OF_CALLS: &str = "authorization,content-type,grpc-timeout,x-grpc-web,x-user-agent";
/// All paths that are served.
const PATHS: [&str; 4] =
    ["/ronde.v1.RondeWeb/Describe", "/ronde.v1.RondeWeb/Open", SESSION_MESSAGES, "/ronde.v1.RondeWeb/Status"];
const SESSION_MESSAGES: &str = "/ronde.v1.RondeWeb/Say";

#[cfg(test)]
mod tests {
    use axum::http::Request;
    use ronde_rpc::convert::TOKEN_BYTES;

    use super::*;

    const PAGE: &str = "https://lab.example";

    fn token(byte: u8) -> RankToken {
        RankToken::new(&[byte; TOKEN_BYTES]).expect("of the right length")
    }

    fn gate() -> Gate {
        Gate::new([(Rank(4), token(4)), (Rank(5), token(5))], vec![PAGE.to_owned()])
    }

    /// Method, path, other headers; the status and a part of the refusal.
    type Case<'a> = (Method, &'a str, &'a [(&'static str, &'a str)], u16, &'a str);

    /// A good call with some headers replaced; an empty value removes one.
    fn head(method: Method, path: &str, others: &[(&'static str, &str)]) -> Parts {
        let own = [("content-type", CONTENT_TYPE_OF_CALLS.to_owned()), ("authorization", web::bearer(&token(5)))];
        let mut request = Request::new(());
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().expect("a path");
        let headers = request.headers_mut();
        for (name, value) in own.into_iter().chain(others.iter().map(|(name, value)| (*name, (*value).to_owned()))) {
            headers.insert(name, value.parse().expect("a value"));
            if value.is_empty() {
                headers.remove(name);
            }
        }
        request.into_parts().0
    }

    fn judged(method: Method, path: &str, others: &[(&'static str, &str)]) -> Result<Entry, (u16, String)> {
        gate()
            .judge(&head(method, path, others))
            .map_err(|refusal| (refusal.http.as_u16(), refusal.status.message().to_owned()))
    }

    #[test]
    fn a_call_is_authenticated_by_its_token() {
        for path in PATHS {
            assert_eq!(judged(Method::POST, path, &[]), Ok(Entry::Call(Caller(Rank(5)))));
            let other = web::bearer(&token(4));
            assert_eq!(judged(Method::POST, path, &[("authorization", &other)]), Ok(Entry::Call(Caller(Rank(4)))));
        }
        let plain = [("content-type", "application/grpc-web"), ("content-length", "100")];
        assert!(judged(Method::POST, PATHS[2], &plain).is_ok());
    }

    #[test]
    fn invalid_requests_are_rejected_by_their_head() {
        let foreign = web::bearer(&token(6));
        let large = (limits::WEB_BODY_BYTES_MAX + 1).to_string();
        let cases: [Case<'_>; 14] = [
            (Method::POST, "/", &[], 404, "only the calls"),
            (Method::POST, "/ronde.v1.Ronde/Session", &[], 404, "only the calls"),
            (Method::POST, "/ronde.v1.RondeWeb/Open/", &[], 404, "only the calls"),
            (Method::GET, PATHS[0], &[], 405, "a POST"),
            (Method::OPTIONS, PATHS[0], &[("access-control-request-method", "POST")], 405, "a POST"),
            (Method::POST, PATHS[0], &[("content-type", "")], 415, "content type"),
            (Method::POST, PATHS[0], &[("content-type", "application/grpc")], 415, "content type"),
            (Method::POST, PATHS[0], &[("content-type", "application/grpc-web-text")], 415, "text"),
            (Method::POST, PATHS[0], &[("authorization", "")], 401, "carries a rank's token"),
            (Method::POST, PATHS[0], &[("authorization", "Bearer 00")], 401, "64 hexadecimal digits"),
            (Method::POST, PATHS[0], &[("authorization", &foreign)], 401, "of no rank of this sidecar"),
            (Method::POST, PATHS[0], &[("content-length", &large)], 413, "at most 1114112 bytes"),
            (Method::POST, PATHS[0], &[("origin", "https://evil.example")], 403, "--web-origin"),
            (Method::POST, PATHS[0], &[("origin", "null")], 403, "--web-origin"),
        ];
        for (method, path, headers, status, words) in cases {
            let (found, reason) = judged(method, path, headers).expect_err(words);
            assert!(found == status && reason.contains(words), "{path} {headers:?}: {found} {reason}");
        }
    }

    #[test]
    fn pages_of_a_named_origin_may_ask_and_read() {
        let asking = [("origin", PAGE), ("access-control-request-method", "POST"), ("authorization", "")];
        assert_eq!(judged(Method::OPTIONS, PATHS[1], &asking), Ok(Entry::Preflight));
        let asking = head(Method::OPTIONS, PATHS[1], &asking);
        let answer = gate().allow(&asking);
        assert_eq!(answer.status(), StatusCode::NO_CONTENT);
        assert_eq!(answer.headers()[ACCESS_CONTROL_ALLOW_ORIGIN], PAGE);
        assert!(answer.headers()[ACCESS_CONTROL_ALLOW_HEADERS].to_str().expect("text").contains("authorization"));
        // No other page may read anything, not even a refusal.
        let foreign = head(Method::POST, PATHS[1], &[("origin", "https://evil.example")]);
        let refused = gate().judge(&foreign).expect_err("not named").answer(&foreign);
        let refused = gate().open_to_page(&foreign, refused);
        assert_eq!(refused.headers().get(ACCESS_CONTROL_ALLOW_ORIGIN), None);
    }

    #[test]
    fn a_refusal_speaks_the_language_of_the_request() {
        let answer = |others: &[(&'static str, &str)]| {
            let head = head(Method::POST, PATHS[0], others);
            gate().judge(&head).expect_err("no token").answer(&head)
        };
        let spoken = answer(&[("authorization", "")]);
        assert_eq!(spoken.status(), StatusCode::UNAUTHORIZED);
        assert_eq!(spoken.headers()["content-type"], CONTENT_TYPE_OF_CALLS);
        assert_eq!(spoken.headers()["grpc-status"], "16");
        assert_eq!(
            (&spoken.headers()["connection"], &spoken.headers()["www-authenticate"]),
            (&HeaderValue::from_static("close"), &HeaderValue::from_static("Bearer"))
        );
        assert_eq!(answer(&[("content-type", "text/html")]).headers()["content-type"], "text/plain; charset=utf-8");
    }
}
