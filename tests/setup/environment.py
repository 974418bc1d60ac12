"""Makes the Python environment that tests and demo run in. Does only what is missing, and prints what it does.

    python3 tests/setup/environment.py STAGE...     makes these stages; prints nothing when all exist
    python3 tests/setup/environment.py path [STAGE] prints the python of the environment with this stage

Stages; each brings the first with it:

    base       a virtual environment with NumPy
    tools      ruff, mypy, pytest and its xdist
    training   PyTorch for CPUs and scikit-learn
    bench      what the benchmark draws with, and Open MPI as a peer
    torch-suite  what PyTorch's own tests import
    notebook   what runs the notebook of the examples in a kernel

Further stages have separate environments, as tests import nothing from there (`path packaging` prints a python):

    packaging  what packs wheels
    cross      what compiles them against an old glibc, and for other machines; with `packaging`
    mpich      MPICH's mpiexec, whose name is also that of Open MPI's
    deploy     what checks manifests of Kubernetes and scripts of Slurm
    helm       helm, which renders them; with `deploy`
    frontends  Lightning, Accelerate, Transformers and DeepSpeed (0.3 GB); a layer on the environment of `training`,
               whose packages it sees, PyTorch too
    tensorflow TensorFlow with Keras 3 and Keras 2 (1.7 GB); `tensorflow-2.20` and `tensorflow-2.19` are older ones
    keras-torch  Keras 3 on PyTorch; a layer, too
    jax        JAX for CPUs, Optax and Flax (0.8 GB)
    mxnet      MXNet with the NumPy that it needs (0.2 GB)
    gpu        PyTorch for CUDA with its libraries (3 GB)
    ray        Ray with Train and Tune (0.4 GB); a layer, too
    docs       what builds the site of the documentation, and checks the workflow files in .github
    sbom       what checks lists of components
    spark      Spark with Spark Connect, TensorFlow for CPUs with Keras, and Lightning (2.3 GB); a layer, too
    page       what drives a browser, for the page of a sidecar
    monitor    TensorBoard and Weights & Biases, to which steps are logged; a layer, too
    petastorm  Petastorm with the PyArrow that it needs, beside which reading is measured (0.2 GB); a layer, too
    torchft    torchft's last release, and `torchft-nightly`, a later one with another interface; layers, too

The environment is outside of the checkout, in RONDE_CACHE (default ~/.cache/ronde), under a name made of the Python
it is for and the requirements' content: checkouts with equal requirements share it, and a change makes a new one. Those
of `bench`, `torch-suite` and `notebook` are not part of the name: a change installs them into the existing environment.
The torch of a system Python is linked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
# Each environment's stages; its first one makes it.
ENVIRONMENTS = {
    "python": ["base", "tools", "training", "bench", "torch-suite", "notebook"],
    "packaging": ["packaging", "cross"],
    "mpich": ["mpich"],
    "deploy": ["deploy", "helm"],
    "docs": ["docs"],
    "gpu": ["gpu"],
    "frontends": ["frontends"],
    "jax": ["jax"],
    "mxnet": ["mxnet"],
    "ray": ["ray"],
    "page": ["page"],
    "monitor": ["monitor"],
    "sbom": ["sbom"],
    "spark": ["spark"],
    "petastorm": ["petastorm"],
    "tensorflow": ["tensorflow"],
    "tensorflow-2.20": ["tensorflow-2.20"],
    "tensorflow-2.19": ["tensorflow-2.19"],
    "keras-torch": ["keras-torch"],
    "torchft": ["torchft"],
    "torchft-nightly": ["torchft-nightly"],
}
# The stages of the environment `python` that a layer needs.
LAYERS = {
    layer: ["base", "tools", "training"]
    for layer in ("frontends", "keras-torch", "monitor", "petastorm", "ray", "spark", "torchft", "torchft-nightly")
}
# What these packages depend on is not installed: of some only files are used, others' requirements list what they need.
WITHOUT_DEPENDENCIES = {"helm", "petastorm"}
# Their requirements are not part of the environment's name.
UNNAMED_STAGES = {"bench", "notebook", "torch-suite"}


def main() -> int:
    """Makes the requested stages; returns the process's exit status."""
    asked = sys.argv[1:]
    known = [stage for stages in ENVIRONMENTS.values() for stage in stages]
    if asked[:1] == ["path"] and len(asked) <= 2 and set(asked[1:]) <= set(known):
        kind = next(kind for kind, stages in ENVIRONMENTS.items() if (asked[1:] or ["base"])[0] in stages)
        print(location(kind) / "bin" / "python")
        return 0
    if not asked or not set(asked) <= set(known):
        print(__doc__, file=sys.stderr)
        return 64
    for kind, stages in ENVIRONMENTS.items():
        if wanted := [stage for stage in stages if stage in asked]:
            if kind in LAYERS:
                make_all("python", LAYERS[kind])
            make_all(kind, [stages[0], *wanted])
    return 0


