"""The examples of estimators run as programs."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "sdk-python" / "examples"
TIMEOUT_S = 900


@pytest.mark.parametrize("name", ["pytorch_spark", "keras_spark", "lightning_spark"])
def test_an_example_recognizes_digits(home: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--store", str(tmp_path)]
    done = subprocess.run(command, env=os.environ, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = re.search(r"test accuracy (\S+) of 3\d\d images", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 0.85
