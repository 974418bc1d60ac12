//! Input from clients of the gRPC-Web listener: the token in a head, and bodies before they are decoded.

use ronde_fuzz::{Outcome, Target};
use ronde_rpc::v1::client_message::Message;
use ronde_rpc::{RankToken, ring, v1, web};
use ronde_wire::limits;

/// An accepted body has no more messages than a call may have, and the size that was counted.
pub(crate) fn web_bodies() -> Target {
    let release = |request| v1::ClientMessage { message: Some(Message::Release(v1::Release { request })) };
    let request = |count| v1::SayRequest {
        session_token: vec![5; 16].into(),
        number: 7,
        messages: (0..count).map(release).collect(),
    };
    let framed = |message: &v1::SayRequest| {
        let mut bytes = Vec::new();
        ring::encode(message, &mut bytes);
        let length = u32::try_from(bytes.len()).expect("small");
        [&[0][..], &length.to_be_bytes(), &bytes].concat()
    };
    let seeds = vec![framed(&request(0)), framed(&request(3)), framed(&request(200))];
    Target::new("web_bodies", seeds, move |bytes| {
        if let Err(error) = web::check_body(bytes) {
            return Outcome::refused(&error);
        }
        let request: v1::SayRequest = match ring::decode(&bytes[5..]) {
            Ok(request) => request,
            Err(error) => return Outcome::refused(&error),
        };
        assert!(request.messages.len() <= limits::WEB_MESSAGES_MAX + 16, "more than were counted");
        let counted: usize = request.messages.iter().map(web::element_bytes).sum();
        assert!(framed(&request).len() <= counted + request.session_token.len() + 64, "more bytes than were counted");
        Outcome::read(&request.messages.len().checked_ilog2())
    })
}

#[test]
fn fuzz_web_bodies() {
    web_bodies().run();
}

/// A decoded token has the same encoding but for the case of its letters.
pub(crate) fn web_tokens() -> Target {
    let token = RankToken::new(&[0xA7; 32]).expect("32 bytes");
    let good = web::bearer(&token).into_bytes();
    let seeds = vec![good.clone(), good.to_ascii_uppercase()];
    Target::new("web_tokens", seeds, move |bytes| match web::token_in(bytes) {
        Some(token) => {
            assert!(web::bearer(&token).as_bytes().eq_ignore_ascii_case(bytes), "another token comes back");
            Outcome::read(&"a token")
        }
        None => Outcome::refused(&"no token"),
    })
}

#[test]
fn fuzz_web_tokens() {
    web_tokens().run();
}
