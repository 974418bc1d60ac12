//! [`TraceFile`]: the file of a timeline, a JSON array that is valid after every write.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use ronde_rpc::v1;

use super::trace::Trace;

/// The file, the state of its trace, and its length.
pub(super) struct TraceFile {
    file: File,
    trace: Trace,
    /// The offset of the closing bracket, which the next events overwrite.
    end: u64,
}

impl TraceFile {
    /// Creates or truncates the file.
    pub(super) fn create(path: &Path) -> std::io::Result<Self> {
        Ok(Self { file: File::create(path)?, trace: Trace::default(), end: 0 })
    }

    /// Writes the first event: the time at which the recording starts.
    pub(super) fn begin(mut self) -> std::io::Result<Self> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map(|since| since.as_micros()).unwrap_or_default();
        self.trace.begin(u64::try_from(since).unwrap_or(u64::MAX));
        self.write()?;
        Ok(self)
    }

    /// Writes the events of a batch.
    pub(super) fn add(mut self, batch: v1::TimelineBatch) -> std::io::Result<Self> {
        self.trace.add(batch);
        self.write()?;
        Ok(self)
    }

    /// Ends all open spans.
    pub(super) fn finish(mut self) -> std::io::Result<()> {
        self.trace.finish();
        self.write()
    }

    /// Writes events and the closing bracket over the previous bracket in one call, so that the file is valid JSON even if this
    /// process is killed.
    fn write(&mut self) -> std::io::Result<()> {
        let lines = self.trace.take_lines();
        if lines.is_empty() {
            return Ok(());
        }
        let mut text = String::new();
        for line in lines {
            text.push_str(if self.end == 0 && text.is_empty() { "[\n" } else { ",\n" });
            text.push_str(&line);
        }
        let end = self.end + text.len() as u64;
        text.push_str(TAIL);
        self.file.seek(SeekFrom::Start(self.end))?;
        if let Err(error) = self.file.write_all(text.as_bytes()) {
            // Probably the disk is full. The earlier contents are restored, unless that fails, too.
            return Err(match self.restore() {
                Ok(()) => error,
                Err(other) => {
                    std::io::Error::new(error.kind(), format!("{error}; restoring the file failed, too: {other}"))
                }
            });
        }
        self.end = end;
        Ok(())
    }

    fn restore(&mut self) -> std::io::Result<()> {
        self.file.set_len(self.end)?;
        self.file.seek(SeekFrom::Start(self.end))?;
        self.file.write_all(if self.end == 0 { b"" } else { TAIL.as_bytes() })
    }
}

const TAIL: &str = "\n]\n";

#[cfg(test)]
mod tests {
    use ronde_rpc::v1::timeline_event::{CycleStarted, Event};

    use super::*;

    #[test]
    fn the_file_is_valid_json_after_every_write() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("timeline.json");
        let parsed = || -> Vec<serde_json::Value> {
            serde_json::from_str(&std::fs::read_to_string(&path).expect("it is there")).expect("it is whole")
        };
        let mut trace_file = TraceFile::create(&path).and_then(TraceFile::begin).expect("it can be written");
        let begun = parsed().len();
        for count in 1..4 {
            let event = v1::TimelineEvent { at_us: count, event: Some(Event::CycleStarted(CycleStarted {})) };
            let batch = v1::TimelineBatch { events: vec![event], dropped: 0 };
            trace_file = trace_file.add(batch).expect("it can be written");
            assert_eq!(parsed().len() as u64, begun as u64 + count);
        }
        trace_file.finish().expect("it can be written");
        assert!(parsed()[0]["args"]["start_time_since_epoch_in_micros"].as_u64().expect("a time") > 1 << 50);
    }

    #[test]
    fn a_full_disk_is_reported() {
        let full =
            TraceFile::create(Path::new("/dev/full")).and_then(TraceFile::begin).err().expect("there is no room");
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    }
}
