//! The tables of the view: each is a title, columns and rows.

use ratatui::layout::Constraint;
use ratatui::text::{Line, Span};
use ratatui::widgets::Row;

use super::super::job::{self, Job, LinkRow, RankRow, Tone};
use super::super::model::{Model, View, Watched};
use super::super::page::{Page, Pending, operation};
use super::super::rates::{Rates, number};
use super::{REST, style};
use crate::status::{bytes, duration};

/// A table with a title.
pub(super) struct Section<'a> {
    pub(super) title: String,
    /// Empty for a table that explains itself.
    pub(super) header: Vec<&'static str>,
    pub(super) widths: Vec<Constraint>,
    pub(super) rows: Vec<Row<'a>>,
    /// What is shown without rows.
    pub(super) empty: String,
}

impl Section<'_> {
    /// The lines that show all of it.
    pub(super) fn lines(&self) -> usize {
        1 + if self.rows.is_empty() { 1 } else { self.rows.len() + usize::from(!self.header.is_empty()) }
    }
}

fn toned<'a>(tone: Tone, words: impl Into<String>) -> Span<'a> {
    Span::styled(words.into(), style(tone))
}

fn plain<'a>(words: impl Into<String>) -> Span<'a> {
    Span::raw(words.into())
}

fn cells<'a, const COUNT: usize>(cells: [Span<'a>; COUNT]) -> Row<'a> {
    Row::new(cells)
}

/// The sidecars, with what each does in a second. Nothing is encrypted between the ranks of one sidecar; what they contribute
/// shows that they work.
pub(super) fn sidecars<'a>(job: &Job<'_>, width: u16) -> Section<'a> {
    let row = |watched: &&Watched| {
        let rate = |of: fn(&Rates) -> f64| watched.rates.as_ref().map(of);
        let per_second =
            |of: fn(&Rates) -> f64| rate(of).map_or_else(|| "-".to_owned(), |rate| format!("{}/s", bytes(rate)));
        let count = |of: fn(&Rates) -> f64| rate(of).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.0}/s"));
        let (tone, mut state) = job.state(watched);
        if watched.page.is_none() {
            state = format!("{state}, at {}", watched.address);
        }
        let name = watched.page.as_ref().map_or_else(|| "?".to_owned(), |page| page.sidecar.to_string());
        let ranks = watched.page.as_ref().map(|page| numbers(&ranks_of(page))).unwrap_or_default();
        let mut row = vec![
            plain(name),
            toned(tone, state),
            plain(ranks),
            plain(per_second(|rates| rates.contributed)),
            plain(per_second(|rates| rates.sealed)),
            plain(per_second(|rates| rates.opened)),
        ];
        if width >= COUNTED {
            row.push(plain(count(|rates| rates.operations)));
        }
        if width >= ADDRESSED {
            row.push(plain(watched.address.clone()));
        }
        Row::new(row)
    };
    let mut section = Section {
        title: "Sidecars".to_owned(),
        header: vec!["", "state", "ranks", "contributed", "encrypted", "decrypted"],
        widths: vec![
            Constraint::Length(3),
            REST,
            Constraint::Length(11),
            Constraint::Length(11),
            Constraint::Length(9),
            Constraint::Length(9),
        ],
        rows: job.sidecars.iter().map(row).collect(),
        empty: "No sidecar is found.".to_owned(),
    };
    if width >= COUNTED {
        section.header.push("operations");
        section.widths.push(RATE);
    }
    if width >= ADDRESSED {
        section.header.push("admin page");
        section.widths.push(Constraint::Length(21));
    }
    section
}

fn ranks_of(page: &Page) -> Vec<u32> {
    let served = page.placement.iter().enumerate().filter(|(_, sidecar)| **sidecar == page.sidecar);
    served.filter_map(|(rank, _)| u32::try_from(rank).ok()).collect()
}

