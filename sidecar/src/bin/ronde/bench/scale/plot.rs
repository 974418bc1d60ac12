//! Draws the predicted efficiency by the number of hosts, as SVG.

use std::fmt::Write as _;

use super::document::{GPUS_PER_HOST, HOSTS, LINKS_GBIT};
use super::model::{Cluster, Machine, step};
use super::workloads::workloads;

/// A picture with a line for each workload and rate of the link.
pub(super) fn plot(machine: &Machine) -> String {
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    axes(&mut text);
    for (number, (workload, color)) in workloads().iter().zip(COLORS).enumerate() {
        for (link_gbit, dash) in LINKS_GBIT.into_iter().zip(DASHES) {
            let machine = Machine { link_gbit, ..*machine };
            let at = |hosts: u32| {
                let efficiency = step(workload, Cluster { hosts, gpus_per_host: GPUS_PER_HOST }, &machine).efficiency;
                format!("{:.1},{:.1}", x(hosts), y(efficiency))
            };
            let points: Vec<String> = HOSTS.into_iter().map(at).collect();
            // A string cannot fail to be written to.
            let _ = writeln!(
                text,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\" \
                 stroke-dasharray=\"{dash}\"/>",
                points.join(" ")
            );
        }
        let (left, top) = (WIDTH - RIGHT + 8.0, TOP + 16.0 * number as f64);
        let _ = writeln!(text, "<text x=\"{left}\" y=\"{top}\" fill=\"{color}\">{}</text>", workload.name);
    }
    legend(&mut text);
    text.push_str("</svg>\n");
    text
}

fn axes(text: &mut String) {
    let (right, floor) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for percent in [0, 20, 40, 60, 80, 100] {
        let y = y(f64::from(percent) / 100.0);
        let _ = writeln!(
            text,
            "<line x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{LEFT}\" y=\"{y:.1}\" dx=\"-6\" dy=\"4\" text-anchor=\"end\">{percent} %</text>"
        );
    }
    for hosts in HOSTS {
        let x = x(hosts);
        let _ = writeln!(text, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{hosts}</text>", floor + 16.0);
    }
    let _ = writeln!(
        text,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">hosts, each with {GPUS_PER_HOST} GPUs</text>",
        (LEFT + right) / 2.0,
        floor + 34.0
    );
    let _ = writeln!(text, "<text x=\"{LEFT}\" y=\"{}\" dx=\"-44\">modelled efficiency</text>", TOP - 14.0);
}

fn legend(text: &mut String) {
    for (number, (link_gbit, dash)) in LINKS_GBIT.into_iter().zip(DASHES).enumerate() {
        let (left, y) = (WIDTH - RIGHT + 8.0, TOP + 90.0 + 16.0 * number as f64);
        let _ = writeln!(
            text,
            "<line x1=\"{left}\" y1=\"{0}\" x2=\"{1}\" y2=\"{0}\" stroke=\"#333\" stroke-dasharray=\"{dash}\"/>\
             <text x=\"{1}\" y=\"{y}\" dx=\"6\">{link_gbit} Gbit/s</text>",
            y - 4.0,
            left + 34.0
        );
    }
}

/// By the logarithm.
fn x(hosts: u32) -> f64 {
    let most = f64::from(HOSTS[HOSTS.len() - 1]).log2();
    LEFT + 12.0 + (WIDTH - LEFT - RIGHT - 24.0) * (f64::from(hosts).log2() - 1.0) / (most - 1.0)
}

fn y(efficiency: f64) -> f64 {
    HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * efficiency.clamp(0.0, 1.0)
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 132.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;
/// Told apart also by the colour-blind: M. Okabe and K. Ito, *Color Universal Design*, 2008.
const COLORS: [&str; 4] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"];
const DASHES: [&str; 3] = ["6 3", "none", "2 2"];

#[cfg(test)]
mod tests {
    use super::super::measured::MACHINE;
    use super::*;

    #[test]
    fn every_workload_has_a_line_for_each_link_within_the_picture() {
        let text = plot(&MACHINE);
        assert_eq!(text.matches("<polyline").count(), COLORS.len() * LINKS_GBIT.len());
        let points = text.split("points=\"").skip(1).filter_map(|rest| rest.split('"').next());
        for point in points.flat_map(str::split_whitespace) {
            let (x, y) = point.split_once(',').expect("two numbers");
            let (x, y): (f64, f64) = (x.parse().expect("a number"), y.parse().expect("a number"));
            assert!((LEFT..=WIDTH - RIGHT).contains(&x) && (TOP..=HEIGHT - BOTTOM).contains(&y), "{point}");
        }
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
    }
}
