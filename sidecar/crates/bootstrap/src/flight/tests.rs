use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;

/// A record of sidecar 0 that was made at this time.
fn record(made_us: u64) -> FlightRecord {
    let request = RequestRecord {
        set: 0,
        name: "allreduce.w".to_owned(),
        collective: "allreduce".to_owned(),
        bytes: 4,
        site: Some("train.py:81".to_owned()),
        epoch: 1,
        submitted_us: 5,
        announced_us: Some(6),
        ordered: Some(OrderedRecord { seq: 9, at_us: 7, scheduled: true }),
        withdrawn: false,
        ended: Some(EndRecord { at_us: 8, failed: None }),
    };
    FlightRecord {
        format: FORMAT.to_owned(),
        version: VERSION,
        job: "job".to_owned(),
        run: "7".to_owned(),
        sidecar: 0,
        made_us,
        failure: None,
        epoch: 1,
        epoch_began_us: 4,
        placement: vec![0, 0],
        sets: Vec::new(),
        ranks: vec![RankRecord { rank: 0, submitted: 1, requests: vec![request] }],
        operations: Vec::new(),
        last_to_be_ready: vec![1, 0],
        waited_for_us: vec![5, 0],
        waiting: Vec::new(),
    }
}

fn bytes(record: &FlightRecord) -> Vec<u8> {
    serde_json::to_vec(record).expect("a record is JSON")
}

fn refused(bytes: &[u8]) -> String {
    FlightRecord::parse(bytes).expect_err("it is no record").to_string()
}

#[test]
fn a_record_is_read_back() {
    assert_eq!(FlightRecord::parse(&bytes(&record(10))), Ok(record(10)));
}

