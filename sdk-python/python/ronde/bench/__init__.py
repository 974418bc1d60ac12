"""A benchmark of ronde against its peers. It checks every result; backends take turns, so that noise affects all alike.

    ronde bench
    ronde bench train --model mlp

docs/PERFORMANCE.md describes the method. `python3 -m ronde.bench` is the same program.
"""
