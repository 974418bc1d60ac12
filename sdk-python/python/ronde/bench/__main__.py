"""The command line of the benchmark: `ronde bench` and `python3 -m ronde.bench`."""

from __future__ import annotations

import argparse
import json
import pathlib
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from ronde.bench import cases, keras, report, run, training_modes
from ronde.bench.cases import COLLECTIVES, DEFAULT, FULL, QUICK, RANKS_MAX, World
from ronde.bench.errors import BenchError, UsageError
from ronde.bench.groups import LABELS
from ronde.bench.named import WIRE_TYPES, Extras, Named
from ronde.bench.train import Training

if TYPE_CHECKING:
    from collections.abc import Sequence

SUBCOMMANDS = ("collectives", "train", "keras", "report")
PEERS = ("gloo", "mpi")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the process's exit status."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        options.action(options)
    except BenchError as error:
        print(f"ronde bench: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("ronde bench: interrupted; nothing is written", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses and checks a command line. `action` is the function to run. Raises UsageError; --help ends the process."""
    words = list(arguments)
    if not words or (words[0] not in SUBCOMMANDS and words[0] not in ("-h", "--help")):
        words.insert(0, SUBCOMMANDS[0])
    return _parser().parse_args(words)


def _collectives(options: argparse.Namespace) -> None:
    extent = QUICK if options.quick else FULL if options.full else DEFAULT
    chosen = cases.cases(extent, options.collectives or COLLECTIVES, options.sizes or (), options.rounds)
    training = (
        Training("mlp", training_modes.BATCHES["mlp"], options.rounds or extent.train_rounds, 1)
        if options.train
        else None
    )
    bench = run.Run("collectives", options.seed, _given_options(options), _extras(options), options.link_gbit)
    worlds = _worlds(bench, options.hosts, extent.hosts, options.ranks or extent.ranks)
    peers = list(dict.fromkeys(options.peers))
    _finish(bench.measure(worlds, chosen, peers, training), options)


def _train(options: argparse.Namespace) -> None:
    batch = options.batch or training_modes.BATCHES[options.model]
    for codec in options.codec:
        if codec.name in WIRE_TYPES:
            raise UsageError(f"--codec {codec.name}: training takes plugins, such as bf16 or topk:ratio=0.01")
    codecs = tuple(codec.text for codec in options.codec)
    training = Training(options.model, batch, options.rounds, RANKS_MAX, codecs)
    bench = run.Run("train", options.seed, _given_options(options), _extras(options), options.link_gbit)
    worlds = _worlds(bench, options.hosts, (1,), options.ranks or DEFAULT.ranks)
    _finish(bench.measure(worlds, [], [], training), options)


def _keras(options: argparse.Namespace) -> None:
    keras.require_tensorflow()
    ranks = options.ranks or DEFAULT.ranks
    fit = keras.Fit(ranks, options.batch, options.rounds, options.steps, options.keras, options.seed)
    found = keras.measure(fit)
    # Write results first: they must not be lost if the tables cannot be written.
    if options.json:
        report.write(options.json, json.dumps(found, indent=1) + "\n")
    print(keras.render(found))
    if options.markdown:
        report.write(options.markdown, keras.render(found, markdown=True))


def _report(options: argparse.Namespace) -> None:
    files = options.files
    if len(files) > 1 and (options.markdown or options.plot):
        raise UsageError("--markdown and --plot are of one report; --html takes several")
    reports = [(path, report.read(path)) for path in files]
    with report.complete(files):
        if options.html is not None:
            report.write_page(reports, options.html)
        for _, found in reports:
            report.show(found, None, options.markdown, options.plot)


def _finish(found: dict[str, Any], options: argparse.Namespace) -> None:
    report.finish(found)
    report.show(found, options.json, options.markdown, getattr(options, "plot", None))


def _extras(options: argparse.Namespace) -> Extras:
    paths = tuple(str(path.absolute()) for path in options.plugin)
    return Extras(tuple(options.codec), tuple(getattr(options, "reducer", ())), paths)


def _worlds(bench: run.Run, asked: Sequence[int] | None, usual: Sequence[int], ranks: Sequence[int]) -> list[World]:
    """Returns the worlds, one host first. Skips those of several hosts that are impossible and not requested."""
    hosts = list(asked or usual)
    reason = run.why_no_hosts()
    if reason is not None and max(hosts) > 1:
        if asked:
            raise UsageError(f"--hosts {max(hosts)}: {reason}")
        bench.report["notes"].append(f"several hosts are skipped: {reason}")
        hosts = [1]
    worlds = []
    for world in (World(host, rank) for host in hosts for rank in ranks):
        try:
            run.check_world(world)
            worlds.append(world)
        except BenchError as error:
            if asked:
                raise
            bench.report["notes"].append(f"{world.title()} is skipped: {error}")
    if bench.gbit is not None and max(world.hosts for world in worlds) == 1:
        raise UsageError("--link-gbit is of links between hosts: give --hosts 2")
    return worlds


def _given_options(options: argparse.Namespace) -> dict[str, Any]:
    given_options: dict[str, Any] = {}
    for name, value in vars(options).items():
        if isinstance(value, list):
            given_options[name] = [one if isinstance(one, (int, str)) else str(one) for one in value]
        elif isinstance(value, (int, float, str, type(None))):
            given_options[name] = value
    return given_options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().rstrip()}\nsee `ronde bench --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ronde bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(title="subcommands", required=True)
    add = commands.add_parser
    collectives = add(
        "collectives",
        help="collectives and a training step against peers (default)",
        epilog=_EXAMPLES[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train = add(
        "train",
        help="training: samples a second and scaling efficiency",
        epilog=_EXAMPLES[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    again = add(
        "report",
        help="show reports in JSON files again, also as a page of plots",
        epilog=_EXAMPLES[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of_keras = add("keras", help="a step of Keras' fit, beside MultiWorkerMirroredStrategy; needs TensorFlow")
    _add_keras(of_keras)
    of_keras.set_defaults(action=_keras)
    collectives.set_defaults(action=_collectives)
    train.set_defaults(action=_train)
    again.set_defaults(action=_report)
    _add_collectives(collectives)
    _add_train(train)
    again.add_argument("files", type=pathlib.Path, nargs="+", metavar="FILE.json")
    again.add_argument("--html", type=pathlib.Path, metavar="FILE", help="write one page of plots and tables")
    for command in (collectives, train):
        _add_common(command)
    for command in (collectives, again):
        command.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw all-reduce into a PNG file")
    for command in (collectives, train, again):
        command.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the tables as Markdown")
    return parser


def _add_collectives(parser: argparse.ArgumentParser) -> None:
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="about a minute: one host, few sizes and rounds")
    extent.add_argument("--full", action="store_true", help="every power of 4 up to 256 MB, many rounds")
    parser.add_argument("--collectives", type=_listed(_collective), metavar="NAME,...", help=", ".join(COLLECTIVES))
    parser.add_argument("--sizes", type=_listed(cases.parse_size), metavar="SIZE,...", help="such as 4,64KB,16MB")
    peers_help = "gloo, mpi (default: both); the training step is beside Gloo in any case"
    parser.add_argument("--peers", type=_listed(_peer), default=list(PEERS), metavar="NAME,...", help=peers_help)
    parser.add_argument("--rounds", type=_positive, metavar="N", help="turns of each backend for each case")
    _add_several(parser, "--reducer", Named.parse, _NAMED, "all-reduce by this plugin, too")
    parser.add_argument("--no-train", dest="train", action="store_false", help="skip the training step of a perceptron")


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(training_modes.BATCHES), default="mlp", help="default: mlp")
    parser.add_argument(
        "--batch", type=_positive, metavar="N", help="samples a rank and step; the default is the model's"
    )
    parser.add_argument(
        "--rounds", type=_positive, default=DEFAULT.train_rounds, metavar="N", help="turns of each training mode"
    )


def _add_keras(parser: argparse.ArgumentParser) -> None:
    parser.description = keras.__doc__
    parser.add_argument("--ranks", type=_listed(_ranks), metavar="N,...", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--batch", type=_positive, default=64, metavar="N", help="rows a rank and step (default: 64)")
    parser.add_argument("--rounds", type=_positive, default=5, metavar="N", help="turns of each mode (default: 5)")
    parser.add_argument("--steps", type=_positive, default=6, metavar="N", help="timed steps of a turn (default: 6)")
    parser.add_argument("--keras", type=int, choices=[2, 3], default=2, help="Keras 3 is without the peer (default: 2)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of all data (default: 1)")
    json_help = "write the report as JSON, of a schema that `ronde bench report` does not show"
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help=json_help)
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE", help="write the tables as Markdown")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=_listed(_ranks), metavar="N,...", help="world sizes (default: 2,4)")
    parser.add_argument(
        "--hosts",
        type=_listed(_positive),
        metavar="N,...",
        help="on how many hosts; several are network namespaces and need root",
    )
    parser.add_argument(
        "--link-gbit", type=_rate, metavar="N", help="gigabits a second of each host's link (default: no limit)"
    )
    codec_help = "with this codec, too: a plugin, or float16 or bfloat16 in all-reduces"
    _add_several(parser, "--codec", Named.parse, _NAMED, codec_help)
    _add_several(parser, "--plugin", pathlib.Path, "FILE|DIR", "plugins that do not come with ronde")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of all data (default: 1)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the report as JSON")


def _add_several(parser: argparse.ArgumentParser, option: str, kind: Any, metavar: str, text: str) -> None:
    text += "; may be given several times"
    parser.add_argument(option, type=kind, action="append", default=[], metavar=metavar, help=text)


def _listed(one: Any) -> Any:
    def many(text: str) -> list[Any]:
        return [one(part) for part in text.split(",")]

    return many


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{text!r} is no number from 1 on")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.001 <= rate <= 1000:
        raise UsageError(f"{text!r} is no rate: give gigabits a second, 0.001 to 1000")
    return rate


def _ranks(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= RANKS_MAX:
        raise UsageError(f"{text!r} ranks cannot be measured; give 2 to {RANKS_MAX}")
    return int(text)


def _collective(text: str) -> str:
    if text not in COLLECTIVES:
        raise UsageError(f"{text!r} is no collective; there are {', '.join(COLLECTIVES)}")
    return text


def _peer(text: str) -> str:
    if text not in PEERS:
        raise UsageError(f"{text!r} is no peer; there are {', '.join(LABELS[name] + f' ({name})' for name in PEERS)}")
    return text


def _end(number: int, _frame: object) -> None:
    # An exception in the main thread makes the benchmark end its ranks and remove its hosts.
    sys.exit(128 + number)


_NAMED = "NAME[:KEY=VALUE]..."
_EXAMPLES = (
    "Examples:\n  ronde bench --quick\n  ronde bench --collectives allreduce --sizes 4,1MB --plot bench.png\n"
    "  ronde bench --collectives allreduce --sizes 64MB --hosts 2 --codec bfloat16 --codec bf16 --no-train",
    "Examples:\n  ronde bench train --model resnet50 --ranks 2\n  ronde bench train --model cnn --json cnn.json\n"
    "  ronde bench train --hosts 2 --ranks 2 --link-gbit 1 --codec topk:ratio=0.01",
    "Examples:\n  ronde bench report bench.json\n  ronde bench report bench.json --markdown table.md --plot bench.png\n"
    "  ronde bench report monday.json tuesday.json --html bench.html",
)

if __name__ == "__main__":
    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, _end)
    sys.exit(main())
