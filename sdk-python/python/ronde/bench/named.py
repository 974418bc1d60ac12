"""Codecs and reducers of the command line, such as `topk:ratio=0.01`.

Imports neither PyTorch nor the native client: the benchmark's main process does not use them.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Union

from ronde.bench.errors import UsageError

Value = Union[bool, int, float, str]
# ronde's built-in codecs; every other codec is a plugin.
WIRE_TYPES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Named:
    """A codec or a reducer and its parameters."""

    name: str
    parameters: tuple[tuple[str, Value], ...]
    text: str

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def parse(text: str) -> Named:
        """Parses NAME or NAME:KEY=VALUE:KEY=VALUE. Raises UsageError."""
        name, *pairs = text.split(":")
        if not re.fullmatch(r"[a-z0-9-]+(@[0-9.]+)?", name):
            raise UsageError(f"{text!r} names no plugin: give one such as bf16 or topk:ratio=0.01")
        parameters = []
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not key or not equals:
                raise UsageError(f"{pair!r} in {text!r} is no parameter: give one such as ratio=0.01")
            parameters.append((key, _value(value)))
        if name in WIRE_TYPES and parameters:
            raise UsageError(f"{text!r}: {name} has no parameters")
        return Named(name, tuple(parameters), text)

    def codec(self) -> Any:
        """Returns the client's `codec` argument."""
        import ronde

        return self.name if self.name in WIRE_TYPES else ronde.Plugin(self.name, **dict(self.parameters))

    def reducer(self) -> Any:
        """Returns the client's `op` argument."""
        import ronde

        return ronde.PluginOp(self.name, **dict(self.parameters))


@dataclasses.dataclass(frozen=True)
class Extras:
    """Additional variants of ronde.

    codecs   -- codecs of all-reduces, or of gradients in training
    reducers -- reducer plugins of all-reduces
    plugins  -- files or folders of plugins that do not come with ronde
    """

    codecs: tuple[Named, ...] = ()
    reducers: tuple[Named, ...] = ()
    plugins: tuple[str, ...] = ()

    def variants(self, collective: str) -> int:
        """Returns the number of additional variants of a collective."""
        return len(self.codecs) + len(self.reducers) if collective == "allreduce" else 0

    def worker_options(self) -> list[str]:
        """Returns the options of a rank."""
        options = []
        for option, named in (("--codec", self.codecs), ("--reducer", self.reducers)):
            for one in named:
                options += [option, one.text]
        return options

    def launcher_options(self) -> list[str]:
        """Returns the options of `ronde run`."""
        return [word for path in self.plugins for word in ("--plugin", path)]


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
