"""The arithmetic of pods on recorded environments, the scripts that use it, and what they refuse."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from hosts import run

IMAGE = ROOT / "compose" / "image"
sys.path.insert(0, str(IMAGE))

import pod  # noqa: E402
import prepare  # noqa: E402
import workers  # noqa: E402

# A process may take ten seconds to start beside other tests.
PATIENCE_S = 60

# What the controllers set, and what the manifests add.
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "RONDE_NODE": "1",
    "RONDE_JOB": "train",
    "RONDE_NODES": "3",
    "RONDE_WORKERS_PER_NODE": "2",
    "RONDE_HOSTS": "train-node-0-{}.train",
    "RONDE_PORT": "7400",
}
TRAINER = {
    "JOB_COMPLETION_INDEX": "2",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29500",
    "RONDE_JOB": "digits",
    "RONDE_HOSTS": "digits-node-0-{}.digits",
}


def test_an_indexed_job() -> None:
    found = pod.of_environment(JOBSET)
    assert (found.index, found.nodes, found.workers, found.size) == (1, 3, 2, 6)
    assert list(found.ranks) == [2, 3]
    assert found.placement == [0, 0, 1, 1, 2, 2]
    assert found.peers == ("train-node-0-0.train:7400", "train-node-0-1.train:7400", "train-node-0-2.train:7400")


def test_kubeflow_trainer() -> None:
    found = pod.of_environment(TRAINER)
    assert (found.index, found.nodes, found.size, list(found.ranks)) == (2, 4, 32, list(range(16, 24)))
    assert found.peers[0] == f"{TRAINER['PET_MASTER_ADDR']}:7400"
    # Every rank is on the sidecar of its pod, as torchrun numbers them.
    for index in range(4):
        of_pod = pod.of_environment({**TRAINER, "PET_NODE_RANK": str(index)})
        assert all(of_pod.placement[rank] == index for rank in of_pod.ranks)


def test_a_job_without_a_number_of_workers_has_one_in_each_pod() -> None:
    given = {name: value for name, value in JOBSET.items() if name not in {"RONDE_WORKERS_PER_NODE", "RONDE_NODE"}}
    found = pod.of_environment(given)
    assert (found.workers, list(found.ranks), found.size) == (1, [1], 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RONDE_JOB": ""}, "RONDE_JOB is ''"),
        ({"RONDE_JOB": "Über"}, "1 to 63 characters"),
        ({"RONDE_NODES": ""}, "none of RONDE_NODES, PET_NNODES is set"),
        ({"RONDE_NODES": "1:4"}, "RONDE_NODES is '1:4', which is not a whole number"),
        ({"RONDE_NODES": "1025"}, "from 1 to 1024"),
        ({"RONDE_NODE": "3"}, "RONDE_NODE is 3; it must be a whole number from 0 to 2"),
        ({"RONDE_NODE": "-1"}, "not a whole number"),
        ({"RONDE_WORKERS_PER_NODE": "65"}, "from 1 to 64"),
        ({"RONDE_WORKERS_PER_NODE": "", "PET_NPROC_PER_NODE": "auto"}, "set numProcPerNode in the TrainJob"),
        ({"RONDE_NODES": "1024", "RONDE_WORKERS_PER_NODE": "8"}, "are 8192 ranks"),
        ({"RONDE_HOSTS": "train"}, "write {} once"),
        ({"RONDE_PORT": "70000"}, "from 1 to 65535"),
    ],
)
def test_a_wrong_environment_is_explained(changes: dict[str, str], words: str) -> None:
    with pytest.raises(pod.PodError) as refused:
        pod.of_environment({**JOBSET, **changes})
    assert words in str(refused.value)


def test_the_configuration_is_what_the_sidecar_reads(tmp_path: pathlib.Path) -> None:
    tomllib = pytest.importorskip("tomllib", reason="this Python cannot read TOML")
    text = prepare.configuration(pod.of_environment(JOBSET), tmp_path, has_secret=True)
    table = tomllib.loads(text)["sidecar"]
    assert table == {
        "job": "train",
        "index": 1,
        "peers": [f"train-node-0-{index}.train:7400" for index in range(3)],
        "placement": [0, 0, 1, 1, 2, 2],
        "job-secret-file": f"{tmp_path}/credentials/job-secret",
    }
    table = tomllib.loads(prepare.configuration(pod.of_environment(JOBSET), tmp_path, has_secret=False))["sidecar"]
    assert table["certs"] == f"{tmp_path}/credentials"
    assert "job" not in table


def prepared(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(IMAGE / "prepare.py"), *arguments], PATIENCE_S, env=environment)


def test_a_pod_gets_its_own_certificates_and_no_others(tmp_path: pathlib.Path, ronde: str) -> None:
    certs, out, secret = tmp_path / "certs", tmp_path / "out", tmp_path / "secret"
    out.mkdir()
    secret.mkdir()
    made = run([ronde, "certs", "once", "--job", "train", "--sidecars", "0-2", str(certs)], PATIENCE_S)
    assert made.returncode == 0, made.stderr
    for index in range(3):
        for name in ["cert.pem", "key.pem"]:
            (secret / f"sidecar-{index}-{name}").write_bytes((certs / f"sidecar-{index}" / name).read_bytes())
    (secret / "ca.pem").write_bytes((certs / "sidecar-0" / "ca.pem").read_bytes())
    done = prepared(["--credentials", str(secret), str(out)], JOBSET)
    assert done.returncode == 0, done.stderr
    found = {path.name: path.stat().st_mode & 0o777 for path in (out / "credentials").iterdir()}
    assert found == {"cert.pem": 0o400, "key.pem": 0o400, "ca.pem": 0o400}
    assert (out / "credentials").stat().st_mode & 0o777 == 0o700
    shown = run([ronde, "certs", "inspect", str(out / "credentials")], PATIENCE_S)
    assert shown.returncode == 0, shown.stderr
    assert "spiffe://ronde.local/job/train/sidecar/1" in shown.stdout
    # A container that starts again replaces what it left.
    assert prepared(["--credentials", str(secret), str(out)], JOBSET).returncode == 0


def test_a_secret_without_the_files_of_this_pod_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sidecar-0-key.pem").write_text("of another")
    done = prepared(["--credentials", str(tmp_path), str(tmp_path)], JOBSET)
    assert done.returncode == 1
    assert "neither job-secret nor sidecar-1-cert.pem, sidecar-1-key.pem, ca.pem is in" in done.stderr
    assert "which has sidecar-0-key.pem" in done.stderr
    assert not (tmp_path / "credentials").exists()


def test_a_file_that_is_removed_while_the_files_are_read_is_missing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the kubelet, or by who replaces them. The message is the same as before and after that."""
    for name in prepare.CERTIFICATES:
        (tmp_path / f"sidecar-1-{name}").write_text("old")
    read = prepare.read

    def then_one_is_removed(path: pathlib.Path) -> bytes | None:
        content = read(path)
        (tmp_path / "sidecar-1-key.pem").unlink(missing_ok=True)
        return content

    monkeypatch.setattr(prepare, "read", then_one_is_removed)
    messages = set()
    for _ in range(2):
        with pytest.raises(pod.PodError, match=r"nor sidecar-1-key\.pem is in") as refused:
            prepare.files_of(tmp_path, 1)
        messages.add(str(refused.value))
    assert len(messages) == 1, messages


