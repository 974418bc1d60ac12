//! What the functions of the tables do.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ronde_wire::limits;
use ronde_wire::stream::{HANDLE_BYTES, Handle, SidecarMessage, WorkerMessage, scratch, set_scratch};

use crate::buffer::Buffer;
use crate::connection::{Operation, Receiver, Ring, SIDECAR_TIMEOUT, Sender};
use crate::error::Error;
use crate::settings::Settings;

/// The plugin once NCCL has initialised it.
pub(crate) struct Plugin {
    pub(crate) settings: Settings,
    /// Connections that are not up yet, by the number that their handle holds meanwhile.
    connecting: Mutex<HashMap<u64, Connecting>>,
    next: AtomicU64,
    listeners: AtomicU16,
}

struct Connecting {
    ring: Ring,
    handle: Handle,
    /// When NCCL has asked for it last.
    polled: Instant,
}

/// A listener, until it is closed.
pub(crate) struct Listener {
    handle: Handle,
    state: Mutex<ListenerState>,
}

struct ListenerState {
    /// The listener's own ring. The listener exists as long as it does.
    own: Ring,
    /// That of the next connection.
    next: Option<Ring>,
}

/// One end of a connection. After an error every call fails with the same text.
pub(crate) struct End<T> {
    state: Mutex<EndState<T>>,
}

struct EndState<T> {
    /// `None` once it is closed.
    end: Option<T>,
    failure: Option<String>,
}

/// An operation and its connection.
pub(crate) struct Request {
    operation: Arc<Operation>,
    end: AnyEnd,
}

/// Either end of a connection.
pub(crate) enum AnyEnd {
    Sender(Arc<End<Sender>>),
    Receiver(Arc<End<Receiver>>),
}

impl Plugin {
    /// A plugin with these settings.
    pub(crate) fn new(settings: Settings) -> Self {
        Self { settings, connecting: Mutex::default(), next: AtomicU64::new(1), listeners: AtomicU16::new(0) }
    }

    /// Listens, and writes the handle.
    pub(crate) fn listen(&self, bytes: &mut [u8; HANDLE_BYTES]) -> Result<Listener, Error> {
        // Listeners take turns among the lanes.
        let lane = self.listeners.fetch_add(1, Ordering::Relaxed);
        let mut own = Ring::open(&self.settings, limits::STREAM_RING_BYTES_MIN, lane)?;
        own.begin(&WorkerMessage::Listen)?;
        let begin = Instant::now();
        let handle = loop {
            match own.message()? {
                Some(SidecarMessage::Listening(handle)) => break handle,
                Some(message) => return Err(Error::Over(format!("the sidecar answered {message:?}"))),
                None if begin.elapsed() > SIDECAR_TIMEOUT => {
                    let seconds = SIDECAR_TIMEOUT.as_secs();
                    return Err(Error::Over(format!("the sidecar did not answer within {seconds} s")));
                }
                None => std::thread::yield_now(),
            }
        };
        *bytes = handle.encode();
        Ok(Listener { handle, state: Mutex::new(ListenerState { own, next: None }) })
    }

    /// Connects to a handle; `None` while that goes on. Call it again with the same memory.
    pub(crate) fn connect(&self, bytes: &mut [u8; HANDLE_BYTES]) -> Result<Option<End<Sender>>, Error> {
        let handle = Handle::decode(bytes)?;
        // Before the lock, because this waits for the sidecar, and other threads connect, too.
        let new = match scratch(bytes) {
            0 => {
                let mut ring = Ring::open(&self.settings, self.settings.ring_bytes, handle.lane.0)?;
                ring.begin(&WorkerMessage::Connect(handle.clone()))?;
                Some(ring)
            }
            _ => None,
        };
        let (now, mut connecting) = (Instant::now(), lock(&self.connecting));
        let number = match (new, scratch(bytes)) {
            (Some(ring), _) => {
                // NCCL polls without a pause what it still wants.
                connecting.retain(|_, other| now.duration_since(other.polled) < ABANDONED_AFTER);
                let number = self.next.fetch_add(1, Ordering::Relaxed);
                connecting.insert(number, Connecting { ring, handle, polled: now });
                set_scratch(bytes, number);
                number
            }
            // The peer made the handle, so the number may be anything.
            (None, number) => match connecting.get(&number) {
                Some(known) if known.handle == handle => number,
                _ => return Err(Error::Usage("the handle was changed while its connection was being made".to_owned())),
            },
        };
        let Some(pending) = connecting.get_mut(&number) else { return Ok(None) };
        pending.polled = now;
        let answer = match pending.ring.message() {
            Ok(None) => return Ok(None),
            Ok(Some(message)) => Ok(message),
            Err(error) => Err(error),
        };
        // Whatever it is, the attempt is over.
        set_scratch(bytes, 0);
        let Some(Connecting { ring, .. }) = connecting.remove(&number) else { return Ok(None) };
        match answer? {
            SidecarMessage::Connected { window, .. } => {
                Ok(Some(End::new(Sender::new(ring, self.settings.ring_bytes, window)?)))
            }
            message => Err(Error::Over(format!("the sidecar answered {message:?}"))),
        }
    }

