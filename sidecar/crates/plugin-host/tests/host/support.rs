//! What the tests of this crate share: hosts, instances, spans.

use std::sync::Arc;

use ronde_plugin_host::{Host, HostConfig, Instance, LoadError, Parameters, Plugin, Span, Stage};
use ronde_wire::DType;

pub(crate) use crate::modules::{CODEC, Wat, reducer_manifest};

/// A host as it is by default.
pub(crate) fn host() -> Host {
    Host::new(HostConfig::default()).expect("a host")
}

/// Why a module is not let in.
pub(crate) fn refused(host: &Host, module: &[u8]) -> LoadError {
    host.load(module, None).expect_err("the module is not let in")
}

/// A plugin and an instance with its defaults.
pub(crate) fn running(host: &Host, module: &Wat) -> (Arc<Plugin>, Instance) {
    let plugin = host.load(&module.wasm(), None).unwrap_or_else(|error| panic!("{error}\n{}", module.text()));
    let instance = plugin.instance(&Parameters::defaults(plugin.manifest())).expect("an instance");
    (plugin, instance)
}

/// A span of a tensor that is long enough for every test.
pub(crate) fn span(dtype: DType) -> Span {
    Span { dtype, stage: Stage::Contribution, offset: 0, tensor_elements: 1 << 20, round: 0, tensor: 1 }
}

/// The same host completes an ordinary encoding, decoding and reduction.
pub(crate) fn works(host: &Host) {
    let (_, mut codec) = running(host, &Wat::codec());
    let values: Vec<u8> = (0..251_u8).cycle().take(4_000).collect();
    let (mut state, mut encoded) = (vec![0; 4_000], Vec::new());
    codec.encode(&span(DType::F32), &values, &mut state, &mut encoded).expect("an ordinary encoding");
    assert_eq!(encoded, values);
    assert_eq!(state[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    let mut decoded = vec![0; values.len()];
    codec.decode(&span(DType::F32), &encoded, &mut decoded).expect("an ordinary decoding");
    assert_eq!(decoded, values);
    let (_, mut reducer) = running(host, &Wat::reducer("n-ary", 0));
    let other = vec![9; values.len()];
    let mut result = vec![0; values.len()];
    reducer.reduce(&span(DType::F32), &[&other, &other, &values], &[], &mut result).expect("an ordinary reduction");
    assert_eq!(result, values);
}
