"""Settings of an elastic job as one object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horovod.runner.common.util.settings import BaseSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from horovod.runner.elastic.discovery import HostDiscovery


class ElasticSettings(BaseSettings):
    """Settings of a job whose hosts come and go.

    discovery       -- finds the hosts
    min_num_proc    -- the smallest number of processes
    max_num_proc    -- the largest one; None for no limit
    elastic_timeout -- how long to wait for the smallest number, in seconds; None for the default
    reset_limit     -- how often the job may restart; None for no limit
    cooldown_range  -- how long hosts are excluded after a failure, in seconds; None for ever
    kwargs          -- the attributes of `BaseSettings`
    """

    def __init__(
        self,
        discovery: HostDiscovery,
        min_num_proc: int,
        max_num_proc: int | None,
        elastic_timeout: float | None,
        reset_limit: int | None,
        cooldown_range: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(elastic=True, **kwargs)
        self.discovery = discovery
        self.min_num_proc = min_num_proc
        self.max_num_proc = max_num_proc
        self.elastic_timeout = elastic_timeout
        self.reset_limit = reset_limit
        self.cooldown_range = cooldown_range
