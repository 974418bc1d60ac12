//! The listener over TLS: both sides present certificates of the job.

use std::ffi::OsString;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ronde_rpc::v1;
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::server_message;
use ronde_tests::cluster::{Authority, Cluster, PATIENCE, Plan, Process, Sidecar, ronde_binary};
use ronde_tests::raw::claim;
use ronde_tests::web::{Answer, Call, WebSession, address, connect, framed, messages_body};
use ronde_transport::KeyRequest;
use ronde_wire::{Collective, ReduceOp};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, SignatureScheme, StreamOwned};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use serde_json::{Value, json};

use super::{broadcast, token_of};

/// A TLS client with a certificate, or without one, that accepts any sidecar's.
fn tls_client(certificate: Option<(&str, &str)>, hybrid: bool) -> Result<ClientConfig> {
    let mut provider = aws_lc_rs::default_provider();
    provider.kx_groups = vec![aws_lc_rs::kx_group::X25519];
    if hybrid {
        provider.kx_groups.insert(0, aws_lc_rs::kx_group::X25519MLKEM768);
    }
    let provider = Arc::new(provider);
    let verifier = Arc::new(AnySidecar(Arc::clone(&provider)));
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    Ok(match certificate {
        Some((chain, key)) => {
            let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).collect::<Result<Vec<_>, _>>()?;
            config.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes())?)?
        }
        None => config.with_no_client_auth(),
    })
}

/// The test checks what the sidecar requires, not what it presents; transport's tests do that.
#[derive(Debug)]
struct AnySidecar(Arc<CryptoProvider>);

impl ServerCertVerifier for AnySidecar {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

type Tls = StreamOwned<ClientConnection, TcpStream>;

fn tls(sidecar: &Sidecar, config: ClientConfig) -> Result<Tls> {
    let name = ServerName::try_from("sidecar.invalid")?;
    let connection = ClientConnection::new(Arc::new(config), name)?;
    Ok(StreamOwned::new(connection, connect(address(sidecar)?)?))
}

/// One sidecar with one rank, which requires certificates.
fn tls_plan(authority: &Authority) -> Plan<'_> {
    Plan::of(&[0]).web(json!({ "listen": "127.0.0.1:0", "tls": true })).issued_by(authority)
}

/// A certificate for an index that no sidecar has.
fn client_certificate(authority: &Authority) -> Result<(String, String)> {
    let key = KeyRequest::generate()?;
    let certificate = authority.issue(key.request_pem(), 900)?;
    Ok((certificate, key.key_pem()))
}

#[test]
fn over_tls_both_sides_show_certificates_of_the_job() -> Result<()> {
    let authority = Authority::new("test")?;
    let cluster = tls_plan(&authority).sidecars("")?;
    let sidecar = &cluster.sidecars[0];
    let token = token_of(sidecar, 0)?;
    let describe = Call::new("Describe", Some(&token), framed(&[]));
    let (certificate, key) = client_certificate(&authority)?;
    // The hybrid key exchange is used where the client prefers it, X25519 where it does not know it.
    for (hybrid, group) in [(true, rustls::NamedGroup::X25519MLKEM768), (false, rustls::NamedGroup::X25519)] {
        let mut stream = tls(sidecar, tls_client(Some((&certificate, &key)), hybrid)?)?;
        let answer = Answer::to(&mut stream, &describe)?;
        ensure!(answer.status == 200, "{}", answer.head);
        ensure!(answer.finish()?.1 == "0 ");
        let connection = &stream.conn;
        ensure!(connection.protocol_version() == Some(rustls::ProtocolVersion::TLSv1_3));
        let agreed = connection.negotiated_key_exchange_group().context("a key exchange")?;
        ensure!(agreed.name() == group, "{:?}", agreed.name());
    }
    // A certificate does not replace a token.
    let foreign = tls(sidecar, tls_client(Some((&certificate, &key)), true)?)?;
    ensure!(Answer::to(foreign, &Call::new("Describe", None, framed(&[])))?.status == 401);
    // None, one of another authority, one of another job, and an expired one.
    let (foreign, foreign_key) = client_certificate(&Authority::new("test")?)?;
    let expired = KeyRequest::generate()?;
    let expired_certificate = authority.issue_expired(expired.request_pem(), 900)?;
    let refused = [
        (None, "none"),
        (Some((&*foreign, &*foreign_key)), "another authority's"),
        (Some((&*expired_certificate, &*expired.key_pem())), "an old one"),
    ];
    for (shown, what) in refused {
        let refused = Answer::to(tls(sidecar, tls_client(shown, true)?)?, &describe);
        let error = refused.err().with_context(|| format!("{what} gets in"))?;
        println!("{what}: {error:#}");
        ensure!(format!("{error:#}").contains("alert"), "{what}: {error:#}");
    }
    // Plaintext is not answered either.
    let plain = Answer::to(connect(address(sidecar)?)?, &describe);
    ensure!(plain.is_err(), "it answers in the clear");
    // A session, as without TLS.
    let claim = claim(sidecar.socket_dir()?, "test", 0)?;
    let mut session = WebSession::open(tls(sidecar, tls_client(Some((&certificate, &key)), true)?)?, &token, &claim)?;
    session.await_message("the epoch", |message| {
        matches!(message, server_message::Message::EpochBegan(_)).then_some(())
    })?;
    let sum = v1::Submit {
        collective: Some(Collective::AllReduce { op: ReduceOp::Sum }.into()),
        ..broadcast(1, "allreduce.alone")
    };
    let answer =
        Call::new("Say", Some(&token), messages_body(&session.claimed, 1, [client_message::Message::Submit(sum)]));
    let answer = Answer::to(tls(sidecar, tls_client(Some((&certificate, &key)), true)?)?, &answer)?.finish()?.1;
    ensure!(answer == "0 ", "{answer}");
    session.await_message("the sum", |message| matches!(message, server_message::Message::Completed(_)).then_some(()))
}

