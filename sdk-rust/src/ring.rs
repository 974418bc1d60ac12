//! [`Ring`]: a session's message ring in shared memory. Threads of the program send; one thread at a time receives.
//!
//! # Receiving: leader and followers
//!
//! The receiver is in a lock. A thread that waits for a result tries to take the lock. The thread that gets it *leads*: it
//! receives messages, delivers each result to its waiter, and sleeps on the ring's futex in between, until its own result is
//! there. The other threads *follow*: they park on their own promise. A leader that stops wakes one follower, which takes over.
//! While no thread leads, the session's task receives: the ring's bell is armed and wakes the task.
//!
//! No message is lost when the roles change:
//!
//! - A leader that stops arms the bell while it still holds the lock. Arming checks once more for a message.
//! - A task that is woken and finds the lock taken sets `missed_wakeup`, passes a fence and tries again. A leader releases the
//!   lock, passes a fence and loads `missed_wakeup`. So either the task gets the lock, or the leader sees the flag and wakes the
//!   task.
//! - Code that fulfils a promise without a message (the end of the session) kicks the leader afterwards. A leader checks its
//!   promise between arming and sleeping.
//!
//! A thread that will submit and wait disarms the bell before it submits ([`Ring::expect_leader`]). Messages that arrive
//! meanwhile stay in the ring until that thread leads, another call polls the ring, or the session's task does so with its next
//! heartbeat.
//!
//! # Sending
//!
//! A message for which the ring has no room goes to a bounded backlog, which is flushed when the sidecar has received and rings
//! the bell.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ronde_rpc::{Place, ring, v1};
use ronde_shm::ring::{Bell, Consumer, Kick, Producer, Pushed, RingEnd, RingError, Wait};
use tokio::sync::Notify;

use crate::error::{Error, queue_full};
use crate::promise::{Promise, Unpark};
use crate::session::OUTGOING_MAX;

/// Handles a message of the sidecar.
pub(crate) type Handler<'a> = &'a dyn Fn(v1::ServerMessage) -> Result<(), Error>;

/// A hint how soon the sidecar must receive a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flush {
    /// Now: wakes the sidecar.
    Now,
    /// With the next message or heartbeat: does not wake the sidecar.
    Later,
}

/// The ring of one session.
#[derive(Debug)]
pub(crate) struct Ring {
    sender: Mutex<Sender>,
    receiver: Mutex<Receiver>,
    /// Wakes the leader.
    kick: Kick,
    bell: Arc<Bell>,
    phase: AtomicU8,
    /// Set when the bell rang while a thread held the receiver.
    missed_wakeup: AtomicBool,
    /// Wakes the session's task, which then drives the ring.
    task_wanted: Notify,
    followers: Followers,
    /// Why the ring broke, until the task takes it.
    broken: Mutex<Option<Error>>,
}

/// Threads that wait while another thread leads.
#[derive(Default)]
struct Followers(Mutex<VecDeque<Arc<dyn Unpark>>>);

impl fmt::Debug for Followers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Followers")
    }
}

#[derive(Debug)]
struct Sender {
    producer: Producer,
    /// Encoded messages for which there was no room, oldest first; at most [`OUTGOING_MAX`].
    backlog: VecDeque<Vec<u8>>,
    /// The buffer of the last message.
    message: Vec<u8>,
}

#[derive(Debug)]
struct Receiver {
    consumer: Consumer,
    /// Whether the last wait of a leader was short, so that the next one may spin.
    was_short: bool,
    /// The buffer of the last message.
    message: Vec<u8>,
}

impl Ring {
    pub(crate) fn new(end: RingEnd) -> Self {
        let RingEnd { producer, consumer, bell } = end;
        Self {
            kick: consumer.kick(),
            sender: Mutex::new(Sender { producer, backlog: VecDeque::new(), message: Vec::new() }),
            receiver: Mutex::new(Receiver { consumer, was_short: false, message: Vec::new() }),
            bell,
            phase: AtomicU8::new(NOT_TAKEN),
            missed_wakeup: AtomicBool::new(false),
            task_wanted: Notify::new(),
            followers: Followers::default(),
            broken: Mutex::default(),
        }
    }