/// "0 to 3, 7".
fn numbers(list: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in list {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(*number) => *last = *number,
            _ => runs.push((*number, *number)),
        }
    }
    let word = |(first, last): &(u32, u32)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first} to {last}"),
    };
    runs.iter().map(word).collect::<Vec<_>>().join(", ")
}

/// All ranks.
pub(super) fn ranks<'a>(job: &Job<'_>) -> Section<'a> {
    rank_table("Ranks", &job.ranks(), "The ranks are not known yet.".to_owned())
}

/// The ranks that others have waited for.
pub(super) fn stragglers<'a>(job: &Job<'_>) -> Section<'a> {
    let empty = if job.sees_coordinator() { "Nobody has waited for a rank.".to_owned() } else { elsewhere(job) };
    let is_scheduled = job.head.is_some_and(|page| page.schedule.is_some());
    let note = if is_scheduled { " (steps of a schedule: within a sidecar)" } else { "" };
    rank_table(&format!("Stragglers: ranks that others wait for{note}"), &job.stragglers(), empty)
}

fn rank_table<'a>(title: &str, rows: &[RankRow<'_>], empty: String) -> Section<'a> {
    let row = |row: &RankRow<'_>| {
        let waited = row.waited_us.map_or_else(|| "-".to_owned(), |us| duration(us / 1_000));
        let share = row.share.map_or_else(|| "-".to_owned(), percent);
        cells([
            plain(row.rank.to_string()),
            plain(row.sidecar.to_string()),
            toned(row.tone, row.state.clone()),
            toned(if row.share.is_some_and(|share| share >= LATE_SHARE) { Tone::Waits } else { Tone::Plain }, share),
            plain(waited),
            plain(row.last.map_or_else(|| "-".to_owned(), |count| count.to_string())),
        ])
    };
    Section {
        title: title.to_owned(),
        header: vec!["rank", "sidecar", "state", "wait share", "total", "last"],
        widths: vec![
            Constraint::Length(5),
            Constraint::Length(7),
            REST,
            RATE,
            Constraint::Length(8),
            Constraint::Length(8),
        ],
        rows: rows.iter().map(row).collect(),
        empty,
    }
}

/// Where to look if the coordinator is not among the sidecars.
fn elsewhere(job: &Job<'_>) -> String {
    let coordinator = job.head.map_or(0, |page| page.coordinator);
    format!("Only the coordinator (sidecar {coordinator}) knows which ranks are late; pass its admin page with --url.")
}

/// The links of the sidecars.
pub(super) fn links<'a>(job: &Job<'_>, width: u16) -> Section<'a> {
    let row = |row: &LinkRow<'_>| {
        let ends = plain(format!("{} to {}", row.from, row.link.peer));
        let Some(path) = row.path else {
            let state = if row.link.up { "not measured yet" } else { "down" };
            let tone = if row.link.up { Tone::Plain } else { Tone::Bad };
            return Row::new([ends, toned(tone, state)]);
        };
        let per_second = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{}/s", bytes(rate)));
        let mut row = vec![
            ends,
            plain(path.data_carrier.clone()),
            plain(cipher(path)),
            plain(per_second(row.rates.map(|(sent, _)| sent))),
            plain(per_second(row.rates.map(|(_, received)| received))),
            plain(row.link.round_trip_us.map_or_else(|| "-".to_owned(), |us| format!("{us} us"))),
        ];
        if width >= ROOMY {
            let lost = if path.packets_sent == 0 { "-".to_owned() } else { path.packets_lost.to_string() };
            row.extend([plain(lost), plain(path.address.clone())]);
        }
        Row::new(row)
    };
    let mut section = Section {
        title: "Links".to_owned(),
        header: vec!["link", "transport", "cipher", "sent", "received", "RTT"],
        widths: vec![Constraint::Length(8), Constraint::Length(12), REST, RATE, RATE, Constraint::Length(9)],
        rows: job.links().iter().map(row).collect(),
        empty: "This job has one sidecar here, and no links.".to_owned(),
    };
    if width >= ROOMY {
        section.header.extend(["lost", "address"]);
        section.widths.extend([Constraint::Length(6), Constraint::Length(21)]);
    }
    section
}

