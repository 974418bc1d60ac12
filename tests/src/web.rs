//! A raw HTTP client of the gRPC-Web listener: it writes any head and any body, and parses the answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::server_message;
use ronde_rpc::{RankToken, ring, v1, web};
use socket2::{Domain, Socket, Type};

use crate::cluster::{PATIENCE, Sidecar};

/// A connection, encrypted or not.
pub trait Stream: Read + Write + Send {}

impl<S: Read + Write + Send> Stream for S {}

/// A builder of a request.
#[derive(Clone, Debug)]
pub struct Call {
    /// The first line.
    pub line: String,
    /// The other lines of the head, without the body's length.
    pub headers: Vec<String>,
    /// The length that the head claims; the body's real one when absent.
    pub length: Option<usize>,
    /// The body.
    pub body: Vec<u8>,
}

impl Call {
    /// Creates a valid call of a method, authorized by a rank's token if there is one.
    #[must_use]
    pub fn new(method: &str, token: Option<&RankToken>, body: Vec<u8>) -> Self {
        let mut headers = vec!["Host: sidecar".to_owned(), "Content-Type: application/grpc-web+proto".to_owned()];
        headers.extend(token.map(|token| format!("Authorization: {}", web::bearer(token))));
        let line = format!("POST /ronde.v1.RondeWeb/{method} HTTP/1.1");
        Self { line, headers, length: None, body }
    }

    /// Adds a line to the head.
    #[must_use]
    pub fn with(mut self, header: &str) -> Self {
        self.headers.push(header.to_owned());
        self
    }

    /// Returns the request as it travels.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let length = self.length.unwrap_or(self.body.len());
        let head = format!("{}\r\n{}\r\nContent-Length: {length}\r\n\r\n", self.line, self.headers.join("\r\n"));
        [head.as_bytes(), &self.body].concat()
    }
}

/// Frames a message as the body of a call.
#[must_use]
pub fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("tests' messages are small");
    [&[0][..], &length.to_be_bytes(), message].concat()
}

/// Builds the body of a call of Say.
#[must_use]
pub fn messages_body(
    claimed: &v1::Claimed,
    number: u64,
    messages: impl IntoIterator<Item = client_message::Message>,
) -> Vec<u8> {
    let messages = messages.into_iter().map(|message| v1::ClientMessage { message: Some(message) }).collect();
    let mut bytes = Vec::new();
    ring::encode(&v1::SayRequest { session_token: claimed.session_token.clone(), number, messages }, &mut bytes);
    framed(&bytes)
}

/// Returns the address of a sidecar's gRPC-Web listener.
///
/// # Errors
/// When it does not.
pub fn address(sidecar: &Sidecar) -> Result<SocketAddr> {
    sidecar.serving["web"].as_str().context("the sidecar answers no gRPC-Web")?.parse().context("an address")
}

/// The token in a file.
///
/// # Errors
/// When it cannot be read.
pub fn token(file: &Path) -> Result<RankToken> {
    Ok(RankToken::new(&std::fs::read(file)?)?)
}

/// Connects.
///
/// # Errors
/// When nobody listens.
pub fn connect(address: SocketAddr) -> Result<TcpStream> {
    connect_from(Ipv4Addr::LOCALHOST, address)
}

/// Connects from one of this host's addresses.
///
/// # Errors
/// When nothing listens there.
pub fn connect_from(source: Ipv4Addr, address: SocketAddr) -> Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((source, 0)).into())?;
    socket.connect_timeout(&address.into(), PATIENCE)?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// An answer, whose frames arrive one by one.
pub struct Answer<S> {
    /// The status of HTTP.
    pub status: u16,
    /// The head, in lower case.
    pub head: String,
    /// The head as it was received.
    raw_head: String,
    reader: BufReader<S>,
    chunked: bool,
    /// The received part of the body that is not read yet.
    buffer: Vec<u8>,
    over: bool,
}

/// A frame of the body.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message.
    Message(Vec<u8>),
    /// The end: names and values in lines.
    Trailers(String),
}

impl<S: Stream> Answer<S> {
    /// Makes a call and reads the head of its answer.
    ///
    /// # Errors
    /// When no answer arrives.
    pub fn to(mut stream: S, call: &Call) -> Result<Self> {
        stream.write_all(&call.bytes()).context("the request is not accepted")?;
        Self::read(stream)
    }

    /// Reads the head of an answer.
    ///
    /// # Errors
    /// When no answer arrives.
    pub fn read(stream: S) -> Result<Self> {
        let (mut reader, mut head) = (BufReader::new(stream), String::new());
        while !head.ends_with("\r\n\r\n") {
            ensure!(reader.read_line(&mut head)? > 0, "the connection ended in the head: {head:?}");
        }
        let (raw_head, head) = (head.clone(), head.to_ascii_lowercase());
        let status = head.split(' ').nth(1).context("a status")?.parse()?;
        let chunked = head.contains("transfer-encoding: chunked");
        Ok(Self { status, head, raw_head, reader, chunked, buffer: Vec::new(), over: false })
    }

