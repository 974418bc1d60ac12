//! Parses the lists of hosts and of tasks that Slurm abbreviates.

use ronde_wire::limits;

/// Expands a list of hosts, such as `alpha,node[01-03,7]`. Returns `None` when it cannot be parsed or has more hosts than a
/// job has ranks.
pub(super) fn hosts(text: &str) -> Option<Vec<String>> {
    let mut found = Vec::new();
    for entry in split_outside_brackets(text)? {
        expand(entry, &mut found)?;
    }
    (found.len() <= limits::RANKS_MAX && !found.is_empty()).then_some(found)
}

/// Returns the number of tasks on a node from a list such as `2(x3),1`: three nodes with two tasks, then one with one.
pub(super) fn tasks_on(text: &str, node: u32) -> Option<u32> {
    let mut nodes_before = 0_u32;
    for entry in text.split(',') {
        let (tasks, nodes) = match entry.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (entry, 1_u32),
        };
        nodes_before = nodes_before.checked_add(nodes)?;
        if node < nodes_before {
            return tasks.trim().parse().ok();
        }
    }
    None
}

/// Splits at commas, but not at those in brackets.
fn split_outside_brackets(text: &str) -> Option<Vec<&str>> {
    let (mut depth, mut start, mut parts) = (0_u32, 0, Vec::new());
    for (index, letter) in text.char_indices() {
        match letter {
            '[' => depth += 1,
            ']' => depth = depth.checked_sub(1)?,
            ',' if depth == 0 => {
                parts.push(&text[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    (depth == 0 && parts.iter().all(|part| !part.is_empty())).then_some(parts)
}

/// Expands the first bracket of an entry, and the rest of it by recursion, once for each of its numbers.
fn expand(entry: &str, found: &mut Vec<String>) -> Option<()> {
    let Some((before, rest)) = entry.split_once('[') else {
        found.push(entry.to_owned());
        return Some(());
    };
    let (ranges, after) = rest.split_once(']')?;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let width = first.len();
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || (last - first) as usize >= limits::RANKS_MAX {
            return None;
        }
        for number in first..=last {
            expand(&format!("{before}{number:0width$}{after}"), found)?;
            if found.len() > limits::RANKS_MAX {
                return None;
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_hosts_are_expanded() {
        for (text, expanded) in [
            ("vm", "vm"),
            ("alpha,beta", "alpha,beta"),
            ("node[1-3]", "node1,node2,node3"),
            ("node[08-10,12],gpu7", "node08,node09,node10,node12,gpu7"),
            ("r[1-2]n[0-1]-ib", "r1n0-ib,r1n1-ib,r2n0-ib,r2n1-ib"),
        ] {
            assert_eq!(hosts(text).expect(text).join(","), expanded);
        }
    }

    #[test]
    fn other_lists_of_hosts_are_rejected() {
        for text in
            ["", "a,", "node[1-", "node]1[", "node[3-1]", "node[a-b]", "node[]", "n[1-999999999]", "a[1-999]b[1-999]"]
        {
            assert_eq!(hosts(text), None, "{text}");
        }
    }

    #[test]
    fn tasks_of_a_node_are_found() {
        assert_eq!([0, 1, 2, 3, 4].map(|node| tasks_on("2(x3),1", node)), [Some(2), Some(2), Some(2), Some(1), None]);
        assert_eq!(tasks_on("2", 0), Some(2));
        for text in ["", "many", "2(x", "2(x3", "2(xtwo)"] {
            assert_eq!(tasks_on(text, 0), None, "{text}");
        }
    }
}
