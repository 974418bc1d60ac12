"""Run by every rank of at least two: errors of plugins reach all ranks, and the next operation works."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import numpy

import ronde

X = numpy.ones(5_000, numpy.float32)


def fails(client: ronde.Client, kind: type[Exception], words: tuple[str, ...], call: Callable[[], Any]) -> None:
    """On this rank; afterwards all ranks can go on."""
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{str(error)!r} lacks {missing}"
    else:
        raise AssertionError(f"this succeeded, but should have raised {words}")
    numpy.testing.assert_array_equal(client.allreduce(numpy.ones(3), op=ronde.Sum), client.size)
    numpy.testing.assert_array_equal(client.allreduce(X, ronde.Sum, codec=ronde.Plugin("bf16")), client.size)


def check_refusals(client: ronde.Client) -> None:
    """Unsupported uses and missing plugins raise, whether all ranks or one requests them."""
    plugin, op, odd = ronde.Plugin, ronde.PluginOp, client.rank == client.size - 1
    whole = numpy.ones(5_000, numpy.int32)
    refused: list[tuple[tuple[str, ...], Any, dict[str, Any]]] = [
        (("no plugin nosuch",), X, {"codec": plugin("nosuch")}),
        (("no plugin nosuch",), X, {"op": op("nosuch")}),
        (("topk@9.9.9",), X, {"codec": plugin("topk@9.9.9")}),
        (("topk", "rato"), X, {"codec": plugin("topk", rato=0.5)}),
        (("topk", "ratio", "2"), X, {"codec": plugin("topk", ratio=2.0)}),
        (("topk", "ratio"), X, {"codec": plugin("topk", ratio="half")}),
        (("topk", "int32"), whole, {"codec": plugin("topk")}),
        (("median", "int32"), whole, {"op": op("median")}),
        (("topk", "codec"), X, {"op": op("topk")}),
        (("median", "reduc"), X, {"codec": plugin("median")}),
    ]
    for words, tensor, options in refused:
        fails(client, ronde.RefusedError, words, partial(client.allreduce, tensor, **options))
        one: dict[str, Any] = options if odd else {"codec": plugin("topk")}
        asked = partial(client.allreduce, tensor if odd else X, name=f"one asks for {words}", **one)
        fails(client, ronde.RefusedError, words, asked)


def check_mismatches(client: ronde.Client) -> None:
    """Ranks that ask for different plugins, or for one under different parameters."""
    odd = client.rank == client.size - 1
    topk, median = ronde.Plugin("topk", ratio=0.5), ronde.PluginOp("median")
    different: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
        (("Mismatched codecs", "topk"), {"codec": topk}, {"codec": ronde.Plugin("topk", ratio=0.25)}),
        (("Mismatched codecs", "topk", "bf16"), {"codec": topk}, {"codec": ronde.Plugin("bf16")}),
        (("Mismatched codecs", "topk", "none"), {"codec": topk}, {}),
        (("Mismatched codecs", "bf16", "bfloat16"), {"codec": ronde.Plugin("bf16")}, {"codec": "bfloat16"}),
        (("Mismatched reduction operation", "median"), {"op": median}, {"op": ronde.Median}),
        (("Mismatched reduction operation", "trimmed-mean"), {"op": median}, {"op": ronde.PluginOp("trimmed-mean")}),
    ]
    for number, (words, most, one) in enumerate(different):
        asked = partial(client.allreduce, X, name=f"different {number}", **(one if odd else most))
        fails(client, ronde.MismatchError, words, asked)


def check_arguments(client: ronde.Client) -> None:
    """Errors that only the caller gets."""
    topk = ronde.Plugin("topk")
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("topk as a codec with min", lambda: client.allreduce(X, ronde.Min, codec=topk)),
        ("op is 8; give", lambda: client.allreduce(X, 8)),
        ("ronde.Plugin", lambda: client.allreduce(X, codec="topk")),
        ("is no name of a plugin", lambda: client.allreduce(X, codec=ronde.Plugin("Top K"))),
        ("REDUCESCATTER takes no plugin", lambda: client.reduce_scatter(X, ronde.PluginOp("median"))),  # type: ignore[arg-type]
        ("REDUCE takes no plugin", lambda: client.reduce(X, 0, ronde.PluginOp("median"))),  # type: ignore[arg-type]
    ]
    for words, call in wrong:
        fails(client, ValueError, (words,), call)


def main() -> None:
    """Runs all checks."""
    with ronde.connect() as client:
        check_arguments(client)
        check_refusals(client)
        check_mismatches(client)
        client.barrier()
        print(f"rank {client.rank}: wrong plugins raised with the reason", flush=True)


if __name__ == "__main__":
    main()
