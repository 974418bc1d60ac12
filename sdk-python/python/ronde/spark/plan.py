"""What the driver gives to all tasks of a run. It contains no key: Spark stores it with the stage."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ronde.cluster.credentials import Credentials

if TYPE_CHECKING:
    from collections.abc import Mapping

# The rows that tasks return: a piece of what a rank leaves.
SCHEMA = "rank int, kind string, part int, content binary"
RESULT, STDOUT, STDERR = "result", "stdout", "stderr"


@dataclass(frozen=True)
class RunPlan:
    """A run, for its tasks.

    run_id      -- a name that no other run has; not secret
    call        -- the function and its arguments, pickled by `ronde.run`
    size        -- the number of ranks
    timeout     -- seconds for all tasks to start their ranks
    begins_until -- by the hosts' clocks, in seconds since 1970: tasks that Spark starts later end at once
    variables   -- for the ranks and their sidecars
    interfaces  -- the networks that sidecars listen on; "" for all
    credentials -- that the caller names: paths on the hosts, never a secret
    is_private  -- whether Spark's own connections between hosts are encrypted and authenticated
    unprotected -- otherwise, why not, for the error
    executable  -- the Python of the ranks; "" for that of the tasks
    timestamps  -- whether lines of output begin with the time
    keeps_output -- the streams, "stdout" or "stderr", that the driver wants
    """

    run_id: str
    call: bytes = field(repr=False)
    size: int
    timeout: float
    variables: Mapping[str, str] = field(repr=False)
    begins_until: float = math.inf
    interfaces: str = ""
    credentials: Credentials = field(default_factory=Credentials)
    is_private: bool = False
    unprotected: str = ""
    executable: str = ""
    timestamps: bool = False
    keeps_output: tuple[str, ...] = ()