def test_a_file_that_is_no_key_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "job-secret").write_bytes(b"x" * (prepare.FILE_BYTES_MAX + 1))
    done = prepared(["--credentials", str(tmp_path), str(tmp_path)], JOBSET)
    assert done.returncode == 1
    assert "it is no key or certificate" in done.stderr


def test_renewed_certificates_are_copied(tmp_path: pathlib.Path) -> None:
    secret, out = tmp_path / "secret", tmp_path / "out"
    secret.mkdir()
    out.mkdir()

    def write(text: str) -> None:
        for name in prepare.CERTIFICATES:
            (secret / f"sidecar-1-{name}").write_text(text)

    write("old")
    script = (
        f"import prepare, sys; prepare.FOLLOW_INTERVAL_S = 0.05; sys.argv[1:] = {[*ARGUMENTS, str(secret), str(out)]}"
    )
    command = [sys.executable, "-c", f"{script}; sys.exit(prepare.main())"]
    environment = {**JOBSET, "PYTHONPATH": str(IMAGE)}
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environment, stderr=errors, stdout=subprocess.DEVNULL) as following,
    ):
        wait_for(lambda: text_of(out / "credentials" / "key.pem") == "old")
        (secret / "sidecar-1-key.pem").unlink()
        wait_for(lambda: "the old credentials stay" in log.read_text())
        time.sleep(0.3)
        assert text_of(out / "credentials" / "key.pem") == "old", "half of a replacement is not copied"
        write("new")
        wait_for(lambda: text_of(out / "credentials" / "key.pem") == "new")
        following.send_signal(signal.SIGTERM)
        assert following.wait(timeout=PATIENCE_S) == 0
    assert log.read_text().count("the old credentials stay") == 1, "a mistake is reported once"


