"""Installs PyTorch for CPUs into a virtual environment, with as little to download as the network allows.

    python3 tests/setup/pytorch.py VENV_PYTHON

A torch that works is left alone, wherever it comes from. An index of CPU builds named by RONDE_TORCH_INDEX is asked
first (about 0.2 GB; PyTorch publishes one). PyPI's wheel for Linux on x86-64 is linked against CUDA's libraries, 2.4 GB
that a CPU never calls. So the wheel comes alone (0.54 GB) and each of those libraries gets a stand-in: a shared object
of the same name whose functions all return an error, so that PyTorch finds no GPU. When that does not give a torch that
can train, pip installs all of it.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

CPU_INDEX = os.environ.get("RONDE_TORCH_INDEX")
# What torch imports on a CPU; the rest of its requirements are CUDA's libraries and Triton.
PURE_REQUIREMENTS = ["filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec"]
# For each version of a library's symbols, their names.
Symbols = dict[str, set[str]]

# A training step: convolution, matrix product, backward pass and optimizer all have to work.
PROBE = """
import torch
layer = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 2))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(4, 1, 8, 8)).square().sum().backward()
optimizer.step()
print("torch", torch.__version__)
"""


def main() -> int:
    """Tries the sources from the smallest download to the largest; returns the process's exit status."""
    python = sys.argv[1]
    if works(python):
        return 0
    for what, install in [
        *([(f"{CPU_INDEX} (0.2 GB)", from_cpu_index)] if CPU_INDEX else []),
        ("PyPI, without CUDA's libraries (0.55 GB)", without_cuda),
        ("PyPI, with CUDA's libraries (3 GB, 5.6 GB on disk)", whole),
    ]:
        print(f"installing torch from {what}", flush=True)
        if install(python) and works(python):
            return 0
    print("torch could not be installed; see the messages of pip above", file=sys.stderr)
    return 1


def works(python: str) -> bool:
    """Whether torch can be imported and can train."""
    probe = subprocess.run([python, "-c", PROBE], check=False, capture_output=True, text=True)
    print(probe.stdout.strip() or probe.stderr.strip().rsplit("\n", 1)[-1], flush=True)
    return probe.returncode == 0


def pip(python: str, *arguments: str) -> bool:
    """Runs pip; its messages are for the user."""
    command = [python, "-m", "pip", "install", "--progress-bar", "off", *arguments]
    return subprocess.run(command, check=False).returncode == 0


def from_cpu_index(python: str) -> bool:
    """The smallest download."""
    return pip(python, "--no-deps", "--index-url", str(CPU_INDEX), "torch") and pip(python, *PURE_REQUIREMENTS)


def without_cuda(python: str) -> bool:
    """PyPI's wheel alone, and stand-ins for the libraries that it is linked against."""
    if not (pip(python, *PURE_REQUIREMENTS) and pip(python, "--no-deps", "torch")):
        return False
    find = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    package = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    if not package.startswith(prefix_of(python)):
        print(f"the torch in {package} does not work, and it is not ours to mend", file=sys.stderr)
        return False
    try:
        return stand_in(pathlib.Path(package) / "lib")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no stand-ins for CUDA's libraries: {error}", file=sys.stderr)
        return False


def prefix_of(python: str) -> str:
    """The folder of an interpreter's environment: what lies elsewhere belongs to somebody else."""
    return run(python, "-c", "import sys; print(sys.prefix)").strip() + os.sep


def whole(python: str) -> bool:
    """A plain pip install."""
    return pip(python, "--force-reinstall", "torch")


def stand_in(folder: pathlib.Path) -> bool:
    """Writes a stand-in for each of CUDA's libraries that torch's own are linked against and that is not there."""
    missing: dict[str, Symbols] = {}
    unversioned: set[str] = set()
    for path in sorted(folder.glob("*.so*")):
        library_of = needed_versions(run("readelf", "-W", "-V", str(path)))
        for library in re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-W", "-d", str(path))):
            if is_cuda(library) and not (folder / library).exists():
                missing.setdefault(library, {})
        for symbol in re.findall(r"\sUND\s+(\S+)", run("readelf", "-W", "--dyn-syms", str(path))):
            name, _, version = symbol.partition("@")
            library = library_of.get(version)
            if library in missing:
                missing[library].setdefault(version, set()).add(name)
            elif not version and re.match(r"_*(cu[A-Zdbfs]|nccl|nvrtc|nvshmem|nvJitLink)", name):
                unversioned.add(name)
    for number, library in enumerate(sorted(missing)):
        # A symbol without a version may come from any library that is loaded: the first one has them all.
        compile_library(folder / library, missing[library], unversioned if number == 0 else set())
    print(f"{len(missing)} stand-ins for CUDA's libraries written to {folder}", flush=True)
    return bool(missing)


def needed_versions(description: str) -> dict[str, str]:
    """The library that each symbol version is expected from, from the output of readelf."""
    library_of, library = {}, ""
    for key, value in re.findall(r"(File|Name): (\S+)", description):
        if key == "File":
            library = value
        elif library:
            library_of[value] = library
    return library_of


def is_cuda(library: str) -> bool:
    """Whether a library is one of CUDA's; the driver (libcuda) is the system's."""
    return re.match(r"lib(cu(?!da\.)|nccl|nvrtc|nvshmem|nvJitLink)", library) is not None


def compile_library(path: pathlib.Path, versioned: Symbols, unversioned: set[str]) -> None:
    """Compiles functions of these names that return an error code."""
    # 100 is cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE, and an error to the other libraries as well.
    names = sorted(unversioned.union(*versioned.values()))
    with tempfile.TemporaryDirectory() as scratch:
        code, script = pathlib.Path(scratch, "stand_in.c"), pathlib.Path(scratch, "versions")
        code.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in names))
        script.write_text(
            "".join(f"{version} {{ global: {'; '.join(own)}; }};\n" for version, own in versioned.items())
        )
        versions = [f"-Wl,--version-script={script}"] if versioned else []
        options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}", *versions]
        run("cc", *options, "-o", str(path), str(code))


def run(*command: str) -> str:
    """The output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
