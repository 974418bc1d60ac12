//! Messages are read back, and nothing else is read.

use super::*;
use proptest::prelude::*;

fn handles() -> impl Strategy<Value = Handle> {
    (any::<u32>(), any::<u16>(), any::<u64>(), any::<[u8; 16]>(), any::<u64>()).prop_map(
        |(sidecar, lane, listener, secret, job)| Handle {
            sidecar: SidecarIndex(sidecar),
            lane: Lane(lane),
            listener,
            secret: ListenSecret(secret),
            job,
        },
    )
}

fn worker_messages() -> impl Strategy<Value = WorkerMessage> {
    prop_oneof![
        Just(WorkerMessage::Listen),
        (any::<u64>(), any::<[u8; 16]>())
            .prop_map(|(listener, secret)| WorkerMessage::Accept { listener, secret: ListenSecret(secret) }),
        handles().prop_map(WorkerMessage::Connect),
        Just(WorkerMessage::Data),
        any::<u64>().prop_map(WorkerMessage::Credit),
        Just(WorkerMessage::Finish),
    ]
}

fn sidecar_messages() -> impl Strategy<Value = SidecarMessage> {
    prop_oneof![
        handles().prop_map(SidecarMessage::Listening),
        (any::<u32>(), any::<u32>())
            .prop_map(|(peer, window)| SidecarMessage::Connected { peer: SidecarIndex(peer), window }),
        Just(SidecarMessage::Data),
        Just(SidecarMessage::Finished),
        "[ -~äß]{0,900}".prop_map(SidecarMessage::Failed),
    ]
}

fn frames() -> impl Strategy<Value = StreamFrame> {
    prop_oneof![
        (any::<u64>(), any::<[u8; 16]>())
            .prop_map(|(listener, secret)| StreamFrame::Open { listener, secret: ListenSecret(secret) }),
        (any::<u64>(), any::<u64>()).prop_map(|(number, credit)| StreamFrame::Accept { number, credit }),
        "[ -~äß]{0,900}".prop_map(StreamFrame::Close),
        prop::collection::vec(any::<u8>(), 0..100).prop_map(|body| {
            let head = DataHeader { offset: 0, total: 100 }.encode();
            StreamFrame::Data([&head[..], &body].concat().into())
        }),
        any::<u64>().prop_map(StreamFrame::Credit),
        Just(StreamFrame::Finish),
        Just(StreamFrame::Alive),
        any::<u64>().prop_map(|listener| StreamFrame::Abandon { listener }),
    ]
}

fn short(text: &str) -> String {
    String::from_utf8(truncated(text).to_vec()).expect("it is cut between characters")
}

proptest! {
    #[test]
    fn handles_are_read_back(handle in handles(), mark: u64) {
        let mut bytes = handle.encode();
        prop_assert_eq!(scratch(&bytes), 0);
        set_scratch(&mut bytes, mark);
        prop_assert_eq!((scratch(&bytes), Handle::decode(&bytes)), (mark, Ok(handle)));
    }

    #[test]
    fn messages_of_workers_are_read_back(message in worker_messages()) {
        prop_assert_eq!(WorkerMessage::decode(&message.encode()), Ok(message));
    }

    #[test]
    fn messages_of_sidecars_are_read_back(message in sidecar_messages()) {
        let expected = match message.clone() {
            SidecarMessage::Failed(reason) => SidecarMessage::Failed(short(&reason)),
            other => other,
        };
        prop_assert_eq!(SidecarMessage::decode(&message.encode()), Ok(expected));
    }

    #[test]
    fn frames_are_read_back(frame in frames(), stream: u64) {
        let expected = match frame.clone() {
            StreamFrame::Close(reason) => StreamFrame::Close(short(&reason)),
            other => other,
        };
        prop_assert_eq!(StreamFrame::decode(&frame.encode(stream)), Ok((stream, expected)));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = (WorkerMessage::decode(&bytes), SidecarMessage::decode(&bytes), is_data(&bytes), is_finish(&bytes));
        let _ = StreamFrame::decode(&bytes.into());
    }

    #[test]
    fn what_is_read_has_one_spelling(message in worker_messages(), at in any::<prop::sample::Index>(), byte: u8) {
        let mut bytes = message.encode().to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(read) = WorkerMessage::decode(&bytes) && read != WorkerMessage::Data {
            prop_assert_eq!(&read.encode()[..], &bytes[..]);
        }
    }

    #[test]
    fn headers_of_data_are_read_back(offset: u32, total: u32) {
        let header = DataHeader { offset, total };
        prop_assert_eq!(DataHeader::decode(&header.encode()), Some(header));
    }
}

#[test]
fn handles_of_others_are_refused() {
    let handle = Handle { sidecar: SidecarIndex(1), lane: Lane(0), listener: 2, secret: ListenSecret([3; 16]), job: 4 };
    let refused = |change: &dyn Fn(&mut [u8; HANDLE_BYTES])| {
        let mut bytes = handle.encode();
        change(&mut bytes);
        Handle::decode(&bytes).expect_err("it is not a handle").0
    };
    assert!(Handle::decode(&[0; HANDLE_BYTES]).is_err(), "a handle of NCCL's sockets");
    assert!(refused(&|bytes| bytes[0] ^= 1).contains("NCCL_NET_PLUGIN=ronde"));
    assert!(refused(&|bytes| bytes[8] = 2).contains("version"));
    assert!(refused(&|bytes| bytes[HANDLE_BYTES - 9] = 1).contains("where there are none"));
    assert_eq!(format!("{:?}", handle.secret), "ListenSecret(secret)");
    let secrets = |bit: u8| ListenSecret([bit; 16]);
    assert!(secrets(1) == secrets(1) && secrets(1) != secrets(3));
}
