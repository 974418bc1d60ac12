//! Space-time diagrams of plans as SVG: members as columns, rounds downwards, an arrow for each transfer.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ronde_collectives::{Form, Plan, Span, Step, Transfer};

/// All members' plans of one operation as a picture.
pub(crate) fn space_time(title: &str, plans: &[Plan]) -> String {
    let bands = bands(plans);
    let width = 2 * MARGIN + (plans.len() - 1) * COLUMN + TEXT;
    let mut body = String::new();
    let mut top = HEAD;
    for (number, band) in bands.iter().enumerate() {
        band.draw(&mut body, number, top);
        top += band.height();
    }
    let lines = lifelines(plans.len(), &bands, top);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         role=\"img\">\n<title>{title}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" width=\"{width}\" height=\"{height}\" rx=\"8\"/>\n{lines}{body}</svg>\n",
        height = top + MARGIN / 3,
    )
}

/// What happens in one round of all sub-schedules that run side by side.
#[derive(Default)]
struct Band {
    /// By member, the lines that say what is done first.
    steps: Vec<Vec<String>>,
    arrows: Vec<Arrow>,
}

struct Arrow {
    from: usize,
    to: usize,
    label: String,
    colour: usize,
}

/// A prelude's rounds come first; the rounds of all other sub-schedules coincide.
fn bands(plans: &[Plan]) -> Vec<Band> {
    let sub_schedules = plans[0].sub_schedules.len();
    let first = usize::from(plans[0].prelude);
    let mut bands = rounds(plans, 0..first);
    bands.extend(rounds(plans, first..sub_schedules));
    bands
}

fn rounds(plans: &[Plan], sub_schedules: std::ops::Range<usize>) -> Vec<Band> {
    let of_plan = |plan: &Plan| {
        plan.sub_schedules[sub_schedules.clone()].iter().map(|sub_schedule| sub_schedule.rounds.len()).max()
    };
    let count = plans.iter().filter_map(of_plan).max().unwrap_or(0);
    let mut bands = Vec::new();
    for round in 0..count {
        let mut band = Band::default();
        for (member, plan) in plans.iter().enumerate() {
            let contents = || {
                plan.sub_schedules[sub_schedules.clone()]
                    .iter()
                    .filter_map(|sub_schedule| sub_schedule.rounds.get(round))
            };
            band.steps.push(lines(contents().flat_map(|content| &content.steps)));
            let mut sent: BTreeMap<_, Vec<Span>> = BTreeMap::new();
            for transfer in contents().flat_map(|content| &content.transfers) {
                if let Transfer::Send { to, span, form, .. } = *transfer {
                    sent.entry((to, mark(form, span))).or_default().push(span);
                }
            }
            for ((to, mark), spans) in sent {
                let colour = usize::try_from(spans[0].start).unwrap_or(0) % COLOURS;
                let label =
                    if mark.len() > 1 { mark.to_owned() } else { format!("{}{mark}", joined(spans).join(", ")) };
                band.arrows.push(Arrow { from: member, to: to.index(), label, colour });
            }
        }
        bands.push(band);
    }
    bands
}

/// What is done, a line for each verb, in order of their first appearance.
fn lines<'a>(steps: impl Iterator<Item = &'a Step>) -> Vec<String> {
    let mut verbs: Vec<(&str, Vec<Span>)> = Vec::new();
    for step in steps {
        let (verb, span) = match *step {
            Step::Contribute { span, .. } => ("take", span),
            Step::ContributeEach { span, .. } => ("take each rank's", span),
            Step::Reduce { span, .. } => ("reduce", span),
            Step::ReduceN { span, .. } => ("reduce all of", span),
            Step::Finish { span, .. } => ("finish", span),
            Step::Encode { span, .. } => ("encode", span),
            Step::Decode { span, .. } => ("decode", span),
            Step::MeasureOwn { span, .. } => ("measure", span),
            Step::MeasureAll { span, .. } => ("multiply all of", span),
            Step::Conclude { .. } => ("conclude", EMPTY),
            Step::Publish { span, .. } => ("publish", span),
        };
        match verbs.iter_mut().find(|(known, _)| *known == verb) {
            Some((_, spans)) => spans.push(span),
            None => verbs.push((verb, vec![span])),
        }
    }
    verbs.into_iter().filter_map(|(verb, spans)| line(verb, spans)).collect()
}

