"""Begins and ends the session, and answers queries about this process and about ronde."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from ronde import _ronde, device, without_launcher
from ronde.client import connect
from ronde.elastic import membership
from ronde.elastic.notification import notification_manager
from ronde.errors import RondeError
from ronde.frameworks import communicators, hierarchy, ignored_variables, mpi, process_sets, world
from ronde.replay import CONTINUE, RAISE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ronde.client import Client

_log = logging.getLogger("ronde")
_DYNAMIC = "dynamic"
_ON_FAILURE = "RONDE_ON_FAILURE"
_IS_DYNAMIC_BY = ("RONDE_DYNAMIC_PROCESS_SETS", "HOROVOD_DYNAMIC_PROCESS_SETS")


class _Arguments:
    """The last arguments of `init`, for `init_again`."""

    given: tuple[Any, Any, dict[str, Any]] = (None, None, {})


_arguments = _Arguments()


class _Beginning:
    """Makes one thread at a time begin a session. Others wait for it, unless they are to be another rank."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread: int | None = None  # which begins a session
        self._rank: int | None = None  # which it was given

    @contextlib.contextmanager
    def once(self, rank: int | None) -> Iterator[bool]:
        """Returns a context that is entered with whether this thread begins the session.

        Raises ValueError if the process is another rank than the given one.
        """
        with self._changed:
            while self._thread is not None:
                _check_rank(self._rank, rank)
                # The thread gives up after its own timeout.
                self._changed.wait()
            if world.is_begun():
                _check_rank(world.current().client.rank, rank)
                is_first = False
            else:
                self._thread, self._rank, is_first = threading.get_ident(), rank, True
        try:
            yield is_first
        finally:
            if is_first:
                with self._changed:
                    self._thread = None
                    self._changed.notify_all()


def _check_rank(mine: int | None, given: int | None) -> None:
    if mine is not None and given is not None and given != mine:
        raise ValueError(
            f"hvd.init with rank {given} in a process that is rank {mine} already: a process has one session of hvd, "
            "which all its threads share. Use a process for each rank, or in threads a client for each: "
            "ronde.connect(rank=...)"
        )


_beginning = _Beginning()


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None, **settings: Any) -> None:
    """Connects this process to its sidecar. Does nothing if it is connected already.

    comm         -- the ranks that take part, as a list of numbers or a communicator of mpi4py, in ascending order;
                    default: all. All processes of the job must call `init`, each with a list that includes it. With
                    communicators, `mpirun` must have started the job.
    process_sets -- sets to register, the same on all ranks; or "dynamic", so that `add_process_set` and
                    `remove_process_set` may be called, as with HOROVOD_DYNAMIC_PROCESS_SETS=1
    settings     -- arguments of `ronde.connect`; the default of `on_failure` is that of RONDE_ON_FAILURE

    Ranks are those of `ronde run` or `horovodrun`. Under another launcher (mpirun, torchrun, srun, MPICH's mpiexec,
    jsrun) on one host they are those of the launcher, and a process without a launcher is a job of one rank. In these
    cases rank 0 starts the sidecar. Under another launcher on several hosts without sidecars, this raises RondeError
    with cause "settings" that names the ways: each process would train alone. In an elastic job this waits until the
    job has a membership that includes this worker; its rank there may differ from the last one.

    A process has one session, which all frameworks and threads share. Threads that are separate ranks connect by
    `ronde.connect(rank=...)`.

    Raises what `ronde.connect` does, and ValueError for invalid arguments, for another rank than that of the open
    session, and for a duplicate process set; the session stays open in the last two cases.
    """
    with _beginning.once(settings.get("rank")) as is_first:
        if is_first:
            _begin(comm, process_sets, settings)


def init_without_replay(comm: Any, sets: Sequence[Any] | str | None, settings: dict[str, Any], reason: str) -> None:
    """As `init`, for a framework whose operations cannot be submitted again among fewer ranks.

    Raises ValueError with the reason for `on_failure="continue"` in an elastic job.
    """
    on_failure = settings.get("on_failure", default_on_failure())
    if on_failure == CONTINUE and membership.is_elastic():
        raise ValueError(reason)
    init(comm, sets, **{**settings, "on_failure": on_failure or RAISE})


def _begin(comm: Any, process_sets: Sequence[Any] | str | None, settings: dict[str, Any]) -> None:
    _check(comm, process_sets)
    _arguments.given = (comm, process_sets, dict(settings))
    settings = {**without_launcher.settings_without_launcher(settings), **settings}
    if "on_failure" not in settings and (on_failure := default_on_failure()) is not None:
        settings["on_failure"] = on_failure
    # Registered after the handler that stops a sidecar started here, so it runs before that one.
    atexit.unregister(_end_of_program)
    atexit.register(_end_of_program)
    client = membership.connected(lambda: connect(**settings))
    try:
        is_dynamic = process_sets == _DYNAMIC or any(os.environ.get(name) == "1" for name in _IS_DYNAMIC_BY)
        begun = world.World(client, is_dynamic)
        if comm is not None:
            _restrict(begun, comm, settings.get("socket"))
    except BaseException:
        client.close()
        raise
    world.begin(begun)
    if client.rank == 0:
        ignored_variables.name_them()
    notification_manager.follow(client.membership_change if membership.is_elastic() else None)
    if membership.is_elastic():
        client.on_membership(_enter_membership)
    _sets_begin(comm, process_sets)
    if hierarchy.is_asked_for() and begun.base is None:
        begun.hosts = hierarchy.Hosts(client, _hosts(client, settings.get("socket")))


