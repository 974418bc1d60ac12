//! Writes the seeds of every target, and the inputs at which it failed once, to `corpus/<target>`.

#![forbid(unsafe_code)]

use std::path::Path;
use std::{fs, io};

fn main() -> io::Result<()> {
    for target in ronde_cargo_fuzz::all() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
        fs::create_dir_all(&folder)?;
        let failures = target.failures();
        for (number, input) in target.seeds.iter().chain(&failures).enumerate() {
            fs::write(folder.join(format!("seed-{number}")), input)?;
        }
        println!("{}: {} inputs", folder.display(), target.seeds.len() + failures.len());
    }
    Ok(())
}