fn line(verb: &str, spans: Vec<Span>) -> Option<String> {
    if verb == "conclude" {
        return Some(verb.to_owned());
    }
    let spans = joined(spans);
    (!spans.is_empty()).then(|| format!("{verb} {}", spans.join(", ")))
}

/// Which elements, in as few runs as they make.
fn joined(mut spans: Vec<Span>) -> Vec<String> {
    spans.sort_unstable();
    let mut joined: Vec<Span> = Vec::new();
    for span in spans {
        match joined.last_mut() {
            Some(last) if span.start <= last.end() => last.len = last.len.max(span.end() - last.start),
            _ => joined.push(span),
        }
    }
    joined.retain(|span| !span.is_empty());
    joined.into_iter().map(elements).collect()
}

fn elements(span: Span) -> String {
    if span.len == 1 { format!("{}", span.start) } else { format!("{}\u{2013}{}", span.start, span.end() - 1) }
}

/// What stands behind the elements on an arrow, or instead of them.
fn mark(form: Form, span: Span) -> &'static str {
    match form {
        Form::Measures => "\u{3a3}",
        _ if span.is_empty() => "t",
        Form::Values => "",
        Form::Encoded => "c",
        Form::EachRank => "r",
    }
}

impl Band {
    /// Where arrows begin, below the text.
    fn node(&self) -> usize {
        LINE * self.steps.iter().map(Vec::len).max().unwrap_or(0) + 12
    }

    fn height(&self) -> usize {
        self.node() + if self.arrows.is_empty() { 4 } else { FLIGHT }
    }

    fn draw(&self, body: &mut String, number: usize, top: usize) {
        let node = top + self.node();
        let _ = writeln!(body, "<text class=\"round\" x=\"14\" y=\"{}\">{number}</text>", top + 16);
        for (member, steps) in self.steps.iter().enumerate() {
            for (index, step) in steps.iter().enumerate() {
                let (x, y) = (column(member) + 7, top + LINE * index + 15);
                let _ = writeln!(body, "<text class=\"step\" x=\"{x}\" y=\"{y}\">{step}</text>");
            }
        }
        for arrow in &self.arrows {
            arrow.draw(body, node, node + FLIGHT - 14);
        }
        let mut placed: Vec<(f64, f64)> = Vec::new();
        for arrow in &self.arrows {
            placed.push(arrow.write(body, node, node + FLIGHT - 14, &placed));
        }
    }
}

impl Arrow {
    fn draw(&self, body: &mut String, from_y: usize, to_y: usize) {
        let Self { from, to, colour, .. } = self;
        let (x1, x2, y1, y2) = (column(*from) as f64, column(*to) as f64, from_y as f64, to_y as f64);
        let (dx, dy) = (x2 - x1, y2 - y1);
        let length = (dx * dx + dy * dy).sqrt();
        let (ux, uy) = (dx / length, dy / length);
        // The head: a triangle whose tip touches the receiver's line.
        let (bx, by) = (x2 - 9.0 * ux, y2 - 9.0 * uy);
        let (ax, ay, cx, cy) = (bx - 3.5 * uy, by + 3.5 * ux, bx + 3.5 * uy, by - 3.5 * ux);
        let _ = writeln!(body, "<path class=\"c{colour}\" d=\"M{x1:.0} {y1:.0}L{bx:.1} {by:.1}\"/>");
        let _ = writeln!(body, "<path class=\"h{colour}\" d=\"M{x2:.0} {y2:.0}L{ax:.1} {ay:.1}L{cx:.1} {cy:.1}Z\"/>");
    }

    /// Writes the label near the sender, where no other one is yet; says where.
    fn write(&self, body: &mut String, from_y: usize, to_y: usize, placed: &[(f64, f64)]) -> (f64, f64) {
        let Self { from, to, label, colour } = self;
        let (x1, x2, y1, y2) = (column(*from) as f64, column(*to) as f64, from_y as f64, to_y as f64);
        let at = |share: f64| (x1 + (x2 - x1) * share, y1 + (y2 - y1) * share + 4.0);
        let distance = |(x, y): (f64, f64)| {
            placed
                .iter()
                .map(|(a, b)| ((x - a) * (x - a) / 4.0 + (y - b) * (y - b)).sqrt())
                .fold(f64::INFINITY, f64::min)
        };
        let shares = || (0..12).map(|step| 0.16 + 0.03 * f64::from(step));
        let free = shares().find(|share| distance(at(*share)) > LABELS_APART);
        let roomiest = || shares().max_by(|a, b| distance(at(*a)).total_cmp(&distance(at(*b))));
        let (x, y) = at(free.or_else(roomiest).unwrap_or(0.3));
        let _ = writeln!(body, "<text class=\"label halo\" x=\"{x:.0}\" y=\"{y:.0}\">{label}</text>");
        let _ = writeln!(body, "<text class=\"label t{colour}\" x=\"{x:.0}\" y=\"{y:.0}\">{label}</text>");
        (x, y)
    }
}

