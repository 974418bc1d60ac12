"""The wheel, installed into new environments without a compiler.

RONDE_WHEEL names the wheel; without it the artefacts of `make build` are packed in the same way. The oldest and the
newest Python of the machine install it, with RONDE_ALL_PYTHONS=1 all of them.
"""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import zipfile

import pytest
from installed import Installed, pack_development_wheel, run

ROOT = pathlib.Path(__file__).parent.parent.parent
# The functions of the script that makes wheels.
sys.path.insert(0, str(ROOT / "sdk-python" / "packing"))
PACKING = runpy.run_path(str(ROOT / "sdk-python" / "packing" / "wheel.py"))
COMPILERS = ["cargo", "rustc", "cc", "gcc", "clang", "ld", "protoc", "cmake", "make"]
WHEEL_BYTES_MAX = 40_000_000

ALLREDUCE = """
import numpy as np, ronde
with ronde.connect() as client:
    mean = client.allreduce(np.arange(3, dtype=np.float32) * client.rank)
    print("rank", client.rank, "has", mean.tolist())
"""


def interpreters() -> list[str]:
    """The machine's Pythons from 3.9 on that can make environments, one of each version, the oldest first."""
    folders = [pathlib.Path(entry) for entry in os.environ.get("PATH", "").split(":")]
    homes = os.environ.get("PYENV_ROOT"), pathlib.Path.home() / ".pyenv"
    folders += [path for home in homes if home for path in pathlib.Path(home).glob("versions/*/bin")]
    found: dict[int, str] = {}
    for path in [sys.executable, *(str(path) for folder in folders for path in folder.glob("python3.*"))]:
        if path != sys.executable and not re.search(r"/python3\.\d+$", path):
            continue
        probe = "import sys, venv, ensurepip; print(sys.version_info[1] if sys.version_info >= (3, 9) else '')"
        done = subprocess.run([path, "-c", probe], check=False, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip():
            found.setdefault(int(done.stdout), path)
    versions = sorted(found)
    chosen = versions if os.environ.get("RONDE_ALL_PYTHONS") == "1" else sorted({versions[0], versions[-1]})
    return [found[version] for version in chosen]


BY_NAME = """
import sys, torch
import torch.distributed as dist
assert "ronde" not in sys.modules
if sys.argv[1:] != ["automatic"]:
    dist.init_process_group("ronde")
assert dist.is_initialized()
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("rank", dist.get_rank(), "has", total.tolist(), "of", dist.get_backend())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("python", interpreters())
def test_a_job_runs_where_nothing_can_be_compiled(python: str, wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    if is_foreign(wheel):
        pytest.skip("a wheel for another machine; its program is tried below")
    installed = Installed(python, wheel, tmp_path / "environment")
    assert [name for name in COMPILERS if shutil.which(name, path=str(installed.bin))] == []
    lines = installed.output_of("ronde", "run", "-np", "2", "--sidecars", "2", "python", "-c", ALLREDUCE).splitlines()
    assert sorted(line.split("has ")[1] for line in lines if "has " in line) == ["[0.0, 0.5, 1.0]"] * 2
    version = installed.output_of("ronde", "version")
    assert re.match(r"ronde \d+\.\d+\.\d+\nwire \d", version)
    assert installed.output_of("python", "-m", "ronde", "version") == version
    assert "ronde" in installed.output_of("ronde", "check")
    assert installed.output_of("ronde", "plugin", "inspect", "topk").startswith("topk@")
    assert installed.output_of("python", "-c", "import ronde; print(ronde.__version__)").strip() in version
    files = installed.output_of("python", "-c", "import importlib.metadata as m; print(*m.files('ronde'), sep='\\n')")
    assert {"ronde/py.typed", "ronde/_ronde.pyi", "ronde/torch/__init__.py"} <= set(files.split())


def test_pytorch_finds_the_backend_by_its_name(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With the torch of the tests' environment, and the entry points of the wheel."""
    if is_foreign(wheel):
        pytest.skip("a wheel for another machine")
    pytest.importorskip("torch")
    installed = Installed(sys.executable, wheel, tmp_path / "environment")
    site = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    linked = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "linked.pth").write_text("\n".join(linked) + "\n")
    for options, argument in [([], "named"), (["-x", "RONDE_AUTOINIT=1"], "automatic")]:
        lines = installed.output_of("ronde", "run", "-np", "2", *options, "python", "-c", BY_NAME, argument)
        assert lines.count("has [3.0] of ronde") == 2, lines


