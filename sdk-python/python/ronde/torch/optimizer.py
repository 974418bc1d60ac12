"""The distributed optimizer, which reduces gradients while the backward pass still computes others."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.elastic.membership import is_elastic
from ronde.frameworks.process_sets import ProcessSet, global_process_set, reduces
from ronde.ops import Adasum, Average
from ronde.submission import reduction
from ronde.torch.adasum import AdasumDistributed, DeltaReducer
from ronde.torch.compression import Compression, Compressor, PluginCompressor, codec_of
from ronde.torch.reducer import Reducer
from ronde.torch.wrapping import Wrapping, forget_made_gradients, trainable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ronde.plugins import PluginOp


def DistributedOptimizer(  # noqa: N802 -- the name that users know
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] | PluginCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: int | PluginOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Iterable[Iterable[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns an optimizer of the same class that reduces gradients over all ranks before each step.

    named_parameters          -- names that identify parameters on all ranks, usually `model.named_parameters()`
    compression               -- compresses a gradient before the submission and decompresses the result. With
                                 `Compression.plugin` a plugin does so between sidecars, for dense gradients,
                                 op=Average and op=Sum. All ranks of the set must make such optimizers in the same
                                 order, because residuals of error feedback are kept by this order; one that is made
                                 again for the same parameters, such as in an elastic job, has its former place
    backward_passes_per_step  -- backward passes whose gradients are summed locally before the reduction
    op                        -- Average or another reduction, also `PluginOp`. With Adasum each rank makes a local
                                 step, and the changes of the parameters are reduced, not the gradients
    gradient_predivide_factor -- with Average: divides by this before and by the rest after the sum
    num_groups                -- deprecated: use groups
    groups                    -- which gradients to reduce together: a number of groups with about as many parameters
                                 each, or lists of parameters, such as `[one.parameters(), two.parameters()]`; those in
                                 no list are reduced one by one. As in Horovod, members that require no gradient and
                                 those that are not the optimizer's are ignored
    sparse_as_dense           -- makes sparse gradients dense; without it all ranks' elements are gathered
    process_set               -- the ranks that reduce; other ranks make local steps

    Do not use the given optimizer afterwards: the result takes over its parameters and state.

    A parameter without a gradient on this rank counts as zeros; if no rank has one, its gradient stays None. (Ranks
    exchange which gradients they have in the first steps, then less and less often, but in each step while one of them
    lacks a gradient; in a step without this exchange the result is zeros.)

    `p.grad` stays the same tensor when it is reduced. From 64 KiB on its memory is replaced by the result's, so another
    tensor that shares that memory (`p.grad.view(-1)`, `p.grad.detach()`) keeps the old elements. The result is written
    in place for gradients that are grouped, cast, on another device, parts of a larger tensor or not contiguous, and
    with `init(mapped=False)` or RONDE_MAPPED=0. Bits are the same either way.

    The result has the attributes of Horovod's wrapper: `op`, `process_set`, `gradient_predivide_factor` and
    `backward_passes_per_step`, and the internal ones `_parameter_names`, `_requires_update`, `_allreduce_delay` and
    `_handles`.

    Gradients are of the floating-point types of `ronde.torch.allreduce` and have the same shapes on all ranks; `step`
    and `synchronize` raise what that does. Raises ValueError for what is no optimizer, reduction or compression, for
    `backward_passes_per_step` below 1, a factor without Average, a plugin as compression with a reduction that excludes
    it, invalid groups, and names that are missing or not unique.
    """
    _check(optimizer, op, gradient_predivide_factor, backward_passes_per_step)
    if num_groups != 0:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    groups = _listed(groups)
    names = _names(optimizer, named_parameters)
    codec_of(compression, op)  # validates also if nothing will be reduced
    if op == Adasum and (is_elastic() or reduces(process_set)):
        deltas = DeltaReducer(names, compression, backward_passes_per_step, process_set)
        return _wrapped(optimizer, AdasumDistributed, deltas)
    reducer = Reducer(names, compression, backward_passes_per_step, op, process_set)
    reducer.predivide, reducer.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    reducer.group(_grouped(groups, trainable(optimizer)))
    return _wrapped(optimizer, _Distributed, reducer)


