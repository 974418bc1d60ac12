"""Runs a program unchanged and reports the TCP ports on which its process listened meanwhile: watched.py PROGRAM ..."""

from __future__ import annotations

import pathlib
import runpy
import sys

from listening import Watch

watch = Watch()
watch.start()
program, *arguments = sys.argv[1:]
sys.argv = [program, *arguments]
sys.path[0] = str(pathlib.Path(program).parent)
try:
    runpy.run_path(program, run_name="__main__")
finally:
    watch.stop()
    print(f"watched in {watch.rounds} rounds: {len(watch.ports)} TCP listeners {sorted(watch.ports)}", flush=True)