def test_the_program_of_another_machine_runs_in_an_emulator(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Without such a machine, an emulator checks that it starts, makes keys, and reads them."""
    if not is_foreign(wheel):
        pytest.skip("a wheel for this machine; it is installed above")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/scripts/ronde"))
        program = pathlib.Path(archive.extract(name, tmp_path))
    program.chmod(0o755)
    emulator = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", str(program)]

    def output_of(*arguments: str) -> str:
        return run([*emulator, *arguments])

    assert re.match(r"ronde \d+\.\d+\.\d+\nwire \d", output_of("version"))
    authority, certificates = str(tmp_path / "authority"), str(tmp_path / "certificates")
    output_of("certs", "init", "--job", "emulated", authority)
    output_of("certs", "issue", "--authority", authority, "--sidecars", "0-1", certificates)
    found = output_of(
        "certs", "inspect", authority, *(str(path) for path in sorted(pathlib.Path(certificates).iterdir()))
    )
    assert "spiffe://ronde.local/job/emulated/sidecar/1" in found


def test_a_wheel_that_is_packed_again_has_the_same_bytes(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """From the same artefacts, in another folder and later. `make wheel-test` compiles twice (packing/reproduce.py)."""
    if "RONDE_WHEEL" in os.environ:
        pytest.skip("a wheel that was made elsewhere")
    again = pack_development_wheel(tmp_path / "again")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def is_foreign(wheel: pathlib.Path) -> bool:
    """Whether the wheel is for another kind of machine."""
    return not wheel.stem.endswith(os.uname().machine)


def test_the_wheel_holds_what_it_should_and_no_more(wheel: pathlib.Path) -> None:
    assert wheel.stat().st_size <= WHEEL_BYTES_MAX
    assert re.fullmatch(r"ronde-[\d.]+-cp39-abi3-(manylinux_2_28|linux)_(x86_64|aarch64)\.whl", wheel.name)
    source = ROOT / "sdk-python" / "python"
    sources = {str(path.relative_to(source)) for path in source.rglob("*.py*") if path.suffix in {".py", ".pyi"}}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        notices = archive.read(next(name for name in names if name.endswith("THIRD_PARTY_LICENCES.txt"))).decode()
    packaged = {name for name in names if ".dist-info/" not in name}
    binary = next(name for name in packaged if name.endswith(".data/scripts/ronde"))
    shipped = {path.parent.name for path in (ROOT / "plugins").glob("*/Cargo.toml")} - {"abi", "sdk"}
    share = binary.replace("scripts/ronde", "data/share/ronde/plugins")
    plugins = {f"{share}/{name}.wasm" for name in shipped}
    nccl_net = binary.replace("scripts/ronde", "data/share/ronde/nccl/libnccl-net-ronde.so")
    assert packaged == sources | {"ronde/py.typed", "ronde/_ronde.abi3.so", binary, nccl_net} | plugins
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(re.search(rf"^{crate} \d", notices, re.MULTILINE) for crate in ["aws-lc-rs", "pyo3", "quinn", "tokio"])
    assert not re.search(r"^(ronde|proptest)\S* \d", notices, re.MULTILINE)


def test_a_wheel_without_a_plugin_is_not_made(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The artefacts may be anything: the plugins are missed before they are packed."""
    del wheel  # which has made the environment that packs
    python = run([sys.executable, str(ROOT / "tests" / "setup" / "environment.py"), "path", "packaging"]).strip()
    (tmp_path / "bf16.wasm").touch()
    names = {"BINARY": "ronde", "EXTENSION": "lib_ronde.so", "NCCL_NET": "libnccl_net_ronde.so", "PLUGINS": "."}
    environment = {f"RONDE_WHEEL_{name}": str(tmp_path / path) for name, path in names.items()}
    command = [python, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "dist")]
    done = subprocess.run(
        command,
        cwd=ROOT / "sdk-python",
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "lacks adasum, clipped-mean, fp16" in done.stderr
    assert "run `make plugins`" in done.stderr
    assert not list(tmp_path.glob("dist/*.whl"))


def test_the_artefacts_need_no_newer_glibc_than_the_tag(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(("/scripts/ronde", ".so"))]
        paths = [pathlib.Path(archive.extract(name, tmp_path)) for name in names]
    assert len(paths) == 3
    extension = next(path for path in paths if path.name == "_ronde.abi3.so")
    assert "PyInit__ronde" in PACKING["readelf"]("--dyn-syms", extension)
    for path in paths:
        assert wheel.stem.endswith(PACKING["machine"](path))
        assert PACKING["too_new"](path, (2, 99)) == []
        # Every program needs more than the first glibc, so the check must find versions.
        assert any("GLIBC_" in text for text in PACKING["too_new"](path, (2, 1)))
        if "manylinux_2_28" in wheel.name:
            assert PACKING["too_new"](path, (2, 28)) == []
