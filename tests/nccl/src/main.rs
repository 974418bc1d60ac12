//! Loads the net plugin as NCCL does, and calls it on command: `ronde-test-nccl LIBRARY VERSION`.
//!
//! Each line of standard input is a command, and one line answers it: `ok ...`, or `err CODE`. NCCL's log goes to standard
//! error. Objects are named by a letter and a number: L a listener, S a sender, R a receiver, Q a request.
//!
//! | command | answer |
//! |---|---|
//! | `init` | the number of devices |
//! | `properties DEVICE` | see [`table::Plugin::properties`] |
//! | `listen` | L and the handle in hexadecimal |
//! | `connect HANDLE` | S |
//! | `try HANDLE TIMES` | `pending` if it is not connected after so many calls |
//! | `accept L` | R |
//! | `meet HANDLE L` | S and R: connects and accepts at the same time |
//! | `send S BYTES SEED`, `recv R BYTES` | Q, which is not complete yet |
//! | `wait Q` | bytes and digest |
//! | `poll Q` | `pending`, or as `wait` |
//! | `pass S R BYTES ROUNDS SEED` | sends and receives at the same time, each round; the last digest |
//! | `pump S BYTES COUNT`, `drain R BYTES COUNT` | many messages with 8 requests at a time; the seconds that it took |
//! | `tcp-drain BYTES IP`, `tcp-pump ADDRESS BYTES` | the same over a plain socket, which listens at the IP address; its address first |
//! | `register R KIND`, `flush R`, `recv-many R` | calls that are refused or do nothing |
//! | `close OBJECT` | |

#![deny(unsafe_code)]

mod table;

use std::collections::{HashMap, VecDeque};
use std::io::{BufRead, Read, Write, stdin};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use table::{Code, HANDLE_BYTES, Handle, Plugin};

/// Bytes that every receiver expects of a message with this seed.
fn pattern(seed: &str, bytes: usize) -> Vec<u8> {
    if let Ok(seed) = seed.parse::<usize>() {
        return (0..bytes).map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed).to_le_bytes()[0]).collect();
    }
    // A text, repeated.
    seed.bytes().cycle().take(bytes).collect()
}

/// FNV-1a.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// An operation with its buffer, which stays where it is.
struct Pending {
    request: Handle,
    buffer: Vec<u8>,
}

struct Driver {
    plugin: Plugin,
    objects: HashMap<String, Handle>,
    requests: HashMap<String, Pending>,
    next: u32,
}

