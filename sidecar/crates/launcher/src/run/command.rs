//! Mistakes in the worker's command that would fail on every host, and what was meant.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Returns what to write instead if the command is a script of Python in the working directory that cannot be started as a
/// program.
pub(super) fn interpreter_of(command: &[String]) -> Option<String> {
    let program = command.first().filter(|program| program.ends_with(".py"))?;
    let is_program =
        |path: &Path| path.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0);
    let found = if program.contains('/') {
        is_program(Path::new(program))
    } else {
        std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|folder| is_program(&folder.join(program))))
    };
    (!found && Path::new(program).is_file()).then(|| {
        format!(
            "{program} is no program but a script; start its interpreter: ronde run ... python {}",
            command.join(" ")
        )
    })
}

/// Returns the message that the number of processes is missing. An option after the program belongs to it, so the
/// message names one that was meant for ronde.
pub(super) fn number_is_missing(command: &[String]) -> String {
    let names = ["-np", "-n", "--np", "--num-proc", "--nproc-per-node"];
    let is_number = |option: &&String| names.contains(&name_of(option));
    let missing = "the number of processes is not given; give -np N (--num-proc), or hosts with -H HOST:SLOTS";
    match command.iter().skip(1).find(is_number) {
        Some(option) => format!("{missing}. {}", belongs_to_program(option, &command[0])),
        None => missing.to_owned(),
    }
}

/// Returns the message that an option for the number of processes comes after the program and so does not count,
/// although the number is known otherwise. The short `-n` is not among them: many programs have it.
pub(super) fn number_after_program(command: &[String]) -> Option<String> {
    let is_number = |option: &&String| ["-np", "--np", "--num-proc"].contains(&name_of(option));
    let option = command.iter().skip(1).find(is_number)?;
    Some(belongs_to_program(option, &command[0]))
}

/// An option without its number: `-np` of `-np4` and of `-np=4`.
fn name_of(option: &str) -> &str {
    let name = option.split('=').next().unwrap_or_default();
    name.trim_end_matches(|c: char| c.is_ascii_digit())
}

fn belongs_to_program(option: &str, program: &str) -> String {
    format!(
        "{option} comes after {program}, so it is an argument of that program: options of ronde come before it, as in \
         ronde run -np 2 python train.py"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_script_that_is_no_program_is_given_its_interpreter() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let script = folder.path().join("train.py");
        std::fs::write(&script, "print(1)").expect("it is ours");
        let line = format!("{} --epochs 3", script.display());
        let suggestion = interpreter_of(&words(&line)).expect("nobody can run it");
        assert!(suggestion.ends_with(&format!("ronde run ... python {line}")), "{suggestion}");
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("it is ours");
        assert_eq!(interpreter_of(&words(&line)), None, "it is a program now");
        for line in ["/nowhere/train.py", "train.py", "python train.py"] {
            assert_eq!(interpreter_of(&words(line)), None, "{line}: other hosts may have it");
        }
    }

    #[test]
    fn a_number_after_the_program_is_noticed_when_another_one_counts() {
        for line in ["python train.py -np 2", "python train.py --num-proc=2", "python train.py -np2"] {
            let text = number_after_program(&words(line)).expect("the program gets it");
            assert!(text.contains(" comes after python, so it is an argument of that program"), "{text}");
        }
        for line in ["python train.py --epochs 3", "head -n 3", "--np"] {
            assert_eq!(number_after_program(&words(line)), None, "{line}");
        }
    }

    #[test]
    fn an_option_after_the_program_is_named() {
        for line in ["python train.py -np 2", "python train.py --num-proc=2", "python train.py -n2", "sh -n"] {
            let option = line.split(' ').find(|word| word.starts_with('-')).expect("one is there");
            let text = number_is_missing(&words(line));
            assert!(text.contains(&format!(". {option} comes after {}", &words(line)[0])), "{text}");
        }
        assert!(number_is_missing(&words("python train.py --epochs 3")).ends_with("-H HOST:SLOTS"));
    }
}
