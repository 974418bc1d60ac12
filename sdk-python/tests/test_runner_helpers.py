"""Helper functions of Horovod's launcher: shell commands, threads, addresses, caches, keys."""

from __future__ import annotations

import argparse
import io
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, Callable

import pytest

from horovod.runner.common.util import (
    codec,
    config_parser,
    env,
    hosts,
    safe_shell_exec,
    secret,
    settings,
    timeout,
    tiny_shell_exec,
)
from horovod.runner.common.util.host_hash import host_hash
from horovod.runner.util import cache, lsf, network, remote, streams, threads

PATIENCE_S = 60


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it does not come to be"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return not safe_shell_exec._is_alive(pid)


def execute(command: str, **arguments: Any) -> tuple[int, str, str]:
    out, errors = io.StringIO(), io.StringIO()
    status = safe_shell_exec.execute(command, stdout=out, stderr=errors, **arguments)
    return status, out.getvalue(), errors.getvalue()


def test_a_command_and_its_streams() -> None:
    assert execute("echo out; echo errors >&2; exit 3") == (3, "out\n", "errors\n")
    assert execute("printf 'a\\nb\\rc'; printf 'é' >&2", index=4) == (
        0,
        "[4]<stdout>:a\n[4]<stdout>:b\r[4]<stdout>:c\n",
        "[4]<stderr>:é\n",
    )
    _, out, _ = execute("echo a", index=0, prefix_output_with_timestamp=True)
    assert re.fullmatch(r"\w{3} \w{3} .*\d{4}\[0\]<stdout>:a\n", out)
    assert execute("echo $PASSED $HOME", env={"PASSED": "this"})[1] == "this\n"
    assert execute("kill -9 $$")[0] == 128 + signal.SIGKILL
    assert execute("head -c 300000 /dev/zero | tr '\\0' x")[1] == "x" * 300_000


def test_a_command_writes_to_this_process_without_streams(capfd: pytest.CaptureFixture[str]) -> None:
    assert safe_shell_exec.execute("echo out; echo errors >&2", index=1) == 0
    output = capfd.readouterr()
    assert (output.out, output.err) == ("[1]<stdout>:out\n", "[1]<stderr>:errors\n")


@pytest.mark.parametrize("trap", ["", "trap 'echo asked; exit 7' TERM; "])
def test_an_event_ends_a_command_and_its_children(trap: str, tmp_path: pathlib.Path) -> None:
    event, file = threading.Event(), tmp_path / "pids"
    command = f"{trap}sleep 100 & echo $$ $! > {file}.new; mv {file}.new {file}; wait; sleep 100"
    result: list[Any] = []
    thread = threads.in_thread(lambda: result.append(execute(command, events=[threading.Event(), event])))
    until(file.exists)
    event.set()
    thread.join(PATIENCE_S)
    status, out, _ = result[0]
    assert (status, out) == ((7, "asked\n") if trap else (128 + signal.SIGTERM, ""))
    until(lambda: all(is_gone(int(pid)) for pid in file.read_text().split()))


def test_a_command_that_does_not_end_when_asked_is_killed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_shell_exec, "GRACEFUL_TERMINATION_TIME_S", 0.2)
    event, file = threading.Event(), tmp_path / "pid"
    command = f"trap '' TERM; echo $$ > {file}.new; mv {file}.new {file}; while :; do sleep 0.05; done"
    result: list[Any] = []
    thread = threads.in_thread(lambda: result.append(execute(command, events=[event])))
    until(file.exists)
    event.set()
    thread.join(PATIENCE_S)
    assert result[0][0] == 128 + signal.SIGKILL
    until(lambda: is_gone(int(file.read_text())))


