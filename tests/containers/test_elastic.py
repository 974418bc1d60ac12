"""The elastic job of the compose file, when the container of a host dies and comes back."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

from conftest import leave_out
from project import Project, is_local

HOSTS = [f"host-{index}" for index in range(3)]
TRAINING_S = 600


def test_a_host_dies_and_comes_back(project: Callable[..., Project]) -> None:
    """The others continue, the engine starts the container again, and a new worker there takes part until the end."""
    if not is_local():
        leave_out("docker", "the death of a container needs root on the engine's machine")
    one = project(COMPOSE_PROFILES="elastic", RONDE_EPOCHS="40")
    one.start("elastic")
    one.await_lines("elastic", r"as rank 2 of 3$")
    os.kill(one.inspect("host-1")["State"]["Pid"], signal.SIGKILL)
    one.await_lines("elastic", r"continues as rank \d of 2$")
    one.wait(lambda: one.inspect("host-1")["RestartCount"] == 1, "the restart of the container")
    one.await_lines("elastic", r"continues as rank 0 of 3$")
    assert one.await_exit("elastic", TRAINING_S) == 0, one.everything()
    ends = re.findall(r"rank (\d) of 3: test accuracy (0\.\d+), weights ([0-9a-f]+)", one.logs("elastic"))
    assert sorted(rank for rank, _, _ in ends) == ["0", "1", "2"], one.logs("elastic")[-4000:]
    assert all(float(accuracy) > 0.95 for _, accuracy, _ in ends)
    assert len({weights for _, _, weights in ends}) == 1


def test_a_host_that_is_stopped_is_left_in_order(project: Callable[..., Project]) -> None:
    """`docker stop` is a notice: no failure is reported, and the job ends well without that host."""
    one = project(COMPOSE_PROFILES="elastic", RONDE_EPOCHS="20")
    one.start("elastic")
    one.await_lines("elastic", r"as rank 2 of 3$")
    one.compose("stop", "host-2")
    one.await_lines("elastic", r"continues as rank \d of 2$")
    assert one.await_exit("elastic", TRAINING_S) == 0, one.everything()
    assert "RONDE-E3" not in one.logs("elastic"), "no worker has failed"
    assert re.search(r"rank 1 of 2: test accuracy", one.logs("elastic"))


def test_the_containers_of_hosts_have_the_documented_limits(project: Callable[..., Project]) -> None:
    """As all others: no capabilities, no new privileges, a read-only root, and a user that is not root."""
    one = project(COMPOSE_PROFILES="elastic")
    one.start(*HOSTS)
    for host in HOSTS:
        found = one.inspect(host)
        limits = found["HostConfig"]
        assert limits["CapDrop"] == ["ALL"]
        assert limits["SecurityOpt"] == ["no-new-privileges:true"]
        assert limits["ReadonlyRootfs"] is True
        assert limits["Memory"] > 0
        assert limits["PidsLimit"] == 512
        assert found["Config"]["User"] == "10002:10002"
        assert [mount["Destination"] for mount in found["Mounts"]] == ["/hosts"]
