"""`ronde plugin`: shipped plugins pass the conformance list, and so do those written from docs/PLUGINS.md.

Plugins are built here with cargo and clang; without clang the one in C is left out.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from blocks import of_section

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "PLUGINS.md"
SHIPPED = sorted(
    path.parent.name for path in (ROOT / "plugins").glob("*/Cargo.toml") if path.parent.name not in {"abi", "sdk"}
)
# Beyond their defaults.
SETTINGS = {
    "topk": [["ratio=1"], ["ratio=0.0001"]],
    "randomk": [["ratio=1"], ["ratio=0.0001", "seed=7"]],
    "int8": [["chunk=16"], ["chunk=16384"]],
    "onebit": [["chunk=64"], ["chunk=4096"]],
    "trimmed-mean": [["trim=0"], ["trim=0.5"]],
}

# Several compilations beside other tests.
BUILD_TIMEOUT_S = 1_200

Ronde = "Callable[..., subprocess.CompletedProcess[str]]"


@pytest.fixture(scope="module")
def ronde() -> Ronde:
    """Runs `ronde plugin` with these words."""
    binary = os.environ.get("RONDE_BIN")
    if not binary:
        pytest.skip("RONDE_BIN does not name the binary `ronde`; run the tests by `make test-python`")

    def run(*words: object, cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [binary, "plugin", *map(str, words)]
        return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=600)

    return run


@pytest.fixture(scope="module")
def shipped() -> Callable[[str], pathlib.Path]:
    """The modules that `make plugins` has built."""
    folder = pathlib.Path(os.environ.get("RONDE_BIN", "")).parent.parent / "plugins"

    def module(name: str) -> pathlib.Path:
        path = folder / f"{name}.wasm"
        if not path.exists():
            pytest.fail(f"{path} is not there; build it with `make plugins`")
        return path

    return module


def passed(done: subprocess.CompletedProcess[str]) -> str:
    """The output of a command that must succeed."""
    assert done.returncode == 0, f"{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def refused(done: subprocess.CompletedProcess[str], code: str) -> str:
    """The error of a command that must fail with this code."""
    assert done.returncode != 0, f"{done.args} succeeded:\n{done.stdout}"
    assert f"[RONDE-{code}]" in done.stderr, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_plugin_conforms(name: str, ronde: Ronde, shipped: Callable[[str], pathlib.Path]) -> None:
    for settings in [[], *SETTINGS.get(name, [])]:
        words = [word for setting in settings for word in ("--set", setting)]
        text = passed(ronde("test", shipped(name), *words))
        assert "fail" not in text
        assert re.search(rf"{name}@1\.0\.0 passes \d+ checks", text), text
        assert passed(ronde("check", shipped(name), *words)).startswith("ok: ")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_page_of_a_shipped_plugin_matches_its_manifest(
    name: str, ronde: Ronde, shipped: Callable[[str], pathlib.Path]
) -> None:
    manifest = json.loads(passed(ronde("inspect", "--json", shipped(name))))["manifest"]
    page = (ROOT / "plugins" / name / "README.md").read_text()
    kinds = [*manifest["kinds"].values()]
    types = re.search(r"\*\*Types\*\*: ([\w, ]+)\.", page)
    assert types, "the types"
    assert types[1].split(", ") == kinds[0]["dtypes"]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\d.]+) \| ([\d.]+) to ([\d.]+)", page, re.MULTILINE)
    shown = [(row[0], row[1], *map(float, row[2:])) for row in rows]
    parameters = manifest["parameters"]
    assert shown == [(p["name"], p["type"], p["default"], p["min"], p["max"]) for p in parameters], "the parameters"
    state = kinds[0].get("state_bytes", 0)
    assert (f"**State**: {state} bytes an element" in page) == (state > 0), "the state"


def test_a_module_is_described(ronde: Ronde, shipped: Callable[[str], pathlib.Path]) -> None:
    text = passed(ronde("inspect", shipped("topk")))
    assert "ratio: a float of 0.0001 to 1.0" in text
    assert "ronde log" in text
    assert "ronde_encode: () -> i32" in text
    assert re.search(r"SHA-256 [0-9a-f]{64}", text)


@pytest.mark.parametrize("kind", ["codec", "reducer"])
def test_a_new_plugin_builds_and_conforms(kind: str, ronde: Ronde, tmp_path: pathlib.Path) -> None:
    sdk = ROOT / "plugins" / "sdk"
    passed(ronde("new", "my-own", "--kind", kind, "--sdk", sdk, cwd=tmp_path))
    package = tmp_path / "my-own"
    assert "exists" in refused(ronde("new", "my-own", cwd=tmp_path), "E802")
    environment = {**os.environ, "CARGO_TARGET_DIR": str(tmp_path / "target")}
    tests = ["cargo", "test", "--offline", "--quiet"]
    tested = subprocess.run(tests, cwd=package, env=environment, timeout=BUILD_TIMEOUT_S, check=False)
    assert tested.returncode == 0
    text = passed(ronde("build", cwd=package))
    assert text.startswith("./my-own.wasm: my-own@0.1.0, ")
    passed(ronde("build", "--out", "plugins", cwd=package))
    passed(ronde("build", "--out", "plugins/of-today.wasm", cwd=package))
    assert sorted(path.name for path in (package / "plugins").iterdir()) == ["my-own.wasm", "of-today.wasm"]
    assert "passes" in passed(ronde("test", "my-own.wasm", cwd=package))
    assert "plugin/native" in passed(ronde("bench", "--time", 1, "--kib", 64, "my-own.wasm", cwd=package))


def test_a_folder_that_is_not_a_plugin_package_is_rejected(ronde: Ronde, tmp_path: pathlib.Path) -> None:
    assert "Cargo.toml is missing" in refused(ronde("build", cwd=tmp_path), "E802")


def test_the_plugin_in_c_conforms(ronde: Ronde, tmp_path: pathlib.Path) -> None:
    if not (shutil.which("clang") and shutil.which("wasm-ld")):
        pytest.skip("the plugin in C needs clang and lld (Debian: apt-get install clang lld)")
    source, commands = of_section(PAGE, "A plugin in C")
    assert source.language == "c"
    assert source.file is not None
    (tmp_path / source.file[0]).write_text(source.text)
    clang, test = commands.text.splitlines()
    subprocess.run(clang.split(), cwd=tmp_path, timeout=BUILD_TIMEOUT_S, check=True)
    assert "nonzero@1.0.0 passes" in passed(ronde(*test.split()[2:], cwd=tmp_path))


def test_signatures_are_made_and_verified(
    ronde: Ronde, shipped: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    shutil.copy(shipped("bf16"), tmp_path / "bf16.wasm")
    for name in ["release", "other"]:
        assert "ed25519:" in passed(ronde("keygen", name, cwd=tmp_path))
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert "not signed" in refused(ronde("verify", "--key", "release.pub", "bf16.wasm", cwd=tmp_path), "E804")
    assert "not signed" in refused(ronde("check", "--key", "release.pub", "bf16.wasm", cwd=tmp_path), "E804")
    passed(ronde("sign", "--key", "release", "bf16.wasm", cwd=tmp_path))
    passed(ronde("verify", "--key", "release.pub", "bf16.wasm", cwd=tmp_path))
    assert "signed by ed25519:" in passed(ronde("check", "--key", "release.pub", "bf16.wasm", cwd=tmp_path))
    assert "signed by" in refused(ronde("verify", "--key", "other.pub", "bf16.wasm", cwd=tmp_path), "E804")
    refused(ronde("check", "--key", "other.pub", "bf16.wasm", cwd=tmp_path), "E804")
    # The same plugin with one more custom section is another file.
    changed = (tmp_path / "bf16.wasm").read_bytes() + b"\x00\x02\x01x"
    (tmp_path / "bf16.wasm").write_bytes(changed)
    refused(ronde("verify", "--key", "release.pub", "bf16.wasm", cwd=tmp_path), "E804")
    refused(ronde("check", "bf16.wasm", cwd=tmp_path), "E804")


def test_wrong_arguments_are_explained(
    ronde: Ronde, shipped: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    topk = shipped("topk")
    assert "ratio" in refused(ronde("test", topk, "--set", "ratio=2"), "E805")
    assert "it has: ratio" in refused(ronde("test", topk, "--set", "rate=0.1"), "E805")
    assert "does not support float64" in refused(ronde("bench", topk, "--dtype", "float64"), "E805")
    (tmp_path / "no.wasm").write_bytes(b"\x00asm\x01\x00\x00\x00")
    assert "ronde.manifest" in refused(ronde("check", tmp_path / "no.wasm"), "E801")
    assert "cannot read" in refused(ronde("inspect", tmp_path / "none.wasm"), "E801")


def test_a_shipped_plugin_is_found_by_its_name(ronde: Ronde, tmp_path: pathlib.Path) -> None:
    assert passed(ronde("inspect", "topk", cwd=tmp_path)).startswith("topk@1.0.0: ")
    assert "cannot read" in refused(ronde("inspect", "no-such-plugin", cwd=tmp_path), "E801")
