"""Measures a step of Keras' `fit`: with ronde, with a barrier instead of gradients, and in tf.distribute's strategy.

The peer is `tf.distribute.MultiWorkerMirroredStrategy` with its ring over gRPC, without encryption. Only `fit` of
tf-keras (Keras 2) runs in it, so ronde is measured with tf-keras, too; `--keras 3` measures ronde with Keras 3, without
the peer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import socket
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from ronde.bench import groups, machine
from ronde.bench.cases import World
from ronde.bench.errors import BenchError, WrongResultError
from ronde.bench.measure import NANOSECONDS
from ronde.bench.summary import Summary, slowest
from ronde.bench.table import Table, time_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Backend, mode and the row's name.
MODES = [
    ("ronde", "fit", "ronde, DistributedOptimizer"),
    ("ronde", "barrier", "a barrier, no gradients"),
    ("ronde", "alone", "one rank alone"),
    ("mirrored", "fit", "MultiWorkerMirroredStrategy, ring"),
]
SCHEMA = "ronde-bench-keras/1"
WARM_UP = 2
# Of weights after the first step, relative to the largest sampled value: backends add gradients in another order.
TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Fit:
    """What is measured.

    ranks  -- numbers of ranks, one world each
    batch  -- rows of each rank and step
    rounds -- turns of each mode, of `steps` steps
    keras  -- 2 or 3
    """

    ranks: Sequence[int]
    batch: int
    rounds: int
    steps: int
    keras: int
    seed: int

    def modes(self) -> list[tuple[str, str, str]]:
        """Returns what takes turns."""
        return [each for each in MODES if self.keras == 2 or each[0] == "ronde"]


def measure(fit: Fit) -> dict[str, Any]:
    """Measures all worlds. Returns the report. Raises WrongResultError, and BenchError for what cannot be measured."""
    found: dict[str, Any] = {"schema": SCHEMA, "machine": machine.describe(), "keras": fit.keras, "batch": fit.batch}
    found["worlds"] = []
    for ranks in fit.ranks:
        found["worlds"].append(_world(fit, ranks))
    found["machine"]["load_average_after"] = list(os.getloadavg())
    return found


def _world(fit: Fit, ranks: int) -> dict[str, Any]:
    with _groups(fit, ranks) as ready:
        if fit.keras == 2:
            _compare_first_step(ready, ranks)
        times: dict[str, list[int]] = {label: [] for _, _, label in fit.modes()}
        for turn in range(WARM_UP + fit.rounds):
            for backend, mode, label in fit.modes():
                count = 1 if mode == "alone" else ranks
                answers = ready[backend].ask("steps", count, mode=mode, steps=fit.steps)
                if turn >= WARM_UP:
                    times[label] += slowest([answer["nanoseconds"] for answer in answers])
        for group in ready.values():
            of_ranks = _weights(group)
            if any(weights != of_ranks[0] for weights in of_ranks):
                raise WrongResultError(f"after `fit` with {group.label} the ranks' weights differ")
        versions = ready["ronde"].versions
    seconds = {
        label: dataclasses.asdict(Summary.of([time * NANOSECONDS for time in all_times]))
        for label, all_times in times.items()
    }
    return {"ranks": ranks, "versions": versions, "seconds": seconds}


@contextlib.contextmanager
def _groups(fit: Fit, ranks: int) -> Iterator[dict[str, groups.Group]]:
    world = World(1, ranks)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ronde-bench-")))
        commands = {"ronde": [_ronde_job(fit, ranks, folder)]}
        if fit.keras == 2:
            commands["mirrored"] = _mirrored_ranks(fit, ranks, folder)
        ready = {
            name: stack.enter_context(contextlib.closing(groups.Group(name, command, world, folder)))
            for name, command in commands.items()
        }
        for group in ready.values():
            group.wait_until_ready()
        yield ready


def _rank(fit: Fit, name: str, folder: pathlib.Path) -> list[str]:
    legacy = ["env", "TF_CPP_MIN_LOG_LEVEL=2", f"TF_USE_LEGACY_KERAS={int(fit.keras == 2)}"]
    options = ["--control", str(groups.control_path(name, folder)), "--backend", name]
    options += ["--batch", str(fit.batch), "--seed", str(fit.seed)]
    return [*legacy, sys.executable, "-m", "ronde.bench.keras_rank", *options]


def _ronde_job(fit: Fit, ranks: int, folder: pathlib.Path) -> list[str]:
    start = ["run", "--num-proc", str(ranks), "--start-timeout", str(groups.START_SECONDS)]
    return [groups.ronde_binary(), *start, *_rank(fit, "ronde", folder)]


def _mirrored_ranks(fit: Fit, ranks: int, folder: pathlib.Path) -> list[list[str]]:
    workers = [f"127.0.0.1:{port}" for port in _free_ports(ranks)]
    commands = []
    for rank in range(ranks):
        cluster = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
        command = [*_rank(fit, "mirrored", folder), "--rank", str(rank), "--ranks", str(ranks)]
        commands.append(["env", f"TF_CONFIG={cluster}", *command])
    return commands


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _weights(group: groups.Group) -> list[list[list[float]]]:
    """Returns the sampled values of each weight, rank by rank."""
    return [answer["weights"] for answer in group.ask("weights", mode="fit")]


def _compare_first_step(ready: dict[str, groups.Group], ranks: int) -> None:
    """Trains one step with both backends, and compares the weights.

    Later ones differ by more than rounding: a unit whose value is near zero is on at one backend and off at the other.
    """
    for group in ready.values():
        group.ask("steps", ranks, mode="fit", steps=0)
    _compare(_weights(ready["ronde"])[0], _weights(ready["mirrored"])[0])


def _compare(mine: list[list[float]], others: list[list[float]]) -> None:
    """Raises WrongResultError if a weight of ronde differs from that of the peer by more than the tolerance.

    A value that is not finite differs from any, also from itself: it proves nothing about the gradients.
    """
    sizes, expected_sizes = ([len(values) for values in weights] for weights in (mine, others))
    if sizes != expected_sizes:
        raise WrongResultError(
            f"the model of ronde has weights of {sizes} sampled values, and the peer's has weights of {expected_sizes}"
        )
    for index, (values, expected) in enumerate(zip(mine, others)):
        limit = TOLERANCE * max(map(abs, expected), default=0.0)
        for value, other in zip(values, expected):
            if not (math.isfinite(other) and abs(value - other) <= limit):
                raise WrongResultError(
                    f"after the same steps weight {index} of ronde differs from that of the peer: one value is "
                    f"{value:.6g} instead of {other:.6g}, and {limit:.3g} is the largest difference allowed"
                )


def tables(report: dict[str, Any]) -> list[Table]:
    """Returns a table for each world.

    The communication is what a step takes beyond one with a barrier.
    """
    found = []
    for world in report["worlds"]:
        seconds = world["seconds"]
        barrier = seconds[MODES[1][2]]["median"]
        ours = seconds[MODES[0][2]]["median"] - barrier
        rows = []
        for label, spread in seconds.items():
            quartiles = ", ".join(time_text(spread[name]) for name in ("lower_quartile", "upper_quartile"))
            beyond = spread["median"] - barrier
            is_communication = label in (MODES[0][2], MODES[3][2])
            rows.append(
                [
                    label,
                    f"{time_text(spread['median'])} [{quartiles}]",
                    f"{spread['median'] / barrier:.2f}",
                    time_text(beyond) if is_communication and beyond > 0 else "",
                    f"{beyond / ours:.2f}" if is_communication and ours > 0 else "",
                ]
            )
        title = f"1 host, {world['ranks']} ranks: `fit` of Keras {report['keras']}, 25.2 M parameters, batch "
        header = ["step", "time", "/ barrier only", "communication", "/ ronde's"]
        found.append(Table(title + f"{report['batch']} a rank", header, rows))
    return found


def render(report: dict[str, Any], markdown: bool = False) -> str:
    """Formats a whole report: machine, load, tables."""
    described = report["machine"]
    before, after = described["load_average_before"][0], described["load_average_after"][0]
    versions = report["worlds"][0]["versions"] if report["worlds"] else {}
    blocks = [f"{machine.title(described)}, {', '.join(f'{name} {each}' for name, each in versions.items())}"]
    blocks.append(f"Load average {before:.2f} before and {after:.2f} after.")
    blocks += [f"Note: {note}" for note in machine.warnings(described)]
    blocks += [table.markdown() if markdown else table.text() for table in tables(report)]
    return "\n\n".join(blocks) + "\n"


def require_tensorflow() -> None:
    """Raises BenchError where TensorFlow is not installed."""
    import importlib.util

    if importlib.util.find_spec("tensorflow") is None:
        raise BenchError("TensorFlow is not installed for this Python: pip install tensorflow tf-keras")