def default_on_failure() -> str | None:
    """Returns the value of RONDE_ON_FAILURE, which is the default of `on_failure`; None if it is not set."""
    return os.environ.get(_ON_FAILURE)


def _enter_membership() -> None:
    """Follows the client into another membership, which it has entered to complete operations in flight."""
    if not world.is_begun() or world.current().base is not None:
        return  # the client does not continue among some of the ranks
    world.current().take_all_ranks()
    process_sets.begin(None)
    notification_manager.note_replay()


def shutdown() -> None:
    """Ends the session for all ranks. Runs automatically when the program ends.

    Operations in flight fail, and unread results are lost. Does nothing without a session. `init` may be called again,
    any number of times. If `init` was given only some ranks, it waits for the other ranks' `shutdown`: a session ends
    for the whole job.
    """
    ended = world.end()
    if ended is None:
        return
    notification_manager.follow(None)
    process_sets.end()
    if ended.base is not None:
        with contextlib.suppress(RondeError):  # they have ended it already, or failed
            ended.client.barrier("ronde.worlds_end")
    ended.client.close()


def init_again() -> None:
    """Calls `shutdown`, then `init` with its last arguments."""
    shutdown()
    comm, sets, settings = _arguments.given
    init(comm, sets, **settings)


def _end_of_program() -> None:
    """Calls `shutdown`, unless an exception ends the program: then the other ranks receive the failure."""
    if getattr(sys, "last_value", None) is None or hasattr(sys, "ps1"):
        shutdown()
    elif (ended := world.end()) is not None:
        ended.client.end_of_program()


def is_initialized() -> bool:
    """Returns whether `init` has been called, and `shutdown` has not been called since."""
    return world.is_begun()


def client() -> Client:
    """Returns the process's client, ronde's native interface. Raises ValueError before `init`."""
    return world.current().client


def rank() -> int:
    """This process's number, from 0."""
    return world.current().rank


def size() -> int:
    """The number of processes."""
    return world.current().size


def max_size() -> int:
    """The largest number of processes that an elastic job may have (`--max-np`); in other jobs, and without a limit,
    the number of processes.
    """
    given = membership.max_size()
    return size() if given is None else given


def local_rank() -> int:
    """This process's number among those of the same sidecar: those of the same host, as `ronde run` starts them."""
    return world.current().local_rank


def local_size() -> int:
    """The number of processes of the same sidecar."""
    return world.current().local_size


def cross_rank() -> int:
    """The number of this process's sidecar among those that have a process of this local rank."""
    return world.current().cross_rank


def cross_size() -> int:
    """The number of sidecars that have a process of this local rank."""
    return world.current().cross_size


def is_homogeneous() -> bool:
    """Whether all sidecars serve the same number of processes."""
    return world.current().is_homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to record the phases of each operation in Chrome's trace format. Rank 0 writes the file.

    file_path   -- the file; an existing one is replaced
    mark_cycles -- whether to mark the times at which the coordinator orders operations

    Raises ValueError before `init`, and HorovodInternalError if the file cannot be written.
    """
    client().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the recording and completes the file. Raises ValueError before `init`."""
    client().stop_timeline()


def mpi_threads_supported() -> bool:
    """Returns whether other threads of this process may call MPI, such as by mpi4py, beside ronde.

    ronde itself never calls MPI. So if MPI is initialized already, this is whether it was with MPI_THREAD_MULTIPLE;
    otherwise it is True, unless HOROVOD_MPI_THREADS_DISABLE is 1 (`horovodrun --mpi-threads-disable`).

    Raises ValueError before `init`, and in a job that MPI's launcher has not started.
    """
    world.current()
    if not mpi.has_started_this():
        raise ValueError("Horovod has not been built with MPI support, or mpirun has not started this process.")
    return mpi.has_threads()


def mpi_enabled() -> bool:
    """Returns whether a session is open in a process that MPI's launcher has started. Tensors never go through MPI."""
    return world.is_begun() and mpi.has_started_this()


def mpi_built() -> bool:
    """Returns whether MPI's launcher (mpirun, mpiexec) has started this process. Tensors never go through MPI."""
    return mpi.has_started_this()


def gloo_enabled() -> bool:
    """Returns whether a session is open in a process that MPI's launcher has not started.

    Programs use this to detect a controller without MPI.
    """
    return world.is_begun() and not mpi.has_started_this()


