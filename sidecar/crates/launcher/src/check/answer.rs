//! The answer of `ronde check`: the findings about all hosts, their summary, and both as JSON.

use ronde_bootstrap::exit::print;
use serde_json::{Value, json};

use super::judge::{Finding, Mark};

/// The findings about all hosts.
#[derive(Debug, Default)]
pub(super) struct Answer {
    findings: Vec<(Option<String>, Finding)>,
}

impl Answer {
    /// Adds the findings about a host, or about this one, and prints them unless `is_quiet`.
    pub(super) fn add(&mut self, host: Option<&str>, findings: Vec<Finding>, is_quiet: bool) {
        for finding in findings {
            if !is_quiet {
                let prefix = host.map(|host| format!("{host}: ")).unwrap_or_default();
                // The summary comes last: if that cannot be written either, the command fails.
                let _ = print(&format!("{prefix}{finding}\n"));
            }
            self.findings.push((host.map(str::to_owned), finding));
        }
    }

    /// The worst mark.
    pub(super) fn worst(&self) -> Mark {
        self.findings.iter().map(|(_, finding)| finding.mark).max().unwrap_or(Mark::Ok)
    }

    /// One line: how many findings there are of each kind, and whether jobs can run.
    pub(super) fn summary(&self) -> String {
        let [ok, warn, fail] = [Mark::Ok, Mark::Warn, Mark::Fail].map(|mark| self.count(mark));
        let verdict = match self.worst() {
            Mark::Ok => "jobs can run".to_owned(),
            Mark::Warn => "jobs can run; see the warnings".to_owned(),
            Mark::Fail => format!("stop: jobs cannot run on {}", self.unfit().join(", ")),
        };
        let plural = if warn == 1 { "" } else { "s" };
        format!("{ok} ok, {warn} warning{plural}, {fail} failed: {verdict}")
    }

    /// The answer as one object.
    pub(super) fn json(&self) -> String {
        let one = |(host, finding): &(Option<String>, Finding)| -> Value {
            let Finding { mark, topic, found, fix } = finding;
            json!({ "host": host, "mark": mark.to_string(), "topic": topic, "found": found, "fix": fix })
        };
        let findings: Vec<Value> = self.findings.iter().map(one).collect();
        let summary = json!({
            "ok": self.count(Mark::Ok),
            "warn": self.count(Mark::Warn),
            "fail": self.count(Mark::Fail),
            "stop": self.worst() == Mark::Fail,
            "text": self.summary(),
        });
        json!({ "version": env!("CARGO_PKG_VERSION"), "summary": summary, "findings": findings }).to_string()
    }

    fn count(&self, mark: Mark) -> usize {
        self.findings.iter().filter(|(_, finding)| finding.mark == mark).count()
    }

    /// The hosts on which jobs cannot run.
    fn unfit(&self) -> Vec<String> {
        let failed = self.findings.iter().filter(|(_, finding)| finding.mark == Mark::Fail);
        let mut hosts: Vec<String> =
            failed.map(|(host, _)| host.clone().unwrap_or_else(|| "this host".to_owned())).collect();
        hosts.dedup();
        hosts
    }
}

#[cfg(test)]
mod tests {
    use super::super::judge::{fail, ok};
    use super::*;

    #[test]
    fn the_summary_decides_whether_to_stop() {
        let mut answer = Answer::default();
        answer.add(None, vec![ok("version", "1".into()), ok("clock", "right".into())], true);
        assert_eq!(answer.summary(), "2 ok, 0 warnings, 0 failed: jobs can run");
        answer.add(
            Some("beta"),
            vec![fail("reach", "no answer".into(), "start sshd"), fail("ports", "none".into(), "free some")],
            true,
        );
        assert_eq!(answer.summary(), "2 ok, 0 warnings, 2 failed: stop: jobs cannot run on beta");
        let json: Value = serde_json::from_str(&answer.json()).expect("JSON");
        assert_eq!((&json["summary"]["stop"], &json["summary"]["fail"]), (&true.into(), &2.into()));
        assert_eq!(json["findings"][0]["host"], Value::Null);
        let third = &json["findings"][2];
        assert_eq!(
            (&third["host"], &third["mark"], &third["fix"]),
            (&"beta".into(), &"fail".into(), &"start sshd".into())
        );
    }
}
