"""Optimizers and trainers of MXNet that average gradients over all ranks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import mxnet as mx

from ronde.frameworks import world
from ronde.frameworks.basics import client
from ronde.frameworks.process_sets import ProcessSet, global_process_set, members_of, reduces, size_of
from ronde.mxnet.compression import Compression, Compressor
from ronde.mxnet.mpi_ops import like, to_numpy, write
from ronde.ops import Sum

if TYPE_CHECKING:
    from collections.abc import Sequence


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer that reduces gradients in `update`, and is otherwise the given one.

    optimizer -- of MXNet
    gradient_predivide_factor -- divides gradients before they are added, and multiplies the sum; the rest of the
                                 division by the number of ranks is part of `rescale_grad`
    num_groups  -- into how many groups the gradients of an update of several parameters are divided; a group starts
                   when all of its gradients are there on all ranks. Default: none; what is in flight at once is
                   fused
    process_set -- the ranks that take part

    With Gluon use `DistributedTrainer`. Raises ValueError before `init`, and for a factor that is not positive.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check(gradient_predivide_factor, num_groups)
        self._optimizer = optimizer
        self._reduction = Reduction("DistributedOptimizer", gradient_predivide_factor, num_groups, process_set)
        # The given optimizer multiplies the sum by this.
        optimizer.rescale_grad *= self._reduction.scale

    def __getattr__(self, item: str) -> Any:
        # Copies and unpickled objects are asked for attributes before they have any.
        if "_optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {item!r}")
        return getattr(self.__dict__["_optimizer"], item)

    def __setattr__(self, item: str, value: Any) -> None:
        if item in ("_optimizer", "_reduction"):
            self.__dict__[item] = value
        else:
            setattr(self._optimizer, item, value)

    # MXNet's own ones drop and set attributes, which are those of the given optimizer here.
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """As that of the given optimizer."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def create_state(self, index: Any, weight: Any) -> Any:
        """As that of the given optimizer."""
        return self._optimizer.create_state(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Reduces the gradients in place, and updates the weights."""
        self._reduce(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `update`, with a copy of the weights in float32."""
        self._reduce(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def set_learning_rate(self, lr: float) -> None:
        """As that of the given optimizer."""
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        """As that of the given optimizer."""
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        """As that of the given optimizer."""
        self._optimizer.set_wd_mult(args_wd_mult)

    def _reduce(self, index: Any, grad: Any) -> None:
        if isinstance(index, (tuple, list)):
            self._reduction.apply(list(zip(map(str, index), grad)))
        else:
            self._reduction.apply([(str(index), grad)])


class DistributedTrainer(mx.gluon.Trainer):
    """A Gluon trainer whose `step` averages gradients over all ranks.

    params, optimizer, optimizer_params -- as for `mxnet.gluon.Trainer`
    compression -- compresses gradients before they are reduced
    gradient_predivide_factor, num_groups, process_set -- as for `DistributedOptimizer`
    prefix      -- for the names of the operations, where a program has several trainers at once

    After `allreduce_grads` gradients are sums, divided by the factor; `step` and `update` scale them to averages. Each
    parameter is on one device. Raises ValueError before `init`, and for parameters on several devices.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: type[Compressor] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check(gradient_predivide_factor, num_groups)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer does not take DistributedOptimizer as its optimizer; it uses the optimizer that "
                "was given to that one",
                stacklevel=2,
            )
            scale, optimizer = optimizer._reduction.scale, optimizer._optimizer
            optimizer.rescale_grad /= scale
        if hasattr(params, "items"):
            # In the same order on all ranks.
            params = [params[name] for name in sorted(params.keys())]
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        name = f"DistributedTrainer.{prefix or ''}"
        self._reduction = Reduction(name, gradient_predivide_factor, num_groups, process_set, compression)
        # `step` multiplies gradients by this, divided by the batch size.
        self._scale *= self._reduction.scale

    def _allreduce_grads(self) -> None:
        gradients = []
        for number, parameter in enumerate(self._params):
            if parameter.grad_req == "null":
                continue
            copies = parameter.list_grad()
            if len(copies) > 1:
                raise ValueError(
                    f"the parameter {parameter.name} is on {len(copies)} devices; each process has one: initialize "
                    "it with ctx=mx.gpu(hvd.local_rank()) or ctx=mx.cpu()"
                )
            gradients.append((str(number), copies[0]))
        self._reduction.apply(gradients)


class Reduction:
    """Adds gradients over the ranks of a set, in place.

    name        -- the first part of the names of operations
    factor      -- divides gradients before they are added
    num_groups  -- into how many groups they are divided; 0 for none
    process_set -- the ranks that take part
    compression -- compresses gradients
    """

    def __init__(
        self,
        name: str,
        factor: float,
        num_groups: int,
        process_set: ProcessSet,
        compression: type[Compressor] = Compression.none,
    ) -> None:
        self._factor, self._process_set = factor, process_set
        self._name, self._num_groups, self._compression = name, num_groups, compression

    @property
    def scale(self) -> float:
        """What a reduced gradient is multiplied by to become an average: 1 where nothing is reduced."""
        return self._factor / size_of(self._process_set) if reduces(self._process_set) else 1.0

    def apply(self, gradients: Sequence[tuple[str, Any]]) -> None:
        """Reduces gradients, each with the last part of its name; all are in flight at once."""
        if not reduces(self._process_set) or not gradients:
            return
        compressed = [self._compression.compress(gradient) for _, gradient in gradients]
        arrays = [to_numpy(array) for array, _ in compressed]
        results = self._reduced([name for name, _ in gradients], arrays)
        for (_, gradient), (array, context), result in zip(gradients, compressed, results):
            decompressed = self._compression.decompress(like(array, result), context)
            write(gradient, to_numpy(decompressed))

    def _reduced(self, names: list[str], arrays: list[Any]) -> list[Any]:
        if self._num_groups == 0:
            handles = [self._begun("allreduce", name, array) for name, array in zip(names, arrays)]
            return [world.wait_for("allreduce", handle) for handle in handles]
        count = min(self._num_groups, len(arrays))
        bounds = [len(arrays) * number // count for number in range(count + 1)]
        handles = [
            self._begun("grouped_allreduce", names[start], arrays[start:end]) for start, end in zip(bounds, bounds[1:])
        ]
        return [result for handle in handles for result in world.wait_for("grouped_allreduce", handle)]

    def _begun(self, kind: str, last: str, given: Any) -> Any:
        """Returns the handle of an all-reduce of an array, or of several as a group.

        last -- the last part of its name
        """
        members, name = members_of(self._process_set), f"{self._name}.{last}"
        submit = client().allreduce_async if kind == "allreduce" else client().grouped_allreduce_async
        with world.traced(kind, name):
            return submit(given, Sum, name, 1.0 / self._factor, 1.0, process_set=members)


def check(factor: float, num_groups: int) -> None:
    """Raises ValueError for an invalid factor or number of groups."""
    if not factor > 0:
        raise ValueError(f"gradient_predivide_factor is {factor}; it is positive")
    if num_groups < 0:
        raise ValueError(f"num_groups is {num_groups}; it is 0 for none, or positive")
