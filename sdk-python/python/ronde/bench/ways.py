"""Ways to train: their names, and which group of ranks trains that way.

Without PyTorch: the benchmark's own process does without it.
"""

from __future__ import annotations

RONDE, DDP, BARRIER, ALONE = "ronde", "ddp", "barrier", "alone"
DDP_RONDE = "ddp on ronde"
# By group. The floor and the step alone need no library of their own, so Gloo's ranks make them.
WAYS = {"ronde": [RONDE, DDP_RONDE], "gloo": [DDP, BARRIER, ALONE]}
LABELS = {
    RONDE: "ronde DistributedOptimizer",
    DDP_RONDE: "DDP on ronde",
    DDP: "DDP on Gloo",
    BARRIER: "a barrier, no data",
    ALONE: "one rank alone",
}
# Gradients encoded: the codec follows, as the command line names it.
CODEC = "ronde codec "
BATCHES = {"mlp": 64, "cnn": 64, "resnet50": 4}


def is_synchronous(way: str) -> bool:
    """Whether all ranks must have the same parameters after it."""
    return way in (RONDE, DDP_RONDE, DDP) or way.startswith(CODEC)


def label(way: str) -> str:
    """For people."""
    return f"ronde, codec {way[len(CODEC) :]}" if way.startswith(CODEC) else LABELS[way]
