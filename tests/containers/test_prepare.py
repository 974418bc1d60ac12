"""The image that prepares pods of Kubernetes runs as they do: without root, on a read-only root file system."""

from __future__ import annotations

import pathlib

import pytest
from conftest import provide_base
from engine import Engine
from project import ROOT

TAG = "ronde-test-prepare"
SETTINGS = {
    "RONDE_JOB": "digits",
    "RONDE_NODES": "2",
    "RONDE_NODE": "1",
    "RONDE_WORKERS_PER_NODE": "2",
    "RONDE_HOSTS": "digits-node-0-{}.digits",
}


@pytest.fixture(scope="module")
def image(docker: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Builds it; its stages need nothing but the three scripts."""
    context = tmp_path_factory.mktemp("context")
    (context / "compose" / "image").mkdir(parents=True)
    for name in ["pod.py", "prepare.py", "workers.py"]:
        (context / "compose" / "image" / name).write_bytes((ROOT / "compose" / "image" / name).read_bytes())
    arguments = ["--network", "host", "--build-arg", f"BASE={provide_base(docker)}"] if docker.is_own else []
    docker.run(
        "build",
        *arguments,
        *["-f", str(ROOT / "compose" / "Dockerfile"), "--target", "prepare", "-t", TAG, str(context)],
        timeout_s=600,
    )
    return TAG


def test_a_pod_is_prepared(image: str, docker: Engine, tmp_path: pathlib.Path) -> None:
    secret, private, tools = (tmp_path / name for name in ["secret", "private", "tools"])
    for folder in (secret, private, tools):
        folder.mkdir()
        folder.chmod(0o777)
    (secret / "job-secret").write_text("for the test")
    (secret / "job-secret").chmod(0o444)
    options = ["--rm", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none"]
    mounts = {secret: "/run/ronde-secret:ro", private: "/run/ronde-private", tools: "/run/ronde-tools"}
    words = [word for source, place in mounts.items() for word in ("-v", f"{source}:{place}")]
    words += [word for name, value in SETTINGS.items() for word in ("-e", f"{name}={value}")]
    arguments = ["--credentials", "/run/ronde-secret", "--tools", "/run/ronde-tools", "/run/ronde-private"]
    output = docker.run("run", *options, *words, image, *arguments)
    assert "job digits, sidecar 1 of 2: ranks 2 to 3 of 4" in output
    copy = private / "credentials" / "job-secret"
    assert copy.read_text() == "for the test"
    assert (copy.stat().st_uid, copy.stat().st_mode & 0o777) == (10001, 0o400)
    assert "digits-node-0-0.digits:7400" in (private / "sidecar.toml").read_text()
    assert sorted(path.name for path in tools.iterdir()) == ["pod.py", "workers.py"]
