"""`Trainer(strategy="horovod")`, which Lightning had until 1.9, over ronde."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import ronde.torch as hvd
from ronde.lightning.environment import PlacedByJob, RondeEnvironment
from ronde.lightning.session import begin

if TYPE_CHECKING:
    from collections.abc import Iterator

_AVERAGES = (None, "avg", "mean", torch.distributed.ReduceOp.AVG)
_SUMS = ("sum", torch.distributed.ReduceOp.SUM)


class HorovodStrategy(PlacedByJob, ParallelStrategy):  # type: ignore[misc]
    """Data parallelism by `DistributedOptimizer`, as Horovod does it, with one device for each process.

    At the start of `fit` all ranks get rank 0's parameters and optimizer states, and learning rates are multiplied by
    the number of ranks. Gradients are averaged in the last backward pass before a step, so that clipping sees averages.

    cluster_environment -- default: RondeEnvironment
    scale_learning_rate -- whether to multiply learning rates, as Lightning's strategy did
    optimizer_settings  -- further arguments of `ronde.torch.DistributedOptimizer`, such as `compression`
    settings            -- further arguments of Lightning's ParallelStrategy
    """

    strategy_name = "horovod"
    # Without it Lightning gives all ranks the whole data.
    is_distributed = True
    # Lightning's property; each is a DistributedOptimizer while it fits.
    optimizers: list[Any]

    def __init__(
        self,
        cluster_environment: RondeEnvironment | None = None,
        scale_learning_rate: bool = True,
        optimizer_settings: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.job = cluster_environment or RondeEnvironment()
        super().__init__(cluster_environment=self.job, **settings)
        self.num_nodes = 1
        self._scale_learning_rate = scale_learning_rate
        self._optimizer_settings = dict(optimizer_settings or {})
        self._is_accumulating = False
        rank_zero_only.rank = self.job.global_rank()

    def _configure_launcher(self) -> None:
        self.job.validate_settings(len(self.parallel_devices or []) or 1, self.num_nodes)

    def setup_environment(self) -> None:
        """Begins the session. Raises what `ronde.torch.init` does."""
        begin(self.job)
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Makes optimizers and, to fit, wraps them and broadcasts rank 0's parameters and states."""
        super().setup(trainer)
        assert self.lightning_module is not None
        hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self._scale_learning_rate:
            self._scale()
        for optimizer in self.optimizers:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        self.optimizers = [self._wrapped(optimizer, trainer.accumulate_grad_batches) for optimizer in self.optimizers]

    def _scale(self) -> None:
        """Multiplies the learning rates of optimizers and schedulers by the number of ranks."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= hvd.size()
                if "initial_lr" in group:
                    group["initial_lr"] *= hvd.size()
        for config in self.lr_scheduler_configs:
            scheduler = config.scheduler
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [rate * hvd.size() for rate in scheduler.base_lrs]

    def _wrapped(self, optimizer: torch.optim.Optimizer, passes: int) -> torch.optim.Optimizer:
        assert self.lightning_module is not None
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [(name, each) for name, each in self.lightning_module.named_parameters() if id(each) in mine]
        settings = {"backward_passes_per_step": passes, **self._optimizer_settings}
        wrapped: torch.optim.Optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, **settings)
        return wrapped

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Returns a context for backward passes that only add to gradients."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Waits for the averages, so that hooks before the step, such as clipping, see them."""
        del closure_loss
        if self._is_accumulating:
            return
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            return  # the program may run several backward passes before its step, which synchronizes
        for optimizer in self.optimizers:
            optimizer.synchronize()

    def model_to_device(self) -> None:
        """Moves the model to the device of this process."""
        assert self.model is not None
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        """Waits until all ranks call it. Does nothing before the session begins."""
        del name
        if hvd.is_initialized():
            hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the object of rank `src`, which is pickled."""
        return hvd.broadcast_object(obj, src) if hvd.is_initialized() else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Returns the mean or the sum of all ranks' tensors. Returns other objects unchanged.

        tensor -- of any shape, the same on all ranks. The mean of integers is a float32, as in Lightning

        Raises ValueError for another reduction, or for a group of some ranks.
        """
        _check_group(group)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if reduce_op in _SUMS:
            return hvd.allreduce(tensor, op=hvd.Sum)
        if reduce_op in _AVERAGES:
            return hvd.allreduce(tensor if tensor.is_floating_point() else tensor.float(), op=hvd.Average)
        raise ValueError(f"reduce_op is {reduce_op!r}; the strategy reduces by 'mean' and 'sum'")

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Returns all ranks' tensors, stacked by rank in a new first dimension.

        sync_grads -- whether gradients flow through the call

        Raises ValueError for a group of some ranks.
        """
        _check_group(group)
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            gathered: torch.Tensor = hvd.allgather(tensor.unsqueeze(0))
        return gathered


def _check_group(group: Any) -> None:
    if group not in (None, torch.distributed.group.WORLD):
        raise ValueError("the strategy reduces over all ranks; for groups of ranks use Trainer(strategy='ronde')")
