"""Settings of a launcher as one object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.runner.common.util.timeout import Timeout


@dataclass
class BaseSettings:
    """The common settings of Horovod's launchers. Attributes have the names of the flags.

    verbose       -- how much to print: 0, 1 or 2
    key           -- the secret of the job
    start_timeout -- the deadline of the start
    nics          -- the names of network interfaces
    """

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str = ""
    tcp_flag: bool | None = False
    binding_args: str | None = None
    key: bytes | None = None
    start_timeout: Timeout | None = None
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: set[str] | None = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


class Settings(BaseSettings):
    """Settings of a job with a fixed list of hosts.

    hosts  -- hosts as `host:slots,...`
    kwargs -- the attributes of `BaseSettings`
    """

    def __init__(self, hosts: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts
