"""The entry points of the wheel, which PyTorch calls in `import torch`, or when a program first names "ronde".

It registers the backend "ronde", so that `torch.distributed.init_process_group("ronde")` works in programs that never
import ronde. It is a module of its own, which imports the standard library only: `import torch` in a program that does
not use ronde may neither fail nor become slower because of ronde. The package is imported when a group is made.

    torch.backends               `torch_backend`, by every PyTorch from 2.5 on, in `import torch`
    torch.distributed.backends   `register`, by PyTorch 2.15 and later, when a program names the backend
    torchrun.handlers            `torchrun_handler`, by torchrun in each of its agents

With RONDE_AUTOINIT=1 the default group is made when the program first asks for it (`Automatic`).
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BACKEND = "ronde"
AUTOINIT = "RONDE_AUTOINIT"
_REINSTALL = "Install ronde again: pip install --force-reinstall WHEEL, where WHEEL is the path of its wheel"
# What `ronde run` and the scripts for Slurm, Kubernetes and compose set for each worker. Only the first one also sets
# RONDE_SIZE, and RANK, WORLD_SIZE and MASTER_ADDR for PyTorch's `env://`.
_JOB = ("RONDE_JOB", "RONDE_RANK")
# What the agents of `torchrun --rdzv-backend ronde` pass to their workers: the directory in which they answer.
AGENT = "RONDE_AGENT"


def torch_backend() -> None:
    """Registers the backend.

    Does not raise if that fails, because PyTorch passes an exception on to the program that imports it. With
    RONDE_AUTOINIT it does: the program would train alone.
    """
    try:
        register()
    except Exception as error:
        if is_automatic(os.environ):
            raise
        print(
            f'ronde: the backend "{BACKEND}" is not registered with PyTorch ({type(error).__name__}: {error}). '
            "Import ronde.torch.distributed in the program to register it, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to "
            "do without ronde",
            file=sys.stderr,
        )


def torchrun_handler() -> Callable[[Any], Any]:
    """Returns the function that makes the handler of `torchrun --rdzv-backend ronde`; torchrun calls this always."""
    return _torchrun_handler


def register() -> None:
    """Registers a creator for the backend and handlers for `ronde://` and `env://`, which import ronde when called.

    Does nothing if that was done, or if PyTorch is built without torch.distributed.
    """
    import torch.distributed

    if not torch.distributed.is_available():
        return
    backend = torch.distributed.Backend
    handlers = _handlers()
    if BACKEND in handlers:
        return
    if BACKEND.upper() not in backend._plugins:
        register_creator(_create)
    handlers[BACKEND] = _rendezvous
    handlers["env"] = _environment(handlers["env"])
    if is_automatic(os.environ):
        Automatic().install()


def replace_rendezvous(handler: Callable[..., Any]) -> None:
    """Calls `register`, then replaces its handler of `ronde://`, for `ronde.torch.distributed`."""
    register()
    _handlers()[BACKEND] = handler


def register_creator(creator: Callable[[Any, Any], Any]) -> None:
    """Registers what makes groups, for devices that are not looked for before a group is made (`Devices`)."""
    import torch.distributed

    backend = torch.distributed.Backend
    backend.register_backend(BACKEND, creator, extended_api=True, devices=["cpu"])
    backend.backend_capability[BACKEND] = Devices()  # type: ignore[assignment]


class Devices(Sequence[str]):
    """The kinds of devices for whose tensors PyTorch calls the backend.

    Without a GPU that is the host alone: PyTorch's flight recorder ends the process with a fault where a group serves
    devices that do not exist. GPUs are counted when PyTorch reads this, which it does for each group: counting them in
    `import torch` loads NVML or initializes CUDA in programs that use neither.
    """

    def _found(self) -> list[str]:
        import torch

        return ["cpu", "cuda"] if torch.cuda.device_count() > 0 else ["cpu"]

    def __getitem__(self, index: Any) -> Any:
        return self._found()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def __repr__(self) -> str:
        return repr(self._found())


def is_in_job(environment: Mapping[str, str]) -> bool:
    """Whether the variables name a job of ronde and this process's rank in it: the session then knows its size.

    The agent of `torchrun --rdzv-backend ronde` names the job; torchrun sets the rank.
    """
    return all(environment.get(name) for name in _JOB) or bool(environment.get(AGENT) and environment.get("RANK"))


def is_other(backend: Any) -> bool:
    """Whether a backend as `init_process_group` takes it, such as `cpu:gloo,cuda:ronde`, is another one than ronde."""
    return {part.rpartition(":")[2].strip() for part in str(backend).lower().split(",")} != {BACKEND}


def is_automatic(environment: Mapping[str, str]) -> bool:
    """Whether the variable RONDE_AUTOINIT asks for a default group. An invalid value counts: its use is an error."""
    return environment.get(AUTOINIT, "") not in ("", "0")


def _import() -> Any:
    """Imports `ronde.torch.distributed`, which registers itself. Raises RuntimeError with the reason if it fails."""
    try:
        import ronde.torch.distributed
    except Exception as error:
        raise RuntimeError(
            f'the backend "{BACKEND}" cannot be used: `import ronde.torch.distributed` failed with '
            f"{type(error).__name__}: {error}. {_REINSTALL}"
        ) from error
    return ronde.torch.distributed


def _create(options: Any, backend_options: Any) -> Any:
    """Creates a group by the creator that `ronde.torch.distributed` registers."""
    _import()
    import torch.distributed

    creator = torch.distributed.Backend._plugins[BACKEND.upper()].creator_fn
    if creator is _create:
        raise RuntimeError(f'ronde.torch.distributed has not registered the backend "{BACKEND}"; install ronde again')
    return creator(options, backend_options)


def _torchrun_handler(parameters: Any) -> Any:
    """Makes the handler of a torchrun agent. Raises RuntimeError with the reason if ronde cannot be imported."""
    try:
        from ronde.torchrun import handler
    except Exception as error:
        raise RuntimeError(
            f'--rdzv-backend "{BACKEND}" cannot be used: `import ronde.torchrun` failed with {type(error).__name__}: '
            f"{error}. {_REINSTALL}"
        ) from error
    return handler.create(parameters)


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Handles `ronde://` by the handler that `ronde.torch.distributed` registers."""
    _import()
    handler = _handlers()[BACKEND]
    if handler is _rendezvous:
        raise RuntimeError("ronde.torch.distributed has not registered ronde://; install ronde again")
    yield from handler(url, **options)


