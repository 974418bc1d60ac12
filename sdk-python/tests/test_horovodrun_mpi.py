"""`horovodrun --mpi`: what Open MPI's mpirun is told, where it cannot be used, and a job that it starts."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from conftest import ronde_binary
from test_horovodrun import horovodrun

from horovod.runner import launch, mpi, translation


def by_mpi(arguments: str, major: int = 5, **environment: str) -> translation.Translation:
    given, _ = launch.parse(arguments.split())
    given.pop("command")
    return mpi.translate(given, major, environment)


def test_what_mpirun_is_told() -> None:
    found = by_mpi("-np 2 --mpi --fusion-threshold-mb 1", PATH="/bin")
    words = ["--allow-run-as-root", "--output", "tag", "-np", "2", "-H", "localhost:2"]
    words += ["--bind-to", "none", "--map-by", "slot", "-x", "HOROVOD_FUSION_THRESHOLD=1048576"]
    assert found.options[: len(words)] == words
    assert found.notes == []
    former = by_mpi("-np 1 --mpi -H localhost:2 --output-filename out -prefix-timestamp --binding-args=-x", 4).options
    words = ["--allow-run-as-root", "--tag-output", "--timestamp-output", "--output-filename", "out"]
    assert former == [*words, "-np", "1", "-H", "localhost:2", "-x"]
    assert by_mpi("-np 1 --output-filename out -prefix-timestamp").options[2] == "tag,timestamp,dir=out"
    assert [note.split(" means")[0] for note in by_mpi("-np 1 --cycle-time-ms 1 --network-interface a").notes] == [
        "--cycle-time-ms",
        "--network-interface",
    ]


def test_mpirun_on_several_hosts_needs_sidecars() -> None:
    with pytest.raises(ValueError, match=r"other hosts \(localhost:1,beta:1\).*start a `ronde sidecar` on each"):
        by_mpi("-np 2 -H localhost:1,beta:1", PATH="/bin")
    spread = by_mpi(
        "-np 2 -H localhost:1,beta:1 -p 2222 -i my/key", PATH="/bin", RONDE_SOCKET="/run/ronde", OLDPWD="/", _="x"
    ).options
    assert spread[-4:] == ["-x", "PATH", "-x", "RONDE_SOCKET"]
    assert spread[spread.index("plm_rsh_args") + 1] == "-p 2222 -i my/key"
    with pytest.raises(ValueError, match="Requested more processes"):
        by_mpi("-np 3 -H localhost:2")
    with pytest.raises(NotImplementedError, match="elastic jobs are not there yet"):
        by_mpi("-np 3 --min-np 2")
    assert (mpi.is_here("127.0.0.1"), mpi.is_here("[::1]"), mpi.is_here("beta")) == (True, True, False)


def test_which_mpi_it_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
print("sum", total, hvd.rank(), hvd.local_size(), os.environ["HOROVOD_LOG_LEVEL"], os.environ["SAID"])
"""


def test_mpirun_starts_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's own; it is beside the Python of the tests."""
    pytest.importorskip("torch")
    if not pathlib.Path(sys.executable).with_name("mpirun").is_file():
        pytest.skip("no mpirun beside this Python; `make setup` installs it")
    beside = [str(pathlib.Path(sys.executable).parent), str(pathlib.Path(ronde_binary()).parent)]
    arguments = ["-np", "2", "--mpi", "--mpi-args=-x SAID=this", "--log-level", "WARNING"]
    done = horovodrun(*arguments, sys.executable, "-c", REDUCED, path=os.pathsep.join(beside))
    assert done.returncode == 0, done.stderr
    lines = [line.partition("sum ")[2] for line in done.stdout.splitlines() if "sum " in line]
    assert sorted(lines) == [f"2.0 {rank} 2 WARNING this" for rank in range(2)]
    failed = horovodrun("-np", "2", "--mpi", "sh", "-c", "exit 3", path=os.pathsep.join(beside))
    assert failed.returncode == 3
