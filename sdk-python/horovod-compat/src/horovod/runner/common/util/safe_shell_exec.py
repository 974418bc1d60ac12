"""Runs shell commands so that none of their processes outlive them or this process."""

from __future__ import annotations

import codecs
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GRACEFUL_TERMINATION_TIME_S = 5
_MIDDLEMAN = pathlib.Path(__file__).with_name("middleman.py")
_POLL_S = 0.05
_CHUNK_BYTES = 65_536
_LINE_END = re.compile(r"(?<=[\r\n])")


def execute(
    command: str,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    index: int | None = None,
    events: Sequence[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Runs a shell command and returns its exit status, 128 + N if signal N ended it.

    env            -- its environment; default: this process's
    stdout, stderr -- text streams for its output, without buffering; default: this process's
    index          -- if given, each line begins with `[index]<stdout>:` or `[index]<stderr>:`
    events         -- setting one of them ends the command: SIGTERM for all its processes, SIGKILL after 5 s
    prefix_output_with_timestamp -- with an index, each line begins with the time

    The command and its child processes also end when this process dies or is interrupted.
    """
    control, asking = os.pipe()
    words = [sys.executable, "-I", "-S", str(_MIDDLEMAN), str(control), str(GRACEFUL_TERMINATION_TIME_S), command]
    try:
        process = subprocess.Popen(
            words,
            env=None if env is None else dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[control],
        )
    except BaseException:
        os.close(asking)
        raise
    finally:
        os.close(control)
    readers = [
        _reader(source, sink, name, index, prefix_output_with_timestamp)
        for source, sink, name in (
            (process.stdout, sys.stdout if stdout is None else stdout, "stdout"),
            (process.stderr, sys.stderr if stderr is None else stderr, "stderr"),
        )
    ]
    try:
        while process.poll() is None and not any(event.is_set() for event in events or ()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S if events else None)
    finally:
        # The middleman ends the command when the pipe ends, unless the command has ended.
        os.close(asking)
        status = process.wait()
        for reader in readers:
            reader.join(GRACEFUL_TERMINATION_TIME_S)
            if reader.is_alive():
                print(
                    f"`{command}` has ended, but one of its child processes still holds its {reader.name}",
                    file=sys.stderr,
                )
    return status


def _reader(source: Any, sink: Any, name: str, index: int | None, has_time: bool) -> threading.Thread:
    def forward() -> None:
        with source:
            forward_stream(source.fileno(), sink, name, index, has_time)

    thread = threading.Thread(target=forward, name=name, daemon=True)
    thread.start()
    return thread


def forward_stream(
    src_fd: int, dst_stream: Any, prefix: str, index: int | None, prefix_output_with_timestamp: bool = False
) -> None:
    """Calls `prefix_stream` on a descriptor, which stays open."""
    with os.fdopen(src_fd, "rb", buffering=0, closefd=False) as source:
        prefix_stream(source, dst_stream, prefix, index, prefix_output_with_timestamp)


def prefix_stream(
    src_stream: Any, dst_stream: Any, prefix: str, index: int | None, prefix_output_with_timestamp: bool = False
) -> None:
    """Copies a stream of UTF-8 bytes to a text stream until it ends. Bytes that are not UTF-8 become U+FFFD.

    prefix -- the stream's name; with an index each line begins with `[index]<prefix>:`, also after a carriage return
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    is_new_line = True
    while True:
        chunk = src_stream.read(_CHUNK_BYTES)
        for part in _LINE_END.split(decoder.decode(chunk, final=not chunk)):
            if part:
                begin = _line_prefix(prefix, index, prefix_output_with_timestamp) if is_new_line else ""
                dst_stream.write(begin + part)
                is_new_line = part[-1] in "\r\n"
        if index is not None and not chunk and not is_new_line:
            dst_stream.write("\n")
        dst_stream.flush()
        if not chunk:
            return


def _line_prefix(prefix: str, index: int | None, has_time: bool) -> str:
    if index is None:
        return ""
    return f"{time.asctime() if has_time else ''}[{index}]<{prefix}>:"


def terminate_executor_shell_and_children(pid: int) -> None:
    """Ends a process and its descendants: SIGTERM, and SIGKILL for those that remain after 5 s.

    Does nothing for a process that has ended.
    """
    family = [pid, *_descendants(pid)]
    deadline = time.monotonic() + GRACEFUL_TERMINATION_TIME_S
    _signal(family, signal.SIGTERM)
    while any(_is_alive(each) for each in family) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        family += [each for each in _descendants(pid) if each not in family]
    _signal([each for each in family if _is_alive(each)], signal.SIGKILL)


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def _is_alive(pid: int) -> bool:
    """Returns whether a process runs. Zombies do not count."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
