//! Test controls of the memory mesh: partition, heal, delay.

use std::task::Poll;
use std::time::Duration;

use ronde_transport::{DownReason, MemoryMesh, MemoryPort, Port, PortEvent, Role};
use ronde_wire::SidecarIndex;

use crate::harness::{CONTROL, control, down, frame, heartbeat, job, up};

async fn pair(mesh: &MemoryMesh) -> (MemoryPort, MemoryPort) {
    let (mut one, mut two) = (mesh.port(SidecarIndex(0), CONTROL), mesh.port(SidecarIndex(1), CONTROL));
    one.open(SidecarIndex(1), Role::Dial);
    up(&mut one, 1).await;
    up(&mut two, 0).await;
    (one, two)
}

/// Polls once, without waiting.
async fn poll_now(port: &mut MemoryPort) -> Poll<PortEvent> {
    std::future::poll_fn(|cx| Poll::Ready(port.poll_event(cx))).await
}

#[tokio::test(start_paused = true)]
async fn a_partition_delays_messages_in_order() {
    let mesh = MemoryMesh::new(job(), Duration::from_secs(5));
    let (mut one, mut two) = pair(&mesh).await;
    one.send(SidecarIndex(1), control(1)).expect("there is a link");
    mesh.cut(SidecarIndex(1), SidecarIndex(0));
    one.send(SidecarIndex(1), control(2)).expect("there is a link");
    assert!(poll_now(&mut two).await.is_pending());
    mesh.heal(SidecarIndex(0), SidecarIndex(1));
    assert_eq!(frame(&mut two, 0).await, heartbeat(1));
    assert_eq!(frame(&mut two, 0).await, heartbeat(2));
}

#[tokio::test(start_paused = true)]
async fn a_dial_across_a_cut_waits_for_its_end_or_the_start_timeout() {
    let mesh = MemoryMesh::new(job(), Duration::from_secs(5));
    let (mut one, mut two) = (mesh.port(SidecarIndex(0), CONTROL), mesh.port(SidecarIndex(1), CONTROL));
    mesh.cut(SidecarIndex(0), SidecarIndex(1));
    one.open(SidecarIndex(1), Role::Dial);
    assert!(matches!(down(&mut one, 1).await, DownReason::Unanswered(_)));
    one.open(SidecarIndex(1), Role::Dial);
    assert!(poll_now(&mut one).await.is_pending());
    mesh.heal(SidecarIndex(0), SidecarIndex(1));
    up(&mut one, 1).await;
    up(&mut two, 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_delay_delays_and_keeps_the_order() {
    let mesh = MemoryMesh::new(job(), Duration::from_secs(5));
    let (mut one, mut two) = pair(&mesh).await;
    mesh.delay(SidecarIndex(0), SidecarIndex(1), Duration::from_millis(70));
    one.send(SidecarIndex(1), control(1)).expect("there is a link");
    mesh.delay(SidecarIndex(0), SidecarIndex(1), Duration::ZERO);
    one.send(SidecarIndex(1), control(2)).expect("there is a link");
    assert!(poll_now(&mut two).await.is_pending());
    let sent = tokio::time::Instant::now();
    assert_eq!(frame(&mut two, 0).await, heartbeat(1));
    // The clock is virtual: exactly this much time has passed, or one timer step more.
    let passed = sent.elapsed();
    assert!((70..=72).contains(&passed.as_millis()), "{passed:?}");
    assert_eq!(frame(&mut two, 0).await, heartbeat(2));
}
