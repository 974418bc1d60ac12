"""compose/apptainer/ronde.def: its `%post` and `%test` run in a container of the same base, without Apptainer."""

from __future__ import annotations

import pathlib
import re
import shutil

from conftest import BUILD_S, Build
from engine import Engine
from project import ROOT

DEFINITION = ROOT / "compose" / "apptainer" / "ronde.def"
PYTHON = "ronde-test-python"
WHEEL = "ronde-test-wheel"
IMAGE = "ronde-test-apptainer"
ALONE = ["run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
# Where PyTorch is here, and then what the container has as its environment.
CHECK = """
export PYTHONPATH=$(echo /opt/ronde/lib/python3*/site-packages)
. /definition/environment
sh -eu /definition/test
horovodrun --check-build
"""


def section(name: str) -> str:
    """The lines of a section of the definition."""
    found = re.search(rf"(?ms)^%{name}\n(.*?)(?=^%|\Z)", DEFINITION.read_text())
    assert found is not None, name
    return found[1]


def test_the_commands_of_the_definition_run(docker: Engine, build: Build, tmp_path: pathlib.Path) -> None:
    """They install ronde and Horovod's names, and the definition's own test passes."""
    build("python", PYTHON)
    build("wheel", WHEEL)
    for name in ("post", "environment", "test"):
        (tmp_path / name).write_text(section(name))
    shutil.copytree(ROOT / "sdk-python" / "examples", tmp_path / "examples")
    assert section("files").split() == ["dist", "/opt/wheels", "sdk-python/examples", "/opt/ronde/examples"]
    file = ["-f", str(pathlib.Path(__file__).with_name("apptainer.Dockerfile"))]
    arguments = ["--build-arg", f"PYTHON={PYTHON}", "--build-arg", f"WHEEL={WHEEL}"]
    network = ["--network", "host"] if docker.is_own else []
    docker.run("build", *network, *file, *arguments, "-t", IMAGE, str(tmp_path), timeout_s=BUILD_S)
    found = docker.run(*ALONE, IMAGE, "sh", "-euc", CHECK)
    assert found.startswith("ronde "), found
    assert "[X] PyTorch" in found, found