    /// The next frame; `None` at the end of the body.
    ///
    /// # Errors
    /// When the connection ends within the body.
    pub fn next_frame(&mut self) -> Result<Option<Frame>> {
        loop {
            if let Some((head, rest)) = self.buffer.split_at_checked(5) {
                let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
                if rest.len() >= length {
                    let (kind, content) = (head[0], rest[..length].to_vec());
                    self.buffer.drain(..5 + length);
                    return Ok(Some(match kind {
                        0 => Frame::Message(content),
                        0x80 => Frame::Trailers(String::from_utf8(content)?),
                        kind => bail!("a frame of kind {kind}"),
                    }));
                }
            }
            if !self.more()? {
                ensure!(self.buffer.is_empty(), "the body ends within a frame: {:?}", self.buffer);
                return Ok(None);
            }
        }
    }

    /// The status of gRPC at the end of the answer, with the messages before it.
    ///
    /// # Errors
    /// When there is none.
    pub fn finish(mut self) -> Result<(Vec<Vec<u8>>, String)> {
        let mut messages = Vec::new();
        if self.head.contains("\r\ngrpc-status:") {
            return Ok((messages, decoded(&self.raw_head)));
        }
        while let Some(frame) = self.next_frame()? {
            match frame {
                Frame::Message(message) => messages.push(message),
                Frame::Trailers(trailers) => return Ok((messages, decoded(&trailers))),
            }
        }
        bail!("the answer has no status: {}", self.head)
    }

    /// The whole body, as text.
    ///
    /// # Errors
    /// When the connection ends within it.
    pub fn text(mut self) -> Result<String> {
        while self.more()? {}
        Ok(String::from_utf8_lossy(&self.buffer).into_owned())
    }

    /// Reads more of the body; whether there was any.
    fn more(&mut self) -> Result<bool> {
        if self.over {
            return Ok(false);
        }
        let wanted = if self.chunked {
            let mut line = String::new();
            ensure!(self.reader.read_line(&mut line)? > 0, "the connection ended within the body");
            usize::from_str_radix(line.trim(), 16)?
        } else {
            let length = self.head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
            length.map_or(Ok(0), str::parse)?
        };
        let start = self.buffer.len();
        self.buffer.resize(start + wanted, 0);
        self.reader.read_exact(&mut self.buffer[start..])?;
        self.over = wanted == 0 || !self.chunked;
        if self.chunked {
            let mut end = String::new();
            self.reader.read_line(&mut end)?;
        }
        Ok(!self.over || wanted > 0)
    }
}

/// A session whose calls the test writes.
pub struct WebSession<S> {
    /// The answer to its claim.
    pub claimed: v1::Claimed,
    answer: Answer<S>,
}

impl<S: Stream> WebSession<S> {
    /// Opens it.
    ///
    /// # Errors
    /// The status with which it is refused.
    pub fn open(stream: S, token: &RankToken, claim: &v1::Claim) -> Result<Self> {
        let mut bytes = Vec::new();
        ring::encode(claim, &mut bytes);
        let mut answer = Answer::to(stream, &Call::new("Open", Some(token), framed(&bytes)))?;
        if answer.head.contains("\r\ngrpc-status:") {
            bail!(answer.finish()?.1);
        }
        match answer.next_frame()? {
            Some(Frame::Message(message)) => match ring::decode::<v1::ServerMessage>(&message)?.message {
                Some(server_message::Message::Claimed(claimed)) => Ok(Self { claimed, answer }),
                other => bail!("the answer to a claim is {other:?}"),
            },
            Some(Frame::Trailers(trailers)) => bail!(decoded(&trailers)),
            None => bail!("the session ended without a word"),
        }
    }

    /// Waits for a message and drops those before it.
    ///
    /// # Errors
    /// When the session ends before, with its status.
    pub fn await_message<T>(&mut self, what: &str, find: impl Fn(server_message::Message) -> Option<T>) -> Result<T> {
        loop {
            match self.answer.next_frame()? {
                Some(Frame::Message(message)) => {
                    let message: v1::ServerMessage = ring::decode(&message)?;
                    if let Some(found) = message.message.and_then(&find) {
                        return Ok(found);
                    }
                }
                Some(Frame::Trailers(trailers)) => {
                    bail!("waited for {what}; the session ended: {}", decoded(&trailers))
                }
                None => bail!("waited for {what}; the connection ended"),
            }
        }
    }
}

/// Status and message of gRPC, in one line: `7 it is not allowed`.
fn decoded(fields: &str) -> String {
    let field = |name: &str| {
        let line =
            fields.lines().filter_map(|line| line.split_once(':')).find(|(field, _)| field.eq_ignore_ascii_case(name));
        line.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let (status, message) = (field("grpc-status"), field("grpc-message"));
    let mut parts = message.split('%');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match code {
            Some(code) => {
                text.push(char::from(code));
                text.push_str(&part[2..]);
            }
            None => text.push_str(part),
        }
    }
    format!("{status} {text}")
}
