"""`horovodrun --mpi`: the arguments of Open MPI's mpirun, invalid uses, and a job that it starts."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import PACKAGE, leave_out, ronde_binary
from test_horovodrun import COMPAT, TIMEOUT_S, horovodrun
from two_hosts import TwoHosts, two_hosts

from horovod.runner import launch, mpi, translation

if TYPE_CHECKING:
    from collections.abc import Iterator


def by_mpi(arguments: str, major: int = 5, **environment: str) -> translation.Translation:
    given, _ = launch.parse(arguments.split())
    given.pop("command")
    return mpi.translate(given, major, environment)


def test_the_arguments_of_mpirun() -> None:
    found = by_mpi("-np 2 --mpi --fusion-threshold-mb 1", PATH="/bin")
    words = ["--allow-run-as-root", "--output", "tag", "-np", "2", "-H", "localhost:2"]
    words += ["--bind-to", "none", "--map-by", "slot", "-x", "HOROVOD_FUSION_THRESHOLD=1048576"]
    assert found.options[: len(words)] == words
    assert found.notes == []
    former = by_mpi("-np 1 --mpi -H localhost:2 --output-filename out -prefix-timestamp --binding-args=-x", 4).options
    words = ["--allow-run-as-root", "--tag-output", "--timestamp-output", "--output-filename", "out"]
    assert former == [*words, "-np", "1", "-H", "localhost:2", "-x"]
    assert by_mpi("-np 1 --output-filename out -prefix-timestamp").options[2] == "tag,timestamp,dir=out"
    # It makes `mpi_threads_supported` return False.
    limited = by_mpi("-np 1 --mpi-threads-disable")
    assert (limited.exports, limited.notes) == ({"HOROVOD_MPI_THREADS_DISABLE": "1"}, [])
    # mpirun has no such flag: the sidecar that rank 0 starts reads the variable.
    hidden = by_mpi("-np 1 --log-hide-timestamp")
    assert hidden.exports == {"HOROVOD_LOG_HIDE_TIME": "1"}
    assert hidden.notes == ["--log-hide-timestamp is deprecated; use --log-without-timestamp"]
    assert [
        note.split(" has no effect")[0] for note in by_mpi("-np 1 --cycle-time-ms 1 --network-interface a").notes
    ] == [
        "--cycle-time-ms",
        "--network-interface",
    ]


def launched(arguments: str, **environment: str) -> tuple[list[str], list[str]]:
    given, _ = launch.parse(arguments.split())
    given.pop("command")
    words, notes = mpi.launcher(given, environment)
    return words, [note.split(" has no effect")[0] for note in notes]


def test_sidecars_come_first_on_several_hosts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.0'")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("RONDE_BIN", ronde_binary())
    several = "-np 2 -H localhost:1,beta:1 -p 2222 --fusion-threshold-mb 3 --output-filename out --network-interface a"
    words, notes = launched(several, PATH="/bin", OLDPWD="/", _="x", RONDE_RANK="1", RONDE_WORLD="{}")
    run, _, started = words.index("run"), words.index("--starter"), words.index(str(mpirun))
    assert words[started - 2 : started] == ["--starter", "--"]
    assert sorted(words[run + 1 : started - 2]) == [
        "--fusion-threshold-mb=3",
        "--hosts=localhost:1,beta:1",
        "--network-interfaces=a",
        "--num-proc=2",
        "--ssh-port=2222",
    ]
    assert words[started + 1 : started + 4] == ["--allow-run-as-root", "--output", "tag,dir=out"]
    exported = ["-x", "PATH", "-x", "HOROVOD_FUSION_THRESHOLD=3145728", "-x", "HOROVOD_GLOO_IFACE=a"]
    assert words[words.index("-x") :] == [
        *exported,
        *["-x", "NCCL_SOCKET_IFNAME=a", "-x", "RONDE_WORLD", words[0], "worker", "--"],
    ]
    assert notes == []
    for arguments, variables in (
        (several, {"RONDE_SOCKET": "/run/ronde"}),
        ("-np 2 -H localhost:2 --network-interface a", {}),
    ):
        words, notes = launched(arguments, **variables)
        assert words[0] == str(mpirun)
        assert notes == ["--network-interface"]


def test_mpirun_with_sidecars_that_the_user_started() -> None:
    spread = by_mpi(
        "-np 2 -H localhost:1,beta:1 -p 2222 -i my/key", PATH="/bin", RONDE_SOCKET="/run/ronde", OLDPWD="/", _="x"
    ).options
    assert spread[-4:] == ["-x", "PATH", "-x", "RONDE_SOCKET"]
    assert spread[spread.index("plm_rsh_args") + 1] == "-p 2222 -i my/key"
    with pytest.raises(ValueError, match="Requested more processes"):
        by_mpi("-np 3 -H localhost:2")
    assert (mpi.is_here("127.0.0.1"), mpi.is_here("[::1]"), mpi.is_here("beta")) == (True, True, False)


@pytest.mark.parametrize("flag", ["--mpi", "--jsrun"])
def test_elastic_jobs_have_no_other_starter(flag: str) -> None:
    given, _ = launch.parse(f"-np 3 --min-np 2 {flag}".split())
    given.pop("command")
    with pytest.raises(ValueError, match="elastic jobs are started by `ronde run`; leave out --mpi and --jsrun"):
        launch.launcher_of(given)


def test_only_open_mpi_is_accepted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpi.release("mpirun (Open MPI) 4.1.4\n\nReport bugs") == 4
    assert mpi.release("mpirun (OpenRTE) 3.1.0") == 3
    for text in ("HYDRA build details:\n    Version: 4.0.2", "Intel(R) MPI Library", ""):
        with pytest.raises(ValueError, match="--mpi needs Open MPI"):
            mpi.release(text)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="MPI support has not been built, as there is no mpirun on PATH"):
        mpi.find()


REDUCED = """
import os, numpy, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
fields = ["sum", total, hvd.rank(), hvd.local_size(), os.environ["HOROVOD_LOG_LEVEL"], os.environ["PASSED"]]
# In one write: `print` writes word by word when unbuffered, and mpirun forwards each part.
os.write(1, f"{' '.join(map(str, fields))}{os.linesep}".encode())
"""


def test_mpirun_starts_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's own; it is beside the Python of the tests."""
    pytest.importorskip("torch")
    if not pathlib.Path(sys.executable).with_name("mpirun").is_file():
        leave_out("mpi", "there is no mpirun beside this Python; `make setup` installs it")
    beside = [str(pathlib.Path(sys.executable).parent), str(pathlib.Path(ronde_binary()).parent)]
    arguments = ["-np", "2", "--mpi", "--mpi-args=-x PASSED=this", "--log-level", "WARNING"]
    done = horovodrun(*arguments, sys.executable, "-c", REDUCED, path=os.pathsep.join(beside))
    assert done.returncode == 0, done.stderr
    lines = [line.partition("sum ")[2] for line in done.stdout.splitlines() if "sum " in line]
    assert sorted(lines) == [f"2.0 {rank} 2 WARNING this" for rank in range(2)]
    failed = horovodrun("-np", "2", "--mpi", "sh", "-c", "exit 3", path=os.pathsep.join(beside))
    assert failed.returncode == 3


