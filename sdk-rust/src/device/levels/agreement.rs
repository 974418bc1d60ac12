//! What the ranks of a set report about themselves before its first operation in two levels, and what follows. Pure.

use ronde_wire::Rank;

use super::layout::Layout;

/// What a rank reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Report {
    /// The number of its sidecar.
    pub(super) host: u32,
    /// NCCL's version, and where its GPU is on the bus; or why it cannot use NCCL.
    pub(super) device: Result<(u32, String), String>,
}

/// What the ranks have agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Agreed {
    /// Two levels.
    Two(Layout),
    /// One level, because of the placement of ranks.
    One(String),
    /// A rank cannot use NCCL as the others do.
    Cannot(String),
}

/// The bytes of a report.
pub(super) const REPORT_BYTES: usize = 256;
const TEXT_AT: usize = 10;
const FORMAT: u8 = 1;

impl Report {
    pub(super) fn encode(&self) -> [u8; REPORT_BYTES] {
        let mut bytes = [0; REPORT_BYTES];
        let (version, text) = match &self.device {
            Ok((version, bus_id)) => (*version, bus_id.as_str()),
            Err(reason) => (0, reason.as_str()),
        };
        bytes[0] = FORMAT;
        bytes[1] = u8::from(self.device.is_ok());
        bytes[2..6].copy_from_slice(&self.host.to_le_bytes());
        bytes[6..TEXT_AT].copy_from_slice(&version.to_le_bytes());
        let mut end = text.len().min(REPORT_BYTES - TEXT_AT);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        bytes[TEXT_AT..TEXT_AT + end].copy_from_slice(&text.as_bytes()[..end]);
        bytes
    }

    /// Reads what another rank has sent.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; REPORT_BYTES] =
            bytes.try_into().ok().filter(|bytes: &&[u8; REPORT_BYTES]| bytes[0] == FORMAT)?;
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let text = String::from_utf8_lossy(&bytes[TEXT_AT..]).trim_end_matches('\0').to_owned();
        let device = if bytes[1] == 1 { Ok((number(6), text)) } else { Err(text) };
        Some(Self { host: number(2), device })
    }
}

/// What follows from all reports, which are in the order of the set's ranks.
pub(super) fn agree(me: Rank, ranks: &[Rank], reports: &[Option<Report>]) -> Agreed {
    if ranks.len() != reports.len() {
        return Agreed::Cannot(format!("{} reports for {} ranks", reports.len(), ranks.len()));
    }
    let mut found = Vec::new();
    for (rank, report) in ranks.iter().zip(reports) {
        match report {
            Some(report) => found.push((*rank, report)),
            None => return Agreed::Cannot(format!("{rank} has another release of ronde")),
        }
    }
    let placed: Vec<(Rank, u32)> = found.iter().map(|(rank, report)| (*rank, report.host)).collect();
    let layout = match Layout::of(me, &placed) {
        Ok(layout) => layout,
        Err(reason) => return Agreed::One(reason),
    };
    if let Some((rank, reason)) = found.iter().find_map(|(rank, report)| Some((rank, report.device.as_ref().err()?))) {
        return Agreed::Cannot(format!("{rank}: {reason}"));
    }
    conflict(&found).map_or(Agreed::Two(layout), Agreed::Cannot)
}

/// Why two ranks of a host cannot use NCCL together.
fn conflict(found: &[(Rank, &Report)]) -> Option<String> {
    for (at, (one, report)) in found.iter().enumerate() {
        for (other, its) in found.iter().skip(at + 1).filter(|(_, its)| its.host == report.host) {
            let (Ok((version, bus_id)), Ok((its_version, its_bus_id))) = (&report.device, &its.device) else {
                continue;
            };
            if bus_id == its_bus_id {
                return Some(format!("{one} and {other} use the same GPU, {bus_id}; give each rank its own"));
            }
            if version != its_version {
                return Some(format!(
                    "{one} has NCCL {version} and {other} {its_version}; install the same version on a host"
                ));
            }
        }
    }
    None
}

/// What the ranks' tickets for an operation compare: not zero, and small enough to add for all ranks.
pub(super) fn digest(text: &str) -> i64 {
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    i64::try_from((hash ^ (hash >> 32)) & DIGEST_MASK).unwrap_or_default() | 1
}

/// The sum over 4,096 ranks stays below 2^62.
const DIGEST_MASK: u64 = (1 << 50) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn report(host: u32, bus_id: &str) -> Option<Report> {
        Some(Report { host, device: Ok((22_304, bus_id.to_owned())) })
    }

    fn agreed(reports: &[Option<Report>]) -> Agreed {
        let ranks: Vec<Rank> = (0..).map(Rank).take(reports.len()).collect();
        agree(Rank(0), &ranks, reports)
    }

    fn cannot(reports: &[Option<Report>]) -> String {
        match agreed(reports) {
            Agreed::Cannot(reason) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn reports_are_read_as_they_were_written() {
        let broken = Report { host: 7, device: Err("ä".repeat(400)) };
        for given in [report(3, "0000:01:00.0").expect("one"), Report { host: 0, device: Err("no driver".to_owned()) }]
        {
            assert_eq!(Report::decode(&given.encode()), Some(given));
        }
        let cut = Report::decode(&broken.encode()).expect("a report").device.expect_err("a reason");
        assert_eq!(cut, "ä".repeat(123));
        assert_eq!(Report::decode(&[0; REPORT_BYTES]), None);
        assert_eq!(Report::decode(&[1; 3]), None);
    }

    #[test]
    fn hosts_with_several_gpus_have_two_levels() {
        let Agreed::Two(layout) = agreed(&[report(0, "a"), report(0, "b"), report(1, "a"), report(1, "b")]) else {
            panic!("two levels")
        };
        assert_eq!((layout.hosts(), layout.local()), (2, 2));
        assert!(matches!(agreed(&[report(0, "a"), report(1, "a")]), Agreed::One(_)));
    }

    #[test]
    fn the_rank_that_cannot_is_named() {
        let old = Some(Report { host: 0, device: Err("NCCL is too old".to_owned()) });
        assert_eq!(cannot(&[report(0, "a"), old]), "rank 1: NCCL is too old");
        assert!(cannot(&[report(0, "a"), report(0, "a")]).contains("rank 0 and rank 1 use the same GPU, a"));
        let other = Some(Report { host: 0, device: Ok((23_000, "b".to_owned())) });
        assert!(cannot(&[report(0, "a"), other]).contains("rank 0 has NCCL 22304 and rank 1 23000"));
        assert!(cannot(&[report(0, "a"), None]).contains("another release"));
    }

    #[test]
    fn digests_differ_and_can_be_added() {
        assert_ne!(digest("a"), digest("b"));
        assert!(digest("") > 0 && digest("x").checked_mul(4_096).is_some());
    }
}