/// The answer to a command, or why there is none.
type Answer = Result<String, String>;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let version = arguments[2].parse().expect("the version is a number");
    let plugin = Plugin::open(&arguments[1], version).expect("the plugin can be opened");
    let (name, has_device_memory) = plugin.describe();
    assert!(name == "ronde" && !has_device_memory, "the table is another one: {name}");
    let mut driver = Driver { plugin, objects: HashMap::new(), requests: HashMap::new(), next: 0 };
    for line in stdin().lock().lines() {
        let line = line.expect("standard input is text");
        let words: Vec<&str> = line.split(' ').collect();
        match driver.execute(&words) {
            Ok(text) if text.is_empty() => println!("ok done"),
            Ok(text) => println!("ok {text}"),
            Err(text) => println!("err {text}"),
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` passes")]
fn failed(code: Code) -> String {
    code.0.to_string()
}

fn number(word: &str) -> Result<usize, String> {
    word.parse().map_err(|_| format!("{word} is no number"))
}

/// Polls until there is a value; the error after a minute is `hangs`.
fn until<T>(mut poll: impl FnMut() -> Result<Option<T>, String>) -> Result<T, String> {
    let begin = Instant::now();
    let mut polls = 0_u32;
    loop {
        if let Some(value) = poll()? {
            return Ok(value);
        }
        polls += 1;
        if polls.is_multiple_of(64) {
            if begin.elapsed() > Duration::from_secs(60) {
                return Err("hangs".to_owned());
            }
            // The machine of the tests may have fewer cores than processes that poll.
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

impl Driver {
    fn execute(&mut self, words: &[&str]) -> Answer {
        match words {
            ["init"] => self.plugin.init().map(|count| count.to_string()).map_err(failed),
            ["properties", device] => {
                let device = device.parse().map_err(|_| "no number".to_owned())?;
                self.plugin.properties(device).map_err(failed)
            }
            ["listen"] => {
                let (listener, handle) = self.plugin.listen().map_err(failed)?;
                let hex: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
                Ok(format!("{} {hex}", self.insert('L', listener)))
            }
            ["connect", handle] => {
                let mut handle = parse_handle(handle)?;
                let end = until(|| self.plugin.connect(&mut handle).map_err(failed))?;
                Ok(self.insert('S', end))
            }
            ["try", handle, times] => self.try_connect(parse_handle(handle)?, number(times)?),
            ["accept", listener] => {
                let listener = self.object(listener)?;
                let end = until(|| self.plugin.accept(listener).map_err(failed))?;
                Ok(self.insert('R', end))
            }
            ["meet", handle, listener] => self.meet(parse_handle(handle)?, listener),
            ["send", end, bytes, seed] => self.start(end, pattern(seed, number(bytes)?)),
            ["recv", end, bytes] => self.start(end, vec![0; number(bytes)?]),
            ["wait", request] => self.wait(request),
            ["poll", request] => self.poll(request),
            ["pass", to, from, bytes, rounds, seed] => self.pass((to, from), number(bytes)?, number(rounds)?, seed),
            ["pump" | "drain", end, bytes, count] => self.pump(end, number(bytes)?, number(count)?),
            ["tcp-drain", bytes, ip] => tcp_drain(number(bytes)?, ip),
            ["tcp-pump", address, bytes] => tcp_pump(address, number(bytes)?),
            ["register", end, kind] => {
                let kind = kind.parse().map_err(|_| "no number".to_owned())?;
                let end = self.object(end)?;
                self.plugin.register(end, &mut [0; 16], kind).map(|()| String::new()).map_err(failed)
            }
            ["flush", end] => {
                let end = self.object(end)?;
                self.plugin.flush(end, &mut [0; 16]).map(|needs| needs.to_string()).map_err(failed)
            }
            ["recv-many", end] => {
                let end = self.object(end)?;
                self.plugin.receive(end, &mut [0; 16], 2).map(|_| String::new()).map_err(failed)
            }
            ["close", name] => {
                let object = self.objects.remove(*name).ok_or("there is no such object")?;
                let kind = name.chars().next().ok_or("no name")?;
                self.plugin.close(kind, object).map(|()| String::new()).map_err(failed)
            }
            _ => Err(format!("{words:?} is no command")),
        }
    }

    fn insert(&mut self, kind: char, object: Handle) -> String {
        let name = self.name(kind);
        self.objects.insert(name.clone(), object);
        name
    }

    fn name(&mut self, kind: char) -> String {
        self.next += 1;
        format!("{kind}{}", self.next)
    }

    fn object(&self, name: &str) -> Result<Handle, String> {
        self.objects.get(name).copied().ok_or_else(|| format!("there is no {name}"))
    }

    fn try_connect(&mut self, mut handle: [u8; HANDLE_BYTES], times: usize) -> Answer {
        for _ in 0..times {
            if let Some(end) = self.plugin.connect(&mut handle).map_err(failed)? {
                return Ok(self.insert('S', end));
            }
        }
        Ok("pending".to_owned())
    }

    fn meet(&mut self, mut handle: [u8; HANDLE_BYTES], listener: &str) -> Answer {
        let (listener, mut sender, mut receiver) = (self.object(listener)?, None, None);
        let (sender, receiver) = until(|| {
            if sender.is_none() {
                sender = self.plugin.connect(&mut handle).map_err(failed)?;
            }
            if receiver.is_none() {
                receiver = self.plugin.accept(listener).map_err(failed)?;
            }
            Ok(sender.zip(receiver))
        })?;
        Ok(format!("{} {}", self.insert('S', sender), self.insert('R', receiver)))
    }

    fn begin(&self, end: &str, buffer: &mut [u8]) -> Result<Option<Handle>, String> {
        let object = self.object(end)?;
        if end.starts_with('S') {
            return self.plugin.send(object, buffer).map_err(failed);
        }
        self.plugin.receive(object, buffer, 1).map_err(failed)
    }

    fn start(&mut self, end: &str, mut buffer: Vec<u8>) -> Answer {
        match self.begin(end, &mut buffer)? {
            None => Ok("full".to_owned()),
            Some(request) => {
                let name = self.name('Q');
                self.requests.insert(name.clone(), Pending { request, buffer });
                Ok(name)
            }
        }
    }

    fn poll(&mut self, name: &str) -> Answer {
        let pending = self.requests.get(name).ok_or("there is no such request")?;
        match self.plugin.test(pending.request).map_err(failed)? {
            None => Ok("pending".to_owned()),
            Some(bytes) => {
                let pending = self.requests.remove(name).ok_or("it is gone")?;
                Ok(format!("{bytes} {}", digest(&pending.buffer[..bytes])))
            }
        }
    }

    fn wait(&mut self, name: &str) -> Answer {
        until(|| match self.poll(name)?.as_str() {
            "pending" => Ok(None),
            text => Ok(Some(text.to_owned())),
        })
    }

    fn pass(&mut self, (to, from): (&str, &str), bytes: usize, rounds: usize, seed: &str) -> Answer {
        let mut last = String::new();
        for _ in 0..rounds {
            let received = self.start(from, vec![0; bytes])?;
            let sent = self.start(to, pattern(seed, bytes))?;
            let (mut is_sent, mut digest) = (false, None);
            // Both are polled: a peer may read only while its own message is read.
            last = until(|| {
                is_sent = is_sent || self.poll(&sent)? != "pending";
                if digest.is_none() {
                    digest = Some(self.poll(&received)?).filter(|text| text != "pending");
                }
                Ok(digest.clone().filter(|_| is_sent))
            })?;
        }
        Ok(last)
    }

    fn pump(&mut self, end: &str, bytes: usize, count: usize) -> Answer {
        let mut buffers: Vec<Vec<u8>> = (0..REQUESTS).map(|_| vec![1; bytes]).collect();
        let begin = Instant::now();
        let mut running: VecDeque<(Handle, Vec<u8>)> = VecDeque::new();
        let mut started = 0;
        while started < count || !running.is_empty() {
            if started < count
                && let Some(mut buffer) = buffers.pop()
            {
                let request = until(|| self.begin(end, &mut buffer))?;
                running.push_back((request, buffer));
                started += 1;
                continue;
            }
            let Some((request, buffer)) = running.pop_front() else { break };
            until(|| self.plugin.test(request).map_err(failed))?;
            buffers.push(buffer);
        }
        Ok(begin.elapsed().as_secs_f64().to_string())
    }
}

fn parse_handle(hex: &str) -> Result<[u8; HANDLE_BYTES], String> {
    let byte = |at: usize| hex.get(2 * at..2 * at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    let bytes: Option<Vec<u8>> = (0..HANDLE_BYTES).map(byte).collect();
    bytes.and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| "it is no handle".to_owned())
}

/// Receives bytes over a plain socket, whose address it prints first.
fn tcp_drain(bytes: usize, ip: &str) -> Answer {
    let listener = TcpListener::bind((ip, 0)).map_err(|error| error.to_string())?;
    println!("at {}", listener.local_addr().map_err(|error| error.to_string())?);
    let (mut stream, _) = listener.accept().map_err(|error| error.to_string())?;
    let (mut buffer, mut left, begin) = (vec![0; TCP_BUFFER_BYTES], bytes, Instant::now());
    while left > 0 {
        match stream.read(&mut buffer).map_err(|error| error.to_string())? {
            0 => return Err("the sender has ended".to_owned()),
            read => left = left.saturating_sub(read),
        }
    }
    Ok(begin.elapsed().as_secs_f64().to_string())
}

fn tcp_pump(address: &str, bytes: usize) -> Answer {
    let mut stream = TcpStream::connect(address).map_err(|error| error.to_string())?;
    let (buffer, mut left, begin) = (vec![1; TCP_BUFFER_BYTES], bytes, Instant::now());
    while left > 0 {
        let part = left.min(buffer.len());
        stream.write_all(&buffer[..part]).map_err(|error| error.to_string())?;
        left -= part;
    }
    Ok(begin.elapsed().as_secs_f64().to_string())
}

/// Requests at a time, as NCCL has for a connection.
const REQUESTS: usize = 8;
/// A message of NCCL's.
const TCP_BUFFER_BYTES: usize = 512 << 10;
