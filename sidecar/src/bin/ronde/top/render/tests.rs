//! Frames as text, at several sizes and states.

use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::fixtures;
use super::super::model::{Action, Answering, Model, Sample, View, act, update};
use super::super::{lines, page::Page};
use super::{first_row, render};

/// The lines of a frame of this size.
fn frame(model: &Model, columns: u16, rows: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a buffer");
    let frame = terminal.draw(|frame| render(frame, model)).expect("a buffer");
    lines(frame.buffer)
}

fn text(model: &Model, columns: u16, rows: u16) -> String {
    frame(model, columns, rows).join("\n")
}

fn holds(text: &str, pieces: &[&str]) {
    for piece in pieces {
        assert!(text.contains(piece), "{piece:?} is not in:\n{text}");
    }
}

/// After a change of the page of each sidecar.
fn changed(view: View, change: impl Fn(&mut Page)) -> Model {
    let mut model = fixtures::model(view);
    let answers = [0_u16, 1].map(|sidecar| {
        let mut page = fixtures::page(u32::from(sidecar), 2);
        change(&mut page);
        fixtures::answered(sidecar, page)
    });
    update(&mut model, Sample { answers: answers.into(), ..Sample::default() }, Duration::from_secs(2));
    model
}

#[test]
fn the_overview_of_a_small_terminal() {
    let found = frame(&fixtures::model(View::Overview), 80, 24);
    let expected = "\
job night: 4 ranks, epoch 2, up 61 s, transport auto, ronde 0.2.0
runs
 1 overview   2 ranks   3 links   4 waits   5 engine
Sidecars ───────────────────────────────────────────────────────────────────────
     state                        ranks        contributed  encrypted  decrypted
0    runs, coordinator            0, 1         3.0 GB/s     2.0 GB/s   1.5 GB/s
1    runs                         2, 3         3.0 GB/s     2.0 GB/s   1.5 GB/s
Operations that wait for ranks ─────────────────────────────────────────────────
missing                   waited    operation
3                         3 s       allreduce.layer4.weight
Stragglers: ranks that others wait for (steps of a schedule: within a sidecar) ─
rank   sidecar  state                             wait share  total     last
3      1        late by 3 s: allreduce.layer4.we  40 %        400 ms    40
0      0        in the epoch                      0 %         9 ms      1
2      1        in the epoch                      0 %         4 ms      2
Links ──────────────────────────────────────────────────────────────────────────
link      transport     cipher                 sent        received    RTT
0 to 1    TLS over TCP  AES_128_GCM_SHA256     2.0 GB/s    1.5 GB/s    120 us
1 to 0    TLS over TCP  AES_128_GCM_SHA256     2.0 GB/s    1.5 GB/s    120 us
Engine of sidecar 0 (1 to 3 of 6) ──────────────────────────────────────────────
fusion       13.0 tensors in an operation, 12500 of 13000 fused; 12.5 MB a rank
operations   120/s, 1600 tensors/s; 1 in flight, 2 requests pending
schedule     161 tensors in 12 operations a step; 40 steps without negotiation
q quit  ? help  tab or 1-5 view  arrows select  p pause  s sort";
    assert_eq!(found.join("\n"), expected);
}

#[test]
fn the_overview_of_a_large_terminal_has_two_columns_and_a_plot() {
    let found = text(&fixtures::model(View::Overview), 200, 50);
    println!("{found}");
    holds(&found, &["the top is 6.0 GB/s", "Engine of sidecar 0", "membership", "AES_128_GCM_SHA256", "█"]);
    let first = found.lines().find(|line| line.starts_with("Sidecars ")).expect("a title");
    assert!(first.contains("Operations that wait for ranks"), "side by side: {first}");
}

#[test]
fn the_throughput_of_a_job_on_one_sidecar_is_shown() {
    let model = changed(View::Overview, |page| {
        page.traffic.sealed_bytes = 0;
        page.traffic.opened_bytes = 0;
    });
    let found = text(&model, 100, 30);
    println!("{found}");
    holds(&found, &["contributed  encrypted  decrypted  operations", "3.0 GB/s     0 B/s      0 B/s      120/s"]);
    assert!(!found.contains("admin page"), "{found}");
    holds(&text(&model, 120, 30), &["operations  admin page", "120/s       127.0.0.1:41000"]);
}

