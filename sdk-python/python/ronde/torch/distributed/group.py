"""Groups of `torch.distributed` whose operations ronde performs, in the form that the installed PyTorch can use.

A PyTorch of 2.15 or later calls a backend that is written in Python: the group is PyTorch's own, may have other
backends for other devices, and is to hooks, the profiler and compiled programs as any other. An older one calls only
whole groups that are written in Python; then the group has this backend for tensors of all devices.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch._C import _distributed_c10d as c10d

from ronde.errors import RondeError
from ronde.submission import read_nothing
from ronde.torch.distributed.collectives import Collectives
from ronde.torch.distributed.messages import Messages
from ronde.torch.distributed.monitored import monitored_barrier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.torch.distributed.groups import Groups
    from ronde.torch.distributed.ranks import Ranks
    from ronde.torch.distributed.work import Operation

# Both untyped, because they have more overloads of each method than PyTorch's functions call.
_ProcessGroup: Any = torch.distributed.ProcessGroup
_Backend: Any = getattr(c10d, "Backend", None)
# Operations that a whole group keeps for C++ while nobody waits for them.
_UNWAITED_MAX = 1024


def _can_extend_backend() -> bool:
    """Returns whether C++ calls methods of a Python class that extends `Backend`."""
    try:
        backend = type("Probe", (_Backend,), {"getBackendName": lambda self: "probe"})(0, 1)
        return bool(backend.name() == "probe")
    except (TypeError, RuntimeError, AttributeError):
        return False


def _keeps_operations() -> bool:
    """Returns whether C++ keeps the part in Python of an operation that a group in Python returns: it wraps it then."""
    made = c10d.Work()
    probe = type("Probe", (_ProcessGroup,), {"barrier": lambda self, opts: made})(0, 1)
    return _ProcessGroup.barrier(probe, c10d.BarrierOptions()) is not made


class Group(Collectives, Messages):
    """A group over a process set. Ranks are those within the group.

    Programs do not see this class, but one of its subclasses.
    """

    def _set_up(self, ranks: Ranks, name: str, label: str, timeout: datetime.timedelta, groups: Groups) -> None:
        """Sets the group up.

        name    -- PyTorch's name of the group
        label   -- a part of the names of its operations, unique among the groups of the same ranks
        timeout -- after which an operation is given up
        groups  -- those of its session, which make and keep it
        """
        self._begin_group(ranks, label, timeout, groups.completer)
        self._name, self.groups = name, groups

    if TYPE_CHECKING:

        def rank(self) -> int:
            """Returns this process's rank within the group."""

        def size(self) -> int:
            """Returns the number of ranks."""

    def getBackendName(self) -> str:  # noqa: N802
        """Returns `ronde`."""
        return "ronde"

    def name(self) -> str:
        """Returns `ronde`."""
        return "ronde"

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the timeout of later operations."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Shuts the group down, for `torch.distributed.destroy_process_group`."""
        self.groups.leave(self, False)

    def abort(self) -> None:
        """Shuts the group down without waiting for other ranks. Operations in flight fail."""
        self.fail_operations(RondeError(f"the process group {self._name} is aborted by this rank", "aborted"))
        self.groups.leave(self, True)

    def barrier(self, opts: Any = None) -> Operation:
        """Completes when all ranks have called it, together with all earlier operations of this rank."""
        return self._begin("barrier", self._ranks.request("barrier", read_nothing), opts, [])

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """A barrier whose RuntimeError after the timeout names the missing ranks.

        opts -- the timeout, or options with one
        """
        given = opts if isinstance(opts, datetime.timedelta) else opts.timeout
        monitored_barrier(self, given if given >= datetime.timedelta(0) else self._timeout, wait_all_ranks)

    def _get_sequence_number_for_group(self) -> int:
        """Returns how many operations this rank has begun in the group."""
        return self._count

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: sequence numbers begin at 0 on all ranks."""

    def part_of(self, ranks: Sequence[int], name: str, timeout: datetime.timedelta) -> Group | None:
        """Makes a group of some ranks of this one, in their order. Returns None if this rank is not one of them."""
        return self.groups.make(self.in_job(ranks), name, timeout)

    def in_job(self, ranks: Sequence[int]) -> list[int]:
        """Returns the job's ranks of these ranks within the group. Raises ValueError for one that it does not have."""
        return [self._ranks.in_job(rank) for rank in ranks]


