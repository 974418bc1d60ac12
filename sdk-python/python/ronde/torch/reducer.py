"""Reduces one optimizer's gradients, from the hooks of the backward pass to the step."""

from __future__ import annotations

import contextlib
import numbers
import warnings
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ronde.elastic.membership import is_elastic
from ronde.errors import RondeError
from ronde.frameworks import basics, world
from ronde.frameworks.process_sets import ProcessSet, members_of, reduces, size_of
from ronde.frameworks.window import Window
from ronde.frameworks.world import InFlight
from ronde.ops import Average, Sum
from ronde.plugins import PluginOp
from ronde.torch.compression import codec_of, keeps_results
from ronde.torch.gradient_vote import GradientVote
from ronde.torch.handles import Handles
from ronde.torch.sparse import sparse_allreduce_async
from ronde.torch.step_commit import StepCommit
from ronde.torch.wrapping import Watcher, forget_made_gradients, too_many_passes, trainable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ronde.client import Client
    from ronde.torch.compression import Compressor, PluginCompressor

# The numbers of optimizers with a codec, for each process set: by the first parameter, and how many there are. An
# optimizer for the parameters of an earlier one has its number. In an elastic job, workers that remain may make one in
# each call of the function, and a new worker makes only the last one: both must have the same number.
_numbers: defaultdict[int | None, WeakTensorKeyDictionary] = defaultdict(WeakTensorKeyDictionary)
_count: Counter[int | None] = Counter()


