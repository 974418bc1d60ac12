"""A cluster of Ray with two nodes, in a network namespace of its own: Ray listens on all addresses."""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

# A shell that starts the tests in the background ignores SIGINT, which tests send to themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = pathlib.Path(__file__).parent.parent.parent
# The package, Horovod's names for it, and the examples.
FOLDERS = [ROOT / "sdk-python" / folder for folder in ("python", "horovod-compat/src", "examples")]
sys.path[:0] = map(str, FOLDERS)
# Modules of the SDK's tests, for this process only.
sys.path.append(str(ROOT / "sdk-python" / "tests"))

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
# The head's processors, and those of the other node, which has two GPUs in Ray's books.
HEAD_CPUS, OTHER_CPUS, OTHER_GPUS = 3, 2, 2


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """The cluster, to which this process is connected."""
    environment()
    enter_own_network()
    home = tempfile.mkdtemp(prefix="ray-")
    # Ray writes its token for the cluster, and the address of the cluster, there.
    os.environ.update(HOME=home, RAY_TMPDIR=home, RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
    pathlib.Path(home, "ray").mkdir()
    import ray
    from ray.cluster_utils import Cluster

    size = {"object_store_memory": 100 * 2**20, "include_dashboard": False, "temp_dir": f"{home}/t"}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": HEAD_CPUS, "num_gpus": 0, **size})
    try:
        size.pop("include_dashboard")
        size.pop("temp_dir")
        made.add_node(num_cpus=OTHER_CPUS, num_gpus=OTHER_GPUS, **size)
        ray.init(address=made.address, log_to_driver=False)
        made.wait_for_nodes()
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        shutil.rmtree(home, ignore_errors=True)


def leave_out(what: str, reason: str) -> None:
    """Skips a test, or fails if RONDE_REQUIRE lists what it needs."""
    if what in os.environ.get("RONDE_REQUIRE", "").split(","):
        pytest.fail(f"RONDE_REQUIRE names {what}, but {reason}", pytrace=False)
    pytest.skip(f"LEFT OUT: {reason}")


def environment() -> None:
    """Sets what workers of Ray inherit: where the package and the binary of this checkout are."""
    binary = os.environ.get("RONDE_BIN")
    if not binary or not pathlib.Path(binary).is_file():
        pytest.fail("RONDE_BIN does not name the binary `ronde`; run the tests by `make ray-test`")
    # Ray's workers have a niceness of 15 unless a variable says otherwise, and then starve on a busy machine.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 -- Ray's name
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, [*FOLDERS, pathlib.Path(__file__).parent]))
    # Examples train in float64, where sums of other partial sums are next to equal.
    os.environ["DIGITS_DTYPE"] = "float64"


def enter_own_network() -> None:
    """Moves this thread, and the processes that it starts, into a new network namespace, which has a loopback only."""
    if os.environ.get("RONDE_NO_NETNS") == "1" or os.geteuid() != 0:
        leave_out("netns", "Ray listens on all addresses, so it runs in a network namespace, which only root can make")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        leave_out("netns", f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
