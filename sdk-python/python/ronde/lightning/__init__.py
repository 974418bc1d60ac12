"""Lightning on ronde: importing this module registers `Trainer(strategy="ronde")` and `Trainer(strategy="horovod")`.

    import lightning
    import ronde.lightning
    lightning.Trainer(strategy="ronde").fit(model)       # ronde run -np 4 python train.py

`"ronde"` is Lightning's DDP over the backend "ronde"; `"horovod"` is the strategy that Lightning had until 1.9. Both
start no processes: `ronde run` does, one for each device. For the package `lightning` from 2.2 on, not for
`pytorch_lightning`, whose classes are others.
"""

from __future__ import annotations

from typing import Any

from ronde.frameworks.requirement import require

# First, for their errors.
require("torch", "PyTorch")
require("lightning", "Lightning")

from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from ronde.lightning.barrier import replace_gloo_barrier  # noqa: E402
from ronde.lightning.ddp import RondeStrategy  # noqa: E402
from ronde.lightning.environment import RondeEnvironment  # noqa: E402
from ronde.lightning.horovod import HorovodStrategy  # noqa: E402
from ronde.lightning.monitor import StepMonitorCallback  # noqa: E402

__all__ = ["HorovodStrategy", "RondeEnvironment", "RondeStrategy", "StepMonitorCallback"]


def _register(strategy: Any, description: str) -> None:
    name = strategy.strategy_name
    if name not in StrategyRegistry:
        StrategyRegistry.register(name, strategy, description=description)


_register(RondeStrategy, "DistributedDataParallel over the backend ronde")
_register(HorovodStrategy, "Horovod's distributed optimizer over ronde")
replace_gloo_barrier()
