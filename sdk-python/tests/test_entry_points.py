"""The wheel's entry points in programs that never import ronde. They are those of pyproject.toml."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
from typing import Callable

import pytest
from conftest import WORKERS
from installed_wheel import PACKAGE, describe_wheel, of_job

pytest.importorskip("torch")

# Seconds of processor time that the entry point may add to `import torch`.
COST_MAX_S = 0.005


@pytest.fixture(scope="session")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the metadata of an installed wheel that has the project's entry points."""
    return describe_wheel(tmp_path_factory.mktemp("metadata"))


def python(code: str, paths: list[pathlib.Path], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", ["ronde", "ronde://"])
def test_the_name_works_where_ronde_is_not_imported(
    world: Callable[..., str], metadata: pathlib.Path, name: str
) -> None:
    """Also with the default `env://`, for which PyTorch alone opens a listener on rank 0."""
    output = world("by_name.py", 2, 1, name, options=of_job(metadata))
    assert output.count("of 2 has the sum over ronde with 0 listeners") == 2


def test_rank_and_size_are_the_jobs_where_pytorchs_variables_are_missing(
    world: Callable[..., str], metadata: pathlib.Path
) -> None:
    """As in Slurm, Kubernetes and compose, whose scripts set RONDE_JOB and RONDE_RANK."""
    output = world("job_alone.py", 2, 1, str(WORKERS / "by_name.py"), "ronde", options=of_job(metadata))
    assert output.count("of 2 has the sum over ronde with 0 listeners") == 2
    variables = of_job(metadata, RONDE_AUTOINIT="1")
    output = world("job_alone.py", 2, 1, str(WORKERS / "by_name.py"), "automatic", options=variables)
    assert output.count("of 2 has the sum over ronde with 0 listeners") == 2


@pytest.mark.parametrize("local", [[], ["local"]])
def test_rank_0_serves_the_store_of_groups_of_gloo_that_it_is_no_member_of(
    world: Callable[..., str], metadata: pathlib.Path, local: list[str]
) -> None:
    assert world("mixed_groups.py", 3, 1, *local, options=of_job(metadata)).count("gloo beside ronde") == 3


def test_a_store_that_cannot_be_opened_is_an_error(world: Callable[..., str], metadata: pathlib.Path) -> None:
    output = world("job_alone.py", 2, 1, str(WORKERS / "no_address.py"), options=of_job(metadata))
    assert output.count("MASTER_ADDR and MASTER_PORT are not set") == 2


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_may_end_without_destroying_groups(world: Callable[..., str], metadata: pathlib.Path, late: int) -> None:
    """The rank that is done waits for the others' operations."""
    output = world("no_destroy.py", 2, 1, str(late), options=of_job(metadata))
    assert output.count("sum 1.0") == 2


def test_gloo_works_in_the_same_job(world: Callable[..., str], metadata: pathlib.Path) -> None:
    output = world("by_name.py", 2, 1, "gloo", options=of_job(metadata))
    assert len(re.findall("of 2 has the sum over gloo with [12] listeners", output)) == 2


def test_the_name_works_without_the_call_in_import_torch(world: Callable[..., str], metadata: pathlib.Path) -> None:
    """PyTorch 2.15 has entry points for backends; it calls them by name."""
    import torch.distributed

    if not hasattr(torch.distributed.Backend, "_ensure_backend_registered"):
        pytest.skip("this PyTorch has no entry points for backends of torch.distributed")
    options = of_job(metadata, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert world("by_name.py", 2, 1, "ronde", options=options).count("of 2 has the sum over ronde") == 2


def test_the_variable_makes_the_default_group(world: Callable[..., str], metadata: pathlib.Path) -> None:
    output = world("by_name.py", 2, 1, "automatic", options=of_job(metadata, RONDE_AUTOINIT="1"))
    assert output.count("of 2 has the sum over ronde with 0 listeners") == 2


INITIALIZED = "import torch.distributed as dist; print(dist.is_initialized())"


@pytest.mark.parametrize("value", ["0", "", "1"])
def test_the_variable_does_nothing_without_a_launcher(metadata: pathlib.Path, value: str) -> None:
    done = python(INITIALIZED, [PACKAGE, metadata], RONDE_AUTOINIT=value)
    assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)


def test_a_wrong_value_of_the_variable_is_an_error(metadata: pathlib.Path) -> None:
    code = """
    import torch.distributed as dist
    for attempt in range(2):
        try:
            dist.is_initialized()
        except RuntimeError as error:
            print(error)
    """
    done = python(code, [PACKAGE, metadata], RONDE_AUTOINIT="yes")
    assert done.stdout.count("RONDE_AUTOINIT is 'yes'; set it to 1") == 2, done.stderr


def test_a_group_that_cannot_be_made_is_an_error(metadata: pathlib.Path, tmp_path: pathlib.Path) -> None:
    job = {"RONDE_JOB": "none", "RONDE_RANK": "0", "RONDE_SIZE": "2", "RONDE_SOCKET": str(tmp_path)}
    done = python(INITIALIZED, [PACKAGE, metadata], RONDE_AUTOINIT="1", RONDE_START_TIMEOUT="1", **job)
    assert done.returncode != 0
    assert "False" not in done.stdout
    assert "RONDE_AUTOINIT=1: the default process group of torch.distributed cannot be made" in done.stderr


BROKEN = {
    "an exception": "raise OSError('a disk that fails')",
    "no extension": "from ronde import _ronde",
    "a syntax error": "this is not Python",
}
USE = """
import torch, torch.distributed as dist
print(torch.ones(2).sum().item())
try:
    dist.init_process_group("ronde", store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("reason", sorted(BROKEN))
def test_a_broken_ronde_does_not_break_import_torch(
    metadata: pathlib.Path, tmp_path: pathlib.Path, reason: str
) -> None:
    (tmp_path / "ronde").mkdir()
    (tmp_path / "ronde" / "__init__.py").write_text(BROKEN[reason] + "\n")
    shutil.copy(PACKAGE / "ronde_entry_points.py", tmp_path)
    done = python(USE, [tmp_path, metadata])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2.0\n")
    assert 'the backend "ronde" cannot be used: `import ronde.torch.distributed` failed with' in done.stdout
    assert done.stderr == ""


def test_a_pytorch_that_refuses_the_backend_is_reported_and_used(metadata: pathlib.Path) -> None:
    code = """
    import os
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch, torch.distributed as dist
    def refuse(*arguments, **settings): raise TypeError("another interface")
    dist.Backend.register_backend = refuse
    import ronde_entry_points
    ronde_entry_points.torch_backend()
    print(torch.ones(2).sum().item())
    os.environ["RONDE_AUTOINIT"] = "1"
    try:
        ronde_entry_points.torch_backend()
    except TypeError as error:
        print("raised", error)
    """
    done = python(code, [PACKAGE, metadata])
    assert done.stdout == "2.0\nraised another interface\n", done.stderr
    assert 'the backend "ronde" is not registered with PyTorch (TypeError: another interface)' in done.stderr


def test_importing_ronde_first_registers_once(metadata: pathlib.Path) -> None:
    code = "import ronde.torch.distributed, torch; print(torch.distributed.Backend.RONDE)"
    done = python(code, [PACKAGE, metadata])
    assert (done.stdout, done.stderr) == ("ronde\n", "")


def loads_of_the_entry_point(metadata: pathlib.Path) -> list[list[str]]:
    """The seconds of processor time that the entry point adds to `import torch` in a new process, and its modules."""
    code = """
    import os, sys, time
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    # As in an installation, which has bytecode: the second process finds it.
    sys.dont_write_bytecode, sys.pycache_prefix = False, BYTECODE
    from importlib.metadata import entry_points
    (entry,) = [entry for entry in entry_points(group="torch.backends") if entry.name == "ronde"]
    before, start = set(sys.modules), time.process_time()
    entry.load()()
    print(time.process_time() - start, *(set(sys.modules) - before))
    """
    code = code.replace("BYTECODE", repr(str(metadata / "bytecode")))
    return [python(code, [PACKAGE, metadata]).stdout.split() for _ in range(3)]


def test_import_torch_loads_nothing_else(metadata: pathlib.Path) -> None:
    assert [modules for _, *modules in loads_of_the_entry_point(metadata)] == [["ronde_entry_points"]] * 3


@pytest.mark.heavy
@pytest.mark.measured
def test_import_torch_takes_no_longer(metadata: pathlib.Path) -> None:
    """Processor time, as other programs use the machine; the least of three, as the first one may find a cold cache.

    Heavy although it is short: many tests at the same time make processor time longer, too.
    """
    assert min(float(seconds) for seconds, *_ in loads_of_the_entry_point(metadata)) < COST_MAX_S


def test_import_torch_calls_no_function_of_torch_cuda(metadata: pathlib.Path) -> None:
    """It would load NVML, or initialize CUDA, in every program."""
    code = """
    import os, sys
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    from importlib.metadata import entry_points
    called = []
    def note(frame, event, argument):
        if event == "call" and "/torch/cuda/" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)
        if event == "c_call" and "cuda" in getattr(argument, "__name__", "").lower():
            called.append(argument.__name__)
    sys.setprofile(note)
    for group in ["torch.backends", "torch.distributed.backends"]:
        (entry,) = [entry for entry in entry_points(group=group) if entry.name == "ronde"]
        entry.load()()
    import ronde.torch.distributed
    print(called)
    torch.distributed.distributed_c10d.BackendConfig("ronde")
    print("device_count" in called)
    """
    done = python(code, [PACKAGE, metadata])
    assert done.stdout == "[]\nTrue\n", done.stderr


@pytest.mark.parametrize(("count", "expected"), [(0, {"cpu": "ronde"}), (2, {"cpu": "ronde", "cuda": "ronde"})])
def test_groups_serve_the_devices_that_exist(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: dict[str, str]
) -> None:
    import torch
    import torch.distributed.distributed_c10d as c10d

    import ronde.torch.distributed  # noqa: F401

    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert c10d.BackendConfig("ronde").get_device_backend_map() == expected


@pytest.mark.parametrize(
    ("url", "variables", "found"),
    [
        ("env://", {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ("env://?rank=3&world_size=4", {"RANK": "1", "WORLD_SIZE": "2"}, (3, 4)),
        ("env://?rank=0", {"RANK": "1", "WORLD_SIZE": "2"}, (0, 2)),
        ("env://", {"RANK": "1"}, (1, None)),
        ("env://", {"RANK": "", "WORLD_SIZE": "2"}, (None, 2)),
    ],
)
def test_numbers_come_from_the_url_or_the_environment(
    url: str, variables: dict[str, str], found: tuple[int | None, int | None]
) -> None:
    from ronde.torch.distributed.env_rendezvous import numbers

    assert numbers(url, variables) == found


def test_numbers_that_are_none_are_an_error() -> None:
    from ronde.torch.distributed.env_rendezvous import numbers

    with pytest.raises(ValueError, match="RANK is 'one', but must be a number"):
        numbers("env://", {"RANK": "one", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("ronde", False), ("cpu:ronde,cuda:ronde", False), ("gloo", True), ("cpu:gloo,cuda:ronde", True), ("NCCL", True)],
)
def test_other_backends_are_recognized(backend: str, expected: bool) -> None:
    from ronde_entry_points import is_other

    assert is_other(backend) is expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RONDE_JOB": "j", "RONDE_RANK": "0"}, True),
        ({"RONDE_JOB": "j", "RONDE_RANK": ""}, False),
        ({"RONDE_JOB": "j", "RONDE_SOCKET": "/s"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
    ],
)
def test_a_job_is_named_with_the_rank_in_it(variables: dict[str, str], expected: bool) -> None:
    import ronde_entry_points

    assert ronde_entry_points.is_in_job(variables) is expected


def test_imports_of_pytorchs_own_modules_do_not_make_the_group(metadata: pathlib.Path) -> None:
    """Some read `group.WORLD` for default arguments; a launcher without a job would make that an error."""
    code = """
    import torch.distributed.nn, torch.distributed.fsdp, torch.distributed.tensor.parallel, torch.distributed.checkpoint
    import torch._dynamo
    print("imported")
    torch.distributed.is_initialized()
    """
    launcher = {
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    done = python(code, [PACKAGE, metadata], RONDE_AUTOINIT="1", **launcher)
    assert done.stdout == "imported\n", done.stderr
    assert "the default process group of torch.distributed cannot be made" in done.stderr
