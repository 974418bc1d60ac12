"""Hugging Face Accelerate on handwritten digits. ronde is not named here: RONDE_AUTOINIT=1 makes the process group.

RONDE_AUTOINIT=1 ronde run -np 2 accelerate launch --cpu --num_processes 1 accelerate_digits.py
RONDE_AUTOINIT=1 ronde run -np 2 python accelerate_digits.py
RONDE_AUTOINIT=1 torchrun --nproc-per-node 2 accelerate_digits.py       on one host
python accelerate_digits.py                                             one process, on the same global batches
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from digits import GLOBAL_BATCH, Digits, dataset, report, whole_batches
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

EPOCHS = 4


def main() -> None:
    """Trains and reports."""
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    train, test = dataset(seed=0)
    torch.manual_seed(0)
    digits = Digits()
    optimizer = torch.optim.SGD(digits.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(whole_batches(*train), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(digits, optimizer, loader)
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
    weights = accelerator.get_state_dict(model)
    report(weights, test, accelerator.process_index, accelerator.num_processes)


if __name__ == "__main__":
    main()
