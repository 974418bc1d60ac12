//! Draws a search as SVG: the score of each sample, and the best so far.

use std::fmt::Write as _;

use super::log::Search;

/// A picture of searches, each with a name of letters.
pub(super) fn plot(searches: &[(&str, &Search)]) -> String {
    let samples = || searches.iter().flat_map(|(_, search)| &search.samples);
    let highest = samples().map(|sample| sample.score).fold(0.0, f64::max);
    let frame = Frame {
        count: searches.iter().map(|(_, search)| search.samples.len()).max().unwrap_or(0),
        highest: if highest > 0.0 { highest } else { 1.0 },
    };
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    frame.axes(&mut text);
    for (number, ((name, search), color)) in searches.iter().zip(COLORS.iter().cycle()).enumerate() {
        frame.search(&mut text, search, color);
        let y = TOP + 16.0 * number as f64;
        // A string cannot fail to be written to.
        let _ = writeln!(text, "<text x=\"{LEFT}\" y=\"{y:.0}\" dx=\"8\" fill=\"{color}\">{name}</text>");
    }
    text.push_str("</svg>\n");
    text
}

/// Where values are in the picture.
struct Frame {
    count: usize,
    highest: f64,
}

impl Frame {
    fn x(&self, sample: usize) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (sample as f64 + 0.5) / self.count.max(1) as f64
    }

    fn y(&self, score: f64) -> f64 {
        HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (score / self.highest)
    }

    fn axes(&self, text: &mut String) {
        let (right, floor) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
            let (score, y) = (self.highest * share, self.y(self.highest * share));
            let _ = writeln!(
                text,
                "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{LEFT}\" y=\"{y:.1}\" dx=\"-6\" dy=\"4\" text-anchor=\"end\">{score:.0}</text>"
            );
        }
        let middle = (LEFT + right) / 2.0;
        let _ = writeln!(
            text,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">sample, 1 to {}; line: the best so far</text>\
             <text x=\"{LEFT}\" y=\"{}\" dx=\"-6\" text-anchor=\"end\">MB/s</text>",
            floor + 28.0,
            self.count,
            TOP - 14.0
        );
    }

    fn search(&self, text: &mut String, search: &Search, color: &str) {
        let mut best = 0.0_f64;
        let mut line = String::new();
        for (number, sample) in search.samples.iter().enumerate() {
            best = best.max(sample.score);
            let (x, y) = (self.x(number), self.y(sample.score));
            let _ = write!(line, "{}{x:.1},{:.1}", if number == 0 { "" } else { " " }, self.y(best));
            let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{color}\"/>");
        }
        let _ = writeln!(text, "<polyline points=\"{line}\" fill=\"none\" stroke=\"{color}\"/>");
    }
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 36.0;
const BOTTOM: f64 = 44.0;
/// Told apart also by the colour-blind: M. Okabe and K. Ito, *Color Universal Design*, 2008.
const COLORS: [&str; 3] = ["#0072B2", "#D55E00", "#009E73"];

#[cfg(test)]
mod tests {
    use super::super::log::tests::LOG;
    use super::*;

    #[test]
    fn every_sample_has_its_point_within_the_picture() {
        let path = tempfile::NamedTempFile::new().expect("a file can be made");
        std::fs::write(path.path(), LOG).expect("ours");
        let search = Search::read(path.path(), 3).expect("a complete log");
        let text = plot(&[("tls", &search), ("quic", &search)]);
        assert_eq!(text.matches("<circle").count(), 6);
        assert_eq!(text.matches("<polyline").count(), 2);
        for part in ["tls</text>", "quic</text>", ">250</text>", "1 to 3"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let heights = text.split("cy=\"").skip(1).filter_map(|rest| rest.split('"').next()?.parse::<f64>().ok());
        assert!(heights.into_iter().all(|y| (TOP..=HEIGHT - BOTTOM).contains(&y)), "{text}");
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
    }

    #[test]
    fn nothing_is_drawn_without_samples() {
        assert_eq!(plot(&[]).matches("<circle").count(), 0);
    }
}
