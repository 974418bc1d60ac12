"""Ways to train: their names, and which group of ranks trains that way.

Without PyTorch: the benchmark's own process does without it.
"""

from __future__ import annotations

RONDE, DDP, BARRIER, ALONE = "ronde", "ddp", "barrier", "alone"
DDP_RONDE = "ddp on ronde"
# By group. The floor and the step alone need no library of their own, so Gloo's ranks make them.
MODES = {"ronde": [RONDE, DDP_RONDE], "gloo": [DDP, BARRIER, ALONE]}
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


def is_synchronous(mode: str) -> bool:
    """Whether all ranks must have the same parameters after it."""
    return mode in (RONDE, DDP_RONDE, DDP) or mode.startswith(CODEC)


def label(mode: str) -> str:
    """For people."""
    return f"ronde, codec {mode[len(CODEC) :]}" if mode.startswith(CODEC) else LABELS[mode]
