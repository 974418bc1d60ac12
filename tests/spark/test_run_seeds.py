"""The blocks about `horovod.spark.run` of Horovod's documentation run unchanged, and its names are there."""

from __future__ import annotations

import inspect
import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = pathlib.Path(__file__).parent
EXAMPLES = HERE.parent.parent / "sdk-python" / "examples"
TIMEOUT_S = 400


def test_the_block_runs_in_the_shell_of_pyspark(home: pathlib.Path) -> None:
    """As there: typed into `pyspark`, whose session is there already."""
    text = HERE.joinpath("seeds", "run.txt").read_text()
    options = ["--master", "local-cluster[2,1,1024]", "--conf", "spark.ui.enabled=false"]
    options += ["--conf", "spark.driver.bindAddress=127.0.0.1", "--conf", "spark.driver.host=127.0.0.1"]
    typed = text.replace("\nimport", "\n\nimport") + "\nexit()\n"
    done = subprocess.run(
        [sys.executable, "-c", "from pyspark.find_spark_home import _find_spark_home as f; print(f())"],
        check=True,
        capture_output=True,
        text=True,
    )
    command = [str(pathlib.Path(done.stdout.strip(), "bin", "pyspark")), *options]
    # Interactive, although there is no terminal.
    variables = {**os.environ, "PYSPARK_DRIVER_PYTHON_OPTS": "-i"}
    done = subprocess.run(
        command, input=typed, env=variables, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for rank in range(2):
        line = f"Hello, rank = {rank}, local_rank = {rank}, size = 2, local_size = 2, magic_number = 42"
        assert f"[{rank}]<stdout>:{line}\n" in done.stdout, f"{done.stdout}\n{done.stderr}"
    assert "[0, 1]" in done.stdout


def test_the_example_trains_as_one_process_does(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    import torch

    weights = []
    for words in ([], ["--single"]):
        file = tmp_path / f"weights{len(words)}"
        variables = {**os.environ, "DIGITS_WEIGHTS": str(file)}
        command = [sys.executable, str(EXAMPLES / "spark_digits.py"), *words]
        done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        weights.append(torch.load(file, weights_only=True))
    # In float64. Half of the data is far off.
    flat = [torch.cat([each[name].flatten() for name in sorted(each)]) for each in weights]
    assert float((flat[0] - flat[1]).norm() / flat[1].norm()) < 1e-9


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of Horovod, which are those that can be given by position, and their defaults."""
    found = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in found if each.kind is each.POSITIONAL_OR_KEYWORD}


def test_horovods_names_and_parameters() -> None:
    import horovod.spark
    import horovod.spark.conf
    import horovod.spark.gloo_run
    import horovod.spark.mpi_run
    import horovod.spark.runner
    import horovod.spark.task
    import ronde.spark.task

    assert horovod.spark.run is horovod.spark.runner.run is ronde.spark.run
    assert horovod.spark.run_elastic is ronde.spark.run_elastic
    assert horovod.spark.task.get_available_devices is ronde.spark.task.get_available_devices
    none = dict.fromkeys(["num_proc", "start_timeout", "use_mpi", "use_gloo", "extra_mpi_args", "env"])
    none |= dict.fromkeys(["stdout", "stderr"])
    expected = {"fn": inspect.Parameter.empty, "args": (), "kwargs": None, **none, "verbose": 1, "nics": None}
    assert parameters(horovod.spark.run) == {**expected, "prefix_output_with_timestamp": False, "executable": None}
    elastic = list(parameters(horovod.spark.run_elastic))
    assert elastic[:9] == [
        *("fn", "args", "kwargs", "num_proc", "min_num_proc", "max_num_proc"),
        *("start_timeout", "elastic_timeout", "reset_limit"),
    ]
    assert elastic[9:] == [
        *("env", "stdout", "stderr", "verbose", "nics", "prefix_output_with_timestamp", "min_np", "max_np"),
    ]
    assert horovod.spark.conf.SPARK_CONF_ALWAYS_RESTART_FAILED_TASK == ("spark.task.maxFailures", "2147483647")
    with pytest.raises(RuntimeError, match=r"Call horovod\.spark\.run, which takes the same function"):
        horovod.spark.gloo_run.gloo_run(None, None, None, None, None)
    with pytest.raises(RuntimeError, match=r"Call horovod\.spark\.run, which takes the same function"):
        horovod.spark.mpi_run.mpi_run(None, None, None, None, None)


@pytest.mark.parametrize("release", ["2.4.8", "3.4.1", "5.0.0", "unknown"])
def test_a_release_that_is_not_supported_is_named(release: str) -> None:
    from ronde.spark import version

    with pytest.raises(
        ImportError, match=f"PySpark {release} is installed, but ronde.spark needs PySpark 3.5 or later"
    ):
        version.check(release)


@pytest.mark.parametrize("name", ["ronde.spark", "horovod.spark", "horovod.spark.torch"])
def test_importing_beside_an_old_release_names_both(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text('__version__ = "3.4.1"\n')
    found = [str(tmp_path), *(str(EXAMPLES.parent / folder) for folder in ("python", "horovod-compat/src"))]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], env=variables, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("ImportError: PySpark 3.4.1 is installed, but ronde.spark needs PySpark 3.5 or later"), line


@pytest.mark.parametrize("release", ["3.5.0", "4.3.0", "4.4.0.dev0"])
def test_releases_that_are_supported(release: str) -> None:
    from ronde.spark import version

    version.check(release)


def test_which_settings_of_spark_may_carry_a_key() -> None:
    from ronde.spark.session import check, unprotected

    def reason(release: str = "4.0.0", **settings: str) -> str:
        conf = {name.replace("_", "."): value for name, value in settings.items()}
        return unprotected(lambda name: conf.get(name, ""), release)

    assert reason().startswith("spark.authenticate is off")
    crypto = {"spark_authenticate": "true", "spark_network_crypto_enabled": "true"}
    tls = {"spark_authenticate": "true", "spark_ssl_rpc_enabled": "true"}
    assert reason(spark_authenticate="true") == "they are authenticated, but plaintext"
    assert reason(spark_authenticate="true", spark_ssl_enabled="true") == "they are authenticated, but plaintext"
    assert reason(spark_network_crypto_enabled="true").startswith("spark.authenticate is off")
    assert "saslFallback is not off" in reason(**crypto)
    assert reason(**crypto, spark_network_crypto_saslFallback="false") == ""
    assert "does not check certificates" in reason(**tls)
    assert reason(**tls, spark_ssl_trustStore="/etc/trust") == ""
    # Earlier releases have no TLS between their processes, whatever the settings are.
    for release in ("3.5.1", "unknown"):
        assert "has an effect from Spark 4.0 on" in reason(release, **tls, spark_ssl_trustStore="/etc/trust")
        assert "saslFallback is not off" in reason(release, **{**tls, **crypto}, spark_ssl_trustStore="/etc/trust")
        assert reason(release, **crypto, spark_network_crypto_saslFallback="false") == ""
    with pytest.raises(ValueError, match=r"use ronde\.spark\.run_elastic"):
        check(lambda name: "true" if name == "spark.dynamicAllocation.enabled" else "")


def test_a_missing_ronde_is_installed_from_its_wheel() -> None:
    from ronde.spark.running import failure

    text = str(failure(RuntimeError("ModuleNotFoundError: No module named 'ronde.spark'"), 2))
    assert "has no module ronde" in text
    assert 'pip install "WHEEL[spark]", where WHEEL is the path of its wheel' in text


def test_gpus_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    from ronde.spark.task import get_available_devices

    with pytest.raises(RuntimeError, match="this process is neither"):
        get_available_devices()
    monkeypatch.setenv("RONDE_SPARK_GPUS", "3,1")
    assert get_available_devices() == ["3", "1"]
    monkeypatch.setenv("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "1")
    monkeypatch.setenv("RONDE_LOCAL_RANK", "2")
    assert get_available_devices() == ["2"]
    # In an elastic job the local rank is 0 on every rank.
    monkeypatch.setenv("RONDE_ELASTIC", "1")
    with pytest.raises(ValueError, match="in a job of run_elastic the local rank is 0 on every rank"):
        get_available_devices()
    monkeypatch.setenv("HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "0")
    assert get_available_devices() == ["3", "1"]
