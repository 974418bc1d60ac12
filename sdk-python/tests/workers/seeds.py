"""Run by every rank: programs of the documentation, one after the other, with the names that they assume.

    seeds.py FOLDER

Each file of the folder is a block. `NAME = ...` and `OPTION=...` in it stand for what a reader has: a dataset, a model,
a number. Only these ranks run the part after `# on ranks 0 and 2`. Before each block a session ends, and all names are
new; after it, its results are checked.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
import traceback
from types import SimpleNamespace
from typing import Any, Callable

import torch
import torch.nn.functional
from torch import optim

import horovod.torch as hvd

BATCH = 2
RANKS = re.compile(r"^# on (?:all ranks|ranks (\d) and (\d))$", re.MULTILINE)


def model_of() -> torch.nn.Module:
    """A small model, another one on each rank."""
    torch.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LogSoftmax(dim=1))


def given() -> dict[str, Any]:
    """Returns the names that a block assumes. Models, data and optimizers differ between ranks."""
    model = model_of()
    inputs, targets = torch.randn(8, 4), torch.randint(3, (8,))
    samples = torch.utils.data.TensorDataset(inputs, targets)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    names: dict[str, Any] = {
        "torch": torch,
        "hvd": hvd,
        "F": torch.nn.functional,
        "optim": optim,
        "model": model,
        "optimizer": optimizer,
        "opt": optim.SGD(model.parameters(), lr=0.1),
        "data": inputs,
        "target": targets,
        "args": SimpleNamespace(lr=0.1, momentum=0.9, clip=0.01, log_interval=2),
        "compression": hvd.Compression.fp16,
        "Compressor": hvd.Compression.none,
        "CustomCompressor": hvd.Compression.fp16,
        "tensor": torch.ones(5),
        "tensor_for_even_ranks": torch.ones(3),
        "tensor_for_odd_ranks": torch.ones(3) * 2,
        "lr": 0.01,
        "epochs": 3,
        "batches_per_epoch": 4,
        "batches_per_commit": 2,
        "get_random_batch": lambda: (torch.randn(BATCH, 4), torch.randint(3, (BATCH,))),
    }
    return {**names, "samples": samples, "dataset": samples, "train_dataset": samples}


class Filled(ast.NodeTransformer):
    """Puts what a reader has in the place of `...`: the names that are given, or a number."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        """`NAME = ...` leaves what the name has."""
        return ast.Pass() if is_ellipsis(node.value) else self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> Any:
        """`OPTION=...` is a number."""
        if is_ellipsis(node.value):
            node.value = ast.Constant(BATCH)
        return self.generic_visit(node)


def is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def parts_of(text: str) -> list[tuple[tuple[str, ...], str]]:
    """Returns the parts of a block with the ranks that run each; none means all."""
    marks = list(RANKS.finditer(text))
    ends = [*(mark.start() for mark in marks), len(text)]
    parts = [(tuple(filter(None, mark.groups())), text[mark.end() : end]) for mark, end in zip(marks, ends[1:])]
    return [((), text[: ends[0]]), *parts]


def run(name: str, text: str) -> dict[str, Any]:
    """Runs a block, and gives its names."""
    names = given()
    if "hvd.init(" not in text:
        hvd.init()
    if "optimizer.synchronize()" in text:
        names["optimizer"] = hvd.DistributedOptimizer(names["optimizer"])
        hvd.broadcast_parameters(names["model"].state_dict(), root_rank=0)
    for ranks, part in parts_of(text):
        # The part in front has begun the session, so that the rank is known.
        if not ranks or str(hvd.rank()) in ranks:
            tree = ast.fix_missing_locations(Filled().visit(ast.parse(part)))
            exec(compile(tree, name, "exec"), names)
    return names


def same_everywhere(value: Any) -> None:
    everybodys = hvd.allgather_object(value)
    assert all(str(each) == str(everybodys[0]) for each in everybodys), everybodys


def model_is_same(names: dict[str, Any]) -> None:
    same_everywhere([parameter.tolist() for parameter in names["model"].parameters()])


def gradient_is_clipped(names: dict[str, Any]) -> None:
    model_is_same(names)
    norm = torch.cat([parameter.grad.flatten() for parameter in names["model"].parameters()]).norm()
    assert norm <= names["args"].clip * 1.001, norm


def optimizer_works(names: dict[str, Any]) -> None:
    """Five passes make a step, from which all ranks come out the same."""
    hvd.broadcast_parameters(names["model"].state_dict(), root_rank=0)
    for _ in range(5):
        names["F"].nll_loss(names["model"](names["data"]), names["target"]).backward()
    names["optimizer"].step()
    model_is_same(names)


def compressor_works(names: dict[str, Any]) -> None:
    kinds = [value for value in names.values() if isinstance(value, type) and issubclass(value, names["Compressor"])]
    (compressor,) = set(kinds) - {names["Compressor"], hvd.Compression.fp16, hvd.Compression.none}
    # The documentation's own leaves open what it does.
    if compressor.__name__ == "HalfCompressor":
        reduced = hvd.allreduce(torch.ones(2), compression=compressor)
        assert (reduced.dtype, reduced.tolist()) == (torch.float32, [1, 1])


def compressor_is_registered(names: dict[str, Any]) -> None:
    assert names["Compression"].custom is names["CustomCompressor"]


def result_is_of_the_set(names: dict[str, Any]) -> None:
    assert names["result"].tolist() == [1.0 + hvd.rank() % 2] * 3


def trained_to_the_end(names: dict[str, Any]) -> None:
    model_is_same(names)
    assert (names["state"].epoch, names["state"].batch) == (2, 0)


def state_is_same(names: dict[str, Any]) -> None:
    same_everywhere(names["state_dict"])


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "start_equal": model_is_same,
    "training": model_is_same,
    "clipping": gradient_is_clipped,
    "adasum_optimizer": optimizer_works,
    "compressor": compressor_works,
    "compressor_registered": compressor_is_registered,
    "elastic": trained_to_the_end,
    "objects": state_is_same,
    "static_sets": result_is_of_the_set,
    "dynamic_sets": result_is_of_the_set,
    "communicator_sets": result_is_of_the_set,
}


def provide() -> None:
    """What blocks ask for that a machine without a GPU, or the release that they are about, does not have."""
    torch.cuda.set_device = lambda device: None
    torch.nn.Module.cuda = lambda self, device=None: self
    # Documentation writes it so; the constant is Adasum in every release.
    hvd.AdaSum = hvd.Adasum
    hvd.Compression.custom = hvd.Compression.fp16


def main() -> None:
    """Runs all blocks, and prints a line with the outcome of each."""
    provide()
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
        hvd.shutdown()
        try:
            names = run(path.name, path.read_text())
            CHECKS.get(path.stem, lambda names: None)(names)
            # A rank that leaves ends the session for all, also for a process set that it is not in.
            hvd.barrier()
            print(f"block {path.stem}: ran", flush=True)
        except (ValueError, ImportError) as error:
            print(f"block {path.stem}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
        except BaseException:
            print(f"block {path.stem}: failed", flush=True)
            traceback.print_exc()
            raise


if __name__ == "__main__":
    main()
