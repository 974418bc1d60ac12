//! The codes of the errors of ronde that a worker ended with, from the last lines of its standard error. Pure.
//!
//! Anything may be in these lines: a program can write a code by itself, or report an error that it has handled. What counts
//! is an exception of ronde, or of JAX or TensorFlow around one, with which Python ends. The code of ronde's is in the line with
//! its name; in the other ones it may be in a later line, and the first code counts. An exception that Python has raised from
//! another one is one with it.

use ronde_bootstrap::codes::{CAUSES, Code};

use crate::rows::without_controls;

/// Whether these are the last lines of a worker that ended because another rank or a sidecar did. `None` if no error of ronde
/// is among them.
///
/// Any line with such a code counts here, because programs in other languages and frameworks report errors in their own
/// ways, and what it decides is how a rank is counted.
pub(super) fn is_follower(lines: &[String]) -> Option<bool> {
    let of_others = FOLLOWERS.map(|code| format!("[{code}]"));
    let names_one = |line: &String| of_others.iter().any(|code| line.contains(code));
    match first_cause(&codes(lines)) {
        Some(code) => Some(FOLLOWERS.contains(&code)),
        None => lines.iter().any(names_one).then_some(true),
    }
}

/// Whether the exception that a worker ended with has come from another rank or a sidecar. `None` without such an exception.
pub(super) fn ended_as_follower(lines: &[String]) -> Option<bool> {
    code(lines).map(|code| FOLLOWERS.contains(&code))
}

/// The code of the exception that a worker ended with, or of the first of those that it was raised from: the origin. `None` if
/// anything else follows in these lines: the program may have handled the exception and gone on.
pub(super) fn code(lines: &[String]) -> Option<Code> {
    let ending = Ending::of(lines);
    first_cause(&ending.codes[ending.first..]).filter(|_| ending.is_last)
}

/// The codes of the last exception in these lines, and of those that it was raised from, which come first.
pub(super) fn codes(lines: &[String]) -> Vec<Code> {
    Ending::of(lines).codes
}

fn first_cause(codes: &[Code]) -> Option<Code> {
    codes.iter().copied().find(|code| CAUSES.iter().any(|(_, of_cause)| of_cause == code))
}

/// The exceptions at the end of some lines.
#[derive(Default)]
struct Ending {
    codes: Vec<Code>,
    /// Where the codes of the last report begin. Reports without a traceback may come before it.
    first: usize,
    /// Whether only lines of the last report follow it.
    is_last: bool,
    /// Whether the line with the name of an exception is yet to come.
    is_in_traceback: bool,
    is_chained: bool,
    /// Whether the code of an exception is yet to come.
    is_within: bool,
}

impl Ending {
    fn of(lines: &[String]) -> Self {
        let mut ending = Self::default();
        // Python and others color their lines, and a program may show the cursor again before a report.
        lines.iter().for_each(|line| ending.take(&without_controls(line)));
        ending
    }

    fn take(&mut self, whole: &str) {
        // Groups of exceptions are drawn with bars.
        let line = short_report(whole.trim_start_matches([' ', '\t', '|', '+']).trim_end());
        if line.contains(TRACEBACK) {
            if !self.is_chained {
                (self.first, self.is_last) = (0, true);
                self.codes.clear();
            }
            (self.is_within, self.is_chained, self.is_in_traceback) = (false, false, true);
        } else if CHAINS.contains(&line) {
            (self.is_chained, self.is_in_traceback) = (true, true);
        }
        let begins = exception(line);
        let is_continued = self.is_in_traceback || self.is_within || is_continuation(whole);
        match begins {
            Some(_) if self.is_in_traceback => self.is_in_traceback = false,
            Some(Origin::Ronde | Origin::Framework) if !is_continued || self.codes.is_empty() => {
                (self.first, self.is_last) = (self.codes.len(), true);
            }
            _ => self.is_last &= is_continued,
        }
        self.is_within = match begins {
            Some(origin) => origin != Origin::Other,
            None => self.is_within,
        };
        if self.is_within
            && let Some(code) = code_at_the_end(line)
        {
            self.codes.push(code);
            self.is_within = false;
        }
        self.is_within &= begins != Some(Origin::Ronde);
    }
}

