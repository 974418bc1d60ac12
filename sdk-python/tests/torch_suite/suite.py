"""The tests of PyTorch's wheel, for the backend and the number of processes that the environment names.

PyTorch's tests choose by the name of the backend what they skip and which branch they take. Here ronde is to do all
that Gloo does, and all that only MPI does on the host. So the module gets a name that reads "ronde", equals "gloo", and
does not differ from "mpi". Nothing of PyTorch is copied or changed.

Processes are started by PyTorch's test case, without a launcher of ronde, and meet by a `file://` store.

SUITE_BACKEND -- "ronde" or "gloo"
WORLD_SIZE    -- the number of processes
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from typing import Any, Callable

BACKEND = os.environ["SUITE_BACKEND"]


class _AsGloo(str):
    """The name of a backend that is tested as Gloo is, and as MPI is on the host."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash("gloo")

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other and other != "mpi"


class _Environment(dict):  # type: ignore[type-arg]
    """The environment while PyTorch's module is imported; a variable of a process holds plain texts only."""


def _imported(name: str) -> Any:
    """Imports PyTorch's tests for a backend of this name."""
    environment = os.environ
    os.environ = _Environment(environment, BACKEND=name)  # type: ignore[assignment]  # noqa: B003
    try:
        return importlib.import_module("torch.testing._internal.distributed.distributed_test")
    finally:
        os.environ = environment  # noqa: B003


if BACKEND == "ronde":
    from torch.testing._internal.common_distributed import DistTestCases

    import ronde.torch.distributed  # noqa: F401

    # Where a test needs a backend of a set that names Gloo, PyTorch asks also whether that backend is available.
    DistTestCases.backend_feature["plugin"].add("ronde")
os.environ["BACKEND"] = "gloo"  # decorators ask for it
pytorch = _imported(_AsGloo(BACKEND) if BACKEND == "ronde" else BACKEND)


class Suite(pytorch.TestDistBackend, pytorch.DistributedTest._DistTestBase):  # type: ignore[misc]
    """All tests, each in new processes.

    These are forked by a server that has imported PyTorch, which takes a tenth of the time that the start of an
    interpreter takes. The server has no session and no group.
    """

    def setUp(self) -> None:
        super().setUp()
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])

        def process(target: Callable[..., None], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return context.Process(target=_run, name=name, args=(dict(os.environ), target, args, kwargs))

        self._start_processes(process)


def _run(
    environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Runs a test's process in the environment of the test; the server has that of its own start."""
    os.environ.clear()
    os.environ.update(environment)
    target(*args, **kwargs)


def names() -> list[str]:
    """Returns the names of all tests."""
    return sorted(name for name in dir(Suite) if name.startswith("test_"))
