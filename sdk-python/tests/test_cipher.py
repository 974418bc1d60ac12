"""`ronde bench cipher`, and a job on a processor without AES instructions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest
from conftest import ronde_binary

# aws-lc then takes the processor for one without AES and carry-less multiplication: bits 57 and 33 of its capabilities.
WITHOUT_AES = {"OPENSSL_ia32cap": "~0x200000200000000"}
REDUCE = """
import numpy, ronde
client = ronde.connect()
for count in (1, 1000, 1 << 20):
    values = numpy.arange(count, dtype=numpy.float32)
    assert numpy.array_equal(client.allreduce(values * (client.rank + 1)), values * 1.5), count
"""


def rates(environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    command = [ronde_binary(), "bench", "cipher", "--json"]
    environment = {**os.environ, **(environment or {})}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    report: dict[str, Any] = json.loads(run.stdout)
    assert (report["cipher"], report["record_bytes"]) == ("AES-128-GCM", 16384)
    libraries: list[dict[str, Any]] = report["libraries"]
    return libraries


def used(libraries: list[dict[str, Any]]) -> list[str]:
    return [library["name"] for library in libraries if library["used"]]


def test_one_of_the_libraries_is_used_and_all_are_listed() -> None:
    libraries = rates()
    assert len(used(libraries)) == 1
    assert "aws-lc" in [library["name"] for library in libraries]
    table = subprocess.run([ronde_binary(), "bench", "cipher"], capture_output=True, text=True, timeout=60, check=True)
    assert table.stdout.startswith("AES-128-GCM, records of 16384 bytes in the cache of one core\n")
    assert len(table.stdout.splitlines()) == 1 + len(libraries)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="there is one library on other processors")
def test_where_one_library_has_no_aes_instructions_the_other_is_used_and_results_are_right() -> None:
    # The libraries differ by a factor of ten then, so the outcome does not depend on other work on the machine.
    assert used(rates(WITHOUT_AES)) == ["ring"]
    command = [ronde_binary(), "run", "-np", "2", "--sidecars", "2", "--transport", "tls", sys.executable, "-c", REDUCE]
    job = subprocess.run(
        command, env={**os.environ, **WITHOUT_AES}, capture_output=True, text=True, timeout=120, check=False
    )
    assert job.returncode == 0, job.stdout + job.stderr