def _check(optimizer: Any, op: Any, gradient_predivide_factor: float, backward_passes_per_step: int) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"DistributedOptimizer wraps an optimizer of PyTorch, not a {type(optimizer).__name__}")
    reduction(op, 1.0, 1.0)  # validates it here and not in the first backward pass
    if op != Average and gradient_predivide_factor != 1.0:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")


def _wrapped(optimizer: torch.optim.Optimizer, mixin: type, reducer: Any) -> Any:
    # Unwraps an optimizer that is distributed already; it must not be used any more.
    wrapped = getattr(optimizer, "_wrapped", optimizer)
    if wrapped is not optimizer:
        optimizer._ronde.leave()  # type: ignore[attr-defined]
    kind = type(wrapped)
    distributed: Any = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    result = distributed.__new__(distributed)
    # Shares groups, state and defaults, so that a scheduler made for the optimizer before keeps its effect.
    result.__dict__.update(optimizer.__dict__)
    # A scheduler patches the wrapped optimizer's step, and checks there whether a step was made.
    result.__dict__.pop("step", None)
    result._wrapped = wrapped
    result._ronde = reducer
    reducer.watch(result)
    return result


class _Distributed(Wrapping):
    """The mixin over the wrapped optimizer's class."""

    _ronde: Reducer

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. Afterwards clip them, and step within `skip_synchronize`."""
        self._ronde.synchronize(self)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context in which `step` does not reduce, because `synchronize` was called before."""
        self._ronde.steps_synchronize = False
        try:
            yield
        finally:
            self._ronde.steps_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces the gradients and makes a step of the wrapped optimizer.

        closure -- recomputes loss and gradients and returns the loss, as for `torch.optim.LBFGS`; called equally often
                   on all ranks. After each call the gradients are reduced and the loss, a floating-point tensor or a
                   number, is averaged over the ranks (with op=Sum it is summed), so that all ranks take the same
                   decisions; another result is returned unchanged. A closure may call `synchronize` itself, to clip
                   gradients: they are not reduced again then. Within `skip_synchronize` only the loss is averaged.

        Returns the result of the wrapped optimizer's step, the loss of the first call.
        """
        if closure is None:
            self._ronde.before_step(self)
        else:
            closure = self._ronde.reducing(self, closure)
        self._wrapped._opt_called = True  # PyTorch's schedulers warn without it
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients. Raises AssertionError while they are being reduced."""
        self._ronde.check_idle()
        forget_made_gradients(trainable(self))
        super().zero_grad(set_to_none=set_to_none)


# PyTorch installs hooks over a class's step once; the wrapped class has them already.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def _listed(groups: Any) -> int | list[list[torch.Tensor]]:
    """Returns a number of groups, or the groups, reading iterables once. Raises ValueError for anything else."""
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return groups or 0
    outer = list(groups) if _is_iterable(groups) else [groups]
    if not all(_is_iterable(group) for group in outer):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    listed = [list(group) for group in outer]
    members = [member for group in listed for member in group]
    if not all(isinstance(member, torch.Tensor) for member in members):
        raise ValueError("groups must consist of torch.Tensor")
    if len({id(member) for member in members}) != len(members):
        raise ValueError("A parameter can only appear once in groups.")
    return listed


def _is_iterable(given: Any) -> bool:
    """Returns whether an object is a list or the like. Tensors and strings do not count."""
    return isinstance(given, Iterable) and not isinstance(given, (torch.Tensor, str, bytes))


def _grouped(groups: int | list[list[torch.Tensor]], parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the groups. They are the same on all ranks because parameters have the same order there.

    As in Horovod, members that get no gradient or are not the optimizer's are ignored.
    """
    if isinstance(groups, int):
        count = min(groups, len(parameters))
        shares = [divmod(len(parameters), count) for _ in range(count)]
        starts = [index * each + min(index, more) for index, (each, more) in enumerate(shares)]
        return [parameters[start:end] for start, end in zip(starts, [*starts[1:], len(parameters)])]
    known = set(parameters)
    kept = [[member for member in group if member in known] for group in groups]
    return [group for group in kept if group]


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.Tensor, str]:
    if named_parameters is None:
        return {
            parameter: f"noname.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    named = list(named_parameters)
    if not all(isinstance(item, tuple) for item in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
    unnamed = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named; their shapes: {unnamed}"
        )
    return names