def make_all(kind: str, wanted: list[str]) -> None:
    """Makes what is missing of an environment's stages."""
    folder = location(kind)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Two checkouts may be set up concurrently with the same environment.
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stage in wanted:
            if not stamp(folder, stage).exists():
                make(stage, folder)


def make(stage: str, folder: pathlib.Path) -> None:
    """Installs one stage and notes that it is there."""
    start = time.monotonic()
    python = str(folder / "bin" / "python")
    requirements = requirements_of(stage)
    if any(stage == stages[0] for stages in ENVIRONMENTS.values()):
        print(f"making a virtual environment in {folder}", flush=True)
        run(sys.executable, "-m", "venv", "--clear", str(folder))
    if stage == "base":
        link_torch(folder)
    print(f"installing {', '.join(names(requirements))}", flush=True)
    install = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    if stage in WITHOUT_DEPENDENCIES:
        install.append("--no-deps")
    with layered(folder) if stage in LAYERS else contextlib.nullcontext():
        run(*install, "-r", str(requirements))
    if stage == "training":
        run(python, str(HERE / "pytorch.py"), python)
    if stage == "helm":
        run(python, str(HERE / "helm.py"))
    stamp(folder, stage).touch()
    print(f"{stage}: done in {time.monotonic() - start:.0f} s", flush=True)


def location(kind: str) -> pathlib.Path:
    """The folder of the environment of this Python and these requirements."""
    # Only the first one links torch: the others are the same for whichever Python of this base asks.
    home = torch_home() if kind == "python" else None
    key = hashlib.sha256(f"{sys.version} {sys.base_prefix} {home}".encode())
    for stage in ENVIRONMENTS[kind]:
        if stage not in UNNAMED_STAGES:
            key.update(requirements_of(stage).read_bytes())
    if kind in LAYERS:
        key.update(location("python").name.encode())
    cache = os.environ.get("RONDE_CACHE") or os.path.expanduser("~/.cache/ronde")
    return pathlib.Path(cache) / f"{kind}-{key.hexdigest()[:12]}"


def requirements_of(stage: str) -> pathlib.Path:
    """The file that lists a stage's requirements."""
    return HERE / f"requirements-{stage}.txt"


def stamp(folder: pathlib.Path, stage: str) -> pathlib.Path:
    """The file that marks a stage as complete."""
    if stage not in UNNAMED_STAGES:
        return folder / f".{stage}"
    return folder / f".{stage}-{hashlib.sha256(requirements_of(stage).read_bytes()).hexdigest()[:12]}"


def torch_home() -> str | None:
    """The folder from which the Python that runs this would import torch; nothing is imported."""
    return next((entry for entry in sys.path if entry and pathlib.Path(entry, "torch", "version.py").exists()), None)


def link_torch(folder: pathlib.Path) -> None:
    """Adds an installed torch, the system's or another environment's, after the environment's own packages."""
    if home := torch_home():
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "linked.pth").write_text(home + "\n")


@contextlib.contextmanager
def layered(folder: pathlib.Path) -> Iterator[None]:
    """Puts an environment on that of `python`, and lets pip take PyTorch as installed, without what it requires.

    pip would install CUDA's libraries (3 GB), which pytorch.py leaves out: it reads the requirements of packages that
    exist, too. For the time of the installation the layer describes PyTorch by its name and version alone.
    """
    packages = next(folder.glob("lib/python*/site-packages"))
    below = location("python") / "bin" / "python"
    ask = "import sys, torch; print(torch.__version__, *(path for path in sys.path if path.endswith('-packages')))"
    version, *paths = subprocess.run([below, "-c", ask], check=True, capture_output=True, text=True).stdout.split()
    (packages / "linked.pth").write_text("\n".join(paths) + "\n")
    # That of `bench` finds its MPI in its own environment only, and Lightning initializes an MPI that it finds.
    (packages / "mpi4py.py").write_text('raise ImportError("layers of the environment have no MPI")\n')
    described = packages / f"torch-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    try:
        yield
    finally:
        shutil.rmtree(described)


def names(requirements: pathlib.Path) -> list[str]:
    """The requirements in a file, for people."""
    lines = requirements.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def run(*command: str) -> None:
    """Runs a command whose messages are for the user; exits with its status when it fails."""
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(f"`{' '.join(command)}` failed with status {status}; its messages are above")


if __name__ == "__main__":
    sys.exit(main())
