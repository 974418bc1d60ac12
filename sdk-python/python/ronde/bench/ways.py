"""Ways to train: their names, and which group of ranks trains that way.

Without PyTorch: the benchmark's own process does without it.
"""

from __future__ import annotations

RONDE, DDP, BARRIER, ALONE = "ronde", "ddp", "barrier", "alone"
# By group. The floor and the step alone need no library of their own, so Gloo's ranks make them.
WAYS = {"ronde": [RONDE], "gloo": [DDP, BARRIER, ALONE]}
LABELS = {
    RONDE: "ronde DistributedOptimizer",
    DDP: "DDP on Gloo",
    BARRIER: "a barrier, no data",
    ALONE: "one rank alone",
}
# Ways after which all ranks must have the same parameters.
SYNCHRONOUS = (RONDE, DDP)
BATCHES = {"mlp": 64, "cnn": 64, "resnet50": 4}