/// Whether a line below the name of an exception belongs to it: further lines of ronde's texts, and what JAX and TensorFlow add.
fn is_continuation(line: &str) -> bool {
    let of_missing_rank = || {
        let rest = line.trim_start_matches(|c: char| c.is_ascii_digit());
        rest.len() < line.len() && rest.starts_with(": [")
    };
    let of_rank =
        || line.starts_with("rank ") && [" has not asked for ", " has waited for "].iter().any(|is| line.contains(is));
    let begins = || CONTINUATIONS.iter().any(|beginning| line.starts_with(beginning));
    line.trim().is_empty() || line.starts_with([' ', '\t']) || begins() || of_rank() || of_missing_rank()
}

/// Who defines an exception.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Ronde,
    /// JAX or TensorFlow, which may have the text of an exception of ronde.
    Framework,
    Other,
}

/// The origin of the exception with whose name a line begins, as `ronde.errors.PeerLostError: ` does.
fn exception(line: &str) -> Option<Origin> {
    let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '.');
    let (name, _) = line.split_once(": ").or_else(|| Some((line.strip_suffix(':')?, "")))?;
    if !is_name(name) {
        return None;
    }
    let (module, kind) = name.rsplit_once('.').unwrap_or(("", name));
    if (module.is_empty() || module == RONDE_MODULE) && RONDE_KINDS.contains(&kind) {
        return Some(Origin::Ronde);
    }
    let is_of_package = module.is_empty() || FRAMEWORKS.iter().any(|package| module.starts_with(package));
    if is_of_package && FRAMEWORK_KINDS.contains(&kind) {
        return Some(Origin::Framework);
    }
    KINDS.iter().any(|end| kind.ends_with(end)).then_some(Origin::Other)
}

/// The part of a line that is ronde's short report, or the whole line. A progress bar that has not ended its line comes
/// before it.
fn short_report(line: &str) -> &str {
    if !line.contains(SITE) || exception(line).is_some() {
        return line;
    }
    let begins = |at: &usize| !line[..*at].ends_with(|c: char| c.is_alphabetic() || c == '_' || c == '.');
    let found = RONDE_KINDS.iter().filter_map(|kind| line.rfind(&format!("{kind}: "))).filter(begins);
    found.max().map_or(line, |at| &line[at..])
}

/// The code that ends a line. ronde's short report adds where the call was, and TensorFlow which operation it was.
fn code_at_the_end(line: &str) -> Option<Code> {
    let marked = match line.rsplit_once(SITE) {
        Some((marked, _)) => marked,
        None => line.split(OPERATION).next()?.trim_end().strip_suffix(']')?,
    };
    let (_, code) = marked.rsplit_once(" [")?;
    Code::parse(code.strip_prefix(PREFIX)?)
}

/// The codes of the causes `rank_lost`, `shut_down` and `sidecar_lost`, for which the SDK for Python prints one line
/// (`follower.py`).
const FOLLOWERS: [Code; 3] = [Code::WorkerFailed, Code::LeftEarly, Code::SidecarEnded];
/// How Python begins the report of an exception.
const TRACEBACK: &str = "Traceback (most recent call last)";
/// What Python writes between two exceptions of which one was raised because of, or during the handling of, the other.
const CHAINS: [&str; 2] = [
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
];
/// The module of ronde's exceptions, which its short report omits.
const RONDE_MODULE: &str = "ronde.errors";
const RONDE_KINDS: [&str; 6] =
    ["MismatchError", "PeerLostError", "RefusedError", "RondeError", "ShutDownError", "TimedOutError"];
/// How the modules of JAX (`jax.errors`, `jaxlib.xla_extension`) and TensorFlow begin.
const FRAMEWORKS: [&str; 2] = ["jax", "tensorflow."];
/// Their exceptions for the statuses that operations of ronde fail with.
const FRAMEWORK_KINDS: [&str; 9] = [
    "JaxRuntimeError",
    "XlaRuntimeError",
    "AbortedError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "ResourceExhaustedError",
    "UnknownError",
];
/// How names of exceptions end.
const KINDS: [&str; 3] = ["Error", "Exception", "Interrupt"];
/// How further lines of texts begin: of the engine's reports of a stall and of the record of a rank, and notes of JAX.
const CONTINUATIONS: [&str; 8] = [
    "Missing ranks:",
    "and ",
    "Group ",
    "Its last call was ",
    "The last lines of its stderr:",
    "-----",
    "For simplicity, JAX has removed ",
    "The stack trace below excludes ",
];
/// What ronde writes between the code and the place of the call that failed.
const SITE: &str = "] (at ";
/// How the name of an operation begins behind a text of TensorFlow's.
const OPERATION: &str = " [Op:";
const PREFIX: &str = "RONDE-E";