ARGUMENTS = ["--follow", "--credentials"]


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def text_of(path: pathlib.Path) -> str:
    return path.read_text() if path.exists() else ""


def started(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run(
        [sys.executable, str(IMAGE / "workers.py"), *command],
        PATIENCE_S,
        env={"PATH": os.environ["PATH"], **environment},
    )


def test_workers_get_their_ranks() -> None:
    done = started(
        ["sh", "-c", "echo $RONDE_RANK $RONDE_SIZE $RONDE_LOCAL_RANK $RONDE_LOCAL_SIZE $LOCAL_RANK $RONDE_JOB"], JOBSET
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["2 6 0 2 0 train", "3 6 1 2 1 train"]


# Rank 3 fails. Rank 2 ends after the starter has reported that, so it is the second one even if rank 3 starts late.
SECOND_FAILURE = """
[ "$RONDE_RANK" = 3 ] && exit 5
until grep -q "rank 3 exited" "$STARTER_LOG"; do kill -0 "$PPID" || exit 1; sleep 0.05; done
echo ended
exit 6
"""


def with_grace(grace_s: float, *command: str) -> list[str]:
    """The command line of the starter with another grace period."""
    script = f"import workers; workers.GRACE_S = {grace_s}; raise SystemExit(workers.main())"
    return [sys.executable, "-c", script, *command]


def test_the_first_failure_counts_and_the_others_may_end_by_themselves(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(IMAGE), "STARTER_LOG": str(log), **JOBSET}
    command = with_grace(PATIENCE_S, "sh", "-c", SECOND_FAILURE)
    with log.open("w") as errors:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
    assert done.returncode == 5, log.read_text()
    assert "ended" in done.stdout
    assert "rank 3 exited with code 5" in log.read_text()
    assert "rank 2 exited with code 6" in log.read_text()


def test_a_worker_that_does_not_end_is_killed() -> None:
    # The status is there before the end of the sleep, so the worker has been killed.
    command = with_grace(0.3, "sh", "-c", '[ "$RONDE_RANK" = 3 ] && exit 5; exec sleep 600')
    done = run(command, PATIENCE_S, env={"PATH": os.environ["PATH"], "PYTHONPATH": str(IMAGE), **JOBSET})
    assert done.returncode == 5
    assert "ranks [2] did not end" in done.stderr


def test_a_signal_reaches_the_workers() -> None:
    script = "trap 'echo stopped; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    command = [sys.executable, str(IMAGE / "workers.py"), "sh", "-c", script]
    environment = {"PATH": os.environ["PATH"], **JOBSET}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert [starter.stdout.readline(), starter.stdout.readline()] == ["ready\n", "ready\n"]
        starter.send_signal(signal.SIGTERM)
        output, _ = starter.communicate(timeout=PATIENCE_S)
    assert output.splitlines() == ["stopped", "stopped"]
    assert starter.returncode == 128 + signal.SIGTERM


def test_what_cannot_be_started_is_explained() -> None:
    done = started(["/nonexistent"], JOBSET)
    assert done.returncode == 127
    assert "cannot start '/nonexistent'" in done.stderr
    done = started(["true"], {})
    assert done.returncode == 64
    assert "nothing was started: RONDE_JOB is ''" in done.stderr
    assert started([], JOBSET).returncode == 64


def test_a_killed_worker_has_the_status_of_a_shell() -> None:
    assert workers.status_of(-9) == 137
    assert workers.outcome(-9) == "was ended by SIGKILL"
