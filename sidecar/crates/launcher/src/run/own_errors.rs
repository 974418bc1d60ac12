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
    match code(lines) {
        Some(code) => Some(FOLLOWERS.contains(&code)),
        None => lines.iter().any(names_one).then_some(true),
    }
}

/// The code of the exception that a worker ended with, or of the first of those that it was raised from: the origin.
pub(super) fn code(lines: &[String]) -> Option<Code> {
    codes(lines).into_iter().find(|code| CAUSES.iter().any(|(_, of_cause)| of_cause == code))
}

/// The codes of the last exception in these lines, and of those that it was raised from, which come first.
pub(super) fn codes(lines: &[String]) -> Vec<Code> {
    let (mut codes, mut is_within, mut is_chained) = (Vec::new(), false, false);
    for line in lines {
        // Python and others color their lines, and a program may show the cursor again before a report.
        let line = without_controls(line);
        // Groups of exceptions are drawn with bars.
        let line = short_report(line.trim_start_matches([' ', '\t', '|', '+']).trim_end());
        if line.contains(TRACEBACK) {
            if !is_chained {
                codes.clear();
            }
            (is_within, is_chained) = (false, false);
        } else if CHAINS.contains(&line) {
            is_chained = true;
        }
        let begins = exception(line);
        is_within = match begins {
            Some(origin) => origin != Origin::Other,
            None => is_within,
        };
        if is_within && let Some(code) = code_at_the_end(line) {
            codes.push(code);
            is_within = false;
        }
        is_within &= begins != Some(Origin::Ronde);
    }
    codes
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
}