/// The cipher suite without what the names of all suites begin with.
fn cipher(path: &super::super::page::Path) -> String {
    let suite = path.cipher.as_deref().unwrap_or("in this host");
    suite.strip_prefix("TLS_").unwrap_or(suite).to_owned()
}

/// Operations and the ranks that they wait for.
pub(super) fn waits<'a>(job: &Job<'_>) -> Section<'a> {
    let rows = job.waits();
    let more = job.head.map_or(0, |page| page.negotiating).saturating_sub(rows.len());
    let title = "Operations that wait for ranks";
    Section {
        title: if more > 0 { format!("{title}, and {more} more") } else { title.to_owned() },
        header: vec!["missing", "waited", "operation"],
        widths: vec![Constraint::Length(24), Constraint::Length(8), REST],
        rows: rows
            .iter()
            .map(|waiting| {
                let what = operation(&waiting.collective, &waiting.name);
                cells([toned(Tone::Waits, numbers(&waiting.missing)), plain(duration(waiting.age_ms)), plain(what)])
            })
            .collect(),
        empty: match job.head {
            _ if !job.sees_coordinator() => elsewhere(job),
            Some(page) if page.schedule.is_some() => UNDER_A_SCHEDULE.to_owned(),
            _ => "No operation waits for a rank.".to_owned(),
        },
    }
}

/// Requests that ranks wait for.
pub(super) fn requests<'a>(job: &Job<'_>) -> Section<'a> {
    let row = |request: &&Pending| {
        let note = if request.scheduled { ", in flight under a schedule" } else { "" };
        let what = format!("{}{note}", operation(&request.collective, &request.name));
        cells([plain(request.rank.to_string()), plain(duration(request.age_ms)), plain(what)])
    };
    Section {
        title: "Ranks that wait, with their oldest requests".to_owned(),
        header: vec!["rank", "waited", "operation"],
        widths: vec![Constraint::Length(24), Constraint::Length(8), REST],
        rows: job.requests().iter().map(row).collect(),
        empty: "No rank waits.".to_owned(),
    }
}

/// What the engine does, in sentences.
pub(super) fn engine<'a>(job: &Job<'_>) -> Section<'a> {
    let lines = job.head.map(|page| engine_lines(page, rates_of(job, page))).unwrap_or_default();
    let failure = job.failure().map(|reason| ("last epoch", format!("ended: {reason}")));
    let of = job.head.map_or_else(String::new, |page| format!(" of sidecar {}", page.sidecar));
    Section {
        title: format!("Engine{of}"),
        header: Vec::new(),
        widths: vec![Constraint::Length(11), REST],
        rows: lines.into_iter().chain(failure).map(|(name, words)| cells([plain(name), plain(words)])).collect(),
        empty: "Nothing is known yet.".to_owned(),
    }
}

fn rates_of<'a>(job: &Job<'a>, page: &Page) -> Option<&'a Rates> {
    let is_of = |watched: &&&Watched| watched.page.as_ref().is_some_and(|other| std::ptr::eq(other, page));
    job.sidecars.iter().find(is_of).and_then(|watched| watched.rates.as_ref())
}