#[test]
fn what_is_no_record_of_this_version_is_refused_with_an_error_message() {
    let whole = bytes(&record(10));
    for end in 0..whole.len() {
        let reason = refused(&whole[..end]);
        assert!(reason.starts_with("is not a flight record, or is truncated: "), "{end}: {reason}");
    }
    assert_eq!(refused(b"{}"), "is not a flight record of ronde");
    assert_eq!(refused(br#"{"format":"timeline","version":1}"#), "is not a flight record of ronde");
    let later = FlightRecord { version: 2, ..record(10) };
    assert!(refused(&bytes(&later)).contains("format 2, but this ronde reads format 1; read it with"), "{later:?}");
    let head = format!(r#"{{"format":"{FORMAT}","version":1}}"#);
    assert!(refused(head.as_bytes()).contains("missing field"), "the rest is missing");
    let nested = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(refused(nested.as_bytes()).contains("is not a flight record"), "deep nesting does not overflow the stack");
}

#[test]
fn more_than_a_sidecar_records_is_refused() {
    let mut many = record(10);
    let request = many.ranks[0].requests[0].clone();
    many.ranks[0].requests = vec![request; OPERATIONS_MAX + 1];
    assert_eq!(refused(&bytes(&many)), "is damaged: it has 2001 requests of a rank, but at most 2000 are possible");
    for job in ["../../etc/x", "", "a/b", "\u{1b}"] {
        let reason = refused(&bytes(&FlightRecord { job: job.to_owned(), ..record(10) }));
        assert!(reason.starts_with("is damaged: it has an impossible job name"), "{job:?}: {reason}");
    }
    let ranks = vec![record(10).ranks[0].clone(); 65];
    let reason = refused(&bytes(&FlightRecord { ranks, ..record(10) }));
    assert!(reason.contains("65 ranks of this sidecar"), "{reason}");
    let waiting = |missing| WaitingRecord {
        set: 0,
        name: "w".to_owned(),
        collective: "allreduce".to_owned(),
        missing,
        since_us: 5,
    };
    let reason = refused(&bytes(&FlightRecord { waiting: vec![waiting(vec![1]); WAITING_MAX + 1], ..record(10) }));
    assert_eq!(reason, "is damaged: it has 101 waiting operations, but at most 100 are possible");
    let reason = refused(&bytes(&FlightRecord { waiting: vec![waiting(vec![1; 4_097])], ..record(10) }));
    assert!(reason.contains("4097 ranks of one operation or process set"), "{reason}");
    let set = |ranks| SetRecord { id: 1, ranks };
    let reason = refused(&bytes(&FlightRecord { sets: vec![set(vec![0]); WAITING_MAX + 1], ..record(10) }));
    assert!(reason.contains("101 process sets"), "{reason}");
    let reason = refused(&bytes(&FlightRecord { sets: vec![set(vec![0; 4_097])], ..record(10) }));
    assert!(reason.contains("4097 ranks of one operation or process set"), "{reason}");
}

#[test]
fn a_file_that_does_not_end_is_not_read_to_its_end() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("large.flight.json");
    fs::File::create(&path).and_then(|file| file.set_len(FILE_BYTES_MAX + 5)).expect("a sparse file");
    assert_eq!(FlightRecord::read(&path), Err(Unreadable::Large));
    let pipe = folder.path().join("pipe.flight.json");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let reason = FlightRecord::read(&pipe).expect_err("nobody writes to it").to_string();
    assert_eq!(reason, "cannot be read: it is not a regular file");
    let missing = FlightRecord::read(&folder.path().join("none")).expect_err("it does not exist").to_string();
    assert!(missing.starts_with("cannot be read: "), "{missing}");
}

#[test]
fn texts_of_a_record_cannot_control_a_terminal() {
    let mut hostile = record(10);
    hostile.ranks[0].requests[0].name = "a\u{1b}[2J".to_owned();
    hostile.ranks[0].requests[0].site = Some("x\n".repeat(10_000));
    let read = FlightRecord::parse(&bytes(&hostile)).expect("it is a record");
    let request = &read.ranks[0].requests[0];
    assert_eq!(request.name, "a\\u{1b}[2J");
    let text = bytes(&record(10));
    let changed = String::from_utf8(text)
        .expect("text")
        .replace("\"epoch\":1", &format!("\"epoch\":\"{}\"", "\\u001b[2J".repeat(10_000)));
    let reason = refused(changed.as_bytes());
    assert!(!reason.contains(char::is_control) && reason.len() < 5_000, "{} bytes", reason.len());
    let site = request.site.as_ref().expect("it stays");
    assert!(site.len() <= ronde_wire::limits::REASON_BYTES_MAX && !site.contains('\n'), "{site}");
}

#[test]
fn files_are_private_and_few() {
    let folder = tempfile::tempdir().expect("a directory");
    let directory = folder.path().join("made/here");
    for made_us in 0..20 {
        let path = write(&directory, &record(made_us)).expect("it can be written");
        assert_eq!(fs::metadata(&path).expect("it exists").permissions().mode() & 0o777, 0o600);
        // Times of files are not fine enough everywhere.
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(made_us);
        fs::File::options().append(true).open(&path).and_then(|file| file.set_modified(time)).expect("it is ours");
    }
    assert_eq!(fs::metadata(&directory).expect("it was made").mode() & 0o777, 0o700);
    let names: Vec<String> =
        files(&directory).expect("there are some").iter().map(|path| path.display().to_string()).collect();
    assert_eq!(names.len(), 4, "{names:?}");
    assert!(names[3].ends_with("/job.sidecar-0.19.flight.json"), "{names:?}");
    for job in 0..40 {
        write(&directory, &FlightRecord { job: format!("job-{job}"), ..record(100) }).expect("it can be written");
    }
    assert_eq!(files(&directory).expect("there are some").len(), 16, "of all jobs");
    write(&directory, &FlightRecord { sidecar: 1, ..record(5) }).expect("it can be written");
    assert_eq!(files(&directory).expect("there are some").len(), 17, "another sidecar's file removes none");
}

#[test]
fn records_that_are_added_remove_none() {
    let folder = tempfile::tempdir().expect("a directory");
    for made_us in 0..40 {
        add(folder.path(), &FlightRecord { made_us, ..record(made_us) }).expect("it can be written");
    }
    assert_eq!(files(folder.path()).expect("there are some").len(), 40);
    write(folder.path(), &record(100)).expect("it can be written");
    assert_eq!(files(folder.path()).expect("there are some").len(), 4, "a sidecar keeps few");
}

#[test]
fn what_killed_sidecars_left_unfinished_does_not_pile_up() {
    let folder = tempfile::tempdir().expect("a directory");
    for job in 0..9 {
        let unfinished = folder.path().join(format!("job-{job}.sidecar-0.5.flight.new"));
        fs::write(unfinished, "{").expect("it can be written");
    }
    write(folder.path(), &record(5)).expect("it can be written");
    assert_eq!(fs::read_dir(folder.path()).expect("it is there").count(), 1 + 4);
}

#[test]
fn the_default_directory_keeps_the_records_of_the_newest_jobs() {
    let folder = tempfile::tempdir().expect("a directory");
    let default = folder.path().join("ronde.flight-1");
    let job = |number: u64| default.join(format!("job-{number:02}"));
    for number in 0..20 {
        directory::write_below(&default, &job(number), &record(number)).expect("it can be written");
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(number);
        fs::File::open(job(number)).and_then(|file| file.set_modified(time)).expect("it is ours");
    }
    let names = || {
        let mut names: Vec<_> =
            fs::read_dir(&default).expect("it was made").flatten().map(|it| it.file_name()).collect();
        names.sort();
        names
    };
    assert_eq!((names().len(), names()[0].to_str()), (16, Some("job-04")));
    // The oldest one writes again.
    directory::write_below(&default, &job(4), &record(30)).expect("it can be written");
    assert_eq!((names().len(), names()[0].to_str()), (16, Some("job-04")));
    assert_eq!(fs::metadata(&default).expect("it was made").mode() & 0o777, 0o700);
}

#[test]
fn a_directory_without_records_and_a_path_that_does_not_exist_are_errors() {
    let folder = tempfile::tempdir().expect("a directory");
    let none = files(folder.path()).expect_err("it is empty");
    assert!(none.ends_with("holds no flight record (*.flight.json)"), "{none}");
    let missing = files(&folder.path().join("none")).expect_err("it does not exist");
    assert!(missing.starts_with("cannot read "), "{missing}");
}

#[test]
fn the_setting_is_a_directory_or_off() {
    assert_eq!(FlightDirectory::parse("off"), Ok(FlightDirectory::Off));
    assert_eq!(FlightDirectory::parse("/f").map(|it| it.of_job("j")), Ok(Some("/f".into())));
    assert!(FlightDirectory::parse("").is_err());
    assert_eq!(FlightDirectory::Off.of_job("j"), None);
    let default = FlightDirectory::Default.of_job("j").expect("it records");
    assert!(default.starts_with(std::env::temp_dir()) && default.ends_with("j"), "{default:?}");
}

#[test]
fn a_directory_in_a_shared_place_that_others_may_use_is_refused() {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("private");
    directory::make_private(&path).expect("it is new");
    directory::make_private(&path).expect("it is ours alone");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).expect("it is ours");
    let open = directory::make_private(&path).expect_err("its group may enter it").to_string();
    assert!(open.contains("is not a directory of this user alone"), "{open}");
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(folder.path(), &link).expect("a link");
    assert!(directory::make_private(&link).is_err(), "a link leads anywhere");
}
