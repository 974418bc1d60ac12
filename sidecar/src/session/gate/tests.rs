use std::io::Read;
use std::os::unix::net::UnixStream as StdStream;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// A peer and its admitted connection.
fn connected(gate: &AcceptGate) -> (StdStream, Admitted<StdStream>) {
    let (peer, stream) = StdStream::pair().expect("sockets");
    (peer, gate.admit(stream).expect("this process has a uid"))
}

fn is_closed(connection: &Admitted<StdStream>) -> bool {
    connection.stream().set_nonblocking(true).expect("a socket");
    let mut stream = connection.stream();
    matches!(stream.read(&mut [0]), Ok(0))
}

#[test]
fn the_oldest_unclaimed_connection_makes_room_within_its_users_share() {
    let gate = AcceptGate::new("test.sock", BTreeSet::from([own_uid()]));
    let (_peers, mut connections): (Vec<_>, Vec<_>) = (0..UNCLAIMED_MAX / 2).map(|_| connected(&gate)).unzip();
    assert!(connections.iter().all(|connection| !is_closed(connection)), "each has its place");
    let claim = connections[0].place().claim();
    let (_a, last) = connected(&gate);
    assert!(connections.iter().all(|connection| !is_closed(connection)), "a claimed one needs no place");
    let (_b, another) = connected(&gate);
    assert!(is_closed(&connections[1]) && !is_closed(&connections[0]), "the oldest without a claim");
    assert!(!is_closed(&last) && !is_closed(&another));
    drop(claim);
    assert!(is_closed(&connections[2]) && !is_closed(&connections[0]), "it is the newest without a claim now");
    connections.clear();
    assert_eq!(gate.lock().open.len(), 2);
}

#[test]
fn users_that_are_not_allowed_share_few_places_and_take_none_of_the_others() {
    const ALLOWED: u32 = 100_000;
    let gate = AcceptGate::new("test.sock", (ALLOWED..ALLOWED + 63).collect());
    let connected = |uid| {
        let (peer, stream) = StdStream::pair().expect("sockets");
        (peer, gate.admit_user(stream, uid))
    };
    // Each of the others is another user.
    let users = (0..).map(|other| 200_000 + other).take(SHARE_MIN + 1);
    let (_a, allowed): (Vec<_>, Vec<_>) = (0..SHARE_MIN).map(|_| connected(ALLOWED)).unzip();
    let (_b, others): (Vec<_>, Vec<_>) = users.map(connected).unzip();
    assert_eq!(others.iter().map(is_closed).collect::<Vec<_>>(), [&[true][..], &[false; SHARE_MIN]].concat());
    assert!(!allowed.iter().any(is_closed), "the other users have one share together");
    let _one_more = connected(ALLOWED);
    assert!(is_closed(&allowed[0]) && !others[1..].iter().any(is_closed), "each user has a share");
}

#[test]
fn unclaimed_connections_have_a_deadline() {
    let gate = AcceptGate::new("test.sock", BTreeSet::from([own_uid()]));
    let ((_a, silent), (_b, used)) = (connected(&gate), connected(&gate));
    let claim = used.place().claim();
    gate.close_overdue(Instant::now());
    assert!(!is_closed(&silent));
    gate.close_overdue(Instant::now() + UNCLAIMED_FOR_MAX);
    assert!(is_closed(&silent) && !is_closed(&used));
    drop(claim);
    gate.close_overdue(Instant::now());
    assert!(!is_closed(&used), "its deadline starts over");
    gate.close_overdue(Instant::now() + UNCLAIMED_FOR_MAX);
    assert!(is_closed(&used));
}

#[tokio::test]
async fn an_unclaimed_connection_sends_little() {
    let gate = AcceptGate::new("test.sock", BTreeSet::from([own_uid()]));
    let (mut peer, stream) = UnixStream::pair().expect("sockets");
    let mut connection = gate.admit(stream).expect("this process has a uid");
    // It fails once the connection is dropped.
    let sending = tokio::spawn(async move { peer.write_all(&vec![7; 4 * UNCLAIMED_BYTES_MAX]).await });
    let claim = connection.place().claim();
    let mut half = vec![0; 2 * UNCLAIMED_BYTES_MAX];
    connection.read_exact(&mut half).await.expect("a claimed one sends as much as it likes");
    drop(claim);
    let mut rest = Vec::new();
    let error = connection.read_to_end(&mut rest).await.expect_err("there is more than it may send");
    assert!(error.kind() == io::ErrorKind::InvalidData, "{error}");
    assert!(rest.len() < 2 * UNCLAIMED_BYTES_MAX, "all of it was read");
    drop(connection);
    drop(sending.await);
}