SPREAD = """
import os, pathlib, socket, stat, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
token = pathlib.Path(os.environ["RONDE_TOKEN_FILE"])
mode = oct(stat.S_IMODE(token.stat().st_mode))
places = [hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
secret = token.read_bytes()
is_secret_exposed = any(secret in value.encode() or secret.hex() in value for value in os.environ.values())
names = [socket.gethostname(), os.environ["HOROVOD_HOSTNAME"]]
fields = ["sum", total, *places, *names, mode, is_secret_exposed, os.environ["PASSED"]]
os.write(1, f"{' '.join(map(str, fields))}{os.linesep}".encode())  # see above
hvd.barrier()
hvd.shutdown()
"""


@pytest.fixture
def spread() -> Iterator[TwoHosts]:
    """Two hosts for processes of mpirun."""
    pytest.importorskip("torch")
    if not pathlib.Path(sys.executable).with_name("mpirun").is_file():
        leave_out("mpi", "there is no mpirun beside this Python; `make setup` installs it")
    with two_hosts() as hosts:
        yield hosts


def on_hosts(hosts: TwoHosts, *arguments: str, slots: int = 2) -> subprocess.CompletedProcess[str]:
    """`horovodrun --mpi` on the first of two hosts, with processes on both."""
    folders = [hosts.folder, pathlib.Path(sys.executable).parent, pathlib.Path(ronde_binary()).parent]
    list_ = ",".join(f"{address}:{slots}" for address in hosts.addresses)
    environment = {
        **os.environ,
        "RONDE_BIN": "",
        "PASSED": "this; and, 'that'",
        "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
        "PYTHONPATH": f"{PACKAGE}{os.pathsep}{COMPAT}",
        "TMPDIR": str(hosts.folder),
    }
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", str(2 * slots), "--mpi", "-H", list_, *arguments]
    command = hosts.on_first(command)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)


