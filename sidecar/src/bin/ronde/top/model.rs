//! The state of the view, and how samples and keys change it. Pure: time is an argument.

use std::collections::VecDeque;
use std::time::Duration;

use super::job::Job;
use super::page::Page;
use super::rates::Rates;

/// The state of the view.
#[derive(Clone, Debug)]
pub(super) struct Model {
    /// Every sidecar that has answered or should, by job and index.
    pub(super) sidecars: Vec<Watched>,
    /// The name of the job that is shown.
    pub(super) job: String,
    /// Why no sidecar is found.
    pub(super) problem: Option<String>,
    /// Whether there has been a sample.
    pub(super) sampled: bool,
    pub(super) view: View,
    pub(super) sort: Sort,
    pub(super) paused: bool,
    pub(super) help: bool,
    /// Whether tabs and keys are shown: there is none to press with `--once`.
    pub(super) interactive: bool,
    pub(super) now: Duration,
    /// The selected row of each view.
    cursors: [usize; View::ALL.len()],
}

/// A sidecar as it is known here.
#[derive(Clone, Debug)]
pub(super) struct Watched {
    pub(super) address: String,
    /// The newest page.
    pub(super) page: Option<Page>,
    /// `None` until there are two pages.
    pub(super) rates: Option<Rates>,
    /// Bytes a second that its ranks have contributed, oldest first.
    pub(super) history: VecDeque<u64>,
    pub(super) answer: Answering,
}

/// Whether a sidecar answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answering {
    /// The newest sample has its page.
    Yes,
    /// It does not.
    No { since: Duration, reason: String },
    /// It has removed its directory, as a sidecar does that shuts down cleanly.
    Ended,
}

/// What was found at one time.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// Address and page of each sidecar, or why it has none.
    pub(super) answers: Vec<(String, Result<Box<Page>, String>)>,
    /// Why no sidecar is found, or not all.
    pub(super) problem: Option<String>,
    /// Whether the sidecars were searched for, and not named: a sidecar that was killed leaves its directory behind.
    pub(super) is_search: bool,
}

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum View {
    /// Sidecars, waits, stragglers, links and the engine.
    Overview,
    /// Each rank with its state and how long others have waited for it.
    Ranks,
    /// Each link with transport, cipher and bytes a second.
    Links,
    /// Operations with the ranks that are missing, and the ranks that wait.
    Waits,
    /// Fusion, schedule, plugins and membership.
    Engine,
}

impl View {
    pub(super) const ALL: [Self; 5] = [Self::Overview, Self::Ranks, Self::Links, Self::Waits, Self::Engine];

    /// Its name, as `--view` takes it.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Overview => "overview",
            Self::Ranks => "ranks",
            Self::Links => "links",
            Self::Waits => "waits",
            Self::Engine => "engine",
        }
    }

    const fn index(self) -> usize {
        self as usize
    }
}

/// The order of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    ByRank,
    /// Those for which others wait most come first.
    ByWait,
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Leave the help, or end.
    Quit,
    End,
    Next,
    Previous,
    Show(View),
    /// Move the selection by so many rows.
    Move(isize),
    First,
    Last,
    Pause,
    Help,
    Sort,
    NextJob,
}

impl Model {
    /// A view without data.
    pub(super) fn new(view: View, interactive: bool) -> Self {
        Self {
            sidecars: Vec::new(),
            job: String::new(),
            problem: None,
            sampled: false,
            view,
            sort: Sort::ByRank,
            paused: false,
            help: false,
            interactive,
            now: Duration::ZERO,
            cursors: [0; View::ALL.len()],
        }
    }

    /// The job that is shown.
    pub(super) fn shown(&self) -> Job<'_> {
        Job::of(self)
    }

    /// The names of the jobs, in their order.
    pub(super) fn jobs(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.sidecars.iter().filter_map(Watched::job).collect();
        names.dedup();
        names
    }

    /// The selected row of the view.
    pub(super) fn cursor(&self) -> usize {
        self.cursors[self.view.index()].min(self.shown().rows(self.view).saturating_sub(1))
    }

    fn move_to(&mut self, row: usize) {
        self.cursors[self.view.index()] = row.min(self.shown().rows(self.view).saturating_sub(1));
    }
}

impl Watched {
    /// The name of its job, once that is known.
    pub(super) fn job(&self) -> Option<&str> {
        self.page.as_ref().map(|page| page.job.as_str())
    }

    pub(super) fn answers(&self) -> bool {
        self.answer == Answering::Yes
    }

    fn order(&self) -> (Option<&str>, Option<u32>, &str) {
        (self.job(), self.page.as_ref().map(|page| page.sidecar), &self.address)
    }
}