/// The ground of the rounds, and the members' lines on it.
fn lifelines(members: usize, bands: &[Band], bottom: usize) -> String {
    let mut lines = String::new();
    let (mut top, width) = (HEAD, 2 * MARGIN + (members - 1) * COLUMN + TEXT - 12);
    for (number, band) in bands.iter().enumerate() {
        let (class, height) = (if number.is_multiple_of(2) { "even" } else { "odd" }, band.height());
        let _ = writeln!(lines, "<rect class=\"{class}\" x=\"6\" y=\"{top}\" width=\"{width}\" height=\"{height}\"/>");
        top += height;
    }
    for member in 0..members {
        let x = column(member);
        let _ = writeln!(lines, "<path class=\"life\" d=\"M{x} {}V{bottom}\"/>", HEAD - 6);
        let _ = writeln!(lines, "<text class=\"head\" x=\"{x}\" y=\"{}\">member {member}</text>", HEAD - 14);
    }
    lines
}

fn column(member: usize) -> usize {
    MARGIN + member * COLUMN
}

const EMPTY: Span = Span { start: 0, len: 0 };

/// Pixels: around the columns, between two columns, for the text right of the last one, above the first round, of a line
/// of text, and of the arrows of a round.
const MARGIN: usize = 60;
const COLUMN: usize = 170;
const TEXT: usize = 84;
const HEAD: usize = 44;
const LINE: usize = 13;
const FLIGHT: usize = 88;

/// How far labels are apart at least, where a pixel of height counts as two of width.
const LABELS_APART: f64 = 11.0;

/// Colours by an element's place, from P. Tol's bright scheme; readable on light and on dark ground.
const COLOURS: usize = 5;

const STYLE: &str = "\
text{font-family:system-ui,sans-serif;fill:#333}\
.paper{fill:#fff}.even{fill:#f5f6f8}.odd{fill:#eceff3}\
.life{stroke:#9aa3ad;stroke-width:1.5;fill:none}\
.head{font-size:13px;font-weight:600;text-anchor:middle}\
.round{font-size:11px;fill:#8a939d}.step{font-size:10.5px}\
.label{font-size:11.5px;font-weight:600;text-anchor:middle}\
.halo{fill:#f1f3f6;stroke:#f1f3f6;stroke-width:5px}\
.c0,.c1,.c2,.c3,.c4{stroke-width:1.7;fill:none}\
.c0{stroke:#4477aa}.c1{stroke:#dd5566}.c2{stroke:#228833}.c3{stroke:#b8860b}.c4{stroke:#aa3377}\
.h0{fill:#4477aa}.h1{fill:#dd5566}.h2{fill:#228833}.h3{fill:#b8860b}.h4{fill:#aa3377}\
.t0{fill:#33608f}.t1{fill:#c0394c}.t2{fill:#1a6b28}.t3{fill:#8a6508}.t4{fill:#8c2860}\
@media(prefers-color-scheme:dark){\
text{fill:#d5dae0}.paper{fill:#15191e}.even{fill:#1b2027}.odd{fill:#222831}\
.life{stroke:#5b6570}.round{fill:#7d8791}.halo{fill:#1e242b;stroke:#1e242b}\
.t0{fill:#8db8e8}.t1{fill:#ff9aa6}.t2{fill:#7fd08d}.t3{fill:#e3bd5a}.t4{fill:#e58bc0}\
.c0{stroke:#6a9fd6}.h0{fill:#6a9fd6}.c1{stroke:#ee7a88}.h1{fill:#ee7a88}.c2{stroke:#4fae60}.h2{fill:#4fae60}\
.c3{stroke:#cfa23a}.h3{fill:#cfa23a}.c4{stroke:#cf65a4}.h4{fill:#cf65a4}}";
