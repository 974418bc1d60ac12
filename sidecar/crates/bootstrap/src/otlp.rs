//! Options about the export of metrics to OpenTelemetry, which `ronde run` and `ronde sidecar` share.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::numbers::whole;

/// The options about the export of metrics.
#[derive(Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OtlpArgs {
    /// Let each sidecar send its metrics to this collector of OpenTelemetry, by OTLP over HTTP with protobuf: http:// on the
    /// loopback alone, https:// elsewhere. /v1/metrics is added to the path. [default: nowhere]
    #[arg(long = "otlp-endpoint", value_name = "URL")]
    endpoint: Option<String>,
    /// The authorities, in PEM, one of which has issued the collector's certificate; with https:// only, and needed there. The
    /// file is read on each host.
    #[arg(long = "otlp-ca", value_name = "FILE")]
    ca: Option<PathBuf>,
    /// The time between two exports. [default: 15]
    #[arg(long = "otlp-interval", value_name = "SECONDS", value_parser = whole::<u32>(INTERVAL_S))]
    interval: Option<u32>,
}

const INTERVAL_S: std::ops::RangeInclusive<u64> = 1..=3_600;
const INTERVAL_DEFAULT_S: u32 = 15;

impl OtlpArgs {
    /// Checks that the options go together, and makes the path one as seen from the current directory.
    ///
    /// # Errors
    /// What does not go together.
    pub(crate) fn resolve(mut self) -> anyhow::Result<Self> {
        ensure!(
            self.endpoint.is_some() || (self.ca.is_none() && self.interval.is_none()),
            "--otlp-ca and --otlp-interval go with --otlp-endpoint URL"
        );
        self.ca = self.ca.map(|path| std::path::absolute(&path).unwrap_or(path));
        self.settings()?;
        Ok(self)
    }

    /// Where metrics are sent, if anywhere.
    ///
    /// # Errors
    /// When they would be in the clear beyond this host, or the URL is none.
    pub fn settings(&self) -> anyhow::Result<Option<OtlpSettings>> {
        let Some(endpoint) = &self.endpoint else { return Ok(None) };
        let endpoint = Endpoint::parse(endpoint)?;
        match (&self.ca, endpoint.is_tls) {
            (None, true) => bail!(
                "--otlp-endpoint with https:// needs --otlp-ca FILE: the authorities, in PEM, one of which has issued the \
                 collector's certificate, for example /etc/ssl/certs/ca-certificates.crt"
            ),
            (Some(_), false) => bail!("--otlp-ca goes with an --otlp-endpoint of https://"),
            _ => {}
        }
        let seconds = self.interval.unwrap_or(INTERVAL_DEFAULT_S);
        ensure!(INTERVAL_S.contains(&seconds.into()), "--otlp-interval {seconds} is not from 1 to 3600 seconds");
        Ok(Some(OtlpSettings { endpoint, ca: self.ca.clone(), interval: Duration::from_secs(seconds.into()) }))
    }
}

/// Where metrics are sent, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpSettings {
    /// The collector.
    pub endpoint: Endpoint,
    /// The file with the authorities of its certificate; `None` if it is on the loopback, without TLS.
    pub ca: Option<PathBuf>,
    /// The time between two exports.
    pub interval: Duration,
}

impl OtlpSettings {
    /// Reads the authorities of the collector's certificate.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn read_ca(&self) -> anyhow::Result<Option<String>> {
        let read = |path: &Path| {
            std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}, the file of --otlp-ca", path.display()))
        };
        self.ca.as_deref().map(read).transpose()
    }
}

/// The URL of a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Whether the connection is TLS. Without it the host is an address of the loopback.
    pub is_tls: bool,
    /// A name or an address, without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The path of metrics.
    pub path: String,
}

impl Endpoint {
    fn parse(url: &str) -> anyhow::Result<Self> {
        // Before any message with the URL, which shows no parameters either: they could be secrets.
        ensure!(
            !url.contains('@'),
            "--otlp-endpoint contains a user; arguments are no place for secrets. Send to a collector on this host, which adds them"
        );
        let shown = url.split(['?', '#']).next().unwrap_or_default();
        let form = || format!("--otlp-endpoint {shown:?} is not http://ADDRESS:PORT or https://HOST[:PORT][/PATH]");
        let (is_tls, rest) = match url.split_once("://") {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            _ => bail!(form()),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#\"<>\\".contains(&byte));
        ensure!(!authority.is_empty() && is_plain(authority) && is_plain(path), form());
        let (host, port) = host_and_port(authority).with_context(form)?;
        // Names can be given to any address; this one is reserved for the loopback.
        let host = if host == "localhost" && !is_tls { "127.0.0.1".to_owned() } else { host };
        ensure!(
            is_tls || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback()),
            "--otlp-endpoint {url} would send metrics in the clear beyond this host; use https:// with --otlp-ca, or a collector \
             at an address of the loopback such as http://127.0.0.1:4318"
        );
        let path = format!("/{}/v1/metrics", path.trim_matches('/')).replace("//", "/");
        Ok(Self { is_tls, host, port, path })
    }

