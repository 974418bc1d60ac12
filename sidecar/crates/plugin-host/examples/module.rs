//! Measures a plugin's module on this machine: `cargo run --release --example module -- MODULE.wasm [DTYPE]`.

#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Duration;

use ronde_plugin_host::{Host, HostConfig, Parameters, throughput};
use ronde_wire::DType;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("name a module: module MODULE.wasm [DTYPE]")?;
    let name = arguments.next().unwrap_or_else(|| "float32".to_owned());
    let dtype = DType::from_name(&name).ok_or("there is no such type")?;
    let plugin = Host::new(HostConfig::default())?.load(&wat::parse_file(path)?, None)?;
    let parameters = Parameters::defaults(plugin.manifest());
    for bytes in [16 << 10, 256 << 10, 1 << 20, 16 << 20] {
        for rates in throughput::measure(&plugin, &parameters, dtype, bytes, Duration::from_millis(500))? {
            println!(
                "{bytes:>9} B, {:<20}: plugin {:6.2} GB/s, native sum {:6.2}, with copies {:6.2}, copy {:6.2}; {:.2} of native, {:.2} with copies",
                rates.what,
                rates.plugin / 1e9,
                rates.native / 1e9,
                rates.native_copied / 1e9,
                rates.copy / 1e9,
                rates.plugin / rates.native,
                rates.plugin / rates.native_copied
            );
        }
    }
    let call = throughput::call_nanoseconds(&plugin, &parameters, dtype, Duration::from_millis(500))?;
    println!("a call takes {call:.0} ns");
    Ok(())
}
