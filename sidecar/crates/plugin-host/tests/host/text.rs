//! The plugin that is written in WebAssembly text gives the native sum's bits.

use crate::support::{host, span, works};
use ronde_collectives::kernels::{Side, reduce_into};
use ronde_plugin_host::{Parameters, determinism, throughput};
use ronde_wire::{DType, ReduceOp};

const TEXT: &str = include_str!("../../../../../plugins/text-sum/sum.wat");

#[test]
fn a_plugin_in_text_sums_like_the_native_kernel() {
    let host = host();
    let module = wat::parse_str(TEXT).expect("the text is WebAssembly");
    let plugin = host.load(&module, None).expect("it is let in");
    assert_eq!((plugin.name(), plugin.version()), ("text-sum", "1.0.0"));
    let parameters = Parameters::defaults(plugin.manifest());
    let mut instance = plugin.instance(&parameters).expect("an instance");
    let mut random = fastrand::Rng::with_seed(7);
    for elements in [1, 15, 16, 17, 8_192, 8_193, 100_003] {
        // All bits there are: NaNs, infinities and denormals among them.
        let mut values = |_| (0..elements * 4).map(|_| random.u8(..)).collect::<Vec<u8>>();
        let [left, right] = [0, 1].map(&mut values);
        let (mut ours, mut native) = (left.clone(), left);
        instance.reduce_pair(&span(DType::F32), &mut ours, &right).expect("a sum");
        reduce_into(DType::F32, ReduceOp::Sum, &mut native, &right, Side::AccumulatorLeft).expect("a native sum");
        assert!(ours == native, "{elements} elements");
        // Of five ranks, one after the other.
        let several: Vec<&[u8]> = vec![&right, &native, &right, &native, &right];
        let (mut ours, mut folded) = (vec![0; right.len()], right.clone());
        for values in &several[1..] {
            reduce_into(DType::F32, ReduceOp::Sum, &mut folded, values, Side::AccumulatorLeft).expect("a native sum");
        }
        instance.fold(&span(DType::F32), &several, &mut ours).expect("a sum");
        assert!(ours == folded, "{elements} elements of five ranks");
    }
    assert_eq!(determinism::check(&plugin, &parameters), Ok(()));
    let time = std::time::Duration::from_millis(1);
    let rates = throughput::measure(&plugin, &parameters, DType::F32, 1 << 16, time).expect("a measurement");
    assert_eq!(rates.len(), 2, "of two ranks and of four");
    assert!(rates.iter().all(|rates| rates.plugin > 0.0 && rates.native > 0.0 && rates.copy > 0.0));
    works(&host);
}
