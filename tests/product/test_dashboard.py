"""The dashboard of compose/monitoring: its metrics exist, and Prometheus scrapes the sidecars' addresses."""

from __future__ import annotations

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MONITORING = ROOT / "compose" / "monitoring"
COMPOSE = (ROOT / "compose" / "compose.yaml").read_text()
PANELS = json.loads((MONITORING / "dashboard.json").read_text())["panels"]


def queries() -> list[tuple[str, str]]:
    """Each panel's title with each of its queries."""
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def documented() -> dict[str, set[str]]:
    """The metrics of docs/METRICS.md, which a test of the sidecar holds equal to the code, with their labels."""
    rows = re.findall(
        r"^\| `(ronde_\w+)` \| \w+ \| ([^|]*)\|", (ROOT / "docs" / "METRICS.md").read_text(), re.MULTILINE
    )
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_each_query_names_metrics_that_exist() -> None:
    """A metric that was renamed would leave a panel empty."""
    known = documented()
    assert len(known) > 40
    assert len(PANELS) >= 10
    for title, query in queries():
        named = re.findall(r"\bronde_\w+", query)
        assert named, f"{title} asks for nothing of ronde's: {query}"
        assert set(named) <= known.keys(), f"{title}: {set(named) - known.keys()} is not in docs/METRICS.md"


def test_each_label_is_one_of_the_metrics() -> None:
    """A label that does not exist makes one line out of many."""
    known = documented()
    for panel in PANELS:
        for target in panel["targets"]:
            labels = set().union(*(known[name] for name in re.findall(r"\bronde_\w+", target["expr"]))) | {"instance"}
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            used = {label.strip() for group in grouped for label in group.split(",")}
            used |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            used |= set(re.findall(r"\{(\w+)[!=]", target["expr"]))
            assert used <= labels, f"{panel['title']}: {used - labels}"


def test_each_question_of_an_operator_has_a_panel() -> None:
    """Throughput, waiting, the slowest rank, fusion, retransmissions."""
    asked = " ".join(query for _, query in queries())
    wanted = ["sealed_bytes", "waited_for_seconds", "last_to_be_ready", "tensors_total", "packets_lost", "suspect"]
    assert [word for word in wanted if word not in asked] == []


def test_panels_do_not_cover_each_other() -> None:
    """No two overlap, and all are within the width of 24."""
    covered: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert covered.setdefault((x, y), panel["title"]) == panel["title"]


def test_prometheus_asks_where_sidecars_answer() -> None:
    """The addresses of prometheus.yml are those on which sidecars listen in compose.yaml."""
    asked = re.findall(r"- (\S+:\d+)$", (MONITORING / "prometheus.yml").read_text(), re.MULTILINE)
    listening = re.findall(r'--admin-listen, "([^"]+)"', COMPOSE)
    assert asked == listening
    assert len(asked) == 4
