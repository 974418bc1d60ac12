"""Sessions of Spark, in a network namespace of their own: parts of Spark listen on all addresses."""

from __future__ import annotations

import ctypes
import importlib.util
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
    from collections.abc import Iterator, Mapping

_CLONE_NEWNET = 0x40000000
# The executors of `cluster`, with one processor each.
EXECUTORS = 2
CLUSTER = f"local-cluster[{EXECUTORS},1,1024]"
# Kept small: two processors have to do.
_QUIET = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "512m",
}


@pytest.fixture(scope="module")
def spark(home: pathlib.Path) -> Iterator[Any]:
    """A session with two places in one process of Java: `local[2]`."""
    with session("local[2]", home) as started:
        yield started


@pytest.fixture(scope="module")
def cluster(home: pathlib.Path) -> Iterator[Any]:
    """A session with two executors of one place each, processes of Java of their own: `local-cluster[2,1,1024]`."""
    with session(CLUSTER, home) as started:
        yield started


@pytest.fixture(scope="session")
def home() -> Iterator[pathlib.Path]:
    """A folder for what Spark writes, such as the folders of executors; this process is in its own network then."""
    environment()
    enter_own_network()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="spark-"))
    os.environ.update(SPARK_HOME=str(spark_home(folder)), SPARK_LOCAL_DIRS=str(folder / "local"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class session:  # noqa: N801 -- a context manager
    """A session of Spark for a block. One process has one at a time.

    master -- such as "local[2]"
    home   -- a folder, for the warehouse
    conf   -- more of Spark's settings
    """

    def __init__(self, master: str, home: pathlib.Path, conf: Mapping[str, str] | None = None) -> None:
        from pyspark.sql import SparkSession

        assert SparkSession.getActiveSession() is None, "another fixture has a session; use it in another module"
        builder = SparkSession.builder.master(master).appName("ronde")
        for name, value in {**_QUIET, "spark.sql.warehouse.dir": str(home / "warehouse"), **(conf or {})}.items():
            builder = builder.config(name, value)
        self._builder = builder
        self._session: Any = None

    def __enter__(self) -> Any:
        self._session = self._builder.getOrCreate()
        return self._session

    def __exit__(self, *error: object) -> None:
        from pyspark import SparkContext

        gateway = SparkContext._gateway
        self._session.stop()
        # The next session gets a Java of its own: settings such as `spark.authenticate` are read once in a process.
        SparkContext._gateway = SparkContext._jvm = None
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(60)


def spark_home(folder: pathlib.Path) -> pathlib.Path:
    """Makes a folder for SPARK_HOME. Executors of `local-cluster` run there, and in the package otherwise."""
    package = importlib.util.find_spec("pyspark")
    assert package is not None
    assert package.submodule_search_locations is not None
    made = folder / "spark"
    made.mkdir()
    for part in ("bin", "jars", "python"):
        (made / part).symlink_to(pathlib.Path(package.submodule_search_locations[0], part))
    return made


def leave_out(what: str, reason: str) -> None:
    """Skips a test, or fails if RONDE_REQUIRE lists what it needs."""
    if what in os.environ.get("RONDE_REQUIRE", "").split(","):
        pytest.fail(f"RONDE_REQUIRE names {what}, but {reason}", pytrace=False)
    pytest.skip(f"LEFT OUT: {reason}")


def environment() -> None:
    """Sets what executors inherit: where the package and the binary of this checkout are, and the Python."""
    binary = os.environ.get("RONDE_BIN")
    if not binary or not pathlib.Path(binary).is_file():
        pytest.fail("RONDE_BIN does not name the binary `ronde`; run the tests by `make spark-test`")
    if shutil.which("java") is None:
        leave_out("spark", "there is no Java, which Spark runs on; `tests/setup/debian.sh spark` installs it")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, [*FOLDERS, pathlib.Path(__file__).parent]))
    # Examples train in float64, where sums of other partial sums are next to equal.
    os.environ["DIGITS_DTYPE"] = "float64"
    os.environ.update(PYSPARK_PYTHON=sys.executable, PYSPARK_DRIVER_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")


def enter_own_network() -> None:
    """Moves this thread, and the processes that it starts, into a new network namespace, which has a loopback only."""
    if os.environ.get("RONDE_NO_NETNS") == "1" or os.geteuid() != 0:
        leave_out("netns", "Spark runs in a network namespace of its own, which only root can make")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        leave_out("netns", f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
