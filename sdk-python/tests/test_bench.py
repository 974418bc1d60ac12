"""The benchmark's parts: statistics, tables, the command line, and the check of elements."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
from itertools import groupby
from typing import Any

import numpy
import pytest
from conftest import ronde_binary

import ronde
from ronde.bench import cases, creation, data, processes
from ronde.bench.__main__ import main, parse
from ronde.bench.cases import Case, World
from ronde.bench.control import Channel, Listener, ask
from ronde.bench.data import Draw
from ronde.bench.errors import BenchError, OutputError, UsageError, WrongResultError
from ronde.bench.executor import Executor
from ronde.bench.measure import measure_case
from ronde.bench.named import Extras, Named
from ronde.bench.progress import Progress
from ronde.bench.summary import Summary, slowest
from ronde.bench.table import render, time_text

COUNT = 3 * data.BLOCK_ELEMENTS // 2 + 6  # more than a block, not a whole number of them


def test_a_summary_has_quartiles_as_they_are_usually_interpolated() -> None:
    assert Summary.of([4, 1, 3, 2, 5]) == Summary(5, 1, 2, 3, 4, 5)
    assert Summary.of([1, 2, 3, 4]) == Summary(4, 1, 1.75, 2.5, 3.25, 4)
    assert Summary.of([7]) == Summary(1, 7, 7, 7, 7, 7)
    with pytest.raises(ValueError, match="no samples"):
        Summary.of([])


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest([[1, 5, 2], [3, 4, 2]]) == [3, 5, 2]
    with pytest.raises(ValueError, match="different numbers"):
        slowest([[1, 2], [1]])


def result_of(draw: Draw, rank: int, repeats: int = 1) -> Any:
    """What a collective must give, computed at once instead of block by block."""
    inputs = []
    for source in range(draw.ranks):
        share = draw.count // draw.ranks
        inputs.append(numpy.empty(share if draw.collective == "allgather" else draw.count, numpy.float32))
        draw.fill(inputs[-1], source)
    if draw.collective in ("allreduce", "reduce_scatter"):
        total = inputs[0].copy()
        for one in inputs[1:]:
            total += one
        total *= numpy.float32(draw.ranks ** (repeats - 1))
        return total if draw.collective == "allreduce" else numpy.split(total, draw.ranks)[rank]
    if draw.collective == "broadcast":
        return inputs[data.ROOT_RANK]
    if draw.collective == "allgather":
        return numpy.concatenate(inputs)
    return numpy.concatenate([numpy.split(one, draw.ranks)[rank] for one in inputs])


@pytest.mark.parametrize("collective", cases.COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_wrong_element_is_found(collective: str, ranks: int) -> None:
    draw = Draw(collective, COUNT // ranks * ranks, ranks, seed=5, iteration=7)
    for rank in range(ranks):
        right = result_of(draw, rank)
        assert data.find_wrong(draw, rank, right) is None
        for place in (0, len(right) // 2, len(right) - 1):
            for value in (numpy.nextafter(right[place], numpy.float32(-1)), numpy.float32("nan")):
                result = right.copy()
                result[place] = value
                wrong = data.find_wrong(draw, rank, result)
                assert wrong is not None
                assert wrong.element == place
                assert wrong.expected == pytest.approx(right[place])


def test_the_data_of_another_iteration_rank_or_seed_is_wrong() -> None:
    draw = Draw("allreduce", 64, 2, seed=1, iteration=1)
    right = result_of(draw, 0)
    for other in (Draw("allreduce", 64, 2, 1, 2), Draw("allreduce", 64, 2, 2, 1), Draw("allreduce", 64, 3, 1, 1)):
        assert data.find_wrong(other, 0, right) is not None


def test_a_loop_on_its_own_result_stays_finite_and_is_checked() -> None:
    for ranks in (2, 4, 64):
        repeats = data.repeats_max(ranks)
        draw = Draw("allreduce", 128, ranks, seed=3, iteration=0)
        result = result_of(draw, 0, repeats)
        assert numpy.isfinite(result).all()
        assert data.find_wrong(draw, 0, result, repeats) is None
        assert data.find_wrong(draw, 0, result, repeats - 1) is not None


def test_sizes_are_parsed_and_formatted() -> None:
    assert [cases.parse_size(text) for text in ("4", "64KB", "1 mb", "4k")] == [4, 65536, 1 << 20, 4096]
    assert [cases.size_text(nbytes) for nbytes in (4, 1536, 256 << 20)] == ["4 B", "1.5 KB", "256 MB"]
    for text in ("", "3", "-4", "1GB", "x", "1.5MB"):
        with pytest.raises(UsageError, match="no size"):
            cases.parse_size(text)
    for seconds, text in (
        (8e-7, "0.8 us"),
        (1.234e-5, "12.3 us"),
        (2.34e-4, "234 us"),
        (0.0123, "12.3 ms"),
        (2, "2 s"),
    ):
        assert time_text(seconds) == text


def test_elements_are_shared_evenly() -> None:
    assert Case("allgather", 4096, 1, 1, 1).count(3) == 1023
    assert Case("allreduce", 4096, 1, 1, 1).count(3) == 1024
    assert Case("alltoall", 4, 1, 1, 1).count(4) == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--sizes", "1GB"], "no size"),
        (["--ranks", "1"], "ranks cannot be measured"),
        (["--collectives", "gossip"], "there are allreduce"),
        (["--peers", "nccl"], "no peer"),
        (["--quick", "--full"], "not allowed with"),
        (["train", "--model", "gpt"], "invalid choice"),
        (["train", "--codec", "bfloat16"], "training takes plugins"),
        (["--codec", "topk:0.01"], "no parameter"),
        (["--reducer", "Not a plugin"], "names no plugin"),
        (["--codec", "float16:x=1"], "has no parameters"),
        (["--hosts", "1", "--link-gbit", "1"], "give --hosts 2"),
        (["--hosts", "2", "--link-gbit", "fast"], "no rate"),
        (["report"], "required"),
        (["--rounds", "0"], "from 1 on"),
        (["--hosts", "2", "--ranks", "3"], "divided evenly"),
        (["report", "/no/such/file"], "cannot be read"),
    ],
)
def test_a_wrong_command_line_is_rejected(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.bench.run.why_no_hosts", lambda: None)
    monkeypatch.setattr("ronde.bench.machine.ronde_binary", lambda: sys.executable)
    monkeypatch.setattr("ronde.bench.machine._versions", lambda: {"ronde_build": "release"})
    monkeypatch.setattr("ronde.bench.machine._cipher", dict)
    assert main(words) in (2, 64)
    assert text in capsys.readouterr().err


def test_hosts_are_optional_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_NO_NETNS", "1")
    assert parse(["--quick"]).hosts is None
    monkeypatch.setattr("ronde.bench.machine._versions", lambda: {"ronde_build": "release"})
    monkeypatch.setattr("ronde.bench.machine._cipher", dict)
    assert main(["--hosts", "2"]) == 64


def entry(backend: str, variant: str, median: float) -> dict[str, Any]:
    seconds = Summary(3, median / 2, median * 0.9, median, median * 1.1, median * 2).__dict__
    return {
        "backend": backend,
        "variant": variant,
        "seconds": seconds,
        "back_to_back_seconds": median,
        "cpu_seconds_per_gb": 1.25,
    }


def a_report() -> dict[str, Any]:
    entries = [entry("ronde", "in place", 1e-3), entry("ronde", "new", 3e-3), entry("gloo", "in place", 2e-3)]
    case = {"collective": "allreduce", "bytes": 1 << 20, "dtype": "float32", "entries": entries}
    small = {**case, "bytes": 4}
    ways = ["ronde", "ddp", "barrier", "alone"]
    steps = [
        {
            "way": way,
            "ranks": 1 if way == "alone" else 2,
            "seconds": Summary(3, *[seconds] * 5).__dict__,
            "samples_per_second": (1 if way == "alone" else 2) * 64 / seconds,
            "cpu_seconds_per_step": 0.5,
        }
        for way, seconds in zip(ways, (0.24, 0.3, 0.2, 0.16))
    ]
    training = {"model": "mlp", "batch": 64, "parameters": 25_175_050, "entries": steps}
    world = {
        "hosts": 1,
        "ranks": 2,
        "backends": {"ronde": {"versions": {}, "idle_cores": 0.01, "idle_cores_of_a_sidecar": 0.004}, "gloo": {}},
        "missing": {},
        "cases": [small, case],
        "training": training,
        "other_work_cores": 0.01,
    }
    machine = {
        "cores": 2,
        "cpu_model": "a processor",
        "memory_bytes": 8 << 30,
        "kernel": "6.1",
        "architecture": "x86_64",
        "load_average_before": [0.1, 0.1, 0.1],
        "load_average_after": [2.0, 1.0, 0.5],
        "versions": {"ronde": "1", "ronde_build": "release"},
    }
    return {"schema": "ronde-bench/1", "machine": machine, "notes": ["a note"], "worlds": [world]}


def test_the_table_shows_medians_ratios_and_cpu() -> None:
    text = render(a_report())
    rows = {
        line.split(",")[0] + "," + line.split(",")[1][:9]: line.split() for line in text.splitlines() if "," in line
    }
    assert rows["allreduce 1 MB, in place"][-3:] == ["0.50", "1.25", "1.25"]
    assert " 1.50  " in next(line for line in text.splitlines() if line.startswith("allreduce 1 MB, new"))
    assert "1.25" not in next(line for line in text.splitlines() if line.startswith("allreduce 4 B, new"))
    trained = next(line for line in text.splitlines() if line.startswith("ronde DistributedOptimizer"))
    assert trained.split()[-4:] == ["1.20", "533.3", "0.67", "0.5"]
    assert "0.40% of a core" in text
    assert "Note: a note" in text
    assert "MB sent/step" not in text


def test_between_hosts_the_table_of_training_shows_what_was_sent() -> None:
    report = a_report()
    report["worlds"][0].update(hosts=2)
    for sent, step in enumerate(report["worlds"][0]["training"]["entries"]):
        step["sent_bytes_per_step"] = sent * 1e6
    lines = render(report).splitlines()
    assert next(line for line in lines if "CPU s/step" in line).endswith("MB sent/step")
    shown = [line.split()[-1] for line in lines if line.startswith(("ronde Dist", "DDP on", "a barrier", "one rank"))]
    assert shown == ["0.0", "1.0", "2.0", "3.0"]


def test_between_hosts_gloos_cpu_time_is_shown_with_that_of_encryption_too() -> None:
    report = a_report()
    report["worlds"][0].update(hosts=2)
    # Without rates, as in reports of earlier versions, the column is left out.
    assert "Gloo + AES  " not in render(report)
    aws_lc = {"name": "aws-lc", "encrypts_gb_s": 4.0, "decrypts_gb_s": 2.0, "used": True}
    ring = {"name": "ring", "encrypts_gb_s": 3.0, "decrypts_gb_s": 1.0, "used": False}
    report["machine"]["cipher"] = {"cipher": "AES-128-GCM", "record_bytes": 16384, "libraries": [ring, aws_lc]}
    text = render(report)
    assert "a processor, AES-128-GCM at 4.0 and 2.0 GB/s a core (aws-lc), 8 GiB" in text
    row = next(line.split() for line in text.splitlines() if line.startswith("allreduce 1 MB, in place"))
    # A reduction sends each byte once in each direction: 1.25 + 2 (1 / 4 + 1 / 2).
    assert row[-3:] == ["1.25", "1.25", "2.75"]
    crossing = {collective: World(2, 4).bytes_sent(collective) for collective in cases.COLLECTIVES}
    assert crossing == {"allreduce": 2, "allgather": 1, "broadcast": 1, "reduce_scatter": 1, "alltoall": 2}
    assert {World(1, 4).bytes_sent(collective) for collective in cases.COLLECTIVES} == {0}


def test_the_table_as_markdown_has_as_many_cells_in_each_row() -> None:
    lines = render(a_report(), markdown=True).splitlines()
    tables = [list(rows) for is_table, rows in groupby(lines, lambda line: line.startswith("|")) if is_table]
    assert [{row.count("|") for row in rows} for rows in tables] == [{7}, {7}]
    assert "| allreduce 1 MB, in place | 1 ms [900 us, 1.1 ms] | 2 ms [1.8 ms, 2.2 ms] | 0.50 | 1.25 | 1.25 |" in lines


def test_a_report_is_read_and_other_files_are_rejected(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, markdown = tmp_path / "a.json", tmp_path / "a.md"
    path.write_text(json.dumps(a_report()))
    assert main(["report", str(path), "--markdown", str(markdown)]) == 0
    assert capsys.readouterr().out == render(a_report())
    assert markdown.read_text() == render(a_report(), markdown=True)
    path.write_text(json.dumps({"schema": "ronde-bench/0"}))
    assert main(["report", str(path)]) == 64
    path.write_text("[]")
    assert main(["report", str(path)]) == 64


@pytest.mark.parametrize(
    ("kind", "status"), [(BenchError, 69), (UsageError, 64), (OutputError, 73), (WrongResultError, 1)]
)
def test_an_error_has_the_exit_status_that_all_commands_have(
    kind: type[BenchError], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_path: pathlib.Path) -> None:
        raise kind("what failed")

    monkeypatch.setattr("ronde.bench.report.read", fail)
    assert main(["report", "a.json"]) == status
    assert capsys.readouterr().err == "ronde bench: what failed\n"
    table = (pathlib.Path(__file__).parents[2] / "docs" / "ERRORS.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {status} |")]
    assert "`bench`" in row or row.endswith("| all |")


def test_the_plot_is_a_picture(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.json"
    path.write_text(json.dumps(a_report()))
    assert main(["report", str(path), "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(path), "--plot", str(tmp_path / "no" / "a.png")]) == 73


def an_all_collective_report() -> dict[str, Any]:
    found = a_report()
    (world,) = found["worlds"]
    names = {"allgather": "into", "alltoall": "into", "broadcast": "in place"}
    for collective, variant in names.items():
        for size in (4096, 1 << 20):
            entries = [entry("ronde", variant, 1e-3), entry("gloo", variant, 2e-3), entry("ronde", "topk", 9e-4)]
            world["cases"].append({"collective": collective, "bytes": size, "dtype": "float32", "entries": entries})
    return found


def test_a_page_has_a_plot_for_each_collective_and_nothing_from_elsewhere(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    first, second, page = tmp_path / "monday<1>.json", tmp_path / "tuesday.json", tmp_path / "bench.html"
    first.write_text(json.dumps(an_all_collective_report()))
    second.write_text(json.dumps(a_report()))
    assert main(["report", str(first), str(second), "--html", str(page)]) == 0
    text = page.read_text()
    assert text.count("<svg") == 5
    for words in (
        "monday&lt;1&gt;.json",
        "tuesday.json",
        "alltoall, one host, 2 ranks",
        "bus bandwidth (GB/s)",
        "ronde topk",
    ):
        assert words in text, words
    # Of the SVG's declarations of namespaces nothing is loaded.
    loaded = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"https?:|<script|@import|<link|<img|src=", loaded)
    assert "currentColor" in text
    assert "#010203" not in text
    assert "prefers-color-scheme: dark" in text
    assert main(["report", str(first), str(second), "--html", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == text, "equal reports give equal pages"


def test_bus_bandwidth_counts_what_a_rank_sends() -> None:
    pytest.importorskip("matplotlib")
    from ronde.bench.plot import bus_bandwidth

    found = {
        name: bus_bandwidth({"collective": name, "bytes": 400}, 4, 2.0)
        for name in ("allreduce", "allgather", "broadcast")
    }
    assert found == {"allreduce": 300.0, "allgather": 150.0, "broadcast": 200.0}


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ("not JSON", "cannot be read as a report"),
        ("", "cannot be read as a report"),
        ("[]", "cannot be read as a report"),
        ('{"schema": "ronde-bench/9"}', "of schema 'ronde-bench/9'; this release reads 'ronde-bench/1'"),
        ('{"schema": "ronde-bench/1", "worlds": []}', "has no measurement"),
        ('{"schema": "ronde-bench/1", "worlds": [{"hosts": 1}]}', "not a complete report: KeyError"),
    ],
)
def test_a_file_that_is_no_report_gives_a_sentence_and_no_page(
    contents: str, text: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "a.json", tmp_path / "a.html"
    path.write_text(contents)
    assert main(["report", str(path), "--html", str(page)]) == 64
    found = capsys.readouterr().err
    assert text in found
    assert found.startswith(f"ronde bench: {path}")
    assert not page.exists()


def test_a_table_is_of_one_report(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(a_report()))
    assert main(["report", str(path), str(path), "--markdown", str(tmp_path / "a.md")]) == 64
    assert "--html takes several" in capsys.readouterr().err


class Alone:
    """A backend of one rank, which breaks an element of one result."""

    rank, ranks = 0, 1
    versions: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, breaks: int) -> None:
        self.breaks = breaks
        self.calls = 0
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1

    def operations(self, collective: str, tensor: Any) -> dict[str, Any]:
        def operation() -> Any:
            self.calls += 1
            if self.calls == self.breaks:
                tensor[9] += 1
            return tensor

        return {"in place": operation}


def test_a_rank_checks_each_iteration_and_the_end_of_a_loop() -> None:
    backend: Any = Alone(breaks=3)
    executor = Executor(backend)
    assert executor.handle({"do": "open", "collective": "allreduce", "count": 12, "seed": 1})["variants"] == [
        "in place"
    ]
    answer = executor.handle({"do": "measure", "variant": "in place", "first": 10, "iterations": 4})
    assert (answer["wrong"]["iteration"], answer["wrong"]["element"]) == (12, 9)
    assert answer["wrong"]["got"] == answer["wrong"]["expected"] + 1
    assert backend.barriers == 3
    for breaks, found in ((99, set()), (10, {"wrong"})):
        backend.breaks, backend.calls = breaks, 0
        executor.handle({"do": "prepare", "iteration": 20})
        assert executor.handle({"do": "loop", "variant": "in place", "iterations": 10})["nanoseconds"] > 0
        assert set(executor.handle({"do": "check"})) == found
    assert backend.barriers == 3
    assert executor.handle({"do": "close"}) == {}


class Pretender:
    """A mock group without ranks, which can give wrong answers."""

    name, label, ranks = "gloo", "Gloo", 2

    def __init__(self, wrong_what: str | None) -> None:
        self.wrong_what = wrong_what
        self.asked: list[str] = []

    def ask(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
        self.asked.append(what)
        answers: list[dict[str, Any]] = [{}, {}]
        if what == "open":
            return [{"variants": ["in place"]}] * 2
        if what == "measure":
            answers = [{"nanoseconds": [1000 * (rank + 1)] * arguments["iterations"]} for rank in range(2)]
        if what == "loop":
            answers = [{"nanoseconds": 500 * arguments["iterations"]}] * 2
        if what == self.wrong_what:
            answers[1] = {**answers[1], "wrong": {"iteration": 3, "element": 17, "got": 2.0, "expected": 1.0}}
        return answers

    def cpu_seconds(self) -> float:
        return 1.5 * self.asked.count("loop")


def test_a_case_takes_the_slowest_rank_and_counts_cpu_for_bytes() -> None:
    group: Any = Pretender(None)
    found = measure_case(Case("allreduce", 1 << 20, 4, 3, 1), [group], 1, Progress(4))
    (only,) = found["entries"]
    assert only["seconds"]["median"] == pytest.approx(2e-6)
    assert only["seconds"]["samples"] == 12
    assert only["back_to_back_seconds"] == pytest.approx(5e-7)
    assert only["cpu_seconds_per_gb"] == pytest.approx(1.5 * 1e9 / (4000 * (1 << 20)))
    assert group.asked[-1] == "close"


@pytest.mark.parametrize("what", ["measure", "check"])
def test_a_wrong_result_names_case_rank_and_element(what: str) -> None:
    group: Any = Pretender(what)
    named = "allreduce 1 MB, 2 ranks, iteration 3, rank 1, element 17: 2.0 instead of 1.0"
    with pytest.raises(WrongResultError, match=named) as raised:
        measure_case(Case("allreduce", 1 << 20, 4, 3, 1), [group], 1, Progress(4))
    assert raised.value.exit_status == 1


def test_ranks_with_different_results_of_a_codec_are_found() -> None:
    class Divided(Pretender):
        def ask(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
            answers = super().ask(what, **arguments)
            return [{**answer, "digest": str(rank)} for rank, answer in enumerate(answers)]

    group: Any = Divided(None)
    with pytest.raises(WrongResultError, match="gave ranks different results: allreduce 1 MB, 2 ranks"):
        measure_case(Case("allreduce", 1 << 20, 4, 3, 1), [group], 1, Progress(4))


def test_plugins_are_named_with_their_parameters() -> None:
    named = Named.parse("topk@1.0.0:ratio=0.01:rounds=3:exact=true:of=largest")
    assert named.parameters == (("ratio", 0.01), ("rounds", 3), ("exact", True), ("of", "largest"))
    assert repr(named.codec()) == "Plugin('topk@1.0.0', ratio=0.01, rounds=3, exact=True, of='largest')"
    assert Named.parse("bfloat16").codec() == "bfloat16"
    extras = Extras((named,), (Named.parse("median"),), ("/a/b.wasm",))
    assert extras.worker_options() == ["--codec", str(named), "--reducer", "median"]
    assert extras.launcher_options() == ["--plugin", "/a/b.wasm"]
    assert (extras.variants("allreduce"), extras.variants("broadcast")) == (2, 0)


def test_a_failed_rank_is_reported_while_others_are_silent(tmp_path: pathlib.Path) -> None:
    listener = Listener(tmp_path / "control")
    workers = [Channel.connect(str(tmp_path / "control")) for _ in range(2)]
    for rank, worker in enumerate(workers):
        worker.send({"rank": 1 - rank})
    channels, hellos = listener.gather(2, lambda: None)
    listener.close()
    assert [hello["rank"] for hello in hellos] == [0, 1]
    workers[0].send({"error": "broken"})
    with pytest.raises(BenchError, match="rank 1: broken"):
        ask(channels, {"do": "something"})
    workers[1].close()
    with pytest.raises(BenchError, match="rank 0 has ended"):
        ask(channels[:1], {"do": "something"})


def test_fragmented_messages_are_reassembled() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    thread = threading.Thread(target=lambda: [theirs.sendall(part) for part in (b'{"a"', b": 1}", b"\n")])
    thread.start()
    assert channel.receive() == {"a": 1}
    thread.join()
    theirs.close()
    assert channel.receive() is None


def test_cpu_time_is_that_of_a_tree_of_processes() -> None:
    program = "import subprocess, sys; sys.stdout.write('x'); sys.stdout.flush(); subprocess.run(['cat'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.read(1)
        found = processes.tree([parent.pid])
        assert parent.pid in found
        assert os.getpid() not in found
        assert found < processes.tree([os.getpid()])
        assert 0 < processes.cpu_seconds(found) < processes.busy_seconds()
        assert processes.command_line(parent.pid)[:2] == [sys.executable, "-c"]
        parent.stdin.close()  # type: ignore[union-attr]
    assert processes.cpu_seconds([parent.pid]) == 0.0


def test_a_real_run_checks_and_reports(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    ronde_binary()
    path = tmp_path / "a.json"
    words = ["--ranks", "2", "--hosts", "1", "--sizes", "4,64KB", "--collectives", "allreduce", "--rounds", "1"]
    status = main([*words, "--peers", "gloo", "--no-train", "--json", str(path)])
    shown = capsys.readouterr()
    assert status == 0, shown.err
    report = json.loads(path.read_text())
    (world,) = report["worlds"]
    assert report["machine"]["versions"]["ronde"] == ronde.__version__
    libraries = report["machine"]["cipher"]["libraries"]
    assert [library["used"] for library in libraries].count(True) == 1
    assert all(library["encrypts_gb_s"] > 0 and library["decrypts_gb_s"] > 0 for library in libraries)
    assert {key for key in report["machine"] if key.startswith("load")} == {"load_average_before", "load_average_after"}
    assert world["backends"]["ronde"]["idle_cores_of_a_sidecar"] < 1
    for case in world["cases"]:
        shared = [("ronde", "shared")] if case["bytes"] > 4 else []
        assert [(entry["backend"], entry["variant"]) for entry in case["entries"]] == [
            ("ronde", "in place"),
            ("ronde", "new"),
            *shared,
            ("gloo", "in place"),
        ]
        for one in case["entries"]:
            assert 0 < one["seconds"]["least"] <= one["seconds"]["median"] <= one["seconds"]["most"]
            assert one["cpu_seconds_per_gb"] > 0
    assert World(world["hosts"], world["ranks"]).title() in shown.out
    # On ronde as well as on Gloo, the copy of the report in the file shows the same.
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == shown.out


def test_a_real_run_with_codec_and_reducer_compares_the_ranks(tmp_path: pathlib.Path) -> None:
    ronde_binary()
    path = tmp_path / "a.json"
    words = ["--ranks", "2", "--hosts", "1", "--sizes", "64KB", "--collectives", "allreduce", "--rounds", "1"]
    words += ["--codec", "bfloat16", "--codec", "topk:ratio=0.1", "--reducer", "median", "--no-train"]
    assert main([*words, "--peers", "gloo", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    (case,) = report["worlds"][0]["cases"]
    variants = [entry["variant"] for entry in case["entries"] if entry["backend"] == "ronde"]
    assert variants == ["in place", "new", "shared", "codec bfloat16", "codec topk:ratio=0.1", "reducer median"]
    assert report["options"]["codec"] == ["bfloat16", "topk:ratio=0.1"]


@pytest.mark.heavy
def test_the_creation_of_groups_is_measured() -> None:
    """On ronde, in both ways; every figure is there."""
    pytest.importorskip("torch")
    ronde_binary()
    for way in ("file", "run"):
        measured = creation.measure(way, "ronde", 2)
        assert list(measured) == list(creation.FIGURES)
        assert all(seconds > 0 for seconds in measured.values()), measured