/// Takes a sample. A view that is paused keeps what it shows.
pub(super) fn update(model: &mut Model, sample: Sample, now: Duration) {
    if model.paused {
        return;
    }
    model.now = now;
    model.sampled = true;
    let is_gone = |watched: &Watched| !sample.answers.iter().any(|(address, _)| *address == watched.address);
    for watched in model.sidecars.iter_mut().filter(|watched| is_gone(watched)) {
        watched.answer = Answering::Ended;
        watched.rates = None;
        watched.note_rate();
    }
    model.problem = sample.problem;
    for (address, answer) in sample.answers {
        let is_known = model.sidecars.iter().any(|watched| watched.address == address);
        if sample.is_search && !is_known && answer.is_err() {
            continue;
        }
        // A port can be that of another sidecar later.
        let is_same = |watched: &&mut Watched| {
            watched.address == address
                && watched
                    .page
                    .as_ref()
                    .zip(answer.as_ref().ok())
                    .is_none_or(|(before, now)| is_one_sidecar(before, now))
        };
        match model.sidecars.iter_mut().find(is_same) {
            Some(watched) => note(watched, answer, now),
            None => {
                model.sidecars.retain(|watched| watched.address != address);
                model.sidecars.push(Watched::new(address, answer, now));
            }
        }
    }
    forget(&mut model.sidecars);
    model.sidecars.sort_by(|one, other| one.order().cmp(&other.order()));
    choose_job(model);
}

fn is_one_sidecar(before: &Page, now: &Page) -> bool {
    (&before.job, before.sidecar) == (&now.job, now.sidecar)
}

impl Watched {
    fn new(address: String, answer: Result<Box<Page>, String>, now: Duration) -> Self {
        let mut made = Self { address, page: None, rates: None, history: VecDeque::new(), answer: Answering::Ended };
        note(&mut made, answer, now);
        made
    }

    /// Notes the rate of this sample: nothing if the sidecar does not answer. Histories of all sidecars end with the same sample,
    /// because the plot adds them up.
    fn note_rate(&mut self) {
        let bytes = self.rates.as_ref().map_or(0.0, |rates| rates.contributed);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rate is positive and below 2^64"
        )]
        self.history.push_back(bytes as u64);
        if self.history.len() > HISTORY_MAX {
            self.history.pop_front();
        }
    }
}

/// Notes the answer of a sidecar.
fn note(watched: &mut Watched, answer: Result<Box<Page>, String>, now: Duration) {
    match answer {
        Ok(page) => {
            let earlier = watched.page.replace(*page);
            let newest = watched.page.as_ref();
            watched.rates = earlier.as_ref().zip(newest).and_then(|(before, now)| Rates::between(before, now));
            watched.answer = Answering::Yes;
        }
        Err(reason) => {
            let since = match &watched.answer {
                Answering::No { since, .. } => *since,
                Answering::Yes | Answering::Ended => now,
            };
            watched.rates = None;
            watched.answer = Answering::No { since, reason };
        }
    }
    watched.note_rate();
}

/// Forgets the sidecars that do not answer and that no sidecar that does expects: those of jobs that have ended, once
/// another one runs, those that have left an elastic job, and those whose job runs again under its name.
fn forget(sidecars: &mut Vec<Watched>) {
    let living: Vec<&Page> =
        sidecars.iter().filter(|watched| watched.answers()).filter_map(|watched| watched.page.as_ref()).collect();
    if living.is_empty() {
        return;
    }
    let expects = |page: &&Page, gone: &Page| {
        page.job == gone.job && (page.placement.is_empty() || page.placement.contains(&gone.sidecar))
    };
    // The same job and index at another address: the sidecar of a later run.
    let is_replaced = |gone: &Page| living.iter().any(|page| is_one_sidecar(page, gone));
    let is_kept = |watched: &Watched| match (&watched.page, &watched.answer) {
        (_, Answering::Yes) | (None, Answering::No { .. }) => true,
        (None, Answering::Ended) => false,
        (Some(gone), Answering::No { .. } | Answering::Ended) => {
            !is_replaced(gone) && living.iter().any(|page| expects(page, gone))
        }
    };
    let mut kept: VecDeque<bool> = sidecars.iter().map(is_kept).collect();
    sidecars.retain(|_| kept.pop_front().unwrap_or(true));
}

/// Shows the first job if the one that was shown is gone.
fn choose_job(model: &mut Model) {
    let jobs = model.jobs();
    if !jobs.contains(&model.job.as_str()) {
        model.job = jobs.first().copied().unwrap_or_default().to_owned();
    }
}

