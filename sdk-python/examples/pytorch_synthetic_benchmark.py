"""Images per second of a model of PyTorch on random data, with the flags of Horovod's script of this name.

    ronde run -np 2 python pytorch_synthetic_benchmark.py --model resnet50 --batch-size 8 --num-iters 3

Models are those of `ronde bench train` (resnet50, resnet101, vgg16, inception3), and those of torchvision if that is
installed.
"""

from __future__ import annotations

import argparse
import os
import timeit
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import ronde.torch as hvd
from ronde.bench import image_models


def main() -> None:
    """Measures and reports."""
    options = arguments()
    hvd.init()
    use_cuda = not options.no_cuda and torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(hvd.local_rank())
    else:
        torch.set_num_threads(1)
    device = torch.device("cuda" if use_cuda else "cpu")
    model = model_of(options.model).to(device)
    # With Adasum the rate needs no factor, except where the ranks of a host are averaged first.
    is_averaged = os.environ.get("RONDE_HIERARCHICAL_ADASUM") == "1"
    factor = (hvd.local_size() if is_averaged else 1) if options.use_adasum else hvd.size()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01 * factor)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    labels = torch.randint(1000, (options.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if use_cuda:
            torch.cuda.synchronize()

    name = "GPU" if use_cuda else "CPU"
    log(f"Model: {options.model}")
    log(f"Batch size: {options.batch_size}")
    log(f"Number of {name}s: {hvd.size()}")
    timeit.timeit(step, number=options.num_warmup_batches)
    rates = []
    for number in range(options.num_iters):
        seconds = timeit.timeit(step, number=options.num_batches_per_iter)
        rates.append(options.batch_size * options.num_batches_per_iter / seconds)
        log(f"Iter #{number}: {rates[-1]:.1f} img/sec per {name}")
    mean, spread = float(np.mean(rates)), 1.96 * float(np.std(rates))
    log(f"Img/sec per {name}: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {hvd.size()} {name}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp16-allreduce", action="store_true", help="reduce gradients in half precision")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="images of each rank")
    parser.add_argument("--image-size", type=int, default=224, help="32 for vgg16 of ronde, at least 75 for inception3")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    return parser.parse_args()


def model_of(name: str) -> nn.Module:
    """Returns a new model. Exits with the names that there are for another one."""
    own = ("resnet50", "resnet101", "vgg16", "inception3")
    if name in own:
        made: nn.Module = getattr(image_models, name)()
        return made
    try:
        from torchvision import models
    except ImportError:
        raise SystemExit(f"no model {name}: without torchvision there are {', '.join(own)}") from None
    if not hasattr(models, name):
        raise SystemExit(f"torchvision has no model {name}")
    found: nn.Module = getattr(models, name)()
    return found


def log(text: str) -> None:
    """Prints on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