/// A sidecar, and a session of its rank whose client has a certificate that is valid for `life` from now.
fn brief_session(authority: &Authority, life: Duration) -> Result<(Cluster, WebSession<Tls>)> {
    let cluster = tls_plan(authority).sidecars("")?;
    let sidecar = &cluster.sidecars[0];
    let key = KeyRequest::generate()?;
    let (token, claim) = (token_of(sidecar, 0)?, claim(sidecar.socket_dir()?, "test", 0)?);
    let certificate = authority.issue_for(key.request_pem(), 900, life)?;
    let stream = tls(sidecar, tls_client(Some((&certificate, &key.key_pem())), true)?)?;
    let mut session = WebSession::open(stream, &token, &claim)?;
    session.await_message("the epoch", |message| {
        matches!(message, server_message::Message::EpochBegan(_)).then_some(())
    })?;
    Ok((cluster, session))
}

const LIVES: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(10)];
const LONGEST_LIFE: Duration = Duration::from_secs(25);

#[test]
fn a_connection_ends_with_its_certificate() -> Result<()> {
    let authority = Authority::new("test")?;
    // A busy machine may let the shorter lives end before the session is open.
    let opened = LIVES.iter().find_map(|life| Some((*life, brief_session(&authority, *life).ok()?)));
    let (life, (cluster, mut session)) = match opened {
        Some(opened) => opened,
        None => (LONGEST_LIFE, brief_session(&authority, LONGEST_LIFE)?),
    };
    let sidecar = &cluster.sidecars[0];
    let token = token_of(sidecar, 0)?;
    // It is kept alive until then.
    let (long, long_key) = client_certificate(&authority)?;
    let deadline = Instant::now() + life + PATIENCE;
    for number in 1.. {
        ensure!(Instant::now() < deadline, "the connection outlives its certificate");
        let beat = messages_body(&session.claimed, number, [client_message::Message::Heartbeat(v1::Heartbeat {})]);
        let stream = tls(sidecar, tls_client(Some((&long, &long_key)), true)?)?;
        Answer::to(stream, &Call::new("Say", Some(&token), beat))?.finish()?;
        if session
            .await_message("a sign of life", |message| {
                matches!(message, server_message::Message::Alive(_)).then_some(())
            })
            .is_err()
        {
            return Ok(());
        }
    }
    unreachable!("numbers do not end")
}

#[test]
fn certificates_of_the_command_line_do_and_fresh_ones_are_taken() -> Result<()> {
    let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
    let path = |name: &str| directory.path().join(name);
    let certs = |words: &[&str], paths: &[&str]| -> Result<()> {
        let mut command = Command::new(ronde_binary()?);
        let output = command.arg("certs").args(words).args(paths.iter().map(|name| path(name))).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    certs(&["init", "--job", "night"], &["authority"])?;
    certs(&["issue", "--sidecars", "0,900", "--authority"], &["authority", "."])?;
    // An address of the loopback that no other test uses.
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let peers = format!("127.99.{high}.{}:7400", low.max(1));
    let mut command = Command::new(ronde_binary()?);
    command.args(["sidecar", "--lanes", "1", "--peers", &peers, "--web-listen", "127.0.0.1:0", "--web-tls"]);
    let paths: [OsString; 4] =
        ["--certs".into(), path("sidecar-0").into(), "--runtime-dir".into(), directory.path().into()];
    let process = Process::start("sidecar 0".to_owned(), command.args(paths).env("RONDE_LOG", "info"))?;
    let mut sidecar = Sidecar { process, index: 0, bound: Value::Null, serving: Value::Null };
    sidecar.await_serving()?;
    let read = |name: &str| std::fs::read_to_string(path(name));
    let shown = || -> Result<Vec<u8>> {
        let (chain, key) = (read("sidecar-900/cert.pem")?, read("sidecar-900/key.pem")?);
        let mut stream = tls(&sidecar, tls_client(Some((&chain, &key)), true)?)?;
        let describe = Call::new("Describe", Some(&token_of(&sidecar, 0)?), framed(&[]));
        ensure!(Answer::to(&mut stream, &describe)?.status == 200);
        let shown = stream.conn.peer_certificates().and_then(|chain| chain.first()).context("a certificate")?;
        Ok(shown.to_vec())
    };
    let own = |directory: &Path| -> Result<Vec<u8>> {
        Ok(CertificateDer::from_pem_file(directory.join("cert.pem"))?.to_vec())
    };
    let first = own(&path("sidecar-0"))?;
    ensure!(shown()? == first, "another certificate than the directory's");
    certs(&["rotate", "--authority"], &["authority", "sidecar-0"])?;
    let fresh = own(&path("sidecar-0"))?;
    ensure!(fresh != first);
    // The files are polled once a second.
    let deadline = Instant::now() + PATIENCE;
    while shown()? != fresh {
        ensure!(Instant::now() < deadline, "the fresh certificate is not shown");
    }
    Ok(())
}
