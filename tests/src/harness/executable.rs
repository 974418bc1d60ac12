//! Programs that a test makes and executes.
//!
//! Another process writes them. A process that a test starts has the descriptors of all threads until it executes its own
//! program: a file that one thread writes at that moment stays open for writing there, and executing it fails meanwhile
//! ("Text file busy", ETXTBSY).

use std::path::Path;
use std::process::Command;

/// Makes an executable file with this text.
///
/// # Panics
/// When it cannot be written.
pub fn write_executable(path: &Path, text: &str) {
    let mut command = Command::new("sh");
    command.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(path).arg(text);
    run(&mut command);
}

/// Copies a program, so that all users can execute the copy.
///
/// # Panics
/// When it cannot be copied.
pub fn copy_executable(program: &Path, path: &Path) {
    run(Command::new("install").args(["-m", "755"]).arg(program).arg(path));
}

fn run(command: &mut Command) {
    let output = command.output().expect("coreutils are installed");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