def gloo_built() -> bool:
    """Returns True, though ronde contains no Gloo. Programs use this to detect support for CPUs without MPI."""
    return True


def nccl_built() -> int:
    """Returns the version of NCCL, such as 22304, if collectives on GPUs may use it here; else 0.

    They may with RONDE_GPU_STAGING=ronde and RONDE_GPU_LEVELS=auto or 2, where NVIDIA's driver and NCCL 2.18 or later
    are installed (docs/GPU.md). Nothing is compiled, so this is asked when the function is called.
    """
    if device.staging_choice() != "ronde" or device.levels_choice() == "1" or not _ronde.has_gpu_driver():
        return 0
    try:
        return _ronde.nccl_version()
    except RondeError as error:
        _log.info("no collective uses NCCL: %s", error)
        return 0


def ddl_built() -> bool:
    """Returns False: ronde does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Returns False: ronde does not use oneCCL."""
    return False


def cuda_built() -> bool:
    """Returns whether tensors on NVIDIA's GPUs can be used: whether their driver is installed here.

    Nothing is compiled, so this is asked when the function is called. It does not start the driver, which may list no
    GPU; `ronde check` shows that.
    """
    return _ronde.has_gpu_driver()


def rocm_built() -> bool:
    """Returns whether this process uses a PyTorch for AMD's GPUs, whose tensors PyTorch copies through main memory.

    This release has not been run on such a GPU.
    """
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.hip is not None


def _check(comm: Any, sets: Any) -> None:
    if comm is not None and not communicators.is_communicator(comm) and not isinstance(comm, (list, tuple, range)):
        raise ValueError(
            f"Invalid type of argument comm: {type(comm).__name__}; give a list of ranks or a communicator of mpi4py"
        )
    if isinstance(sets, str) and sets != _DYNAMIC:
        raise ValueError(f'process_sets is {sets!r}; give a list of hvd.ProcessSet, or "dynamic"')
    if sets is not None and not isinstance(sets, (str, list, tuple)):
        raise ValueError(f"process_sets is {sets!r}; give a list of hvd.ProcessSet")
    if comm is None and isinstance(sets, (list, tuple)) and any(getattr(each, "mpi_comm", None) for each in sets):
        raise NotImplementedError("process sets of MPI communicators need the global one too: hvd.init(comm, ...)")


def _sets_begin(comm: Any, sets: Sequence[Any] | str | None) -> None:
    process_sets.begin(comm)
    if sets and not isinstance(sets, str):
        process_sets.register_static(sets)


def _restrict(begun: world.World, comm: Any, socket: Any) -> None:
    """Restricts the world to some ranks, after all ranks of the job have exchanged their lists."""
    session = begun.client
    if communicators.is_communicator(comm):
        communicators.check_started_by_mpi(session.size)
        mine = communicators.world_ranks(comm)
    else:
        mine = communicators.rank_list(comm, "comm takes")
    everybodys = process_sets.exchanged(session, [mine, _sidecar_of_this_process(socket)], "comm")
    _check_restriction(mine, begun)
    hosts = {rank: host for rank, (_, host) in enumerate(everybodys)}
    # All ranks receive the same lists and register the same sets in the same order.
    for ranks in sorted({tuple(ranks) for ranks, _ in everybodys if _is_ranks_of(ranks, session.size)}):
        if len(ranks) == session.size:
            continue
        members = session.add_process_set(ranks)
        if list(ranks) == mine:
            numbers = sorted(set(hosts.values()))
            begun.restrict(members, [numbers.index(hosts[rank]) for rank in ranks])


def _hosts(session: Client, socket: Any) -> list[str]:
    return process_sets.exchanged(session, _sidecar_of_this_process(socket), "hosts")


def sidecar_id() -> str:
    """Returns a text that workers of this process's sidecar share."""
    return _sidecar_of_this_process(_arguments.given[2].get("socket"))


def _is_ranks_of(ranks: list[int], size: int) -> bool:
    return ranks == sorted(set(ranks)) and bool(ranks) and ranks[-1] < size


def _check_restriction(mine: list[int], begun: world.World) -> None:
    if not _is_ranks_of(mine, begun.size):
        raise ValueError(
            f"comm is {mine}; give ranks of the job, from 0 to {begun.size - 1}, once and in ascending order"
        )
    if begun.rank not in mine:
        raise ValueError(
            f"comm is {mine}, in which this process, rank {begun.rank} of the job, is not; each process gives the "
            "ranks among which it counts"
        )


def _sidecar_of_this_process(socket: Any) -> str:
    """Returns an identifier that workers of one sidecar share, also across containers: that of its directory."""
    directory = os.fspath(socket or os.environ.get("RONDE_SOCKET") or os.sep)
    found = os.stat(directory)
    return f"{os.uname().nodename if directory == os.sep else ''}:{found.st_dev}:{found.st_ino}"