def test_mpirun_starts_the_processes_of_several_hosts(spread: TwoHosts) -> None:
    done = on_hosts(spread, "--verbose", sys.executable, "-c", SPREAD)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("sum ")[2] for line in done.stdout.splitlines() if "sum " in line]
    (a, b), (name_a, name_b) = spread.addresses, spread.names
    assert sorted(lines) == [
        f"4.0 {rank} {rank % 2} 2 {rank // 2} 2 {[name_a, name_b][rank // 2]} {[a, b][rank // 2]} 0o400 False "
        "this; and, 'that'"
        for rank in range(4)
    ]
    assert spread.reached() == {b}
    # The sidecars' arguments contain the addresses over which they reach each other.
    assert f"sidecar 1 ({b}) at {b} over v0" in done.stderr
    assert not list(spread.folder.glob("ronde-*"))


# mpirun gives the status of whoever ends first, and ends the others: rank 0 leaves that to rank 1, which lets it print
# before.
FAILING = """
import pathlib, sys, time
import horovod.torch as hvd
hvd.init()
marker = pathlib.Path(sys.argv[1])
if hvd.rank() == 1:
    hvd.shutdown()
    while not marker.exists():
        time.sleep(0.05)
    raise SystemExit(5)
try:
    hvd.barrier()
except hvd.HorovodInternalError as error:
    print(error, file=sys.stderr, flush=True)
    marker.touch()
    time.sleep(60)
"""


def test_a_process_that_fails_ends_the_job_of_several_hosts(spread: TwoHosts) -> None:
    done = on_hosts(spread, sys.executable, "-c", FAILING, str(spread.folder / "marker"), slots=1)
    assert done.returncode == 5
    assert re.search(r"ronde: \S*mpirun exited with code 5; its output is above \[RONDE-E219\]", done.stderr)
    assert "rank 1 has shut down" in done.stderr
    assert not list(spread.folder.glob("ronde-*"))


def test_processes_on_unexpected_hosts_are_reported(spread: TwoHosts) -> None:
    done = on_hosts(spread, "--binding-args=--map-by ppr:1:node", "-np", "2", "true")
    assert done.returncode == 64, done.stderr
    text = r"rank \d runs on rondepy\S+, as one of 1 there, but the job's sidecar expects it on host 10\.76\.0\.[12]"
    assert re.search(text, done.stderr), done.stderr
    assert "let mpirun fill the same hosts in the same order" in done.stderr
