//! Tests plugins in the messages to the sidecar, and requests that fail before they are sent.

use ronde::{Client, Codec, Collective, Error, Operation, PluginCall, ReduceOp, ReduceOptions, Tensor, TensorRef};

use crate::fake::{Fake, Settings};
use crate::{DATA_PATHS, OVER_RING, connect};

#[test]
fn the_sidecar_receives_the_plugin_and_its_parameters() {
    for path in DATA_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let owned = Tensor::of(&[2], &[1.0_f32, 2.0]).expect("a tensor");
        let tensor = TensorRef::from(&owned);
        let topk = || PluginCall::new("topk").with("ratio", 0.25).with("seed", -3).with("exact", true);
        let encoded = ReduceOptions::from(ReduceOp::Sum).encoded_by(topk().with("mode", "fast"));
        assert_eq!(client.allreduce("x", tensor, encoded.clone()).expect("a result"), owned);
        let reduced = ReduceOptions::reduced_by(PluginCall::new("median@1.0.0"));
        assert_eq!(client.allreduce("y", tensor, reduced.clone()).expect("a result"), owned);
        let both = client.grouped_allreduce("z", &[tensor, tensor], reduced).expect("results");
        assert_eq!(both, [owned.clone(), owned.clone()]);
        client.allreduce("plain", tensor, ReduceOp::Sum).expect("a result");

        // With a result in this worker's own memory, and one read into the caller's.
        let values = vec![1.5_f32; 100_000];
        let large = TensorRef::of(&[100_000], &values).expect("a tensor");
        let operation = Operation::allreduce("mapped", large, encoded.clone()).mapped();
        let mapped = client.submit_from(&operation).expect("submitted").wait_buffer().expect("a result");
        assert_eq!(mapped.to_tensor().bytes, large.bytes);
        let mut target = vec![0; large.bytes.len()];
        client.allreduce_async("into", large, encoded).expect("submitted").wait_into(&mut target).expect("a result");
        assert_eq!(target, large.bytes);

        let received: Vec<String> =
            fake.received().into_iter().filter(|received| received.starts_with("plugin")).collect();
        let first = "plugin topk ratio=0.25 seed=-3 exact=true mode=\"fast\" for sum, codec plugin";
        let reduced = "plugin median@1.0.0 for plugin, codec none";
        assert_eq!(received, [first, reduced, reduced, reduced, first, first]);
    }
}

#[tokio::test]
async fn the_asynchronous_client_sends_plugins_too() {
    let fake = tokio::task::spawn_blocking(|| Fake::start(Settings::default())).await.expect("started");
    let client = Client::connect(fake.options()).await.expect("a session");
    let owned = Tensor::of(&[2], &[1.0_f32, 2.0]).expect("a tensor");
    let tensor = TensorRef::from(&owned);
    let options = ReduceOptions::default().encoded_by(PluginCall::new("bf16"));
    assert_eq!(client.allreduce("x", tensor, options.clone()).await.expect("a result"), owned);
    client.grouped_allreduce("y", &[tensor, tensor], options).await.expect("results");
    client.close().await;
    let received: Vec<String> = fake.received().into_iter().filter(|received| received.starts_with("plugin")).collect();
    assert_eq!(received, vec!["plugin bf16 for average, codec plugin"; 3]);
    tokio::task::spawn_blocking(move || drop(fake)).await.expect("ended");
}

#[test]
fn an_invalid_plugin_request_fails_only_at_the_caller() {
    let fake = Fake::start(Settings::default());
    let client = connect(&fake, OVER_RING);
    let owned = Tensor::of(&[2], &[1.0_f32, 2.0]).expect("a tensor");
    let tensor = TensorRef::from(&owned);
    let call = || PluginCall::new("topk");
    let encoded = |op| ReduceOptions::from(op).encoded_by(call());
    let with = |call| ReduceOptions::default().encoded_by(call);
    let many = (0..17).fold(call(), |call, index| call.with(format!("p{index}"), true));
    let float16 = |options| ReduceOptions { codec: Codec::F16, ..options };
    let cases = [
        (encoded(ReduceOp::Min), "topk as a codec with min"),
        (encoded(ReduceOp::Adasum), "use Sum or Average"),
        (float16(encoded(ReduceOp::Sum)), "codec float16 and plugin topk"),
        (float16(ReduceOptions::reduced_by(call())), "codec float16 with a reduction by plugin topk"),
        (ReduceOp::Plugin.into(), "names no plugin; use ReduceOptions::reduced_by"),
        (
            ReduceOptions { codec: Codec::Plugin, ..Default::default() },
            "names no plugin; use ReduceOptions::encoded_by",
        ),
        (with(PluginCall::new("")), "\"\" is no name of a plugin"),
        (with(PluginCall::new("Top K")), "\"Top K\" is no name of a plugin"),
        (with(PluginCall::new("topk@")), "\"topk@\" is no name of a plugin"),
        (with(PluginCall::new("x".repeat(65))), "1 to 64 of a-z"),
        (with(call().with("ratio", f64::NAN)), "parameter ratio is NaN, but must be finite"),
        (with(call().with("ratio", 0.5).with("ratio", 0.25)), "parameter ratio is given twice"),
        (with(call().with("", 1)), "\"\" is no name of a parameter"),
        (with(call().with("mode", "x".repeat(65).as_str())), "a text of 65 bytes"),
        (with(many), "17 parameters; a plugin has at most 16"),
    ];
    for (options, words) in cases {
        let error = client.allreduce("x", tensor, options).expect_err(words);
        assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains(words), "{error}");
    }
    let scattered = client.reduce_scatter("x", tensor, encoded(ReduceOp::Sum)).expect_err("no all-reduce");
    let reduced = client.reduce("x", tensor, 0, ReduceOptions::reduced_by(call())).expect_err("no all-reduce");
    let gather = Operation::new("x", Collective::AllGather, Some(tensor));
    let gathered = client.submit_from(&Operation { plugin: Some(call()), ..gather }).expect_err("no reduction");
    for (error, kind) in [(scattered, "REDUCESCATTER"), (reduced, "REDUCE"), (gathered, "ALLGATHER")] {
        let wanted = format!("{kind} takes no plugin, but was given topk");
        assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains(&wanted), "{error}");
    }
    assert!(!fake.received().iter().any(|received| received.starts_with("submit")));
    client.allreduce("x", tensor, encoded(ReduceOp::Sum)).expect("the session goes on");
}
