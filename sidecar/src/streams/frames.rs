//! What arrives from other sidecars about streams.

use std::time::Instant;

use bytes::Bytes;
use ronde_shm::ring::framed;
use ronde_transport::Port;
use ronde_wire::stream::{ListenSecret, STREAM_HEADER_BYTES, SidecarMessage, StreamFrame};
use ronde_wire::{SidecarIndex, limits};

use super::stream::{Number, Role};
use super::table::{PROCESS_GONE, Streams, window_of};

impl Streams {
    /// The link to a peer is up.
    pub(crate) fn handle_up(&mut self, peer: SidecarIndex) {
        self.peers.entry(peer).or_default().received_at = Some(Instant::now());
    }

    /// Handles a frame. A frame for a stream that is over is ignored: it was sent before the sender knew.
    ///
    /// # Errors
    /// How the peer violated the protocol.
    pub(crate) fn handle_frame(
        &mut self,
        port: &mut dyn Port,
        from: SidecarIndex,
        payload: &Bytes,
    ) -> Result<(), String> {
        let (number, frame) = StreamFrame::decode(payload).map_err(|error| error.to_string())?;
        if from != self.config.me {
            self.peers.entry(from).or_default().received_at = Some(Instant::now());
        }
        match frame {
            StreamFrame::Alive => return Ok(()),
            StreamFrame::Open { listener, secret } => {
                self.handle_open(port, (from, number), listener, &secret);
                return Ok(());
            }
            StreamFrame::Abandon { listener } => {
                // It may have been accepted or refused, or the listener closed.
                if let Some(known) = self.listeners.get_mut(&listener) {
                    known.waiting.retain(|waiting| *waiting != (from, number));
                }
                return Ok(());
            }
            _ => {}
        }
        let Some(stream) = self.streams.get(&number).filter(|stream| stream.role != Role::Ended) else {
            if let StreamFrame::Accept { number: remote, .. } = frame {
                // Its worker has given up, which the peer cannot know.
                self.send(port, from, StreamFrame::Close(PROCESS_GONE.to_owned()).encode(remote));
            }
            return Ok(());
        };
        if stream.role.peer() != Some(from) {
            return Err(format!("a frame about stream {number}, which is not one of {from}"));
        }
        match frame {
            StreamFrame::Accept { number: remote, credit } => self.handle_accept(port, number, (from, remote), credit),
            StreamFrame::Data(body) => self.handle_data(port, number, &body),
            StreamFrame::Credit(bytes) => self.handle_credit(number, bytes),
            StreamFrame::Finish => {
                self.finish(number, &SidecarMessage::Finished);
                Ok(())
            }
            StreamFrame::Close(reason) => {
                self.finish(number, &SidecarMessage::Failed(reason));
                Ok(())
            }
            // Handled above.
            StreamFrame::Open { .. } | StreamFrame::Abandon { .. } | StreamFrame::Alive => Ok(()),
        }
    }

    fn handle_open(
        &mut self,
        port: &mut dyn Port,
        (from, number): (SidecarIndex, Number),
        listener: Number,
        secret: &ListenSecret,
    ) {
        let known = self.listeners.get_mut(&listener).filter(|known| known.secret == *secret);
        let refusal = match known {
            None => "there is no listener with this number and secret",
            Some(known) if known.waiting.len() >= limits::STREAMS_WAITING_MAX => {
                "too many connections wait for this listener (STREAMS_WAITING_MAX)"
            }
            Some(known) => {
                known.waiting.push_back((from, number));
                return self.match_listener(listener, port);
            }
        };
        self.stats.refused += 1;
        tracing::warn!(%from, lane = self.config.lane.0, refusal, "a stream is refused");
        self.send(port, from, StreamFrame::Close(refusal.to_owned()).encode(number));
    }

    fn handle_accept(
        &mut self,
        port: &mut dyn Port,
        number: Number,
        (peer, remote): (SidecarIndex, Number),
        credit: u64,
    ) -> Result<(), String> {
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(()) };
        if !matches!(stream.role, Role::Connecting(..)) {
            return Err(format!("stream {number} is accepted again"));
        }
        stream.role = Role::Sending { peer, remote, credit, window: credit };
        let connected = SidecarMessage::Connected { peer, window: window_of(credit) };
        if let Err(error) = stream.push(&connected.encode()) {
            self.close(number, &error, port);
            return Ok(());
        }
        self.stats.connected += 1;
        self.enqueue(number);
        Ok(())
    }

    fn handle_data(&mut self, port: &mut dyn Port, number: Number, body: &Bytes) -> Result<(), String> {
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(()) };
        let Role::Receiving { granted, .. } = &mut stream.role else {
            return Err(format!("data for stream {number}, which does not receive"));
        };
        let cost = framed(body.len() as u64);
        *granted = granted
            .checked_sub(cost)
            .ok_or_else(|| format!("{cost} bytes for stream {number}, of which {granted} were granted"))?;
        self.stats.received_bytes += (body.len() - STREAM_HEADER_BYTES) as u64;
        if let Err(error) = stream.push(body) {
            // Its worker granted more than it has.
            self.stats.refused += 1;
            self.close(number, &format!("the receiver broke its ring: {error}"), port);
        }
        Ok(())
    }

    fn handle_credit(&mut self, number: Number, bytes: u64) -> Result<(), String> {
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(()) };
        let Role::Sending { credit, window, .. } = &mut stream.role else {
            return Err(format!("credit for stream {number}, which does not send"));
        };
        if bytes == 0 {
            return Err(format!("a credit of 0 bytes for stream {number}"));
        }
        *credit = credit.saturating_add(bytes);
        if credit > window {
            return Err(format!("a credit of {credit} bytes for stream {number}, whose window is {window}"));
        }
        self.enqueue(number);
        Ok(())
    }

    /// Ends a stream that its peer has ended.
    fn finish(&mut self, number: Number, message: &SidecarMessage) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        stream.role = Role::Ended;
        if let Err(error) = stream.push(&message.encode()) {
            tracing::debug!(error, "the end of a stream is not reported to its worker");
        }
        // It is dropped now if its worker is gone.
        self.enqueue(number);
    }
}