    /// Wakes the session's task, as [`Ring::task_wanted`] does.
    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Resolves when the session's task must [drive](Ring::drive) the ring.
    pub(crate) async fn task_wanted(&self) {
        self.task_wanted.notified().await;
    }

    /// Why the ring broke, once.
    pub(crate) fn take_broken(&self) -> Option<Error> {
        lock(&self.broken).take()
    }

    /// Sends a message, or queues it until there is room.
    ///
    /// # Errors
    /// [`Error::Limit`] when the sidecar does not read or the message is too long; [`Error::Protocol`].
    pub(crate) fn send(&self, message: &v1::ClientMessage, flush: Flush) -> Result<(), Error> {
        let mut sender = lock(&self.sender);
        let sent = sender.send(message, flush);
        drop(sender);
        sent.inspect_err(|error| {
            if matches!(error, Error::Protocol { .. }) {
                self.break_down(error.clone());
            }
        })
    }

    /// Opens the ring for receiving: the sidecar sends here from now on. Call [`Ring::drive`] next.
    pub(crate) fn open(&self) {
        self.phase.store(OPEN, Ordering::SeqCst);
    }

    /// Waits at most `slice` for a promise and takes its value. Leads if no other thread does; then it spins for `spin` before it
    /// sleeps.
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        promise: &Promise<T>,
        (slice, spin): (Duration, Duration),
        handler: Handler<'_>,
    ) -> Option<Result<T, Error>> {
        let deadline = Instant::now().checked_add(slice);
        let mut answer = promise.take();
        let mut left = Some(slice);
        while answer.is_none() {
            let Some(rest) = left else { break };
            if self.is_open() {
                let receiver = self.try_receiver().or_else(|| self.follow(promise, rest));
                if let Some(receiver) = receiver {
                    self.lead(receiver, &|| promise.is_ready(), (deadline, spin), handler);
                }
                answer = promise.take();
            } else {
                answer = promise.wait_timeout(rest);
            }
            left = rest_until(deadline);
        }
        self.promote();
        answer
    }

    /// Disarms the bell for a thread that will submit and wait, and so receives the answer. If the sidecar answers before the
    /// thread waits, waking the session's task would only delay both. If no thread waits after all, the next call or heartbeat
    /// receives the messages.
    pub(crate) fn expect_leader(&self) {
        let Some(receiver) = self.try_receiver().filter(|_| self.is_open()) else { return };
        receiver.consumer.disarm();
        self.release(receiver);
        // A thread may have found the receiver taken, and follows although no thread leads.
        self.promote();
    }

    /// Receives the messages that are there, if no other thread does.
    pub(crate) fn poll(&self, handler: Handler<'_>) {
        if !self.is_open() {
            return;
        }
        if let Some(mut receiver) = self.try_receiver() {
            self.read(&mut receiver, handler);
            self.arm_and_release(receiver);
            // A thread may have found the receiver taken, and follows although no thread leads.
            self.promote();
        }
    }

    /// The work of the session's task after a wake-up: flushes the backlog, and receives if no thread leads.
    pub(crate) fn drive(&self, handler: Handler<'_>) {
        if let Err(error) = lock(&self.sender).flush() {
            self.break_down(error);
        }
        self.missed_wakeup.store(true, Ordering::SeqCst);
        // The store comes before the attempt: see the module's documentation.
        fence(Ordering::SeqCst);
        if let Some(mut receiver) = self.try_receiver().filter(|_| self.is_open()) {
            self.missed_wakeup.store(false, Ordering::SeqCst);
            self.read(&mut receiver, handler);
            self.arm_and_release(receiver);
            self.promote();
        }
    }

    /// Ends the ring after the session's stream: receives the messages that the sidecar sent before, and none after.
    pub(crate) fn finish(&self, handler: Handler<'_>) {
        if self.phase.swap(OVER, Ordering::SeqCst) != OPEN {
            return;
        }
        self.kick.now();
        // A leader sees the phase and stops.
        let mut receiver = lock(&self.receiver);
        // The ring cannot hold more messages than bytes.
        for _ in 0..ronde_wire::limits::RING_BYTES {
            match receiver.pop() {
                Ok(Some(message)) => {
                    if handler(message).is_err() {
                        return;
                    }
                }
                Ok(None) | Err(_) => return,
            }
        }
    }

    /// Makes the leader check its promise, after a promise was fulfilled without a message.
    pub(crate) fn kick(&self) {
        self.kick.now();
    }

    /// Whether the ring has ended or is broken.
    pub(crate) fn is_over(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == OVER
    }

    fn is_open(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == OPEN
    }

    /// Receives, and sleeps in between, until `ready`, the deadline or the end of the ring.
    fn lead(
        &self,
        mut receiver: MutexGuard<'_, Receiver>,
        ready: &dyn Fn() -> bool,
        (deadline, spin): (Option<Instant>, Duration),
        handler: Handler<'_>,
    ) {
        let since = Instant::now();
        let mut may_spin = receiver.was_short;
        receiver.consumer.disarm();
        while self.read(&mut receiver, handler) && !ready() {
            let Some(left) = rest_until(deadline) else { break };
            // Once for each wait: an answer that does not come soon may take long.
            if std::mem::take(&mut may_spin) && receiver.spin(spin.min(left)) {
                continue;
            }
            match receiver.consumer.arm(Wait::Futex) {
                // A promise fulfilled before the arming did not wake this thread.
                Ok(true) if ready() || !self.is_open() => break,
                Ok(true) => receiver.consumer.sleep(left),
                Ok(false) => {}
                Err(error) => {
                    self.break_down(protocol(error));
                    break;
                }
            }
        }
        receiver.was_short = since.elapsed() < SHORT_WAIT;
        self.arm_and_release(receiver);
    }

    /// Receives the messages that are there, up to a bound. False when the ring is over.
    fn read(&self, receiver: &mut Receiver, handler: Handler<'_>) -> bool {
        for _ in 0..MESSAGES_PER_TURN {
            if !self.is_open() {
                return false;
            }
            let handled = match receiver.pop() {
                Ok(Some(message)) => handler(message),
                Ok(None) => return true,
                Err(error) => Err(error),
            };
            if let Err(error) = handled {
                self.break_down(error);
                return false;
            }
        }
        true
    }

    /// Releases the receiver; the next message wakes the session's task.
    fn arm_and_release(&self, mut receiver: MutexGuard<'_, Receiver>) {
        let armed = receiver.consumer.arm(Wait::Bell);
        self.release(receiver);
        match armed {
            Ok(true) => {}
            Ok(false) => self.task_wanted.notify_one(),
            Err(error) => self.break_down(protocol(error)),
        }
    }

    /// Releases the receiver, and wakes the session's task if it missed a wake-up meanwhile.
    fn release(&self, receiver: MutexGuard<'_, Receiver>) {
        drop(receiver);
        // The receiver is free before the load of the flag: see the module's documentation.
        fence(Ordering::SeqCst);
        if self.missed_wakeup.swap(false, Ordering::SeqCst) {
            self.task_wanted.notify_one();
        }
    }

    /// Parks until the promise is fulfilled, the leader stops or the time is over. Returns the receiver if it is free already.
    fn follow<T: Send + 'static>(&self, promise: &Promise<T>, slice: Duration) -> Option<MutexGuard<'_, Receiver>> {
        let me = promise.unparker();
        lock(&self.followers.0).push_back(Arc::clone(&me));
        // A leader that stopped before it could see this follower has released the receiver.
        let receiver = self.try_receiver();
        if receiver.is_none() {
            promise.park_timeout(slice);
        }
        lock(&self.followers.0).retain(|follower| !Arc::ptr_eq(follower, &me));
        receiver
    }

    /// Wakes one follower, which leads if no other thread does.
    fn promote(&self) {
        let next = lock(&self.followers.0).pop_front();
        if let Some(next) = next {
            next.unpark();
        }
    }

    /// The receiver; `None` while another thread has it.
    fn try_receiver(&self) -> Option<MutexGuard<'_, Receiver>> {
        match self.receiver.try_lock() {
            Ok(receiver) => Some(receiver),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Marks the ring as broken; the session's task ends the session. The first reason stays.
    fn break_down(&self, error: Error) {
        self.phase.store(OVER, Ordering::SeqCst);
        lock(&self.broken).get_or_insert(error);
        self.kick.now();
        self.task_wanted.notify_one();
    }
}