#[cfg(test)]
mod tests {
    use super::*;

    fn of(lines: &[&str]) -> Vec<Code> {
        codes(&owned(lines))
    }

    fn owned(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn a_worker_that_ends_with_an_error_of_its_own_is_no_follower() {
        let lost = "ronde.errors.PeerLostError: rank 1 was killed [RONDE-E301]";
        let shape = "ronde.errors.MismatchError: Mismatched shapes [RONDE-E306]";
        let chain = "During handling of the above exception, another exception occurred:";
        for (lines, expected) in [
            (&[TRACEBACK, lost][..], Some(true)),
            (&[TRACEBACK, shape], Some(false)),
            (&[TRACEBACK, shape, chain, TRACEBACK, lost], Some(false)),
            (&[TRACEBACK, lost, chain, TRACEBACK, shape], Some(true)),
            (&["Error: rank 1 was killed [RONDE-E301]"], Some(true)),
            (&["ValueError: no data"], None),
            (&[], None),
        ] {
            assert_eq!(is_follower(&owned(lines)), expected, "{lines:?}");
        }
        assert_eq!(ended_as_follower(&owned(&[TRACEBACK, lost])), Some(true));
        assert_eq!(
            ended_as_follower(&owned(&["Error: rank 1 was killed [RONDE-E301]"])),
            None,
            "no exception of ronde"
        );
        assert_eq!(code(&owned(&["RondeError: x [RONDE-E210]"])), None, "no exception has this code");
        assert_eq!(code(&owned(&[TRACEBACK, shape, chain, TRACEBACK, lost])), Some(Code::RanksDisagree));
    }

    #[test]
    fn exceptions_of_all_frameworks_have_their_code() {
        let lost = [Code::WorkerFailed];
        assert_eq!(of(&["ronde.errors.PeerLostError: rank 1 was killed [RONDE-E301]", "its last call was x"]), lost);
        assert_eq!(of(&["PeerLostError: rank 1 was killed [RONDE-E301] (at train.py:9)"]), lost);
        assert_eq!(of(&["jax.errors.JaxRuntimeError: ABORTED: rank 1 was killed [RONDE-E301]"]), lost);
        let eager = "tensorflow.python.framework.errors_impl.AbortedError: {{function_node __wrapped__RondeAllreduce}} rank 1 \
                     was killed [RONDE-E301] [Op:RondeAllreduce] name: ";
        assert_eq!(of(&[eager]), lost);
        let graph =
            ["AbortedError: Graph execution error:", "", "Node: 'x'", "rank 1 was killed [RONDE-E301]", "\t [[{{x}}]]"];
        assert_eq!(of(&graph), lost);
        let group = [
            "  + Exception Group Traceback (most recent call last):",
            "  | ronde.errors.PeerLostError: a [RONDE-E301]",
        ];
        assert_eq!(of(&group), lost);
    }

    #[test]
    fn a_progress_bar_before_the_short_report_does_not_hide_it() {
        for bar in ["  50%|\u{2588}\u{2588}   | 5/10 [00:01<00:01,  4.50it/s]", "epoch: 5/10", "training: 50 % "] {
            assert_eq!(
                of(&[&format!("{bar}ShutDownError: rank 1 left [RONDE-E305] (at train.py:9)")]),
                [Code::LeftEarly]
            );
            assert_eq!(of(&[&format!("{bar}ShutDownError: rank 1 left [RONDE-E305]")]), [], "no report of ronde's");
        }
    }

    #[test]
    fn control_sequences_do_not_hide_an_exception() {
        for line in [
            "\x1b[?25hPeerLostError: rank 1 was killed [RONDE-E301] (at train.py:9)",
            "\x07PeerLostError: rank 1 was killed [RONDE-E301] (at train.py:9)",
            "50 %\x1b[?25hPeerLostError: rank 1 was killed [RONDE-E301] (at train.py:9)",
            "\x1b[1;35mronde.errors.PeerLostError\x1b[0m: \x1b[35mrank 1 was killed [RONDE-E301]\x1b[0m",
        ] {
            assert_eq!(of(&[line]), [Code::WorkerFailed], "{line:?}");
        }
    }

    #[test]
    fn what_a_program_writes_by_itself_has_none() {
        for line in [
            "see [RONDE-E301]",
            "ValueError: [RONDE-E301] is not a number of a batch",
            "WARNING:root:handled: rank 1 was killed [RONDE-E301]",
            "ValueError: no [RONDE-E9] and no [E301]",
            "ValueError: rank 1 was killed [RONDE-E301]",
            "mine.PeerLostError: rank 1 was killed [RONDE-E301]",
            "5/10 mine.PeerLostError: rank 1 was killed [RONDE-E301] (at train.py:9)",
            "ValueError: PeerLostError: rank 1 was killed [RONDE-E301] (at train.py:9)",
        ] {
            assert_eq!(of(&[line]), [], "{line}");
        }
    }

    #[test]
    fn lines_after_an_exception_do_not_count() {
        let refused = "ronde.errors.RefusedError: too many requests [RONDE-E307]";
        let refused_only = [Code::RequestRejected];
        assert_eq!(of(&[refused, "the job ended: rank 1 was killed [RONDE-E301]"]), refused_only);
        assert_eq!(of(&["jax.errors.JaxRuntimeError: ABORTED: a", "b [RONDE-E307]", "c [RONDE-E301]"]), refused_only);
        assert_eq!(of(&["AbortedError: Graph execution error:", "ValueError: a", "b [RONDE-E301]"]), []);
    }

    #[test]
    fn an_exception_that_was_handled_does_not_count_and_one_that_was_raised_from_another_does() {
        let lost = "ronde.errors.PeerLostError: rank 1 was killed [RONDE-E301]";
        assert_eq!(of(&[TRACEBACK, lost, "retrying", TRACEBACK, "ValueError: no data"]), []);
        for chain in CHAINS {
            assert_eq!(of(&[TRACEBACK, lost, "", chain, "", TRACEBACK, "ValueError: no data"]), [Code::WorkerFailed]);
        }
    }

    #[test]
    fn an_exception_is_the_end_only_if_nothing_else_follows() {
        let shape = "ronde.errors.MismatchError: Mismatched shapes [RONDE-E306]";
        let stalled = "ronde.errors.ShutDownError: stalled [RONDE-E305]";
        let code = |lines: &[&str]| code(&owned(lines));
        for follows in [
            &[][..],
            &["Missing ranks:", "2: [late]", "rank 2 has not asked for late for 4.0 s; it computes."],
            &["Its last call was allreduce, 0.3 seconds before.", "The last lines of its stderr:", "  | ValueError: x"],
            &["", "--------------------", "For simplicity, JAX has removed its internal frames from the traceback"],
            &[CHAINS[0], TRACEBACK, "  File \"a.py\", line 1, in main", "ValueError: no data"],
        ] {
            assert_eq!(code(&[&[TRACEBACK, shape], follows].concat()), Some(Code::RanksDisagree), "{follows:?}");
        }
        for follows in ["going on without it", "INFO: saved", "ValueError: no data", "3 batches left"] {
            assert_eq!(code(&[TRACEBACK, shape, follows]), None, "{follows}");
            assert_eq!(code(&[TRACEBACK, shape, follows, TRACEBACK, stalled]), Some(Code::LeftEarly), "{follows}");
            let short = "PeerLostError: rank 1 was killed [RONDE-E301] (at a.py:4)";
            assert_eq!(code(&[shape, follows, short]), Some(Code::WorkerFailed), "{follows}");
        }
        assert_eq!(code(&["jax.errors.JaxRuntimeError: ABORTED: a", "b [RONDE-E306]", "c"]), None);
        assert_eq!(code(&["jax.errors.JaxRuntimeError: ABORTED: a", "b [RONDE-E306]"]), Some(Code::RanksDisagree));
    }
}