#[test]
fn a_very_small_terminal_shows_how_the_job_is() {
    let mut model = fixtures::model(View::Overview);
    assert_eq!(frame(&model, 20, 5)[1], "runs");
    assert!(frame(&model, 20, 5)[0].starts_with("job night: 4 ranks"), "{:?}", frame(&model, 20, 5));
    assert_eq!(frame(&model, 20, 1), ["runs"]);
    for columns in 0..=20 {
        for rows in 0..=20 {
            for view in View::ALL {
                act(&mut model, Action::Show(view));
                frame(&model, columns, rows);
                act(&mut model, Action::Help);
                frame(&model, columns, rows);
            }
        }
    }
}

#[test]
fn many_ranks_scroll_with_the_selection() {
    let mut model = changed(View::Ranks, |page| {
        page.placement = (0..512).map(|rank| rank / 8).collect();
        page.world_size = 512;
        page.waited_for_us = vec![1_000; 512];
    });
    let found = text(&model, 80, 24);
    holds(&found, &["Ranks (1 to 15 of 512)", "rank 0 on sidecar 0: in the epoch"]);
    act(&mut model, Action::Last);
    let found = text(&model, 80, 24);
    holds(&found, &["(498 to 512 of 512)", "\n511    63 ", "rank 511 on sidecar 63"]);
    act(&mut model, Action::Move(-250));
    let found = text(&model, 80, 24);
    holds(&found, &["\n261    32 ", "rank 261 on sidecar 32"]);
    assert_eq!([first_row(512, 15, 0), first_row(512, 15, 261), first_row(512, 15, 511)], [0, 254, 497]);
    assert_eq!([first_row(3, 15, 2), first_row(0, 0, 9), first_row(9, 0, 4)], [0, 0, 4]);
}

#[test]
fn a_lost_sidecar_is_shown_in_words() {
    let mut model = fixtures::model(View::Overview);
    for second in [2, 5] {
        let mut sample = fixtures::sample_without(second, 1);
        if let Ok(page) = &mut sample.answers[0].1 {
            page.links[0].up = false;
            page.phase = "waiting".to_owned();
            page.last_failure = Some(super::super::page::Failure { reason: "sidecar 1 was lost".to_owned() });
        }
        update(&mut model, sample, Duration::from_secs(second));
    }
    let found = text(&model, 100, 30);
    println!("{found}");
    let words = "sidecar 1 has not answered for 3 s: no sidecar answers at 127.0.0.1:41001; it may have ended";
    holds(
        &found,
        &[words, "0 to 1    down", "last epoch   ended: sidecar 1 was lost", "1    has not answered for 3 s"],
    );
    act(&mut model, Action::Show(View::Ranks));
    holds(&text(&model, 100, 30), &["2      1        its sidecar does not answer"]);
    let both = |watched: &mut super::super::model::Watched| watched.answer = Answering::Ended;
    model.sidecars.iter_mut().for_each(both);
    holds(&text(&model, 100, 30), &["the job has ended: none of its 2 sidecars answers"]);
}

#[test]
fn without_data_the_view_shows_what_it_waits_for() {
    let mut model = Model::new(View::Overview, true);
    holds(&text(&model, 80, 24), &["no sidecar has answered yet", "Looking for sidecars."]);
    let problem = Some("no sidecar is found below /run/user/1000; start a job".to_owned());
    update(&mut model, Sample { answers: Vec::new(), problem, ..Sample::default() }, Duration::ZERO);
    holds(&text(&model, 80, 24), &["no sidecar is found below /run/user/1000", "appear here once it runs"]);
    let answers = vec![("127.0.0.1:9".to_owned(), Err("no sidecar answers at 127.0.0.1:9".to_owned()))];
    update(&mut model, Sample { answers, ..Sample::default() }, Duration::from_secs(1));
    holds(&text(&model, 80, 24), &["no sidecar has answered yet", "has not answered for 0 ms"]);
}

