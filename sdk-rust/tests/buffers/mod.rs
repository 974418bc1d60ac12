//! Tests tensors that stay in shared memory: results, and buffers for submissions.

use std::time::Duration;

use ronde::blocking::{self, Progress};
use ronde::{DType, Error, Operation, Options, ReduceOp, Tensor, TensorRef, Transfer};

use crate::fake::{Fake, Settings};
use crate::{DATA_PATHS, SHARED_MEMORY_PATHS, connect, numbers};

#[test]
fn a_large_result_stays_in_shared_memory_until_it_is_dropped() {
    let values = numbers(100_000);
    let (large, small) = ([100_000_u64], [100_u64]);
    let large = || Operation::allreduce(None, TensorRef::of(&large, &values).expect("a tensor"), ReduceOp::Sum);
    let small = || Operation::allreduce(None, TensorRef::of(&small, &values[..100]).expect("a tensor"), ReduceOp::Sum);
    for path in DATA_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let land = |operation: Operation<'_>| client.submit_from(&operation).expect("submitted").wait_buffer();
        let is_shared = path.0 == Transfer::Arena;
        let mapped = land(large().mapped()).expect("a result");
        assert_eq!(mapped.is_mapped(), is_shared);
        assert_eq!(client.shared_memory().slots, usize::from(is_shared));
        for copied in [land(large()), land(small().mapped())] {
            assert!(!copied.expect("a result").is_mapped());
        }
        let mut handle = client.submit_from(&large()).expect("submitted");
        while handle.wait_timeout(Duration::from_millis(50)).expect("no fork") == Progress::NotReady {}
        assert!(handle.take_mapped().expect("no failure").is_none(), "it is still to be read");
        assert_eq!(handle.wait().expect("a result").tensor.expect("a tensor").bytes.len(), 400_000);
        assert!(land(Operation::barrier(None).mapped()).is_err(), "a barrier has no result");
        drop(client);
        fake.wait_for("closed");
        assert_eq!(mapped.to_tensor().to_vec::<f32>().expect("floats"), values);
        assert_eq!((mapped.shape(), mapped.len()), (&[100_000][..], 400_000));
    }
    let fake = Fake::start(Settings::default());
    let client = blocking::Client::connect(Options { mapped: false, ..fake.options() }).expect("a session");
    let copied = client.submit_from(&large().mapped()).expect("submitted").wait_buffer();
    assert!(!copied.expect("a result").is_mapped());
}

#[test]
fn a_buffer_is_submitted_without_a_copy_and_cannot_be_written_meanwhile() {
    let values = numbers(100_000);
    for path in DATA_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let (slots, is_shared) = (|| client.shared_memory().slots, path.0 == Transfer::Arena);
        let mut buffer = client.buffer(DType::F32, &[100_000]).expect("room");
        assert_eq!((buffer.is_mapped(), slots()), (is_shared, usize::from(is_shared)));
        buffer.elements_mut::<f32>().expect("floats").copy_from_slice(&values);
        assert!(buffer.elements::<i32>().expect_err("floats").to_string().contains("of type float32, not int32"));

        let never = client.submit_from(&Operation::allgather(Some("never"), &buffer)).expect("submitted");
        assert_eq!(slots(), usize::from(is_shared), "nothing was copied");
        let refused = buffer.bytes_mut().err().map(|error| error.to_string());
        assert_eq!(refused.is_some_and(|refused| refused.contains("in flight; wait for it")), is_shared);
        let sum = Operation::allreduce(None, &buffer, ReduceOp::Sum).mapped();
        let sum = client.submit_from(&sum).expect("submitted").wait_buffer().expect("a result");
        assert_eq!(sum.elements::<f32>().expect("floats"), values);
        let part = TensorRef::of(&[99], &sum.elements::<f32>().expect("floats")[1..100]).expect("a tensor");
        let again = client.allreduce_async(None, part, ReduceOp::Sum).expect("submitted");
        assert_eq!(slots(), 2 * usize::from(is_shared), "results are read where they lie, too");
        assert_eq!(again.wait().expect("a result").to_vec::<f32>().expect("floats"), values[1..100]);

        drop(client);
        fake.wait_for("closed");
        assert_eq!(buffer.bytes_mut().is_err(), is_shared, "the sidecar may still read it");
        drop(never);
        assert_eq!((buffer.len(), sum.to_tensor().to_vec::<f32>().expect("floats")), (400_000, values.clone()));
    }
    let fake = Fake::start(Settings::default());
    let client = connect(&fake, SHARED_MEMORY_PATHS[0]);
    let empty = client.buffer(DType::F64, &[3, 0]).expect("no bytes need no room");
    assert_eq!((empty.is_mapped(), empty.shape(), empty.len()), (false, &[3, 0][..], 0));
    let error = client.buffer(DType::U8, &[1 << 40]).expect_err("no room");
    assert!(matches!(&error, Error::Limit { reason } if reason.contains("arena_bytes_max")), "{error}");
    let mut buffer = client.buffer(DType::F32, &[100_000]).expect("room");
    let never = client.submit_from(&Operation::allgather(Some("never"), &buffer)).expect("submitted");
    client.allgather("end", &Tensor::of(&[1], &[1_i32]).expect("a tensor")).expect_err("the epoch ends");
    never.wait().expect_err("the epoch has ended");
    client.buffer(DType::U8, &[1]).expect_err("the session is over");
    assert!(buffer.is_mapped() && buffer.bytes_mut().is_ok(), "the sidecar's lanes have dropped the epoch");
}
