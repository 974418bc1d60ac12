//! Keys, signatures and policies.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::support::{Wat, works};
use ronde_plugin_host::trust::{
    Policy, PublicKey, Signature, SigningKey, TrustError, create_key, digest, digest_from_text, digest_text,
    read_public_key, read_signature, read_signing_key, signature_path, write_signature,
};
use ronde_plugin_host::{Host, HostConfig, LoadError};

fn host(policy: Policy) -> Host {
    Host::new(HostConfig { policy, ..HostConfig::default() }).expect("a host")
}

fn key() -> SigningKey {
    SigningKey::generate().expect("a key")
}

#[test]
fn signatures_let_in_what_they_are_of() {
    let (ours, theirs) = (key(), key());
    let plugin = Wat::codec().wasm();
    let only_ours = host(Policy::Keys(vec![ours.public_key()]));
    let signed = only_ours.load(&plugin, Some(&Signature::of(&plugin, &ours))).expect("a signed plugin");
    assert_eq!(signed.signer(), Some(ours.public_key().id()));
    let refused = |host: &Host, plugin: &[u8], signature: Option<&Signature>| match host.load(plugin, signature) {
        Err(LoadError::Trust(error)) => error,
        other => panic!("not for trust: {other:?}"),
    };
    assert!(matches!(refused(&only_ours, &plugin, None), TrustError::Unsigned { .. }));
    let error = refused(&only_ours, &plugin, Some(&Signature::of(&plugin, &theirs)));
    let text = error.to_string();
    assert!(text.contains(&theirs.public_key().id().to_string()), "{text}");
    assert!(text.contains(&ours.public_key().id().to_string()), "{text}");
    // A signature of another file is wrong, whatever the policy.
    let other = Wat::reducer("n-ary", 0).wasm();
    for policy in [Policy::Unsigned, Policy::Keys(vec![ours.public_key()]), Policy::Digests(vec![digest(&plugin)])] {
        let host = host(policy);
        let error = refused(&host, &plugin, Some(&Signature::of(&other, &ours)));
        assert!(matches!(error, TrustError::WrongSignature { .. }), "{error}");
    }
    let unsigned = host(Policy::Unsigned);
    assert_eq!(unsigned.load(&plugin, None).expect("all are let in").signer(), None);
    works(&unsigned);
}

#[test]
fn a_changed_plugin_is_not_what_was_signed() {
    let key = key();
    let host = host(Policy::Keys(vec![key.public_key()]));
    let mut plugin = Wat::codec().wasm();
    let signature = Signature::of(&plugin, &key);
    let last = plugin.len() - 1;
    plugin[last] ^= 1;
    let error = host.load(&plugin, Some(&signature)).expect_err("it was changed");
    assert!(error.to_string().contains("the plugin or the signature was changed"), "{error}");
}

#[test]
fn digests_let_in_what_they_are_of() {
    let plugin = Wat::codec().wasm();
    let host = host(Policy::Digests(vec![digest(&plugin)]));
    let loaded = host.load(&plugin, None).expect("it is on the list");
    assert_eq!(loaded.digest(), digest(&plugin));
    let other = Wat::reducer("n-ary", 0).wasm();
    let error = host.load(&other, None).expect_err("it is not");
    assert!(error.to_string().contains(&digest_text(&digest(&other))), "{error}");
    assert_eq!(digest_from_text(&digest_text(&digest(&other))).expect("a digest"), digest(&other));
    assert!(digest_from_text("abc").is_err() && digest_from_text(&"g".repeat(64)).is_err());
}

#[test]
fn signatures_are_read_as_they_are_written() {
    let key = key();
    let signature = Signature::of(b"some plugin", &key);
    let text = signature.to_text();
    assert_eq!(Signature::from_text(&text).expect("a signature"), signature);
    assert_eq!(Signature::from_text(&text.replace('\n', "\r\n")).expect("from another system"), signature);
    let wrong = [
        String::new(),
        text.replace("signature 1", "signature 2"),
        text.replace("key: ", "key "),
        text.replace("\nsignature: ", "\nsignature: 0"),
        text.clone() + "more\n",
        text.replace('a', "x"),
    ];
    for text in wrong {
        assert!(Signature::from_text(&text).is_err(), "{text}");
    }
}