class Reducer(Watcher):
    """Tracks gradients in flight, and the backward passes that remain for each parameter.

    sparse_as_dense   -- whether sparse gradients are made dense
    steps_synchronize -- whether a step reduces
    in_flight         -- reductions that have not been waited for, by parameter
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        compression: type[Compressor] | PluginCompressor,
        passes: int,
        op: int | PluginOp,
        process_set: ProcessSet,
    ) -> None:
        super().__init__(names, passes, op, process_set)
        self.sparse_as_dense = False
        self.steps_synchronize = True
        self.in_flight: dict[torch.Tensor, Reduction] = {}
        self._compression = compression
        self._codec = codec_of(compression, op)
        self._prefix = "" if self._codec is None else _prefix(process_set, names)
        self._is_passed = False
        self._may_be_alone = False
        self._dropped: dict[torch.Tensor, Reduction] = {}
        self._groups: dict[torch.Tensor, list[torch.Tensor]] = {}
        self._sparse_dimensions: dict[torch.Tensor, int] = {}
        self._synchronized = False
        self._vote = GradientVote()
        self._commit = StepCommit()
        self._parameters: list[torch.Tensor] = []

    def group(self, groups: list[list[torch.Tensor]]) -> None:
        """Reduces the gradients of each group together."""
        self._groups = {parameter: group for group in groups for parameter in group}

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Submits each gradient as soon as the backward pass has accumulated it."""
        self._parameters = trainable(optimizer)
        # One rank of an elastic job may become several.
        self._may_be_alone = is_elastic()
        if self._may_be_alone or self._is_active():
            super().watch(optimizer)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Submits gradients that no hook has submitted, then waits for all reductions."""
        forget_made_gradients(each for each in trainable(optimizer) if each not in self.in_flight)
        if not self._is_active() and not self.in_flight:
            if self._is_passed:
                self.drop_in_flight()  # passes that were counted before all other ranks were lost
            self._synchronized = True
            return
        # Parameters frozen meanwhile still take part, as other ranks may train them. Include new ones, too.
        known = set(self._parameters)
        added = [each for each in trainable(optimizer) if each not in known]
        self._parameters += added
        self.watched.update(added)
        try:
            absent, skipped = self._absent()
            self._submit_rest(skipped)
            self._commit.seal()
            for reduction in list(self.in_flight.values()):
                reduction.wait()
            for parameter in absent:
                if parameter in skipped or not parameter.requires_grad:
                    parameter.grad = None
            self._synchronized = True
        finally:
            self.drop_in_flight()

    def _absent(self) -> tuple[set[torch.Tensor], set[torch.Tensor]]:
        """Returns the parameters without a gradient here, and, if this step has a vote, those without one anywhere."""
        if not self._parameters:
            return set(), set()
        vote_in_flight = self._vote.begin(self._name(self._parameters[0]), self._parameters, self.process_set)
        absent = {each for each in self._parameters if each not in self.in_flight and each.grad is None}
        if vote_in_flight is None:
            return absent, set()
        on_no_rank, sparse = self._vote.result(vote_in_flight, self._parameters)
        self._sparse_dimensions.update(sparse)
        return absent, set(on_no_rank)

    def _submit_rest(self, skipped: set[torch.Tensor]) -> None:
        """Submits gradients that no hook has submitted, in the same order on all ranks."""
        window = Window()
        for parameter in self._parameters:
            group = self._groups.get(parameter)
            if parameter in self.in_flight or parameter not in self.watched:
                continue
            if parameter in skipped and group is None:
                continue
            if basics.client().replay is not None:
                self._submit(parameter)  # no result can be had before all gradients are submitted
                continue
            nbytes = sum(each.numel() * each.element_size() for each in group or [parameter])
            window.submit(nbytes, partial(self._submit, parameter))
        window.finish()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduces the remaining gradients before a step."""
        if self.steps_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "gradients are reduced a second time",
                    stacklevel=3,
                )
            self.synchronize(optimizer)
        self._synchronized = False

    def reducing(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wraps a closure so that it yields the gradients and the loss of all ranks.

        Optimizers decide by the closure's gradients and loss, so both must be the same on all ranks after each call.
        """
        if not self._is_active():
            return closure
        if self.steps_synchronize and self.in_flight:
            self.synchronize(optimizer)  # of backward passes before the step

        def evaluate() -> Any:
            self._synchronized = False
            loss = closure()
            is_done = self._synchronized and not self.in_flight  # by the closure itself
            if self.steps_synchronize and not is_done:
                self.synchronize(optimizer)
            self._synchronized = False
            return self._loss_of_all(loss)

        return evaluate

    def _loss_of_all(self, loss: Any) -> Any:
        """Returns the average of all ranks' losses, or with op=Sum their sum, in line with the gradients."""
        is_tensor = isinstance(loss, torch.Tensor) and loss.is_floating_point()
        is_number = isinstance(loss, numbers.Real) and not isinstance(loss, bool)
        if not (is_tensor or is_number):
            return loss
        local = loss.detach() if is_tensor else torch.tensor(float(loss), dtype=torch.float64)
        name = f"loss.{self._name(self._parameters[0])}" if self._parameters else "loss"
        op = Sum if self.op == Sum else Average
        with world.traced("allreduce", name):
            reduced = basics.client().allreduce(local, op, name, process_set=members_of(self.process_set))
        return reduced if is_tensor else float(reduced)

    def check_idle(self) -> None:
        """Raises AssertionError while gradients are in flight or wait for further backward passes."""
        if self.in_flight or self._is_passed:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): this would lose gradients that are being reduced"
            )

    def handles(self) -> Handles:
        """The reductions in flight, in Horovod's form."""
        return Handles(self)

    def drop(self, parameter: torch.Tensor) -> None:
        """Leaves a gradient unchanged. Its reduction continues, as other ranks take part, but its result is dropped."""
        reduction = self.in_flight.pop(parameter)
        reduction.forget_number()
        self._dropped[parameter] = reduction

    def reset(self) -> None:
        """Resets the counts, as after a step, and drops reductions in flight."""
        for parameter in list(self.in_flight):
            self.drop(parameter)
        self.drop_in_flight()
        self._synchronized = False

    def drop_in_flight(self) -> None:
        """Drops reductions; those that are not complete are withdrawn."""
        for reduction in self.in_flight.values():
            reduction.forget_number()
        self._commit.seal()
        self.in_flight.clear()
        self._is_passed = False
        self._start_delays()

    def _name(self, parameter: torch.Tensor) -> str:
        return self._prefix + super()._name(parameter)

    def _is_active(self) -> bool:
        return reduces(self.process_set)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self._may_be_alone and not self._is_active():
            return
        if parameter in self.in_flight:
            raise too_many_passes()
        self._is_passed = True
        left = self._count_down(parameter)
        if left < 0:
            raise too_many_passes(", and others of the same group are missing")
        group = self._groups.get(parameter)
        if left == 0 and (group is None or all(self.delay.get(each) == 0 for each in group)):
            self._submit(parameter)

    def _submit(self, parameter: torch.Tensor) -> Reduction:
        """Submits a gradient, with its group if it has one."""
        group = self._groups.get(parameter)
        if group is not None:
            self._submit_group(group)
            return self.in_flight[parameter]
        self._finish_dropped([parameter])
        gradient = self._gradient(parameter)
        name = self._name(parameter)
        if gradient.is_sparse and not self.sparse_as_dense:
            return self._submit_sparse(parameter, gradient, name)
        compressed, context = self._compression.compress(self._dense(parameter, gradient))
        op, prescale, postscale = self._reduction()
        client, members = basics.client(), members_of(self.process_set)

        def begin() -> Finishing:
            if compressed is gradient:
                return client.reduce_gradient(gradient, op, name, prescale, postscale, members, self._codec)
            return client.allreduce_async(
                compressed, op, name, prescale, postscale, codec=self._codec, process_set=members
            )

        with world.traced("allreduce", name), self._committing(client):
            handle = begin()
        read = self._reader(parameter, context)
        reduction = self.in_flight[parameter] = Reduction(handle, parameter, gradient, read, context)
        return reduction

    def _committing(self, client: Client) -> contextlib.AbstractContextManager[Any]:
        return self._commit.submitting(client, f"step.{next(iter(self.names.values()), '')}")

    def _finish_dropped(self, parameters: list[torch.Tensor]) -> None:
        """Waits until dropped reductions are no longer in flight, so that their names can be reused."""
        for parameter in parameters if self._dropped else ():
            if (reduction := self._dropped.pop(parameter, None)) is not None:
                reduction.finish()

    def _submit_group(self, group: list[torch.Tensor]) -> None:
        """Submits a group. Missing gradients are submitted as zeros, sparse ones as dense."""
        self._finish_dropped(group)
        gradients = [self._gradient(parameter) for parameter in group]
        pairs = [self._compression.compress(self._dense(*each)) for each in zip(group, gradients)]
        op, prescale, postscale = self._reduction()
        client, members = basics.client(), members_of(self.process_set)
        name = f"group.{self._name(group[0])}"
        with world.traced("grouped_allreduce", name), self._committing(client):
            compressed = [tensor for tensor, _ in pairs]
            together = client.grouped_allreduce_async(
                compressed, op, name, prescale, postscale, codec=self._codec, process_set=members
            )
        whole = _Group(together)
        parts = [_Part(whole, index) for index in range(len(group))]
        for parameter, gradient, part, (_, context) in zip(group, gradients, parts, pairs):
            read = self._reader(parameter, context)
            self.in_flight[parameter] = Reduction(part, parameter, gradient, read, context, kind=None)

    def _submit_sparse(self, parameter: torch.Tensor, gradient: torch.Tensor, name: str) -> Reduction:
        op = self.op
        if isinstance(op, PluginOp) or op not in (Average, Sum):
            raise ValueError(
                f"the gradient of {name} is sparse, for which there are op=Average and op=Sum; use sparse_as_dense=True"
            )
        self._sparse_dimensions[parameter] = gradient.sparse_dim()
        finish = sparse_allreduce_async(gradient, name, op, self.process_set)
        called = _Called(finish)
        reduction = self.in_flight[parameter] = Reduction(called, parameter, gradient, _as_it_is, None, kind=None)
        return reduction

    def _dense(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the gradient for a dense reduction, whose result is made sparse again."""
        if not gradient.is_sparse:
            return gradient
        self._sparse_dimensions[parameter] = gradient.sparse_dim()
        return gradient.to_dense()

    def _reader(self, parameter: torch.Tensor, context: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that converts a result to the gradient for the optimizer."""
        decompress, dimensions = self._compression.decompress, self._sparse_dimensions.get(parameter)
        if dimensions is None and keeps_results(self._compression):
            return _as_it_is  # the copy into the gradient casts, too
        if dimensions is None:
            return lambda result: decompress(result, context)
        return lambda result: decompress(result, context).to_sparse(dimensions)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.grad is None:
            dimensions = self._sparse_dimensions.get(parameter)
            parameter.grad = torch.zeros_like(parameter) if dimensions is None else _nothing(parameter, dimensions)
        return parameter.grad

    def _reduction(self) -> tuple[int | PluginOp, float, float]:
        if self.predivide == 1.0 or self.op != Average:
            return self.op, 1.0, 1.0
        if basics.client().replay is not None:
            # The number of ranks may be another one when the operation completes.
            return Average, 1.0 / self.predivide, self.predivide
        return Sum, 1.0 / self.predivide, self.predivide / size_of(self.process_set)


class Finishing(InFlight, Protocol):
    """An operation in flight whose result need not be read."""

    def finish(self) -> None:
        """Waits until it is no longer in flight."""
        ...


class Reduction:
    """The reduction of one gradient.

    context -- the compressor's context for decompression
    kind    -- what the range of its wait is named after; None: `in_flight` opens ranges itself
    number  -- its handle for `synchronize`, once requested
    """

    def __init__(
        self,
        in_flight: Finishing,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        read: Callable[[torch.Tensor], torch.Tensor],
        context: Any,
        kind: str | None = "allreduce",
    ) -> None:
        self.context = context
        self._kind = kind
        self.number: int | None = None
        self._in_flight = in_flight
        self._parameter = parameter
        self._gradient = gradient
        self._read = read
        self._is_done = False

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_done or self._in_flight.poll()

    def finish(self) -> None:
        """Waits, and leaves the gradient unchanged."""
        self._in_flight.finish()

    def forget_number(self) -> None:
        """Invalidates its handle."""
        if self.number is not None:
            world.forget(self.number)

    def wait(self) -> torch.Tensor:
        """Waits, writes the result into the parameter's gradient, and returns that. May be called again."""
        if not self._is_done:
            in_flight, kind = self._in_flight, self._kind
            result = self._read(in_flight.wait() if kind is None else world.wait_for(kind, in_flight))
            with torch.no_grad():
                _write(result, self._gradient)
                self._put_back()
            self._is_done = True
        return self._gradient

    def _put_back(self) -> None:
        """Writes the result into the new gradient, too, if the user has replaced it meanwhile."""
        now, gradient = self._parameter.grad, self._gradient
        if now is None or now.is_sparse != gradient.is_sparse:
            self._parameter.grad = gradient
        elif now is not gradient:
            _write(gradient, now)
            self._gradient = now


class _Group:
    """A group in flight. The wait for all of its results is one range."""

    def __init__(self, together: Finishing) -> None:
        self._together = together
        self._results: Any = None

    def poll(self) -> bool:
        return self._results is not None or self._together.poll()

    def wait(self) -> Any:
        if self._results is None:
            self._results = world.wait_for("grouped_allreduce", self._together)
        return self._results

    def finish(self) -> None:
        self._together.finish()


class _Part:
    """One of the results of a group in flight."""

    def __init__(self, together: Finishing, index: int) -> None:
        self._together = together
        self._index = index

    def poll(self) -> bool:
        return self._together.poll()

    def wait(self) -> Any:
        return self._together.wait()[self._index]

    def finish(self) -> None:
        self._together.finish()


class _Called:
    """An operation in flight whose result a function returns."""

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        self._call = call

    def poll(self) -> bool:
        return False

    def wait(self) -> torch.Tensor:
        return self._call()

    def finish(self) -> None:
        with contextlib.suppress(RondeError):  # the result is dropped
            self._call()


def _prefix(process_set: ProcessSet, names: Iterable[torch.Tensor]) -> str:
    """Returns the name prefix for an optimizer's gradients. Codecs keep their residuals by name."""
    members = process_set.process_set_id
    numbers, first = _numbers[members], next(iter(names), None)
    number: int | None = None if first is None else numbers.get(first)
    if number is None:
        number = _count[members]
        _count[members] += 1
        if first is not None:
            numbers[first] = number
    return f"optimizer.{number}."


def _nothing(like: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Returns a sparse gradient without elements."""
    indices = torch.zeros((dimensions, 0), dtype=torch.int64, device=like.device)
    values = like.new_zeros((0, *like.shape[dimensions:]))
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=True)


def _write(result: torch.Tensor, gradient: torch.Tensor) -> None:
    """Writes into the gradient's own memory, so that other references to it see the result."""
    if result is gradient:
        return
    if result.is_sparse and not gradient.is_sparse:
        result = result.to_dense()
    gradient.copy_(result)


def _as_it_is(result: torch.Tensor) -> torch.Tensor:
    return result