impl Sender {
    fn send(&mut self, message: &v1::ClientMessage, flush: Flush) -> Result<(), Error> {
        ring::encode(message, &mut self.message);
        let (bytes, limit) = (self.message.len() as u64, self.producer.message_bytes_max());
        if bytes > limit {
            return Err(Error::Limit { reason: RingError::TooLong { bytes, limit }.to_string() });
        }
        if self.backlog.is_empty() && self.producer.push(&self.message).map_err(protocol)? == Pushed::Done {
            if flush == Flush::Now {
                self.producer.wake();
            }
            return Ok(());
        }
        if self.backlog.len() >= OUTGOING_MAX {
            return Err(queue_full(OUTGOING_MAX));
        }
        self.backlog.push_back(self.message.clone());
        self.flush()
    }

    /// Sends the backlog, as far as there is room.
    fn flush(&mut self) -> Result<(), Error> {
        let Self { producer, backlog, .. } = self;
        if backlog.is_empty() {
            return Ok(());
        }
        while let Some(message) = backlog.front() {
            if producer.push(message).map_err(protocol)? == Pushed::Done {
                backlog.pop_front();
            } else if !producer.want_room(message.len() as u64).map_err(protocol)? {
                break;
            }
        }
        producer.wake();
        Ok(())
    }
}

