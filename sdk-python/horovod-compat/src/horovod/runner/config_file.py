"""Reads Horovod's configuration files: YAML with sections of settings, each of which corresponds to a flag.

It supports a small part of YAML: keys with a value, sections of such keys, comments. For anything else it raises an
error with the line.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Union

Scalar = Union[str, bool, None]

CONTROLLERS = ("gloo", "mpi")
_SAME = {
    "params": [
        "fusion_threshold_mb",
        "cycle_time_ms",
        "cache_capacity",
        "hierarchical_allreduce",
        "hierarchical_allgather",
        "torus_allreduce",
    ],
    "library_options": ["mpi_threads_disable", "num_nccl_streams", "thread_affinity", "gloo_timeout_seconds"],
}
_PREFIXED = {
    "autotune": [
        "log_file",
        "warmup_samples",
        "steps_per_sample",
        "bayes_opt_max_samples",
        "gaussian_process_noise",
    ],
    "timeline": ["filename", "mark_cycles"],
    "stall_check": ["warning_time_seconds", "shutdown_time_seconds"],
}
# Flags by section and key. True sets the flag, and false its opposite.
FLAGS: dict[tuple[str, str], str] = {
    **{(section, key): f"--{key.replace('_', '-')}" for section, keys in _SAME.items() for key in keys},
    **{(section, key): f"--{section}-{key}".replace("_", "-") for section, keys in _PREFIXED.items() for key in keys},
    ("autotune", "enabled"): "--autotune",
    ("stall_check", "enabled"): "--stall-check",
    ("logging", "level"): "--log-level",
    ("logging", "with_timestamp"): "--log-with-timestamp",
}
_OPPOSITES = {"--log-with-timestamp": "--log-without-timestamp"}
SECTIONS = {section for section, _ in FLAGS}

_KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][\w-]*) *:(?: +(?P<value>.*))?")
_COMMENT = re.compile(r"(^|\s)#.*$")
_TRUE, _FALSE, _NOTHING = ("true", "yes", "on"), ("false", "no", "off"), ("", "null", "~")


class Config(NamedTuple):
    """The content of a file: flags, and the keys that have no effect here."""

    flags: list[str]
    unknown: list[str]


def read(path: str) -> Config:
    """Reads the flags of a file. Raises ValueError, with file and line, for a syntax error."""
    try:
        with open(path) as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the configuration file {path}: {error}") from error
    flags, unknown = [], []
    for (section, key), value in parse(text, path).items():
        flag = FLAGS.get((section, key))
        if (section, key) == ("", "controller"):
            flags += _controller(value, path)
        elif flag is None:
            unknown.append(f"{section}.{key}" if section else key)
        elif value is True:
            flags.append(flag)
        elif value is False:
            flags.append(_OPPOSITES.get(flag, flag.replace("--", "--no-", 1)))
        elif value is not None:
            flags.append(f"{flag}={value}")
    return Config(flags, unknown)


def parse(text: str, path: str) -> dict[tuple[str, str], Scalar]:
    """Returns the settings by section and key. The section of a top-level key is empty."""
    found: dict[tuple[str, str], Scalar] = {}
    section, depth = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = _without_comment(raw).rstrip()
        if not line or line == "---":
            continue
        match = _KEY.fullmatch(line)
        indent = len(match["indent"]) if match else 0
        if match is None or (indent and (not section or (depth and indent != depth))):
            raise ValueError(f"{path}, line {number}: {raw.strip()!r} is not `key: value` at the depth of its section")
        if indent:
            place, depth = (section, match["key"]), indent
        elif match["value"] is None and match["key"] in SECTIONS:
            section, depth = match["key"], 0
            continue
        else:
            # An unknown section is reported, and so are its keys.
            place, section, depth = ("", match["key"]), match["key"] if match["value"] is None else "", 0
        if place in found:
            raise ValueError(f"{path}, line {number}: {match['key']} is given twice")
        found[place] = _scalar(match["value"] or "", f"{path}, line {number}")
    return found


def _without_comment(line: str) -> str:
    """Returns the line up to a # outside of quotation marks."""
    quoted = re.match(r"""\s*[\w-]+\s*:\s*("[^"]*"|'[^']*')""", line)
    kept = quoted.end() if quoted else 0
    return line[:kept] + _COMMENT.sub("", line[kept:])


def _scalar(text: str, place: str) -> Scalar:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    if text[:1] in {"[", "{", "&", "*", "!", "|", ">", '"', "'", "%", "@", "`"}:
        raise ValueError(f"{place}: {text!r} is not a plain value; write a number, a word, true or false")
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    return None if text.lower() in _NOTHING else text


def _controller(value: Scalar, path: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, str) or value.lower() not in CONTROLLERS:
        raise ValueError(f"{path}: No such controller supported: {value}; it is one of {', '.join(CONTROLLERS)}")
    return [f"--{value.lower()}"]