/// Does what a key asks for; `false` to quit.
pub(super) fn act(model: &mut Model, action: Action) -> bool {
    let help = model.help;
    model.help = action == Action::Help && !help;
    let turn = |view: View, by: usize| View::ALL[(view.index() + by) % View::ALL.len()];
    match action {
        Action::Quit => return help,
        Action::End => return false,
        Action::Help => {}
        Action::Next => model.view = turn(model.view, 1),
        Action::Previous => model.view = turn(model.view, View::ALL.len() - 1),
        Action::Show(view) => model.view = view,
        Action::Move(by) => model.move_to(model.cursor().saturating_add_signed(by)),
        Action::First => model.move_to(0),
        Action::Last => model.move_to(usize::MAX),
        Action::Pause => model.paused = !model.paused,
        Action::Sort => {
            model.sort = match model.sort {
                Sort::ByRank => Sort::ByWait,
                Sort::ByWait => Sort::ByRank,
            }
        }
        Action::NextJob => {
            let jobs = model.jobs();
            let at = jobs.iter().position(|job| *job == model.job).map_or(0, |at| at + 1);
            if let Some(job) = jobs.get(at % jobs.len().max(1)) {
                model.job = (*job).to_owned();
            }
        }
    }
    true
}

/// The rates of a sidecar that are kept: two minutes at one sample a second.
const HISTORY_MAX: usize = 120;

#[cfg(test)]
mod tests {
    use super::super::fixtures::{self, answered, lost};
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_sidecar_has_rates_from_its_second_page_on() {
        let mut model = Model::new(View::Overview, true);
        update(&mut model, fixtures::sample(0), seconds(0));
        assert_eq!((model.sidecars.len(), model.job.as_str()), (2, "night"));
        assert!(model.sidecars.iter().all(|watched| watched.rates.is_none()));
        update(&mut model, fixtures::sample(1), seconds(1));
        let rates = model.sidecars[0].rates.clone().expect("two pages");
        assert_eq!(rates.sealed, 2.0e9);
        assert_eq!(model.sidecars[0].history.len(), 2);
        for second in 2..200 {
            update(&mut model, fixtures::sample(second), seconds(second));
        }
        assert_eq!(model.sidecars[0].history.len(), HISTORY_MAX);
    }

    #[test]
    fn a_lost_sidecar_keeps_its_page_and_the_time_since_when_it_is_lost() {
        let mut model = fixtures::model(View::Overview);
        for second in [5, 9] {
            update(&mut model, fixtures::sample_without(second, 1), seconds(second));
        }
        let Answering::No { since, reason } = &model.sidecars[1].answer else { panic!("{:?}", model.sidecars[1]) };
        assert_eq!((*since, reason.as_str()), (seconds(5), lost(1).as_str()));
        assert!(model.sidecars[1].page.is_some() && model.sidecars[1].rates.is_none());
        update(&mut model, fixtures::sample(10), seconds(10));
        assert!(model.sidecars[1].answers(), "it answers again");
    }

    #[test]
    fn sidecars_that_ended_stay_until_another_job_runs() {
        let mut model = fixtures::model(View::Overview);
        let problem = Some("no sidecar is found".to_owned());
        update(&mut model, Sample { answers: Vec::new(), problem, is_search: true }, seconds(3));
        assert!(model.sidecars.len() == 2 && model.sidecars.iter().all(|watched| watched.answer == Answering::Ended));
        assert_eq!(model.job, "night");
        let mut page = fixtures::page(0, 4);
        page.job = "day".to_owned();
        update(&mut model, Sample { answers: vec![answered(7, page)], ..Sample::default() }, seconds(4));
        assert_eq!((model.sidecars.len(), model.job.as_str()), (1, "day"));
    }

    #[test]
    fn a_job_that_runs_again_under_its_name_is_not_shown_as_ended() {
        let mut model = fixtures::model(View::Overview);
        let answers =
            [0, 1].map(|sidecar| answered(7 + u16::try_from(sidecar).expect("small"), fixtures::page(sidecar, 0)));
        // One sidecar of the earlier run was killed and its directory is left; the other one removed its directory.
        let killed = (answered(0, fixtures::page(0, 0)).0, Err(lost(0)));
        let sample =
            Sample { answers: answers.into_iter().chain([killed]).collect(), is_search: true, ..Sample::default() };
        update(&mut model, sample, seconds(9));
        assert_eq!(model.sidecars.len(), 2, "those of the earlier run are forgotten");
        assert!(model.sidecars.iter().all(Watched::answers));
        assert_ne!(model.shown().verdict().0, super::super::job::Tone::Bad);
        assert!(model.shown().ranks().iter().all(|row| row.state != "its sidecar does not answer"));
    }