def _handlers() -> dict[str, Callable[..., Any]]:
    """Returns PyTorch's handlers of rendezvous by their scheme; `torch.distributed.rendezvous` is also a function."""
    handlers: dict[str, Callable[..., Any]] = importlib.import_module(
        "torch.distributed.rendezvous"
    )._rendezvous_handlers
    return handlers


def _environment(plain: Callable[..., Any]) -> Callable[..., Iterator[tuple[Any, int, int]]]:
    """Wraps PyTorch's handler of `env://`, which opens a TCP listener on rank 0 at once.

    In jobs of ronde the store is opened by the first call that uses it, or when a group of another backend is made. The
    backend "ronde" does not use it. Elsewhere nothing changes.
    """

    @functools.wraps(plain)
    def handler(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        if not is_in_job(os.environ):
            return plain(url, **options)  # type: ignore[no-any-return]
        from ronde.torch.distributed import env_rendezvous

        return env_rendezvous.rendezvous(url, options)

    return handler


class Automatic:
    """RONDE_AUTOINIT=1: makes the default group of `torch.distributed` when the program first asks for it.

    Everything that asks whether torch.distributed is initialised reads one property of PyTorch, `GroupMember.WORLD`.
    Its first read calls `begin`. After that the property is PyTorch's own again. `group.WORLD` is the same property of
    another class, which modules read for default arguments while they are imported: too early to make a group.

    Only the process that a launcher started makes a group: neither its children, which inherit its variables, nor a
    program without a launcher. An error is raised at the first read, and again at each later one.
    """

    def __init__(self) -> None:
        import torch.distributed.distributed_c10d as c10d

        self._c10d = c10d
        self._property: Any = c10d._WorldMeta.__dict__["WORLD"]
        self._initialize: Callable[..., None] = c10d.init_process_group
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._is_begun = False
        self._error: Exception | None = None
        self._group: Any = None

    def install(self) -> None:
        """Replaces the property and `init_process_group`."""
        import torch.distributed

        def read(cls: type) -> Any:
            if cls is self._c10d.GroupMember:
                self.begin()
            return self._property.fget(cls)

        @functools.wraps(self._initialize)
        def initialize(backend: Any = None, *arguments: Any, **settings: Any) -> None:
            self.begin()
            if self._group is None or self._property.fget(self._c10d.GroupMember) is not self._group:
                return self._initialize(backend, *arguments, **settings)
            return _check_same(backend)

        meta: Any = self._c10d._WorldMeta
        meta.WORLD = property(read, self._property.fset)
        for module in (self._c10d, torch.distributed):
            module.init_process_group = initialize  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Makes the group, unless that was done or is being done by this thread.

        Raises RuntimeError if the value of the variable is wrong or the group cannot be made.
        """
        with self._lock:
            if self._error is not None:
                raise RuntimeError(str(self._error)) from self._error
            if self._is_begun:
                return
            self._is_begun = True
            try:
                if self._is_asked_for():
                    self._make()
            except Exception as error:
                self._error = error
                raise
            meta: Any = self._c10d._WorldMeta
            meta.WORLD = self._property

    def _is_asked_for(self) -> bool:
        value = os.environ.get(AUTOINIT, "")
        if value != "1":
            raise RuntimeError(f"{AUTOINIT} is {value!r}; set it to 1 to make the default group automatically, or to 0")
        is_child = os.getpid() != self._process or multiprocessing.parent_process() is not None
        return not is_child and _is_launched()

    def _make(self) -> None:
        try:
            _import()
            from torch.distributed.constants import default_pg_timeout

            from ronde.torch.distributed import env_rendezvous

            env_rendezvous.init_process_group(default_pg_timeout)
        except Exception as error:
            raise RuntimeError(
                f"{AUTOINIT}=1: the default process group of torch.distributed cannot be made: {error}"
            ) from error
        self._group = self._property.fget(self._c10d.GroupMember)
        # Processes that this one starts inherit its rank, which is taken.
        os.environ[AUTOINIT] = "0"


def _is_launched() -> bool:
    """Whether this process is to have a group: a job or a sidecar is named for it, or a launcher started it."""
    if os.environ.get("RONDE_SOCKET") or os.environ.get("RONDE_JOB"):
        return True
    _import()
    from ronde import _ronde

    return _ronde.LaunchedBy.detect(dict(os.environ)) is not None


def _check_same(backend: Any) -> None:
    """Accepts a call of `init_process_group` for the group that exists. Raises ValueError if it names another backend.

    backend -- as `init_process_group` takes it: a name, or names by device, such as `cpu:ronde`; None for any
    """
    if is_other(backend or BACKEND):
        raise ValueError(
            f"{AUTOINIT}=1 has made the default process group with the backend {BACKEND!r}, but the program calls "
            f"init_process_group({str(backend)!r}). Unset {AUTOINIT}, or name {BACKEND!r} in this call"
        )