class WholeGroup(Group, _ProcessGroup):  # type: ignore[misc]
    """A separate process group, for a PyTorch that calls no backend in Python.

    PyTorch calls a group made in Python directly, and passes its operations to the program unchanged.
    """

    def __init__(self, ranks: Ranks, name: str, *rest: Any) -> None:
        _ProcessGroup.__init__(self, ranks.me, ranks.size)
        self._is_alone = False
        self._unwaited: dict[Operation, None] = {}
        self._set_up(ranks, name, *rest)

    # Of messages that are submitted together PyTorch then begins each by itself.
    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_reconfigure = False

    @property
    def group_name(self) -> str:
        """The name under which meshes and compiled programs find the group."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        """Returns `group_name`."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        # While PyTorch makes a group, it queries the group's backends, on machines with devices.
        is_made = self in torch.distributed.distributed_c10d._world.pg_map
        return [torch.device("cpu"), torch.device("cuda")] if is_made else []

    def _get_backend(self, device: torch.device) -> WholeGroup:
        """Returns this group for tensors of any device."""
        del device
        return self

    def _begin(self, *arguments: Any, **options: Any) -> Operation:
        self._check_alone()
        return self._kept(super()._begin(*arguments, **options))

    def _begin_message(self, *arguments: Any, **options: Any) -> Operation:
        self._check_alone()
        return super()._begin_message(*arguments, **options)

    def _kept(self, operation: Operation) -> Operation:
        """Keeps a collective until somebody waits for it, if C++ does not. Of those for which nobody waits, the latest.

        C++ may be the one that waits, as DistributedDataParallel is. PyTorch 2.6 loses the part in Python, and with it
        the function that waits.
        """
        if _KEEPS_OPERATIONS:
            return operation
        self._unwaited[operation] = None
        operation.keeper = self._unwaited
        if len(self._unwaited) > _UNWAITED_MAX:
            self._unwaited.pop(next(iter(self._unwaited)), None)
        return operation

    def _check_alone(self) -> None:
        """Raises NotImplementedError if other backends are asked for, whose place this whole group has taken."""
        if self._is_alone:
            return
        # PyTorch notes what was asked for after it has made the group.
        asked = torch.distributed.distributed_c10d._world.pg_backend_config.get(self, "")
        others = [part for part in str(asked).split(",") if part.partition(":")[2] not in ("", "ronde")]
        if others:
            raise NotImplementedError(
                f"PyTorch {torch.__version__} calls no backend in Python beside others, and {asked} was asked for: "
                "give the backend ronde alone, or install PyTorch 2.15 or later"
            )
        self._is_alone = True

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        del device
        return self.end_coalescing()


_KEEPS_OPERATIONS = _keeps_operations()
CAN_EXTEND_BACKEND = _Backend is not None and _can_extend_backend()

if CAN_EXTEND_BACKEND:
    _OPTIONS: Any = _Backend.Options

    class BackendGroup(Group, _Backend):  # type: ignore[misc]
        """The backend of a process group of PyTorch.

        PyTorch asks a backend for what it supports by attributes. Those of its base class ask the C++ class, which asks
        this one again without end, so all of them are given here.
        """

        def __init__(self, ranks: Ranks, name: str, *rest: Any) -> None:
            _Backend.__init__(self, ranks.me, ranks.size)
            self._set_up(ranks, name, *rest)

        # Of messages that are submitted together PyTorch then begins each by itself.
        supports_coalescing = False
        supports_splitting = True
        supports_shrinking = True
        supports_reconfigure = False
        supports_window = False
        supports_abort_hooks = False
        _supports_time_estimate = False

        @property
        def options(self) -> Any:
            """The options that a group split from this one begins with."""
            options = _OPTIONS("ronde", timeout=self._timeout)
            options.global_ranks_in_group = list(self._ranks.order)
            options.group_name = self._name
            return options

        def eager_connect_single_device(self, device: torch.device | None) -> None:
            """Does nothing: the session is open before the first group is made."""

        def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Group | None:
            """Makes a group of some ranks of this one, for `torch.distributed.split_group`."""
            del store
            return self.part_of(ranks, opts.group_name, opts._timeout)

        def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Any = None) -> Group:
            """Makes a group without some ranks, for `torch.distributed.shrink_group`. These must not be called.

            In the same session if that is open and SHRINK_ABORT is not given, else in a new one of the others alone.
            """
            left = [rank for rank in range(self._ranks.size) if rank not in set(ranks_to_exclude)]
            if self._ranks.me not in left:
                raise RuntimeError(f"rank {self._ranks.me} is to be excluded, so it does not call shrink")
            timeout = self._timeout if opts_override is None else opts_override._timeout
            aborts = bool(shrink_flags & torch.distributed.distributed_c10d.SHRINK_ABORT)
            return self.groups.without_others(self.in_job(left), f"{self._name}.shrunk", timeout, aborts)

    GroupClass: Any = BackendGroup
else:
    GroupClass = WholeGroup


def group_of(process_group: Any) -> Group | None:
    """Returns the group of ronde that performs the operations of a process group on the host; None if none does."""
    if isinstance(process_group, Group):
        return process_group
    try:
        backend = process_group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has no backend for these tensors
        return None
    return backend if isinstance(backend, Group) else None
