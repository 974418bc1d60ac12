"""Names of packages: the extras that Horovod's users type, the recipe for conda, and systems without a wheel."""

from __future__ import annotations

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
SDK = ROOT / "sdk-python"
# Those of Horovod's documentation, and what `pip install horovod[...]` is used with.
EXTRAS = {
    "pytorch",
    "tensorflow",
    "keras",
    "mxnet",
    "spark",
    "ray",
    "all-frameworks",
    "all-dependencies",
    "dev",
    "test",
}
BACKEND = runpy.run_path(str(SDK / "horovod-compat" / "backend.py"))


def packing_python() -> str:
    """The Python of the environment that packs."""
    environment = str(ROOT / "tests" / "setup" / "environment.py")
    subprocess.run([sys.executable, environment, "packaging"], check=True)
    done = subprocess.run(
        [sys.executable, environment, "path", "packaging"], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def extras() -> dict[str, list[str]]:
    tomllib = pytest.importorskip("tomllib")
    found: dict[str, list[str]] = tomllib.loads((SDK / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return found


def test_horovods_extras_are_there() -> None:
    assert set(extras()) >= EXTRAS
    requirements = pytest.importorskip("packaging.requirements")
    for name, needed in extras().items():
        assert needed, name
        for each in needed:
            requirements.Requirement(each)


def test_extras_of_horovod_compat_are_those_of_ronde() -> None:
    metadata = BACKEND["metadata"]()
    named = re.findall(r"(?m)^Provides-Extra: (.+)$", metadata)
    assert set(named) >= EXTRAS
    assert set(named) <= set(extras())
    for name in named:
        assert f'Requires-Dist: ronde[{name}]=={BACKEND["version"]()}; extra == "{name}"' in metadata


def test_frameworks_of_one_extra_do_not_contradict_each_other() -> None:
    """MXNet needs a NumPy that the others do not support."""
    assert "numpy<1.24" in extras()["mxnet"]
    assert not any("mxnet" in each for each in extras()["all-frameworks"])


def test_extras_that_combine_others_have_what_these_have() -> None:
    found = {name: set(needed) for name, needed in extras().items()}
    combined = ["all-frameworks", "keras", "lightning", "pytorch", "ray", "run", "spark", "tensorflow"]
    assert found["all-dependencies"] == set().union(*(found[name] for name in combined))
    assert found["dev"] == found["test"] | found["all-frameworks"]


def test_variables_for_builds_are_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["GPU_OPERATIONS", "LOCAL_VERSION", "SKIP_COMPILE", "WITHOUT_NVTX", "WITH_MPI", "WITH_NVTX"]
    for name in names:
        monkeypatch.setenv(f"HOROVOD_{name}", "1")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    wheel = BACKEND["build_wheel"](str(tmp_path))
    assert (tmp_path / wheel).exists()
    printed = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in printed] == [f"HOROVOD_{name}" for name in names]
    assert all("nothing is compiled" in line for line in printed)


def test_both_distributions_install_from_the_checkout_as_editable(tmp_path: pathlib.Path) -> None:
    """With the artefacts of `make build` in place of a release build."""
    target = pathlib.Path(os.environ["RONDE_BIN"]).parent
    extension = SDK / "python" / "ronde" / "_ronde.abi3.so"
    artefacts = {"BINARY": target / "ronde", "EXTENSION": extension, "NCCL_NET": target / "libnccl_net_ronde.so"}
    variables = {f"RONDE_WHEEL_{name}": str(path) for name, path in artefacts.items()}
    variables["RONDE_WHEEL_PLUGINS"] = str(target.parent / "plugins")
    program = "import sys; from hatchling import build; print(build.build_editable(sys.argv[1]))"
    command = [packing_python(), "-c", program, str(tmp_path)]
    subprocess.run(command, check=True, cwd=SDK, env={**os.environ, **variables}, timeout=300)
    BACKEND["build_editable"](str(tmp_path))
    wheels = sorted(str(path) for path in tmp_path.glob("*.whl"))
    assert len(wheels) == 2, wheels

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=300)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *wheels], check=True, timeout=300)
    origins = "import importlib.util as util; print(*(util.find_spec(name).origin for name in ('ronde', 'horovod')))"
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", origins], check=True, capture_output=True, text=True, env=outside, cwd=tmp_path
    )
    expected = [SDK / "python" / "ronde", SDK / "horovod-compat" / "src" / "horovod"]
    assert done.stdout.split() == [str(folder / "__init__.py") for folder in expected]
    done = subprocess.run([python.parent / "ronde", "version"], check=True, capture_output=True, text=True)
    assert done.stdout.startswith(f"ronde {BACKEND['version']()}")
    assert (python.parent / "horovodrun").is_file()


def test_an_editable_installation_places_the_extension(tmp_path: pathlib.Path) -> None:
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(SDK / 'packing')!r}); from hatch_build import place; "
        "place(*map(pathlib.Path, sys.argv[1:]))"
    )
    source, to = tmp_path / "built.so", tmp_path / "placed.so"

    def placed(content: str) -> int:
        source.write_text(content)
        subprocess.run([packing_python(), "-c", program, source, to], check=True)
        assert to.read_text() == content
        return to.stat().st_ino

    first = placed("one")
    assert placed("one") == first, "the same file is kept"
    with to.open() as loaded:
        assert placed("two") != first
        assert loaded.read() == "one", "a program that has loaded it keeps the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["built.so", "placed.so"]


def test_the_recipe_for_conda_renders() -> None:
    program = (
        "import json, sys; from rattler_build import Stage0Recipe, VariantConfig; "
        "rendered = Stage0Recipe.from_file(sys.argv[1]).render(VariantConfig()); "
        "print(json.dumps([str(each) for each in rendered]))"
    )
    recipe = SDK / "packing" / "conda" / "recipe.yaml"
    done = subprocess.run([packing_python(), "-c", program, str(recipe)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [re.findall(r"(?:package|version)='([^']+)'", each) for each in json.loads(done.stdout)]
    version = BACKEND["version"]()
    assert found == [["ronde", version], ["horovod-compat", version]]
    text = recipe.read_text()
    (numpy,) = [each for each in dependencies() if each.startswith("numpy")]
    assert f"- {numpy.replace('>=', ' >=')}" in text


def dependencies() -> list[str]:
    tomllib = pytest.importorskip("tomllib")
    found: list[str] = tomllib.loads((SDK / "pyproject.toml").read_text())["project"]["dependencies"]
    return found


@pytest.mark.parametrize(
    ("system", "wanted", "name"),
    [("darwin", "", "macOS"), ("win32", "", "Windows"), ("linux", "macosx_14_0_arm64", "macosx_14_0_arm64")],
)
def test_other_systems_are_refused_with_the_reason(system: str, wanted: str, name: str) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SDK / 'packing')!r}); import hatch_build; "
        "hatch_build.check_system('linux', ''); hatch_build.check_system('linux', 'manylinux_2_28_x86_64'); "
        f"hatch_build.check_system({system!r}, {wanted!r})"
    )
    done = subprocess.run([packing_python(), "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        f"RuntimeError: there is no wheel of ronde for {name}: workers and sidecars share memory by memfd"
        in done.stderr
    )
    assert "Linux container or virtual machine" in done.stderr


def test_importing_on_another_system_gives_the_reason() -> None:
    program = f"import sys; sys.path.insert(0, {str(SDK / 'python')!r}); sys.platform = 'darwin'; import ronde"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert re.search(r"ImportError: ronde runs on Linux only, and this is darwin: .*container", done.stderr), (
        done.stderr
    )
