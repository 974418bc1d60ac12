"""Training modes: their names, and the group of ranks for each.

Does not import PyTorch: the benchmark's main process does not use it.
"""

from __future__ import annotations

RONDE, DDP, BARRIER, ALONE = "ronde", "ddp", "barrier", "alone"
DDP_RONDE = "ddp on ronde"
# Modes by group. The barrier without data and the single rank need no library, so Gloo's ranks run them.
MODES = {"ronde": [RONDE, DDP_RONDE], "gloo": [DDP, BARRIER, ALONE]}
LABELS = {
    RONDE: "ronde DistributedOptimizer",
    DDP_RONDE: "DDP on ronde",
    DDP: "DDP on Gloo",
    BARRIER: "a barrier, no data",
    ALONE: "one rank alone",
}
# The prefix of modes with encoded gradients. The codec follows, as on the command line.
CODEC = "ronde codec "
BATCHES = {"mlp": 64, "cnn": 64, "resnet50": 4, "resnet101": 4, "vgg16": 16, "inception3": 4}


def is_synchronous(mode: str) -> bool:
    """Returns whether all ranks must have the same parameters after training."""
    return mode in (RONDE, DDP_RONDE, DDP) or mode.startswith(CODEC)


def label(mode: str) -> str:
    """Returns the name of a mode in tables and messages."""
    return f"ronde, codec {mode[len(CODEC) :]}" if mode.startswith(CODEC) else LABELS[mode]
