"""Leaves of the environment of `ronde run` what the scripts for Slurm, Kubernetes and compose set, and runs a program.

job_alone.py PROGRAM ARGUMENTS...
"""

from __future__ import annotations

import os
import sys

KEPT = {"RONDE_SOCKET", "RONDE_JOB", "RONDE_RANK"}
SET_BY_RUN = ("RONDE_", "HOROVOD_", "OMPI_", "PMI_")
FOR_PYTORCH = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

assert set(os.environ) >= KEPT
for name in set(os.environ) - KEPT - {"RONDE_AUTOINIT"}:
    if name.startswith(SET_BY_RUN) or name in FOR_PYTORCH:
        del os.environ[name]
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