    /// Takes the next connection of a listener; `None` while there is none.
    pub(crate) fn accept(&self, listener: &Listener) -> Result<Option<End<Receiver>>, Error> {
        let mut state = lock(&listener.state);
        if let Some(message) = state.own.message()? {
            return Err(Error::Over(format!("the sidecar sent {message:?} to a listener")));
        }
        if state.next.is_none() {
            let Handle { lane, listener, secret, .. } = listener.handle;
            let mut ring = Ring::open(&self.settings, self.settings.ring_bytes, lane.0)?;
            ring.begin(&WorkerMessage::Accept { listener, secret })?;
            state.next = Some(ring);
        }
        let Some(ring) = &mut state.next else { return Ok(None) };
        let answer = ring.message();
        if let Ok(None) = answer {
            return Ok(None);
        }
        let Some(ring) = state.next.take() else { return Ok(None) };
        match answer? {
            Some(SidecarMessage::Connected { .. }) => Ok(Some(End::new(Receiver::new(ring, self.settings.ring_bytes)))),
            message => Err(Error::Over(format!("the sidecar answered {message:?}"))),
        }
    }
}

impl<T> End<T> {
    fn new(end: T) -> Self {
        Self { state: Mutex::new(EndState { end: Some(end), failure: None }) }
    }

    fn with<R>(&self, then: impl FnOnce(&mut T) -> Result<R, Error>) -> Result<R, Error> {
        let mut state = lock(&self.state);
        if let Some(reason) = &state.failure {
            return Err(Error::Over(reason.clone()));
        }
        let end = state.end.as_mut().ok_or_else(|| Error::Usage("the connection was closed".to_owned()))?;
        let outcome = then(end);
        if let Err(error) = &outcome
            && !matches!(error, Error::Usage(_))
        {
            state.failure = Some(error.to_string());
        }
        outcome
    }

    fn take(&self) -> Option<T> {
        lock(&self.state).end.take()
    }
}

/// Sends a buffer; `None` if there are too many requests.
pub(crate) fn send(end: &Arc<End<Sender>>, buffer: Buffer) -> Result<Option<Request>, Error> {
    let operation = end.with(|sender| sender.send(buffer))?;
    Ok(operation.map(|operation| Request { operation, end: AnyEnd::Sender(Arc::clone(end)) }))
}

/// Receives into a buffer; `None` if there are too many requests.
pub(crate) fn receive(end: &Arc<End<Receiver>>, buffer: Buffer) -> Result<Option<Request>, Error> {
    let operation = end.with(|receiver| receiver.receive(buffer))?;
    Ok(operation.map(|operation| Request { operation, end: AnyEnd::Receiver(Arc::clone(end)) }))
}

/// Ends a sender, after everything that was sent.
pub(crate) fn close_sender(end: &End<Sender>) {
    if let Some(sender) = end.take() {
        sender.close();
    }
}

/// Ends a receiver.
pub(crate) fn close_receiver(end: &End<Receiver>) {
    drop(end.take());
}

impl Request {
    /// The bytes that were sent or received, if the request is complete.
    ///
    /// # Errors
    /// Why it never will be.
    pub(crate) fn test(&self) -> Result<Option<usize>, Error> {
        if let Some(bytes) = self.operation.done() {
            return Ok(Some(bytes));
        }
        let progress = match &self.end {
            AnyEnd::Sender(end) => end.with(Sender::progress),
            AnyEnd::Receiver(end) => end.with(Receiver::progress),
        };
        // It may have been completed before another one failed.
        self.operation.done().map_or_else(|| progress.map(|()| None), |bytes| Ok(Some(bytes)))
    }
}

/// After so long without a call for it, a connection that is being made has been given up: its ring is closed.
const ABANDONED_AFTER: Duration = Duration::from_secs(120);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // After a panic NCCL has received an error. What the lock protects ends with the connection.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
