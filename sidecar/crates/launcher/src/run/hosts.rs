//! Hosts and their slots, from `-H` and from host files.

use std::net::IpAddr;
use std::num::NonZeroU32;

/// A host and its slots for workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    /// Its name or address as given, IPv6 without brackets.
    pub(super) name: String,
    /// The most workers that it runs.
    pub(super) slots: NonZeroU32,
}

impl Host {
    /// This host alone, with room for `ranks`; empty when that is 0.
    pub(super) fn local(ranks: u32) -> Vec<Self> {
        NonZeroU32::new(ranks).map(|slots| Self { name: LOCAL.to_owned(), slots }).into_iter().collect()
    }

    /// The address when the host was given as one; an IPv4 address in the form of IPv6 is that IPv4 address.
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.name.parse::<IpAddr>().ok().map(|address| address.to_canonical())
    }
}

/// Reads `-H`: `host:slots,...`, an IPv6 address in brackets; a host alone has one slot.
///
/// # Errors
/// [`HostsError`] for the first invalid or repeated item.
pub(super) fn parse_list(list: &str) -> Result<Vec<Host>, HostsError> {
    let items = list.split(',').map(str::trim).filter(|item| !item.is_empty());
    distinct(items.map(parse_item).collect::<Result<_, _>>()?)
}

/// The names of hosts in the form of `-H`.
///
/// # Errors
/// [`HostsError`] as [`parse_list`].
pub(crate) fn names(list: &str) -> Result<Vec<String>, HostsError> {
    Ok(parse_list(list)?.into_iter().map(|host| host.name).collect())
}

/// Reads a host file: `host slots=n`, `host:n` or `host` a line; `#` begins a comment; empty lines are ignored.
///
/// # Errors
/// [`HostsError`] for the first invalid line or repeated host.
pub(super) fn parse_file(text: &str) -> Result<Vec<Host>, HostsError> {
    let lines = (1..).zip(text.lines().map(|line| line.split('#').next().unwrap_or_default().trim()));
    let hosts = lines.filter(|(_, line)| !line.is_empty()).map(|(number, line)| parse_line(number, line));
    distinct(hosts.collect::<Result<_, _>>()?)
}

/// Invalid hosts; the user must correct them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HostsError {
    /// An item of `-H`.
    #[error("Invalid host input: {item:?} is not host:slots, for example alpha:4 or [fd00::1]:4")]
    Item {
        /// The item.
        item: String,
    },
    /// A host with a user name.
    #[error(
        "Invalid host input: {item:?} has a user name; put it into ~/.ssh/config (`Host {host}` with `User {user}`), and give the \
         host alone"
    )]
    User {
        /// The item or the line.
        item: String,
        /// The user.
        user: String,
        /// The host.
        host: String,
    },
    /// A line of a host file.
    #[error(
        "Invalid host input: line {number} of the host file, {line:?}, is not `host slots=n`, for example `alpha slots=4`"
    )]
    Line {
        /// Counted from 1.
        number: usize,
        /// The line.
        line: String,
    },
    /// A host that comes twice.
    #[error("host {host:?} is given twice; give it once with all its slots")]
    Twice {
        /// The host.
        host: String,
    },
    /// No hosts.
    #[error("no hosts are given; give at least one as host:slots")]
    Empty,
}

/// The name of the local host.
pub(super) const LOCAL: &str = "localhost";

fn parse_item(item: &str) -> Result<Host, HostsError> {
    let host = || {
        // A host without a number has one slot, as for Horovod and mpirun.
        let (name, slots) =
            if item.contains(':') && !item.ends_with(']') { item.rsplit_once(':')? } else { (item, "1") };
        Some(Host { name: parse_name(name)?, slots: slots.parse().ok()? })
    };
    host().ok_or_else(|| with_user(item).unwrap_or_else(|| HostsError::Item { item: item.to_owned() }))
}

fn parse_line(number: usize, line: &str) -> Result<Host, HostsError> {
    let host = || {
        let Some((name, rest)) = line.split_once(char::is_whitespace) else { return parse_item(line).ok() };
        let slots = rest.split_once('=').filter(|(key, _)| key.trim() == "slots")?.1;
        Some(Host { name: parse_name(name)?, slots: slots.trim().parse().ok()? })
    };
    host().ok_or_else(|| with_user(line).unwrap_or_else(|| HostsError::Line { number, line: line.to_owned() }))
}

/// The error for a host of the form `user@host`, as ssh takes it. No host's name has an `@`.
fn with_user(item: &str) -> Option<HostsError> {
    let (user, rest) = item.split_once('@')?;
    let is_end = |c: char| c == ':' || c.is_whitespace();
    let host = parse_name(&rest[..rest.find(is_end).unwrap_or(rest.len())])?;
    let user = parse_name(user)?;
    Some(HostsError::User { item: item.to_owned(), user, host })
}

/// A host name, an IPv4 address, or an IPv6 address in brackets. A name must not begin with a hyphen, or the remote
/// shell would parse it as an option.
pub(super) fn parse_name(name: &str) -> Option<String> {
    if let Some(inner) = name.strip_prefix('[') {
        let address = inner.strip_suffix(']')?;
        return matches!(address.parse(), Ok(IpAddr::V6(_))).then(|| address.to_owned());
    }
    let allowed = |c: char| c.is_alphanumeric() || "_.-".contains(c);
    (!name.is_empty() && !name.starts_with('-') && name.chars().all(allowed)).then(|| name.to_owned())
}

