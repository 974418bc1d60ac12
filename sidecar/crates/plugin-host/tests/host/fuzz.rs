//! Fuzz targets: manifests, blocks of parameters of other sidecars, signatures and keys.

use crate::support::{CODEC, reducer_manifest};
use ronde_fuzz::{Outcome, fuzz};
use ronde_plugin_host::trust::{PublicKey, Signature, SigningKey};
use ronde_plugin_host::{Limits, Manifest, Parameters, limits};

/// A manifest, a zero byte, and a block of parameters for it.
#[test]
fn fuzz_manifests() {
    let manifest = Manifest::parse(CODEC.as_bytes()).expect("a manifest");
    let block = Parameters::defaults(&manifest).block();
    let reducer = reducer_manifest("two-pass", 3);
    let seeds = vec![[CODEC.as_bytes(), b"\0", &block].concat(), reducer.into_bytes()];
    fuzz("manifests", seeds, |bytes| {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let manifest = match Manifest::parse(&bytes[..end]) {
            Ok(manifest) => manifest,
            Err(error) => return Outcome::refused(&error),
        };
        within_limits(&manifest);
        let defaults = Parameters::defaults(&manifest);
        assert_eq!(Parameters::from_block(&manifest, &defaults.block()).as_ref(), Ok(&defaults));
        let Some(block) = bytes.get(end + 1..) else { return Outcome::read(&manifest.codec.is_some()) };
        let parameters = Parameters::from_block(&manifest, block);
        if let Ok(parameters) = &parameters {
            assert_eq!(parameters.block(), block, "a block has one spelling");
        }
        Outcome::of(&parameters.map(|parameters| parameters.iter().count()))
    });
}

fn within_limits(manifest: &Manifest) {
    let Limits { memory_bytes, call_ms, ranks } = manifest.limits;
    assert!(memory_bytes <= Limits::MAX.memory_bytes && call_ms <= Limits::MAX.call_ms && ranks <= Limits::MAX.ranks);
    assert!(manifest.name.len() <= limits::NAME_BYTES_MAX && manifest.version.len() <= limits::VERSION_BYTES_MAX);
    assert!(manifest.codec.is_some() || manifest.reducer.is_some());
    assert!(!manifest.about.contains(char::is_control));
}

/// Files with signatures and keys: parsing and writing round-trip, and a changed signature is never valid.
#[test]
fn fuzz_signatures() {
    let key = SigningKey::generate().expect("a key");
    let plugin = b"a plugin";
    let signature = Signature::of(plugin, &key).to_text();
    let seeds = vec![signature.clone().into_bytes(), key.public_key().to_pem().into_bytes()];
    let signed = Signature::from_text(&signature).expect("a signature");
    fuzz("signatures", seeds, |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return Outcome::refused(&"no text") };
        if let Ok(key) = PublicKey::from_pem(text) {
            assert_eq!(PublicKey::from_pem(&key.to_pem()).expect("what was written is read"), key);
            return Outcome::read(&"a key");
        }
        let read = Signature::from_text(text);
        if let Ok(read) = &read {
            assert_eq!(Signature::from_text(&read.to_text()).expect("what was written is read"), *read);
            assert!(*read == signed || read.verify(plugin).is_err(), "another signature passes");
        }
        Outcome::of(&read.map(|_| "a signature"))
    });
}
