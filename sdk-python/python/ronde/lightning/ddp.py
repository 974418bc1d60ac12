"""`Trainer(strategy="ronde")`: DistributedDataParallel over the backend "ronde"."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from ronde.lightning.environment import PlacedByJob, RondeEnvironment
from ronde.lightning.session import begin_group


class RondeStrategy(PlacedByJob, DDPStrategy):  # type: ignore[misc]
    """Lightning's DDPStrategy over the backend "ronde", for processes that `ronde run` has started.

    cluster_environment -- default: RondeEnvironment
    settings            -- further arguments of DDPStrategy, except `process_group_backend` and `start_method`

    Ranks and sizes are the job's: `devices` and `num_nodes` of the Trainer need not be given. Raises ValueError if they
    contradict the job, and TypeError for the two arguments that this class sets.
    """

    strategy_name = "ronde"

    def __init__(self, cluster_environment: RondeEnvironment | None = None, **settings: Any) -> None:
        if excess := {"process_group_backend", "start_method"} & set(settings):
            raise TypeError(f"RondeStrategy sets {' and '.join(sorted(excess))} itself; leave it out")
        self.job = cluster_environment or RondeEnvironment()
        super().__init__(cluster_environment=self.job, process_group_backend="ronde", **settings)

    def _configure_launcher(self) -> None:
        # Lightning checks this where it starts processes, which it does not do here.
        self.job.validate_settings(self.num_processes, self.num_nodes)

    def setup_distributed(self) -> None:
        """Makes the process group, unless the program did. Raises what `begin_group` does."""
        begin_group(self.job, self._timeout)
        super().setup_distributed()