#[test]
fn keys_are_files_that_only_their_owner_reads() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("plugins.key");
    let (public, public_path) = create_key(&path).expect("a key");
    assert_eq!(public_path, folder.path().join("plugins.key.pub"));
    assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
    assert_eq!(read_public_key(&public_path).expect("a public key"), public);
    let key = read_signing_key(&path).expect("a private key");
    assert_eq!(key.public_key(), public);
    assert!(create_key(&path).is_err(), "no key is overwritten");
    assert_eq!(read_signing_key(&path).expect("still the same").public_key(), public);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("another mode");
    let error = read_signing_key(&path).expect_err("others can read it");
    assert!(error.to_string().contains("chmod 600"), "{error}");
    assert!(read_public_key(&path).expect_err("it is the private one").to_string().contains("PUBLIC KEY"));

    let plugin = folder.path().join("topk.wasm");
    assert!(read_signature(&plugin).expect("there is none").is_none());
    let written = write_signature(&plugin, &Signature::of(b"bytes", &key)).expect("a signature");
    assert_eq!(
        (written, signature_path(&plugin)),
        (folder.path().join("topk.wasm.sig"), folder.path().join("topk.wasm.sig"))
    );
    read_signature(&plugin).expect("it is read").expect("it is there").verify(b"bytes").expect("it is right");
    fs::write(signature_path(&plugin), "nonsense").expect("a file");
    assert!(read_signature(&plugin).is_err());
}

#[test]
fn where_a_key_is_a_public_one_without_a_private_one_is_not_left() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("key");
    fs::write(&path, "something else").expect("a file");
    assert!(create_key(&path).is_err());
    assert!(!folder.path().join("key.pub").exists());
}

/// From RFC 8410, section 10.3: a key in both forms, as other tools write them.
#[test]
fn keys_of_other_tools_are_read() {
    let private = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
    let public = "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----\n";
    let private = SigningKey::from_pem(private).expect("a private key");
    let public = PublicKey::from_pem(public).expect("a public key");
    assert_eq!(private.public_key(), public);
    assert_eq!(PublicKey::from_pem(&public.to_pem()).expect("as written"), public);
    assert!(SigningKey::from_pem("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n").is_err());
    assert!(!format!("{private:?}").contains("MC4C"));
}

#[test]
fn the_cache_is_private() {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = folder.path().join("compiled");
    let config = || HostConfig { cache_dir: Some(cache.clone()), ..HostConfig::default() };
    let host = Host::new(config()).expect("a host with a cache");
    assert_eq!(fs::metadata(&cache).expect("the folder is made").permissions().mode() & 0o777, 0o700);
    works(&host);
    let files = || fs::read_dir(&cache).expect("the folder").count();
    assert!(files() > 0, "compiled modules are kept");
    works(&Host::new(config()).expect("another host with the same cache"));
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o770)).expect("another mode");
    let error = Host::new(config()).expect_err("others can write to it").to_string();
    assert!(error.contains("mode is 770") && error.contains("700"), "{error}");
    fs::set_permissions(&cache, fs::Permissions::from_mode(0o700)).expect("its mode");
    std::os::unix::fs::symlink(&cache, folder.path().join("link")).expect("a link");
    let linked = HostConfig { cache_dir: Some(folder.path().join("link")), ..HostConfig::default() };
    assert!(Host::new(linked).expect_err("a link").to_string().contains("no folder"));
    let relative = HostConfig { cache_dir: Some("compiled".into()), ..HostConfig::default() };
    assert!(Host::new(relative).expect_err("a relative path").to_string().contains("absolute"));
}

/// Whoever may rename the folder, or one above it, could put compiled code of their own there.
#[test]
fn other_users_cannot_replace_the_cache() {
    let folder = tempfile::tempdir().expect("a folder");
    let above = folder.path().join("above");
    let cache = above.join("between/compiled");
    fs::create_dir_all(&cache).expect("folders");
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
    mode(&cache, 0o700);
    let config = |path: &Path| HostConfig { cache_dir: Some(path.to_owned()), ..HostConfig::default() };
    for (given, words) in [(0o777, "mode 777"), (0o770, "mode 770"), (0o703, "mode 703")] {
        mode(&above, given);
        let error = Host::new(config(&cache)).expect_err("others can replace what lies there").to_string();
        assert!(error.contains(words) && error.contains(&format!("folder {} ", above.display())), "{error}");
    }
    // As in /tmp, which others may write to, but not to what is another's.
    for given in [0o1777, 0o755] {
        mode(&above, given);
        works(&Host::new(config(&cache)).expect("nobody can replace it"));
    }
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(&above, Some(65_534), None).expect("root gives folders away");
        let error = Host::new(config(&cache)).expect_err("its owner can replace what lies there").to_string();
        assert!(error.contains("belongs to user 65534"), "{error}");
        std::os::unix::fs::chown(&above, Some(0), None).expect("and takes them back");
    }
    // A link on the way is followed to what it leads to.
    let open = folder.path().join("open");
    fs::create_dir_all(open.join("inner")).expect("folders");
    mode(&open, 0o777);
    std::os::unix::fs::symlink(open.join("inner"), above.join("link")).expect("a link");
    let linked = above.join("link/compiled");
    let error = Host::new(config(&linked)).expect_err("others can replace what the link leads to").to_string();
    assert!(error.contains(&format!("folder {} ", open.display())), "{error}");
}
