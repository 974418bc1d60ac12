//! The pictures and tables of docs/ALGORITHMS.md are what the plans say. `RONDE_REGENERATE=1 cargo test -p
//! ronde-collectives --test algorithms figures` writes them; without it this compares.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use ronde_collectives::algorithms::TABLE;
use ronde_collectives::check::Proof;
use ronde_collectives::{CostModel, Counts, Plan, Target, Work, WorkKind, algorithm_of, check, select};
use ronde_wire::{Algorithm, Rank, SetTopology, Tuning};

use crate::drawing::space_time;
use crate::worlds::{flat, kinds_for, plans};

/// An algorithm with a section of its own.
struct Section {
    /// Of the picture's file, and of the generated part of the document.
    name: &'static str,
    title: &'static str,
    algorithm: Algorithm,
    kind: WorkKind,
    /// Members in the picture.
    members: u32,
}

const fn section(
    name: &'static str,
    title: &'static str,
    algorithm: Algorithm,
    kind: WorkKind,
    members: u32,
) -> Section {
    Section { name, title, algorithm, kind, members }
}

const ROOT: Rank = Rank(0);
const CODED: WorkKind = WorkKind::AllReduceCoded { encoded_bytes: 2 };
const TWO_PASS: WorkKind = WorkKind::AllReduceTwoPass { measures: 1 };

const SECTIONS: [Section; 15] = [
    section("ring-all-reduce", "Ring all-reduce", Algorithm::Ring, WorkKind::AllReduce, 4),
    section("recursive-doubling", "Recursive doubling", Algorithm::RecursiveDoubling, WorkKind::AllReduce, 5),
    section("halving-doubling", "Halving and doubling", Algorithm::HalvingDoubling, WorkKind::AllReduce, 4),
    section("ring-reduce-scatter", "Ring reduce-scatter", Algorithm::Ring, WorkKind::ReduceScatter, 4),
    section("ring-all-gather", "Ring all-gather", Algorithm::Ring, WorkKind::AllGather, 4),
    section("binomial-reduce", "Binomial reduce", Algorithm::BinomialTree, WorkKind::Reduce { root: ROOT }, 5),
    section("binomial-broadcast", "Binomial broadcast", Algorithm::BinomialTree, WorkKind::Broadcast { root: ROOT }, 5),
    section("linear-gather", "Linear gather", Algorithm::Linear, WorkKind::Gather { root: ROOT }, 4),
    section("linear-scatter", "Linear scatter", Algorithm::Linear, WorkKind::Scatter { root: ROOT }, 4),
    section("pairwise-all-to-all", "Pairwise all-to-all", Algorithm::Pairwise, WorkKind::AllToAll, 4),
    section("dissemination", "Dissemination barrier", Algorithm::Dissemination, WorkKind::Barrier, 5),
    section("direct-coded", "Direct all-reduce with a codec", Algorithm::Direct, CODED, 4),
    section("direct-n-ary", "Direct n-ary all-reduce", Algorithm::Direct, WorkKind::AllReduceNAry, 4),
    section("direct-two-pass", "Direct two-pass all-reduce", Algorithm::Direct, TWO_PASS, 4),
    section("direct-adaptive", "Direct adaptive all-reduce", Algorithm::Direct, WorkKind::AllReduceAdaptive, 4),
];

#[test]
fn every_algorithm_has_a_section() {
    let kinds = kinds_for(&[ROOT]);
    for entry in TABLE.iter().filter(|entry| entry.algorithm != Algorithm::Local) {
        let performed = kinds.iter().filter(|kind| entry.performs(kind, 4) && kind.name() != BY_BLOCKS_NAME);
        for kind in performed {
            let is_shown =
                |section: &Section| section.algorithm == entry.algorithm && section.kind.name() == kind.name();
            assert!(SECTIONS.iter().any(is_shown), "{} of {} has no section", entry.algorithm, kind.name());
        }
    }
}

/// Has the schedule of the coded all-reduce, whose section covers it.
const BY_BLOCKS_NAME: &str = "all-reduce by blocks";

#[test]
fn pictures_are_those_of_the_plans() {
    for section in &SECTIONS {
        let topology = flat(section.members);
        let shards = u64::from(section.members);
        // An element for each shard, so that a shard is named by its number.
        let whole = matches!(section.algorithm, Algorithm::RecursiveDoubling | Algorithm::BinomialTree);
        let work = work_of(section, &topology, if whole { 1 } else { shards });
        let title = format!("{}, {} members", section.title, section.members);
        let picture = space_time(&title, &plans(&topology, &work, &tuning(section.algorithm)));
        compare(&docs().join("algorithms").join(format!("{}.svg", section.name)), &picture);
    }
}

