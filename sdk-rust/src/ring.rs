//! A session's ring as its threads share it: whoever sends writes into it, and one of those who wait reads for all.
//!
//! # Who reads
//!
//! The receiver is in a lock. A thread that waits for an answer tries to take it; who gets it *leads*: it reads what
//! comes, hands each answer to its waiter, and sleeps on the ring's futex in between, until its own answer is there. The others
//! *follow*: they sleep on their own promise. A leader that goes wakes one follower, which takes over. While nobody leads, the
//! session's task does: the receiver is then armed for the bell, which wakes the task.
//!
//! No message is overlooked when the roles change. A leader that goes arms the bell while it still holds the lock, and arming
//! looks once more whether something has come. The task that is rung for and finds the lock taken sets `rung`, passes a fence
//! and tries again; a leader lets the lock go, passes a fence and looks at `rung`. So either the task gets the lock, or
//! the leader sees that it was there and sends for it. Whoever fulfils a promise from elsewhere (the end of the session) kicks the
//! leader after that, and a leader looks at its promise between arming and sleeping.
//!
//! A thread that submits and will wait disarms the bell before it submits ([`Ring::expect_leader`]). What comes meanwhile
//! stays where it is until that thread leads, another call looks, or the session's task does with its next heartbeat.
//!
//! # Who waits for room
//!
//! A message for which the ring has no room goes to a queue with a bound, which is flushed when the sidecar has read and rings.

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

/// What a message of the sidecar is given to.
pub(crate) type Handler<'a> = &'a dyn Fn(v1::ServerMessage) -> Result<(), Error>;

/// How soon the sidecar is to see a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flush {
    /// At once.
    Now,
    /// With the next one, or the next heartbeat: not worth a wake-up of its own.
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
    /// The bell rang while somebody held the receiver.
    missed_wakeup: AtomicBool,
    /// The session's task is to look.
    task_wanted: Notify,
    followers: Followers,
    /// What broke it, until the task takes it.
    broken: Mutex<Option<Error>>,
}

/// Threads that wait while another one leads.
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
    /// Encoded messages that wait for room, oldest first; at most [`OUTGOING_MAX`].
    backlog: VecDeque<Vec<u8>>,
    /// Memory of the last message.
    message: Vec<u8>,
}

#[derive(Debug)]
struct Receiver {
    consumer: Consumer,
    /// Whether the last wait of a leader was short, so that the next one may be.
    was_short: bool,
    /// Memory of the last message.
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

    /// What the session's task waits for besides [`Ring::attention`].
    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    /// Resolves when the session's task is to [attend](Ring::attend).
    pub(crate) async fn task_wanted(&self) {
        self.task_wanted.notified().await;
    }

    /// What broke the ring, once.
    pub(crate) fn take_broken(&self) -> Option<Error> {
        lock(&self.broken).take()
    }

    /// Sends a message, or keeps it until there is room.
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

    /// The sidecar says that from now on it speaks here. To be attended next.
    pub(crate) fn open(&self) {
        self.phase.store(OPEN, Ordering::SeqCst);
    }

    /// Waits at most `slice` for a promise; reads for everybody if nobody else does. Takes the answer. It is
    /// looked for that long before the thread sleeps.
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

    /// A thread is about to submit something and to wait for it, so that it reads what comes. Till then nothing rings the bell:
    /// when the sidecar answers before the thread waits, waking the session's task would only keep the two from each other.
    /// What comes when no thread waits after all is read by the next call, or with the next heartbeat.
    pub(crate) fn expect_leader(&self) {
        let Some(receiver) = self.try_receiver().filter(|_| self.is_open()) else { return };
        receiver.consumer.disarm();
        self.release(receiver);
        // Somebody may have found the receiver taken, and follows nobody.
        self.promote();
    }

    /// Reads what is there, if nobody else does.
    pub(crate) fn poll(&self, handler: Handler<'_>) {
        if !self.is_open() {
            return;
        }
        if let Some(mut receiver) = self.try_receiver() {
            self.read(&mut receiver, handler);
            self.arm_and_release(receiver);
            // Somebody may have found the receiver taken, and follows nobody.
            self.promote();
        }
    }

    /// The bell rang, or somebody sent for the task: sends what waited for room, and reads if nobody leads.
    pub(crate) fn drive(&self, handler: Handler<'_>) {
        if let Err(error) = lock(&self.sender).flush() {
            self.break_down(error);
        }
        self.missed_wakeup.store(true, Ordering::SeqCst);
        // The note comes before the attempt: see the module's header.
        fence(Ordering::SeqCst);
        if let Some(mut receiver) = self.try_receiver().filter(|_| self.is_open()) {
            self.missed_wakeup.store(false, Ordering::SeqCst);
            self.read(&mut receiver, handler);
            self.arm_and_release(receiver);
            self.promote();
        }
    }