    #[test]
    fn sidecars_that_ended_carry_no_traffic() {
        let mut model = fixtures::model(View::Overview);
        let mut sample = fixtures::sample(2);
        sample.answers.truncate(1);
        update(&mut model, sample, seconds(2));
        assert_eq!(model.sidecars[1].answer, Answering::Ended);
        let lengths: Vec<usize> = model.sidecars.iter().map(|watched| watched.history.len()).collect();
        assert_eq!(lengths, [3, 3], "the newest rates are of the same sample");
        let newest = |index: usize| model.sidecars[index].history.back().copied();
        assert!(newest(0) > Some(0));
        assert_eq!(newest(1), Some(0));
    }

    #[test]
    fn directories_of_killed_sidecars_are_not_shown() {
        let left_over = (lost(9), Err(lost(9)));
        let mut model = Model::new(View::Overview, true);
        let mut sample = fixtures::sample(0);
        sample.answers.push(left_over.clone());
        sample.is_search = true;
        update(&mut model, sample, seconds(0));
        assert_eq!(model.sidecars.len(), 2);
        let mut sample = fixtures::sample_without(1, 1);
        sample.is_search = true;
        update(&mut model, sample, seconds(1));
        assert!(!model.sidecars[1].answers(), "one that has answered is lost, and not left out");
        update(&mut model, Sample { answers: vec![left_over], ..Sample::default() }, seconds(2));
        assert_eq!(model.sidecars.len(), 3, "one that was named is shown");
    }

    #[test]
    fn a_sidecar_that_left_an_elastic_job_is_forgotten() {
        let mut model = fixtures::model(View::Overview);
        update(&mut model, fixtures::sample_without(2, 1), seconds(2));
        assert_eq!(model.sidecars.len(), 2, "it has ranks");
        let mut sample = fixtures::sample_without(3, 1);
        if let Ok(page) = &mut sample.answers[0].1 {
            page.placement = vec![0, 0];
        }
        update(&mut model, sample, seconds(3));
        assert_eq!(model.sidecars.len(), 1);
    }

    #[test]
    fn a_port_of_another_sidecar_is_not_taken_for_the_earlier_one() {
        let mut model = fixtures::model(View::Overview);
        let mut page = fixtures::page(0, 50);
        page.job = "day".to_owned();
        update(&mut model, Sample { answers: vec![answered(0, page)], ..Sample::default() }, seconds(50));
        assert_eq!(model.sidecars.len(), 1);
        assert_eq!((model.sidecars[0].rates.as_ref(), model.sidecars[0].history.len()), (None, 1));
    }

    #[test]
    fn a_paused_view_keeps_what_it_shows() {
        let mut model = fixtures::model(View::Overview);
        assert!(act(&mut model, Action::Pause));
        let before = format!("{model:?}");
        update(&mut model, Sample::default(), seconds(90));
        assert_eq!(format!("{model:?}"), before);
        assert!(act(&mut model, Action::Pause));
        update(&mut model, fixtures::sample(91), seconds(91));
        assert_eq!(model.now, seconds(91));
    }

    #[test]
    fn keys_change_views_selection_and_order() {
        let mut model = fixtures::model(View::Overview);
        act(&mut model, Action::Previous);
        assert_eq!(model.view, View::Engine);
        act(&mut model, Action::Next);
        act(&mut model, Action::Next);
        assert_eq!(model.view, View::Ranks);
        act(&mut model, Action::Move(-1));
        assert_eq!(model.cursor(), 0);
        act(&mut model, Action::Move(2));
        assert_eq!(model.cursor(), 2);
        act(&mut model, Action::Move(isize::MAX));
        assert_eq!(model.cursor(), 3, "the last of four ranks");
        act(&mut model, Action::First);
        assert_eq!(model.cursor(), 0);
        act(&mut model, Action::Last);
        act(&mut model, Action::Show(View::Links));
        assert_eq!(model.cursor(), 0, "each view has its selection");
        act(&mut model, Action::Sort);
        assert_eq!(model.sort, Sort::ByWait);
        assert!(act(&mut model, Action::Help) && model.help);
        assert!(act(&mut model, Action::Quit) && !model.help, "the first one leaves the help");
        assert!(!act(&mut model, Action::Quit));
    }

    #[test]
    fn several_jobs_are_shown_in_turn() {
        let mut model = fixtures::model(View::Overview);
        assert!(act(&mut Model::new(View::Ranks, true), Action::NextJob), "there is none");
        let mut page = fixtures::page(0, 4);
        page.job = "day".to_owned();
        let mut sample = fixtures::sample(4);
        sample.answers.push(answered(7, page));
        update(&mut model, sample, seconds(4));
        assert_eq!((model.jobs(), model.job.as_str()), (vec!["day", "night"], "night"));
        act(&mut model, Action::NextJob);
        assert_eq!(model.job, "day");
        act(&mut model, Action::NextJob);
        assert_eq!(model.job, "night");
    }
}