impl Receiver {
    fn pop(&mut self) -> Result<Option<v1::ServerMessage>, Error> {
        if !self.consumer.pop(&mut self.message).map_err(protocol)? {
            return Ok(None);
        }
        let message = ring::decode(&self.message);
        message
            .map(Some)
            .map_err(|error| Error::Protocol { reason: format!("a message on the ring cannot be decoded: {error}") })
    }

    /// Spins until a message is there, at most for `longest`. Returns whether there is one.
    ///
    /// A thread that sleeps wakes up after 2 us, or after 400 us when its core sleeps, too. Between two polls the thread yields its
    /// core, so that spinning takes only time in which the core would be idle.
    fn spin(&mut self, longest: Duration) -> bool {
        let until = Instant::now() + longest;
        loop {
            // A broken ring counts as ready; receiving from it returns the error.
            if self.consumer.is_ready().unwrap_or(true) {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::yield_now();
        }
    }
}

/// How long a wait for the result of a submission spins.
pub(crate) fn spin_time(input: &Place) -> Duration {
    match input {
        Place::Arena { bytes, .. } if *bytes > SMALL_BYTES_MAX => SPIN_AFTER_LARGE,
        Place::Inline(data) if data.len() as u64 > SMALL_BYTES_MAX => SPIN_AFTER_LARGE,
        _ => SPIN,
    }
}

fn protocol(error: RingError) -> Error {
    match error {
        RingError::UsedAfterFork(error) => error.into(),
        broken => Error::Protocol { reason: broken.to_string() },
    }
}

/// The time until a deadline; `None` when it has passed. Without a deadline, a long time.
fn rest_until(deadline: Option<Instant>) -> Option<Duration> {
    let Some(deadline) = deadline else { return Some(Duration::MAX) };
    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
}

/// Ignores poisoning: a panic elsewhere leaves the guarded values whole, because each change is a single call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sidecar does not send on the ring yet.
const NOT_TAKEN: u8 = 0;
const OPEN: u8 = 1;
const OVER: u8 = 2;
/// Messages received before the receiver checks for other work.
const MESSAGES_PER_TURN: usize = 256;
/// How long a leader spins before it sleeps: longer than an answer over one hop takes.
const SPIN: Duration = Duration::from_micros(300);
/// The same after a submission of more than [`SMALL_BYTES_MAX`]. Its answer takes longer, but fewer cores are asleep.
const SPIN_AFTER_LARGE: Duration = Duration::from_micros(100);
const SMALL_BYTES_MAX: u64 = 256 << 10;
/// After a wait shorter than this the next one spins. A wait that slept may last longer than the spin although the next one does
/// not.
const SHORT_WAIT: Duration = Duration::from_millis(1);
