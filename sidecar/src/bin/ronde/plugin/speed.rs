//! `ronde plugin bench`: measures bytes per second, next to the machine's limits.

use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::numbers::whole;
use ronde_plugin_host::throughput;
use ronde_plugin_host::trust::Policy;
use ronde_wire::DType;

use super::PluginWithParameters;

/// Arguments of `ronde plugin bench`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct BenchArgs {
    #[command(flatten)]
    plugin: PluginWithParameters,
    /// Measure one type of elements only, such as float32.
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    dtype: Option<DType>,
    /// KiB of values per call.
    #[arg(long, value_name = "KIB", default_value_t = 1_024, value_parser = whole::<u32>(1..=262_144))]
    kib: u32,
    /// Milliseconds for each measurement.
    #[arg(long, value_name = "MS", default_value_t = 300, value_parser = whole::<u64>(1..=60_000))]
    time: u64,
}

pub(super) fn perform(args: &BenchArgs) -> anyhow::Result<String> {
    let (plugin, parameters) = args.plugin.load(Policy::Unsigned)?;
    let manifest = plugin.manifest();
    let encoded = manifest.codec.iter().flat_map(|codec| &codec.dtypes);
    let reduced = manifest.reducer.iter().flat_map(|reducer| &reducer.dtypes);
    let mut dtypes: Vec<DType> = encoded.chain(reduced).copied().collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    if let Some(only) = args.dtype {
        dtypes.retain(|dtype| *dtype == only);
        let missing = || format!("{} does not support {only}", plugin.label());
        ensure!(!dtypes.is_empty(), anyhow::anyhow!(missing()).context(Code::PluginParameters));
    }
    let time = Duration::from_millis(args.time);
    let mut text = format!("{}, {} KiB at a time, GB/s of values, all copies included\n", plugin.label(), args.kib);
    text.push_str(HEADING);
    for dtype in dtypes {
        let rates = throughput::measure(&plugin, &parameters, dtype, args.kib as usize * 1_024, time);
        for rates in rates.context(Code::PluginFailed)? {
            let what = format!("{} {dtype}", rates.what);
            let all = [rates.plugin, rates.native, rates.native_copied, rates.copy];
            let [own, native, copied, copy] = all.map(|rate| rate / 1e9);
            text.push_str(&format!("{what:<28} {own:>8.2} {native:>11.2} {copied:>11.2} {copy:>11.2}"));
            let [to_native, to_copied, to_copy] = [native, copied, copy].map(|rate| own / rate);
            text.push_str(&format!(" {to_native:>14.2} {to_copied:>14.2} {to_copy:>12.2}\n"));
        }
        let call = throughput::call_nanoseconds(&plugin, &parameters, dtype, time).context(Code::PluginFailed)?;
        text.push_str(&format!("{:<28} {call:>8.0} ns\n", format!("a call with {dtype}")));
    }
    Ok(text)
}

fn dtype(name: &str) -> anyhow::Result<DType> {
    DType::from_name(name).with_context(|| {
        let names: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
        format!("there is no type {name:?}; types are {}", names.join(", "))
    })
}

/// The baselines: sums of private memory, and of operands in shared memory, which all-reduces copy as well.
const HEADING: &str =
    "native: a sum of private memory; copied: the same with the copies that operands in shared memory need
                               plugin      native      copied  plain copy  plugin/native  plugin/copied  plugin/copy
";

const EXAMPLES: &str = "Examples:
  ronde plugin bench my-codec.wasm
  ronde plugin bench --dtype float32 --set ratio=0.05 topk";
