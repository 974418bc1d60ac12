"""The data, the model and the report that the examples share: scikit-learn's handwritten digits."""

from __future__ import annotations

import hashlib
import os
import pathlib

import torch
from sklearn.datasets import load_digits
from torch import nn

TEST_IMAGES = 360
# Examples that are to compare with a single process leave the rest out: batches of this many images come out even.
GLOBAL_BATCH = 64

# In float64, another order of sums changes next to nothing: so trainings can be compared.
torch.set_default_dtype({"float32": torch.float32, "float64": torch.float64}[os.environ.get("DIGITS_DTYPE", "float32")])

Labelled = tuple[torch.Tensor, torch.Tensor]


def dataset(seed: int) -> tuple[Labelled, Labelled]:
    """The 1,797 images of 8 x 8 pixels, split for training and test; the same on all ranks."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.get_default_dtype()).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return (images[train], labels[train]), (images[test], labels[test])


def whole_batches(images: torch.Tensor, labels: torch.Tensor) -> torch.utils.data.TensorDataset:
    """The images of as many global batches as there are, for a data loader."""
    count = len(labels) // GLOBAL_BATCH * GLOBAL_BATCH
    return torch.utils.data.TensorDataset(images[:count], labels[:count])


class Digits(nn.Module):
    """Two convolutions and two linear layers: 70,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classes = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns scores of the ten digits."""
        scores: torch.Tensor = self.classes(self.features(images))
        return scores


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the share of images whose digit is recognized."""
    return float((model(images).argmax(1) == labels).double().mean())


def report(weights: dict[str, torch.Tensor], test: Labelled, rank: int, size: int) -> None:
    """Prints this rank's test accuracy and a digest of its weights, which are the same on all ranks.

    Rank 0 saves the weights in the file that the variable DIGITS_WEIGHTS names, if it is set.
    """
    model = Digits()
    model.load_state_dict(weights)
    digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()[:12]
    print(f"rank {rank} of {size}: test accuracy {accuracy(model, *test):.4f}, weights {digest}", flush=True)
    if (path := os.environ.get("DIGITS_WEIGHTS")) and rank == 0:
        torch.save(weights, pathlib.Path(path))
