//! Reads the log of a search.

use std::path::Path;

use anyhow::{Context, ensure};

/// A sample, or the outcome.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) fusion_threshold_bytes: u64,
    /// `None` where the cost model chooses.
    pub(super) chunk_bytes: Option<u32>,
    pub(super) lanes: u16,
    pub(super) eager_bytes: u32,
    pub(super) hierarchical_allreduce: bool,
    pub(super) alpha_us: f64,
    /// Beside which alpha was tried.
    pub(super) beta_us_per_byte: f64,
    /// Beside which alpha was tried.
    pub(super) gamma_us_per_byte: f64,
    /// Bytes of tensors in a microsecond, which is MB/s.
    pub(super) score: f64,
}

/// The rows of a complete log.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Search {
    /// In the order in which they were tried; the first has the values of the start.
    pub(super) samples: Vec<Row>,
    pub(super) outcome: Row,
}

impl Search {
    /// Reads a file, which has a row for each of so many samples, and one more for the outcome.
    ///
    /// # Errors
    /// When it cannot be read, is no log of a search, or the search did not come to its end.
    pub(super) fn read(path: &Path, samples_max: usize) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| {
            format!(
                "cannot read the log {}; the sidecar of rank 0 writes it, on this host or shared storage",
                path.display()
            )
        })?;
        Self::parse(&text, samples_max).with_context(|| format!("in {}", path.display()))
    }

    fn parse(text: &str, samples_max: usize) -> anyhow::Result<Self> {
        let mut lines = text.lines();
        let head: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
        let mut samples: Vec<Row> = lines.map(|line| row(&head, line)).collect::<anyhow::Result<_>>()?;
        ensure!(
            samples.len() > 1,
            "the search has no sample: its command ended before enough steps with tensors of the same names"
        );
        let last = samples.len() - 1;
        // A space with fewer points than samples is over earlier.
        let is_repeated = samples[..last].iter().any(|sample| *sample == samples[last]);
        ensure!(
            is_repeated && last <= samples_max,
            "the search took {} of {samples_max} samples and has no outcome: its command ended too early",
            samples.len()
        );
        let outcome = samples.pop().context("it has rows")?;
        Ok(Self { samples, outcome })
    }

    /// How many times as fast as the start the outcome is.
    pub(super) fn gain(&self) -> f64 {
        let start = self.samples.first().map_or(0.0, |start| start.score);
        if start > 0.0 { self.outcome.score / start } else { 1.0 }
    }
}

fn row(head: &[&str], line: &str) -> anyhow::Result<Row> {
    let cells: Vec<&str> = line.split(',').collect();
    let cell = |name: &str| {
        let at =
            head.iter().position(|column| *column == name).with_context(|| format!("there is no column {name}"))?;
        let text = cells.get(at).with_context(|| format!("the row {line:?} has no {name}"))?;
        text.parse::<f64>().with_context(|| format!("{text:?} in the column {name} is no number"))
    };
    let whole = |name: &str| {
        let number = cell(name)?;
        ensure!(number >= 0.0 && number.fract() == 0.0 && number < WHOLE_MAX, "{number} in {name} is no whole number");
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked in the line above")]
        Ok(number as u64)
    };
    let chunk_bytes = u32::try_from(whole("chunk_bytes")?)?;
    Ok(Row {
        fusion_threshold_bytes: whole("tensor_fusion_threshold")?,
        chunk_bytes: (chunk_bytes > 0).then_some(chunk_bytes),
        lanes: u16::try_from(whole("lanes")?)?,
        eager_bytes: u32::try_from(whole("eager_bytes")?)?,
        hierarchical_allreduce: whole("hierarchical_allreduce")? > 0,
        alpha_us: cell("alpha_us")?,
        beta_us_per_byte: cell("beta_us_per_byte")?,
        gamma_us_per_byte: cell("gamma_us_per_byte")?,
        score: cell("score")?,
    })
}

/// Whole numbers below this are exact.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) const LOG: &str = "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,tensor_fusion_threshold,chunk_bytes,lanes,eager_bytes,alpha_us,beta_us_per_byte,gamma_us_per_byte,score
1,0,0,1,0,1048576,4096,1,4096,60.000,1.0e-3,1.0e-4,100.0000
1,0,0,1,0,16777216,0,2,4096,60.000,1.0e-3,1.0e-4,250.0000
1,0,0,1,0,65536,1048576,2,4096,60.000,1.0e-3,1.0e-4,90.0000
1,0,0,1,0,16777216,0,2,4096,60.000,1.0e-3,1.0e-4,250.0000
";

    #[test]
    fn a_log_has_its_samples_and_the_outcome() {
        let search = Search::parse(LOG, 3).expect("a complete log");
        assert_eq!((search.samples.len(), search.gain()), (3, 2.5));
        assert_eq!((search.outcome.chunk_bytes, search.outcome.fusion_threshold_bytes), (None, 16 << 20));
        assert_eq!(search.samples[0].chunk_bytes, Some(4_096));
    }

    #[test]
    fn what_is_no_complete_log_is_refused() {
        let without_outcome = LOG.trim_end().rsplit_once('\n').expect("lines").0;
        let head = LOG.lines().next().expect("lines");
        for (text, reason) in [
            (without_outcome, "the search took 3 of 3 samples and has no outcome"),
            (head, "the search has no sample"),
            ("", "the search has no sample"),
            ("a,b\n1,2\n", "there is no column chunk_bytes"),
            (&LOG.replace("90.0000", "fast"), "\"fast\" in the column score is no number"),
            (&LOG.replace(",65536,", ",-1,"), "-1 in tensor_fusion_threshold is no whole number"),
            (&LOG.replace("1,0,0,1,0,65536,1048576,2,4096,60.000,1.0e-3,1.0e-4,90.0000", "1,0"), "has no chunk_bytes"),
        ] {
            let error = format!("{:#}", Search::parse(text, 3).expect_err(text));
            assert!(error.contains(reason), "{error}");
        }
    }
}