#[test]
fn tables_are_those_of_the_plans() {
    let path = docs().join("ALGORITHMS.md");
    let mut document = fs::read_to_string(&path).expect("the document exists");
    for section in &SECTIONS {
        document = with_block(&document, section.name, &figures(section));
    }
    document = with_block(&document, "crossover", &crossover());
    document = with_block(&document, "expressions", &expressions());
    document = with_block(&document, "reasons", &reasons());
    compare(&path, &document);
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../docs")
}

/// Writes when asked to; otherwise the file must say the same.
fn compare(path: &Path, expected: &str) {
    if std::env::var_os("RONDE_REGENERATE").is_some() {
        fs::create_dir_all(path.parent().expect("a file has a folder")).expect("the folder can be made");
        fs::write(path, expected).expect("the file can be written");
        return;
    }
    let found = fs::read_to_string(path).unwrap_or_default();
    let differs = found.lines().zip(expected.lines()).position(|(found, expected)| found != expected);
    assert!(
        found == expected,
        "{} is not what the plans give, from line {} on; run RONDE_REGENERATE=1 cargo test -p ronde-collectives --test \
         figures and read the difference",
        path.display(),
        differs.map_or(found.lines().count(), |line| line) + 1,
    );
}

/// The document with another content of a generated part.
fn with_block(document: &str, name: &str, content: &str) -> String {
    let (open, close) = (format!("<!-- generated: {name} -->\n"), "<!-- end of generated -->");
    let (before, rest) = document.split_once(&open).unwrap_or_else(|| panic!("{open:?} is not in the document"));
    let (_, after) = rest.split_once(close).unwrap_or_else(|| panic!("{name} has no end in the document"));
    format!("{before}{open}{content}{close}{after}")
}

fn tuning(algorithm: Algorithm) -> Tuning {
    Tuning { algorithm, chunk_bytes: 1 << 20, lanes: 1, window: 1 }
}

/// `elements` in all: of every rank's tensor, or of all blocks together.
fn work_of(section: &Section, topology: &SetTopology, elements: u64) -> Work {
    let size = topology.size() as u64;
    let even = |blocks: u64, elements: u64| -> Vec<u64> {
        (0..blocks).map(|block| elements / blocks + u64::from(block < elements % blocks)).collect()
    };
    let tensors = match section.kind.counts() {
        _ if section.kind == WorkKind::Barrier => Vec::new(),
        Counts::One => vec![vec![elements]],
        Counts::EachRank => vec![even(size, elements)],
        Counts::EachPair => vec![(0..size).flat_map(|_| even(size, elements)).collect()],
    };
    Work { kind: section.kind.clone(), element_bytes: 4, tensors }
}

/// The table of an algorithm, for tensors of 1 MiB.
fn figures(section: &Section) -> String {
    const ELEMENTS: u64 = 1 << 18;
    let mut rows = ["| members", "| ---", "| rounds", "| sent", "| reduced"].map(str::to_owned);
    for members in [2, 3, 4, 8, 16] {
        let topology = flat(members);
        let work = work_of(section, &topology, ELEMENTS);
        let plans = plans(&topology, &work, &tuning(section.algorithm));
        let proof = proof(&topology, &work, &plans, section.algorithm);
        let most = |bytes: &[u64]| bytes.iter().max().map_or(0.0, |most| *most as f64 / (1 << 20) as f64);
        let _ = write!(rows[0], " | {members}");
        rows[1].push_str(" | ---");
        let _ = write!(rows[2], " | {}", rounds(&plans));
        let _ = write!(rows[3], " | {}", share(most(&proof.sent_bytes)));
        let _ = write!(rows[4], " | {}", share(most(&proof.reduced_bytes)));
    }
    let table: String = rows.iter().map(|row| format!("{row} |\n")).collect();
    format!("\n![{}](algorithms/{}.svg)\n\n{table}\n", section.title, section.name)
}

fn share(tensors: f64) -> String {
    if tensors == 0.0 { "0".to_owned() } else { format!("{tensors:.2} E") }
}