#[test]
fn each_view_has_its_rows_and_the_selected_one_in_full() {
    let mut model = fixtures::model(View::Links);
    let found = text(&model, 120, 24);
    holds(&found, &["10.0.0.2:7400", "X25519; 3 of 900 packets lost", "certificate until 2026-11-28 10:00 UTC"]);
    act(&mut model, Action::Show(View::Waits));
    act(&mut model, Action::Move(1));
    let found = text(&model, 80, 24);
    holds(
        &found,
        &["Ranks that wait, with their oldest requests", "rank 0 has submitted allreduce.layer4.weight 3 s ago"],
    );
    act(&mut model, Action::Show(View::Engine));
    let found = text(&model, 80, 24);
    holds(&found, &["13.0 tensors in an operation", "25 %", "4.0 MB", "Membership of epoch 2", "1         2, 3"]);
    act(&mut model, Action::Help);
    holds(&text(&model, 80, 24), &["the next view, the previous one"]);
    act(&mut model, Action::Help);
    act(&mut model, Action::Pause);
    holds(&text(&model, 80, 24), &["ronde 0.2.0  paused"]);
}

#[test]
fn a_sidecar_that_is_not_the_coordinator_names_it() {
    let mut model = Model::new(View::Waits, true);
    let answers = vec![fixtures::answered(1, fixtures::page(1, 0))];
    update(&mut model, Sample { answers, ..Sample::default() }, Duration::ZERO);
    holds(
        &text(&model, 100, 24),
        &["Only the coordinator (sidecar 0) knows which ranks are late; pass its admin page with --url."],
    );
}

#[test]
fn operations_in_flight_under_a_schedule_are_shown() {
    let model = changed(View::Waits, |page| {
        page.waiting_tensors.clear();
        for request in &mut page.pending_requests {
            (request.ordered, request.scheduled) = (true, true);
        }
    });
    let found = text(&model, 120, 24);
    holds(&found, &["A schedule runs: operations are not negotiated", "layer4.weight, in flight under a schedule"]);
    let ordered =
        changed(View::Waits, |page| page.pending_requests.iter_mut().for_each(|request| request.ordered = true));
    holds(&text(&ordered, 120, 24), &["No rank waits."]);
}

#[test]
fn names_with_control_characters_do_not_reach_the_terminal() {
    let model = changed(View::Overview, |page| {
        page.job = "a\u{1b}[2Jb".to_owned();
        for waiting in &mut page.waiting_tensors {
            waiting.name = "x\r\ny\u{7}\u{9b}31m".to_owned();
        }
    });
    for view in View::ALL {
        let mut model = model.clone();
        act(&mut model, Action::Show(view));
        assert!(!frame(&model, 100, 30).join("").contains(char::is_control), "{}", text(&model, 100, 30));
    }
}

/// Whatever page a port serves is drawn.
#[test]
fn fuzz_top_frames() {
    use ronde_fuzz::{Outcome, fuzz};

    let page = serde_json::json!({
        "job": "night", "sidecar": 0, "coordinator": 0, "world_size": 4, "epoch": 2, "up_ms": 125_000, "placement": [0, 1],
        "links": [{ "peer": 1, "up": true }], "paths": [{ "peer": 1, "sent_bytes": 5, "certificate": { "until": "x" } }],
        "waiting_tensors": [{ "name": "w", "collective": "ALLREDUCE", "missing": [2, 3], "age_ms": 3_100 }],
        "pending_requests": [{ "rank": 1, "name": "w", "ordered": false, "age_ms": 900 }], "waited_for_us": [1, 2],
        "traffic": { "sealed_bytes": 1_000, "opened_bytes": 7, "operations": 1 }, "ranks_missing": [3],
    });
    fuzz("top_frames", vec![page.to_string().into_bytes()], |bytes| {
        let read = serde_json::from_slice::<Page>(bytes);
        let outcome = Outcome::of(&read);
        let Ok(page) = read else { return outcome };
        let mut model = Model::new(View::Overview, true);
        for second in [0, 1] {
            let mut page = page.clone();
            page.up_ms = page.up_ms.saturating_add(second * 1_000);
            let answers = vec![fixtures::answered(0, page)];
            update(&mut model, Sample { answers, ..Sample::default() }, Duration::from_secs(second));
        }
        for view in View::ALL {
            act(&mut model, Action::Show(view));
            frame(&model, 80, 24);
        }
        outcome
    });
}