fn engine_lines(page: &Page, rates: Option<&Rates>) -> Vec<(&'static str, String)> {
    let stats = &page.stats;
    let mut lines = vec![("fusion", fusion(page, rates))];
    let busy = format!("{} in flight, {} requests pending", page.in_flight, page.pending);
    lines.push((
        "operations",
        match rates {
            Some(rates) => format!("{:.0}/s, {:.0} tensors/s; {busy}", rates.operations, rates.tensors),
            None => busy,
        },
    ));
    lines.push((
        "schedule",
        page.schedule.as_ref().map_or_else(
            || "none: operations are negotiated".to_owned(),
            |found| {
                format!(
                    "{} tensors in {} operations a step; {} steps without negotiation",
                    found.tensors, found.operations, found.steps
                )
            },
        ),
    ));
    let began = format!("epochs that began here: {}; process sets: {}", stats.epochs, page.sets);
    lines.push(("membership", format!("epoch {} with {} ranks; {began}", page.epoch, page.world_size)));
    let sessions = &page.sessions;
    lines.push(("workers", format!("{} attached, {} over a ring in shared memory", sessions.live, sessions.over_ring)));
    if stats.failed > 0 || stats.mismatches > 0 {
        lines.push((
            "failures",
            format!("failed requests: {}; operations on which ranks disagreed: {}", stats.failed, stats.mismatches),
        ));
    }
    if let Some(search) = &page.autotune {
        lines.push((
            "autotune",
            format!("{}, {} of {} samples", search.stage.replace('_', " "), search.samples, search.samples_max),
        ));
    }
    if let Some(gpu) = &page.gpu {
        lines.push((
            "GPUs",
            gpu.unavailable.as_ref().map_or_else(
                || {
                    format!(
                        "{} with NCCL {}: {} operations by NCCL, {} in two levels, {} copied",
                        gpu.gpus, gpu.nccl, gpu.nccl_operations, gpu.two_level_operations, gpu.copied_operations
                    )
                },
                |reason| format!("not used: {reason}"),
            ),
        ));
    }
    lines.extend(page.notes.iter().map(|note| ("note", note.clone())));
    lines
}

/// How many tensors share an operation, and how large the contribution of a rank to it is.
fn fusion(page: &Page, rates: Option<&Rates>) -> String {
    let stats = &page.stats;
    if stats.ordered_operations == 0 && stats.executed == 0 {
        return "no operation so far".to_owned();
    }
    let mean = |tensors: u64, operations: u64| {
        format!("{:.1} tensors in an operation", number(tensors) / number(operations.max(1)))
    };
    let fused = match stats.ordered_operations {
        // Only the coordinator orders.
        0 => mean(stats.tensors_executed, stats.executed),
        ordered => {
            let mean = mean(stats.ordered_tensors, ordered);
            format!("{mean}, {} of {} fused", stats.fused_tensors, stats.ordered_tensors)
        }
    };
    let all = match rates.filter(|rates| rates.operations > 0.0) {
        Some(rates) => rates.contributed / rates.operations,
        None => number(page.traffic.contributed_bytes) / number(page.traffic.operations.max(1)),
    };
    // Contributions of all ranks of the sidecar are counted.
    let ranks = page.placement.iter().filter(|sidecar| **sidecar == page.sidecar).count().max(1);
    format!("{fused}; {} a rank", bytes(all / number(ranks as u64)))
}

/// What plugins do on each sidecar.
pub(super) fn plugins<'a>(job: &Job<'_>) -> Section<'a> {
    let used = |watched: &&&Watched| watched.page.as_ref().is_some_and(|page| page.plugins.spans > 0);
    let row = |watched: &&Watched| {
        let page = watched.page.as_ref();
        let plugins = page.map(|page| page.plugins.clone()).unwrap_or_default();
        let time = watched.rates.as_ref().map_or_else(|| "-".to_owned(), |rates| percent(rates.in_plugins));
        cells([
            plain(page.map_or_else(String::new, |page| page.sidecar.to_string())),
            plain(plugins.spans.to_string()),
            toned(if plugins.faults > 0 { Tone::Bad } else { Tone::Plain }, plugins.faults.to_string()),
            plain(time),
            plain(bytes(number(plugins.state_bytes))),
        ])
    };
    Section {
        title: "Plugins".to_owned(),
        header: vec!["sidecar", "spans", "failed", "time of a lane", "state"],
        widths: vec![
            Constraint::Length(8),
            Constraint::Length(12),
            Constraint::Length(8),
            Constraint::Length(14),
            RATE,
        ],
        rows: job.sidecars.iter().filter(used).map(row).collect(),
        empty: "No plugin was used.".to_owned(),
    }
}