def test_a_command_ends_with_the_process_that_runs_it(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pids"
    command = f"sleep 100 & echo $$ $! > {file}.new; mv {file}.new {file}; wait"
    program = f"from horovod.runner.common.util.safe_shell_exec import execute; execute({command!r})"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        until(file.exists)
        process.kill()
    until(lambda: all(is_gone(int(pid)) for pid in file.read_text().split()))


def test_a_process_and_its_children_are_ended(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pids"
    inner = f"setsid sleep 100 & echo $$ $! > {file}.new; mv {file}.new {file}; wait"
    with subprocess.Popen(["sh", "-c", f"sh -c {shlex.quote(inner)}; true"]) as process:
        until(file.exists)
        safe_shell_exec.terminate_executor_shell_and_children(process.pid)
        process.wait(PATIENCE_S)
    until(lambda: all(is_gone(int(pid)) for pid in file.read_text().split()))
    safe_shell_exec.terminate_executor_shell_and_children(process.pid)


def test_streams_are_copied_with_a_prefix() -> None:
    out = io.StringIO()
    safe_shell_exec.prefix_stream(io.BytesIO(b"one\ntw\xffo"), out, "stdout", 2)
    assert out.getvalue() == "[2]<stdout>:one\n[2]<stdout>:tw\N{REPLACEMENT CHARACTER}o\n"
    reading, writing = os.pipe()
    os.write(writing, b"plain")
    os.close(writing)
    out = io.StringIO()
    safe_shell_exec.forward_stream(reading, out, "stdout", None)
    assert out.getvalue() == "plain"
    os.close(reading)


def test_a_short_command() -> None:
    output, status = tiny_shell_exec.execute("echo out; echo errors >&2; exit 2") or ("", -1)
    assert (sorted(output.splitlines()), status) == (["errors", "out"], 2)


def test_threads() -> None:
    seen: list[int] = []
    threads.in_thread(seen.append, (1,), name="one").join(PATIENCE_S)
    threads.in_thread(lambda: 1 // 0, silent=True).join(PATIENCE_S)
    event, stop = threading.Event(), threading.Event()
    waiting = threads.on_event(event, seen.append, (2,))
    stopped = threads.on_event(threading.Event(), seen.append, (3,), stop=stop, check_stop_interval_s=0.01)
    assert waiting.is_alive()
    event.set()
    stop.set()
    for thread in (waiting, stopped):
        thread.join(PATIENCE_S)
    assert seen == [1, 2]
    for call in (lambda: threads.in_thread(seen.append, 1), lambda: threads.on_event(event, seen.append, 1)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="args must be a tuple"):
            call()
    with pytest.raises(ValueError, match="Event must not be None"):
        threads.on_event(None, seen.append)  # type: ignore[arg-type]


def test_many_threads() -> None:
    together = threading.Barrier(3)

    def meet(number: int) -> int:
        together.wait(PATIENCE_S)
        return number * 2

    call = threads.execute_function_multithreaded
    assert call(meet, [[1], [2], [3]]) == {0: 2, 1: 4, 2: 6}
    assert call(lambda number: number, [[1], [2], [3]], max_concurrent_executions=1) == {0: 1, 1: 2, 2: 3}
    assert call(meet, []) == {}
    done = threading.Event()
    assert call(done.set, [[]], block_until_all_done=False) is None
    assert done.wait(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        call(lambda number: 1 // number, [[1], [0]])


def test_a_pipe_between_threads() -> None:
    pipe = streams.Pipe()
    writer = threads.in_thread(lambda: [pipe.write(piece) for piece in ("abc", "d")])
    assert [pipe.read(2, timeout=PATIENCE_S), pipe.read(timeout=PATIENCE_S), pipe.read()] == ["ab", "c", "d"]
    writer.join(PATIENCE_S)
    with pytest.raises(TimeoutError, match="nothing was written to the pipe"):
        pipe.read(timeout=0.01)
    pipe.write(b"last")
    pipe.flush()
    pipe.close()
    assert [pipe.read(), pipe.read()] == [b"last", None]
    with pytest.raises(RuntimeError, match="Pipe is closed"):
        pipe.write(b"more")


def test_a_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = tmp_path / "cache", []

    @cache.use_cache()
    def check(host: str, port: int = 22) -> set[str]:
        calls.append((host, port))
        return {host}

    kept = cache.Cache(folder, 1, "parameters")
    assert [check("a", fn_cache=kept), check("a", fn_cache=kept), check("a", port=1, fn_cache=kept)] == [{"a"}] * 3
    assert check("a") == check("a", fn_cache=None) == {"a"}
    assert calls == [("a", 22), ("a", 1), ("a", 22), ("a", 22)]
    assert cache.Cache(folder, 1, "parameters").get(("check", ("a",), frozenset())) == {"a"}
    assert cache.Cache(folder, 1, "others").get(("check", ("a",), frozenset())) is None
    assert kept.get("nothing") is None
    kept.put("value", 1)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert kept.get("value") is None
    (folder / "cache.bin").write_bytes(b"broken")
    assert cache.Cache(folder, 1, "parameters").get("value") is None
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written to by other users"):
        cache.Cache(folder, 1, "parameters")


def test_addresses_of_this_host() -> None:
    assert "127.0.0.1" in network.get_local_host_addresses()
    loopback = network.get_local_intfs()
    assert loopback
    name = sorted(loopback)[0]
    assert network.get_local_intfs(name) == {name}
    assert network.get_local_intfs("no such interface") == set()
    assert network.get_driver_ip([name]) == "127.0.0.1"
    assert network.get_driver_ip(None) in network.get_local_host_addresses()
    with pytest.raises(RuntimeError, match="Cannot find an IPv4 address of the common interface: none"):
        network.get_driver_ip(["none"])


def test_hosts_that_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"here": "127.0.0.1", "there": "203.0.113.9"}

    def resolve(name: str) -> str:
        if name not in addresses:
            raise OSError("unknown")
        return addresses[name]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    with pytest.warns(UserWarning, match="the host name nowhere has no address: unknown"):
        assert network.filter_local_addresses(["there", "here", "nowhere"]) == ["there", "nowhere"]
    assert network.resolve_host_address("there") == "203.0.113.9"


def test_commands_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMPI_MCA_plm_rsh_agent", raising=False)
    command = remote.get_remote_command("echo 'a b'", "beta", port=2222, identity_file="my key", timeout_s=5)
    words = shlex.split(command)
    assert words[0] == "ssh"
    assert words[-8:] == ["-p", "2222", "-i", "my key", "-o", "ConnectTimeout=5", "beta", "echo 'a b'"]
    assert "StrictHostKeyChecking" not in command
    assert remote.get_ssh_command("true", "beta") == f"{remote.SSH_COMMAND_PREFIX} beta true"
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", env.KUBEFLOW_MPI_EXEC)
    assert shlex.split(remote.get_remote_command("echo a", "pod")) == [env.KUBEFLOW_MPI_EXEC, "pod", "echo a"]


def test_digests() -> None:
    key = secret.make_secret_key()
    assert (len(key), key == secret.make_secret_key()) == (secret.SECRET_LENGTH, False)
    digest = secret.compute_digest(key, b"message")
    assert len(digest) == secret.DIGEST_LENGTH
    assert secret.check_digest(key, b"message", digest)
    assert not secret.check_digest(key, b"another", digest)
    # RFC 4231, case 2.
    expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert secret.compute_digest(b"Jefe", b"what do ya want for nothing?").hex() == expected


def test_deadlines() -> None:
    late = timeout.Timeout(0, "Timed out waiting for {activity}.")
    until(late.timed_out)
    with pytest.raises(timeout.TimeoutException, match=r"Timed out waiting for hosts\. Timeout after 0 seconds"):
        late.check_time_out_for("hosts")
    assert late.remaining() == 0
    early = timeout.Timeout(3600, "")
    early.check_time_out_for("hosts")
    assert 0 < early.remaining() <= early.timeout == 3600
    given = settings.Settings(hosts="a:1", num_proc=1, verbose=2, start_timeout=early, nics={"eth0"})
    assert (given.hosts, given.num_proc, given.verbose, given.start_timeout) == ("a:1", 1, 2, early)
    assert (given.tcp_flag, given.extra_mpi_args, settings.BaseSettings(3, 1).num_proc) == (False, "", 3)


def test_objects_as_text() -> None:
    pytest.importorskip("cloudpickle")
    number = 3
    encoded = codec.dumps_base64(lambda value: value + number)
    assert isinstance(encoded, str)
    assert codec.loads_base64(encoded)(1) == 4
    assert codec.loads_base64(codec.dumps_base64({"a": 1}, to_ascii=False)) == {"a": 1}


def test_this_host_and_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_hash() == host_hash()
    assert host_hash("salt") != host_hash()
    assert host_hash().startswith(socket.gethostname().partition(".")[0] + "-")
    assert [env.is_exportable(name) for name in ("PATH", "OLDPWD", "BASH_FUNC_x%%", "CUDA_VISIBLE_DEVICES")] == [
        True,
        False,
        False,
        False,
    ]
    monkeypatch.delenv("LSB_JOBID", raising=False)
    assert not lsf.LSFUtils.using_lsf()
    monkeypatch.setenv("LSB_JOBID", "1")
    assert lsf.LSFUtils.using_lsf()


def test_slots_as_text() -> None:
    slot = hosts.get_host_assignments(hosts.parse_hosts("a:1,b:2"), 3)[2]
    assert slot.to_response_string() == "2,3,1,2,0,1"
    assert hosts.SlotInfo.from_response_string("2,3,1,2,0,1") == slot._replace(hostname="")
    assert hosts.INVALID_SLOT_INFO.to_response_string() == "-1,-1,-1,-1,-1,-1"
    with pytest.raises(ValueError, match="not enough values"):
        hosts.SlotInfo.from_response_string("1,2")


def test_a_configuration_sets_arguments() -> None:
    args = argparse.Namespace(fusion_threshold_mb=None, cycle_time_ms=7, use_gloo=None, use_mpi=None, autotune=None)
    config = {
        "controller": "MPI",
        "params": {"fusion_threshold_mb": 32, "cycle_time_ms": 50},
        "autotune": {"enabled": True, "log_file": "f"},
        "stall_check": {"enabled": False, "warning_time_seconds": 5},
        "logging": {"level": "INFO", "with_timestamp": False},
        "timeline": None,
        "unknown": {"key": 1},
    }
    config_parser.set_args_from_config(args, config, {"cycle_time_ms"})
    assert (args.fusion_threshold_mb, args.cycle_time_ms, args.use_mpi, args.use_gloo) == (32, 7, True, None)
    assert (args.autotune, args.autotune_log_file, args.no_stall_check) == (True, "f", True)
    assert (args.stall_check_warning_time_seconds, args.log_level, args.log_with_timestamp) == (5, "INFO", False)
    config_parser.set_args_from_config(args, {"controller": "gloo"}, {"use_mpi"})
    assert args.use_gloo is None
    with pytest.raises(ValueError, match="No such controller supported: smoke"):
        config_parser.set_args_from_config(args, {"controller": "smoke"}, set())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("cycle_time_ms", -1, r"cycle_time_ms=-1 must be >= 0"),
        ("autotune_gaussian_process_noise", 1.5, r"noise=1\.5 must be in \[0, 1\]"),
    ],
)
def test_arguments_are_checked(name: str, value: float, text: str) -> None:
    config_parser.validate_config_args(argparse.Namespace(**{name: 0}))
    with pytest.raises(ValueError, match=text):
        config_parser.validate_config_args(argparse.Namespace(**{name: value}))
