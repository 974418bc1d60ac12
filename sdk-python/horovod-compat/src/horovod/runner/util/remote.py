"""Commands that run other commands on other hosts."""

from __future__ import annotations

import os
import shlex

from horovod.runner.common.util import env as env_util

# Unlike Horovod's, it checks the host's key, unless ssh's own configuration relaxes that.
SSH_COMMAND_PREFIX = "ssh -o PasswordAuthentication=no -o BatchMode=yes"
_AGENT = "OMPI_MCA_plm_rsh_agent"


def get_ssh_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """Returns the shell command that runs `local_command` in a shell of another host, by ssh without a password.

    timeout_s -- how long to wait for the connection
    """
    options = [f"-p {port}"] if port is not None else []
    options += [f"-i {shlex.quote(identity_file)}"] if identity_file is not None else []
    options += [f"-o ConnectTimeout={timeout_s}"] if timeout_s is not None else []
    return " ".join([SSH_COMMAND_PREFIX, *options, shlex.quote(host), shlex.quote(local_command)])


def get_remote_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """Returns `get_ssh_command`, or in a job of Kubeflow's MPI operator the command of its program for pods."""
    if os.environ.get(_AGENT) == env_util.KUBEFLOW_MPI_EXEC:
        return f"{env_util.KUBEFLOW_MPI_EXEC} {shlex.quote(host)} {shlex.quote(local_command)}"
    return get_ssh_command(local_command, host, port, identity_file, timeout_s)