/// Which sidecar serves which ranks.
pub(super) fn members<'a>(job: &Job<'_>) -> Section<'a> {
    let mut served: std::collections::BTreeMap<u32, Vec<u32>> = std::collections::BTreeMap::new();
    for (rank, sidecar) in job.head.map(|page| &page.placement[..]).unwrap_or_default().iter().enumerate() {
        served.entry(*sidecar).or_default().extend(u32::try_from(rank));
    }
    let epoch = job.head.map_or(0, |page| page.epoch);
    Section {
        title: format!("Membership of epoch {epoch}"),
        header: vec!["sidecar", "ranks"],
        widths: vec![Constraint::Length(8), REST],
        rows: served
            .iter()
            .map(|(sidecar, ranks)| cells([plain(sidecar.to_string()), plain(numbers(ranks))]))
            .collect(),
        empty: "No epoch has begun.".to_owned(),
    }
}

/// Everything about the selected row, in views that have one.
pub(super) fn detail<'a>(model: &Model, job: &Job<'_>) -> Option<Vec<Line<'a>>> {
    let cursor = model.cursor();
    let lines = match model.view {
        View::Ranks => rank_detail(job.ranks().get(cursor)?),
        View::Links => link_detail(job.links().get(cursor)?),
        View::Waits => vec![job.waits().get(cursor).map_or_else(
            || job.requests().get(cursor.checked_sub(job.waits().len())?).map(|request| request_line(request)),
            |waiting| Some(job::sentence(waiting)),
        )?],
        View::Overview | View::Engine => return None,
    };
    model.interactive.then(|| lines.into_iter().map(Line::from).collect())
}

fn request_line(request: &Pending) -> String {
    let what = operation(&request.collective, &request.name);
    format!("rank {} has submitted {what} {} ago", request.rank, duration(request.age_ms))
}

fn rank_detail(row: &RankRow<'_>) -> Vec<String> {
    let first = format!("rank {} on sidecar {}: {}", row.rank, row.sidecar, row.state);
    let requests = row.pending.iter().map(|request| request_line(request)).take(1);
    let none = || std::iter::once("no request of it is known to wait".to_owned());
    let second = requests.chain(none()).next();
    [Some(first), second].into_iter().flatten().collect()
}

fn link_detail(row: &LinkRow<'_>) -> Vec<String> {
    let Some(path) = row.path else {
        return vec![format!("sidecar {} has no connection to sidecar {}", row.from, row.link.peer)];
    };
    let until = |certificate: &Option<super::super::page::Certificate>| {
        certificate.as_ref().map_or_else(|| "?".to_owned(), |found| found.until.clone())
    };
    // Only QUIC measures it.
    let lost = match path.packets_sent {
        0 => String::new(),
        sent => format!("; {} of {sent} packets lost", path.packets_lost),
    };
    let exchange = path.key_exchange.as_deref().unwrap_or("no key exchange");
    vec![
        format!("to {}: {} for control, {} for data, {exchange}{lost}", path.address, path.carrier, path.data_carrier),
        format!(
            "{} sent and {} received; certificate until {}, the peer's until {}",
            bytes(number(path.sent_bytes)),
            bytes(number(path.received_bytes)),
            until(&path.certificate),
            until(&path.peer_certificate)
        ),
    ]
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

const UNDER_A_SCHEDULE: &str =
    "A schedule runs: operations are not negotiated, so the coordinator does not know which ranks are missing.";
const RATE: Constraint = Constraint::Length(10);
/// The width from which on the table of links has its additional columns.
const ROOMY: u16 = 110;
/// The widths from which on that of sidecars has operations, and the addresses of admin pages.
const COUNTED: u16 = 90;
const ADDRESSED: u16 = 120;
/// A rank that others wait for in this share of the time slows the job down (docs/OPERATIONS.md has the same alert).
const LATE_SHARE: f64 = 0.2;