    /// The host and port as in a header of HTTP.
    #[must_use]
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

/// Splits `HOST[:PORT]`. The default is the port that collectors have for OTLP over HTTP.
fn host_and_port(authority: &str) -> Option<(String, u16)> {
    let (host, rest) = match authority.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let port = if rest.is_empty() { PORT } else { rest.strip_prefix(':')?.parse().ok().filter(|port| *port > 0)? };
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

/// The port of OTLP over HTTP.
const PORT: u16 = 4318;

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(endpoint: &str, ca: Option<&str>) -> Result<OtlpSettings, String> {
        let args = OtlpArgs { endpoint: Some(endpoint.to_owned()), ca: ca.map(PathBuf::from), interval: None };
        args.settings().map(|settings| settings.expect("there is an endpoint")).map_err(|error| error.to_string())
    }

    #[test]
    fn metrics_go_nowhere_by_default() {
        assert_eq!(OtlpArgs::default().resolve().expect("nothing is given").settings().expect("nothing"), None);
        let alone = OtlpArgs { interval: Some(5), ..OtlpArgs::default() }.resolve().expect_err("no endpoint");
        assert!(alone.to_string().contains("go with --otlp-endpoint"), "{alone}");
        let zero = OtlpArgs { endpoint: Some("http://127.0.0.1".into()), interval: Some(0), ca: None };
        assert!(zero.settings().is_err(), "from a message, which no parser has checked");
    }

    #[test]
    fn urls_are_parsed() {
        let of = |url: &str, ca| {
            let Endpoint { host, port, path, .. } = settings(url, ca).expect(url).endpoint;
            (host, port, path)
        };
        let expected = |host: &str, port, path: &str| (host.to_owned(), port, path.to_owned());
        assert_eq!(of("http://localhost", None), expected("127.0.0.1", 4318, "/v1/metrics"));
        assert_eq!(of("http://[::1]:9/", None), expected("::1", 9, "/v1/metrics"));
        let far = of("https://collector.example:443/api/otlp/", Some("/ca.pem"));
        assert_eq!(far, expected("collector.example", 443, "/api/otlp/v1/metrics"));
        assert_eq!(settings("http://[::1]:9", None).expect("an address").endpoint.authority(), "[::1]:9");
    }

    #[test]
    fn nothing_leaves_the_host_in_the_clear() {
        for url in ["http://10.0.0.1:4318", "http://collector", "http://0.0.0.0:4318", "http://[::ffff:10.0.0.1]"] {
            let error = settings(url, None).expect_err(url);
            assert!(error.contains("in the clear beyond this host"), "{error}");
        }
        assert!(settings("https://collector", None).expect_err("no authorities").contains("needs --otlp-ca FILE"));
        assert!(settings("http://127.0.0.1", Some("/ca.pem")).expect_err("no TLS").contains("--otlp-ca goes with"));
    }

    #[test]
    fn what_is_no_url_is_rejected() {
        for url in [
            "",
            "127.0.0.1:4318",
            "grpc://127.0.0.1",
            "http://",
            "http://127.0.0.1:0",
            "http://127.0.0.1:x/",
            "http://[::1",
            "https://a b",
            "https://a\n",
            "https://a/?x",
            "https://:80",
        ] {
            let error = settings(url, Some("/ca.pem")).expect_err(url);
            assert!(error.contains("is not http://ADDRESS:PORT"), "{url:?}: {error}");
        }
        for scheme in ["https://", "http://", "grpc://", "http:/", ""] {
            let secret = settings(&format!("{scheme}user:secret@collector"), Some("/ca.pem")).expect_err("a secret");
            assert!(secret.contains("no place for secrets") && !secret.contains("secret@"), "{secret}");
            let secret = settings(&format!("{scheme}collector/?key=secret"), Some("/ca.pem")).expect_err("parameters");
            assert!(secret.contains("is not http://") && !secret.contains("secret"), "{secret}");
        }
    }
}