    /// The session's stream has ended: what the sidecar wrote before is read, and nothing after.
    pub(crate) fn finish(&self, handler: Handler<'_>) {
        if self.phase.swap(OVER, Ordering::SeqCst) != OPEN {
            return;
        }
        self.kick.now();
        // A leader sees the phase, and goes.
        let mut receiver = lock(&self.receiver);
        // More messages than fit into the ring were not there when the stream ended.
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

    /// A promise was fulfilled by something else than a message: whoever leads looks at its own.
    pub(crate) fn kick(&self) {
        self.kick.now();
    }

    /// Whether nothing goes over the ring any more.
    pub(crate) fn is_over(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == OVER
    }

    fn is_open(&self) -> bool {
        self.phase.load(Ordering::SeqCst) == OPEN
    }

    /// Reads, and sleeps in between, until `ready`, the deadline or the end.
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
            // Once for each wait: what does not come soon may take long.
            if std::mem::take(&mut may_spin) && receiver.spin(spin.min(left)) {
                continue;
            }
            match receiver.consumer.arm(Wait::Futex) {
                // What was fulfilled before the arming has kicked nobody.
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

    /// Reads what is there, up to a bound. False when the ring is over.
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

    /// Lets the receiver go, such that the next message wakes the session's task.
    fn arm_and_release(&self, mut receiver: MutexGuard<'_, Receiver>) {
        let armed = receiver.consumer.arm(Wait::Bell);
        self.release(receiver);
        match armed {
            Ok(true) => {}
            Ok(false) => self.task_wanted.notify_one(),
            Err(error) => self.break_down(protocol(error)),
        }
    }

    /// Lets the receiver go, and sends for the session's task if that has been there in between.
    fn release(&self, receiver: MutexGuard<'_, Receiver>) {
        drop(receiver);
        // The receiver is free before the look at the note: see the module's header.
        fence(Ordering::SeqCst);
        if self.missed_wakeup.swap(false, Ordering::SeqCst) {
            self.task_wanted.notify_one();
        }
    }

    /// Waits until the promise is kept, the leader goes or the time is over; gives the receiver if it has become free before
    /// that.
    fn follow<T: Send + 'static>(&self, promise: &Promise<T>, slice: Duration) -> Option<MutexGuard<'_, Receiver>> {
        let me = promise.unparker();
        lock(&self.followers.0).push_back(Arc::clone(&me));
        // A leader that went before it could see this follower has left the receiver free.
        let receiver = self.try_receiver();
        if receiver.is_none() {
            promise.park_timeout(slice);
        }
        lock(&self.followers.0).retain(|follower| !Arc::ptr_eq(follower, &me));
        receiver
    }

    /// Wakes one follower, which leads if nobody does.
    fn promote(&self) {
        let next = lock(&self.followers.0).pop_front();
        if let Some(next) = next {
            next.unpark();
        }
    }

    /// `None` while another thread has it.
    fn try_receiver(&self) -> Option<MutexGuard<'_, Receiver>> {
        match self.receiver.try_lock() {
            Ok(receiver) => Some(receiver),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Nothing goes over the ring from now on; the session's task ends the session. The first reason stays.
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

    /// Sends what waits, as far as there is room.
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
            .map_err(|error| Error::Protocol { reason: format!("what came over the ring is no message: {error}") })
    }

    /// Looks for a moment whether something comes. Says whether it did.
    ///
    /// A thread that sleeps is awake again after 2 us, or after 400 where its core has gone to sleep as well. Between two looks
    /// the core is offered to whoever else wants it, so that a look takes time in which it would have been idle.
    fn spin(&mut self, longest: Duration) -> bool {
        let until = Instant::now() + longest;
        loop {
            // What is broken is told by the attempt to read it.
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

/// How long the answer to a submission is looked for.
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

/// What is left until a deadline; `None` when it has passed. Without a deadline, a long time.
fn rest_until(deadline: Option<Instant>) -> Option<Duration> {
    let Some(deadline) = deadline else { return Some(Duration::MAX) };
    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
}

/// A panic elsewhere leaves what these locks guard whole: each change is a single call.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sidecar has not said yet that it speaks here.
const NOT_TAKEN: u8 = 0;
const OPEN: u8 = 1;
const OVER: u8 = 2;
/// Messages read before the reader looks after other things.
const MESSAGES_PER_TURN: usize = 256;
/// How long a leader looks before it sleeps, where it may: more than an answer takes that has to come over one hop.
const SPIN: Duration = Duration::from_micros(300);
/// The same for operations on more than [`SMALL_BYTES_MAX`] here. Their answers take longer, but fewer cores have gone to sleep.
const SPIN_AFTER_LARGE: Duration = Duration::from_micros(100);
const SMALL_BYTES_MAX: u64 = 256 << 10;
/// A wait after which the next one is expected to be over soon. One that has slept may last longer than a look, and the next one
/// not.
const SHORT_WAIT: Duration = Duration::from_millis(1);
