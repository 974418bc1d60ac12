"""A benchmark of ronde against its peers: every result checked, backends taking turns, so that noise hits all alike.

    ronde bench
    ronde bench train --model mlp

How it measures is in docs/PERFORMANCE.md; `python3 -m ronde.bench` is the same program.
"""