fn distinct(hosts: Vec<Host>) -> Result<Vec<Host>, HostsError> {
    if hosts.is_empty() {
        return Err(HostsError::Empty);
    }
    let mut seen = std::collections::BTreeSet::new();
    match hosts.iter().find(|host| !seen.insert(host.name.as_str())) {
        Some(twice) => Err(HostsError::Twice { host: twice.name.clone() }),
        None => Ok(hosts),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host(name: &str, slots: u32) -> Host {
        Host { name: name.into(), slots: NonZeroU32::new(slots).expect("not 0") }
    }

    #[test]
    fn lists_and_files_name_the_same_hosts() {
        let expected = Ok(vec![host("alpha", 4), host("10.0.0.2", 2), host("fd00::1", 1)]);
        assert_eq!(parse_list("alpha:4,10.0.0.2:2,[fd00::1]:1"), expected);
        let single = Ok(vec![host("alpha", 1), host("fd00::1", 1), host("beta", 2)]);
        assert_eq!(parse_list("alpha,[fd00::1],beta:2"), single);
        assert_eq!(parse_file("alpha\n[fd00::1] # one\nbeta slots=2"), single);
        let file = "# two machines\nalpha slots=4\n\n10.0.0.2   slots = 2 # the old one\n[fd00::1]:1\n";
        assert_eq!(parse_file(file), expected);
    }

    #[test]
    fn errors_name_the_wrong_item() {
        for item in ["alpha:", "alpha:0", "alpha:x", ":4", "fd00::1:4", "[fd00::1:4", "[alpha]:4", "-oX:1", "a b:1"] {
            assert_eq!(parse_list(item), Err(HostsError::Item { item: item.into() }));
        }
        let user = |item: &str| HostsError::User { item: item.into(), user: "ada".into(), host: "alpha".into() };
        assert_eq!(parse_list("beta:1,ada@alpha:2"), Err(user("ada@alpha:2")));
        assert_eq!(parse_list("ada@alpha"), Err(user("ada@alpha")));
        assert_eq!(parse_file("beta\nada@alpha slots=2"), Err(user("ada@alpha slots=2")));
        let text = user("ada@alpha:2").to_string();
        assert!(text.contains("~/.ssh/config (`Host alpha` with `User ada`)"), "{text}");
        assert_eq!(parse_list("a b@alpha:2"), Err(HostsError::Item { item: "a b@alpha:2".into() }));
        let line = "alpha cpus=4".to_owned();
        assert_eq!(parse_file("beta slots=1\n\nalpha cpus=4"), Err(HostsError::Line { number: 3, line }));
        assert_eq!(parse_list("a:1,b:1,a:2"), Err(HostsError::Twice { host: "a".into() }));
        assert_eq!(parse_list(" ,"), Err(HostsError::Empty));
        assert_eq!(parse_file("# nobody\n"), Err(HostsError::Empty));
    }

    proptest! {
        #[test]
        fn written_hosts_are_read_back(hosts in proptest::collection::btree_map("[a-z0-9][a-z0-9_.-]{0,12}", 1_u32..=4_096, 1..9)) {
            let expected: Vec<Host> = hosts.iter().map(|(name, slots)| host(name, *slots)).collect();
            let list: Vec<String> = hosts.iter().map(|(name, slots)| format!("{name}:{slots}")).collect();
            let file: Vec<String> = hosts.iter().map(|(name, slots)| format!("{name} slots={slots}")).collect();
            prop_assert_eq!(parse_list(&list.join(",")), Ok(expected.clone()));
            prop_assert_eq!(parse_file(&file.join("\n")), Ok(expected));
        }

        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,64}") {
            let _ = (parse_list(&text), parse_file(&text));
        }
    }

    /// A list, or after a zero byte a host file. Each host that is read can be asked for by name, and is written and read again.
    #[test]
    fn fuzz_hosts() {
        use ronde_fuzz::{Outcome, fuzz};

        let seeds =
            ["alpha:4,10.0.0.2:2,[fd00::1]:1", "\0# two\nalpha slots=4\n10.0.0.2   slots = 2 # old\n[fd00::1]:1\n"];
        let seeds = seeds.map(|seed| seed.as_bytes().to_vec()).to_vec();
        fuzz("hosts", seeds, |bytes| {
            let Ok(text) = std::str::from_utf8(bytes) else { return Outcome::refused(&"no text") };
            let hosts = text.strip_prefix('\0').map_or_else(|| parse_list(text), parse_file);
            if let Ok(hosts) = &hosts {
                let written = |host: &Host| {
                    let name = &host.name;
                    // Only an address has colons.
                    if name.contains(':') {
                        format!("[{name}]:{}", host.slots)
                    } else {
                        format!("{name}:{}", host.slots)
                    }
                };
                let list: Vec<String> = hosts.iter().map(written).collect();
                assert_eq!(parse_list(&list.join(",")).as_ref(), Ok(hosts));
                // A remote shell would parse it as an option.
                assert!(!hosts.iter().any(|host| host.name.is_empty() || host.name.starts_with('-')));
            }
            Outcome::of(&hosts.map(|hosts| hosts.len()))
        });
    }
}