/// Rounds with transfers, those of a prelude and then those of the longest other sub-schedule.
fn rounds(plans: &[Plan]) -> usize {
    let used = |sub_schedule: usize| {
        let longest = plans.iter().map(|plan| plan.sub_schedules[sub_schedule].rounds.len()).max().unwrap_or(0);
        let busy = |round: &usize| {
            let mut rounds = plans.iter().filter_map(|plan| plan.sub_schedules[sub_schedule].rounds.get(*round));
            rounds.any(|round| !round.transfers.is_empty())
        };
        (0..longest).filter(busy).count()
    };
    let first = usize::from(plans[0].prelude);
    let prelude: usize = (0..first).map(used).sum();
    prelude + (first..plans[0].sub_schedules.len()).map(used).max().unwrap_or(0)
}

fn proof(topology: &SetTopology, work: &Work, plans: &[Plan], algorithm: Algorithm) -> Proof {
    check(topology, work, &tuning(algorithm), plans).unwrap_or_else(|violation| panic!("{violation}"))
}

/// Up to which size of a tensor each algorithm is chosen.
fn crossover() -> String {
    let model = CostModel::default();
    let mut rows =
        ["| members", "| ---", "| recursive doubling up to", "| halving and doubling up to"].map(str::to_owned);
    for members in [2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32, 64] {
        let topology = flat(members);
        let chosen = |bytes: u64| algorithm_of(&topology, &WorkKind::AllReduce, 4, bytes / 4, &model);
        let last = |wanted: &[Algorithm]| {
            let (mut low, mut high) = (0, 1 << 30);
            while high - low > 4 {
                let middle = low + (high - low) / 8 * 4;
                if wanted.contains(&chosen(middle)) { low = middle } else { high = middle }
            }
            low
        };
        let doubling = last(&[Algorithm::RecursiveDoubling]);
        let halving = last(&[Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling]);
        let _ = write!(rows[0], " | {members}");
        rows[1].push_str(" | ---");
        let _ = write!(rows[2], " | {} KiB", doubling >> 10);
        let _ =
            if halving > doubling { write!(rows[3], " | {} KiB", halving >> 10) } else { write!(rows[3], " | never") };
    }
    let table: String = rows.iter().map(|row| format!("{row} |\n")).collect();
    format!("\n{table}\n")
}

/// How elements are computed, in the checker's own words.
fn expressions() -> String {
    let mut table = "\n| algorithm | members | elements: expression |\n|---|---|---|\n".to_owned();
    for section in SECTIONS.iter().filter(|section| section.kind.reduces()) {
        for members in [3, 4] {
            let topology = flat(members);
            let work = work_of(section, &topology, u64::from(members));
            let plans = plans(&topology, &work, &tuning(section.algorithm));
            let proof = proof(&topology, &work, &plans, section.algorithm);
            let targets: Vec<Target> = match section.kind {
                WorkKind::ReduceScatter => topology.ranks().into_iter().map(Target::One).collect(),
                WorkKind::Reduce { root } => vec![Target::One(root)],
                _ => vec![Target::EveryRank],
            };
            let mut texts = Vec::new();
            for target in targets {
                let whose = if let Target::One(rank) = target { format!("at {rank} ") } else { String::new() };
                for (span, text) in proof.result(0, target) {
                    let elements = if span.len == 1 {
                        format!("{}", span.start)
                    } else {
                        format!("{} to {}", span.start, span.end() - 1)
                    };
                    texts.push(format!("{whose}{elements}: `{text}`"));
                }
            }
            let _ = writeln!(table, "| {} | {members} | {} |", section.title, texts.join("; "));
        }
    }
    table.push('\n');
    table
}

/// What [`select`] says of some buckets.
fn reasons() -> String {
    let all_reduce = |tensors| Work { kind: WorkKind::AllReduce, element_bytes: 4, tensors };
    let barrier = Work { kind: WorkKind::Barrier, element_bytes: 1, tensors: Vec::new() };
    let median = Work { kind: WorkKind::AllReduceNAry, element_bytes: 4, tensors: vec![vec![1 << 20]] };
    let cases = [
        (2, all_reduce(vec![vec![1_024]])),
        (8, all_reduce(vec![vec![1 << 18]])),
        (4, all_reduce(vec![vec![4 << 20], vec![2 << 20]])),
        (8, median),
        (4, barrier),
    ];
    let line = |(members, work): &(u32, Work)| select(&flat(*members), work, 2, &CostModel::default()).reason;
    let lines: Vec<String> = cases.iter().map(line).collect();
    format!("\n```\n{}\n```\n\n", lines.join("\n"))
}
