"""Models and optimizers of PyTorch as bytes.

An optimizer refers to parameters of its model, so it is pickled with their names, and gets those of the loaded model.
State dictionaries are read by `torch.load(weights_only=True)`, which runs no code.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch

from ronde.spark.common.pickling import dumps, loads, unpicklable
from ronde.spark.common.progress import Progress

if TYPE_CHECKING:
    from ronde.spark.common.store import Store

_PARAMETER = "parameter"
MODEL, EPOCH, BEGUN, PLANNED = "model", "epoch", "begun", "planned"
"""Keys of a checkpoint: weights, and the numbers of epochs of `ronde.spark.common.progress.Progress`."""


def continued(payload: dict[str, Any], store: Store, run_id: str) -> tuple[dict[str, Any], Progress]:
    """Adds the checkpoint of a run, if there is one, as "state". Returns how far the run is."""
    path = store.get_checkpoint_path(run_id)
    if not store.saving_runs() or not store.exists(path):
        return payload, Progress()
    content = store.read(path)
    state = state_of(content)
    return {**payload, "state": content}, Progress(state[EPOCH], state.get(BEGUN, 0), state[PLANNED])


def model_bytes(model: torch.nn.Module) -> bytes:
    """Returns a model, also one of TorchScript. Raises TypeError if it cannot be pickled."""
    if isinstance(model, torch.jit.ScriptModule):
        buffer = io.BytesIO()
        torch.jit.save(model, buffer)
        return dumps(("script", buffer.getvalue()), "the model")
    return dumps(("module", model), "the model", model)


def model_of(content: bytes) -> torch.nn.Module:
    """Returns the model of `model_bytes`. Unpickles it."""
    kind, model = loads(content)
    loaded: torch.nn.Module = torch.jit.load(io.BytesIO(model)) if kind == "script" else model
    return loaded


def optimizer_bytes(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bytes:
    """Returns an optimizer with its state and the names of its parameters.

    Raises ValueError for an optimizer with parameters of another model, and TypeError if it cannot be pickled.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise ValueError("the optimizer has parameters that are not the model's; make it with model.parameters()")
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, names)
    try:
        pickler.dump(optimizer)
    except Exception as error:
        raise TypeError(unpicklable("the optimizer", optimizer, error)) from error
    return buffer.getvalue()


def optimizer_of(content: bytes, model: torch.nn.Module) -> Any:
    """Returns the optimizer of `optimizer_bytes` for the parameters of a model. Unpickles it."""
    return _Unpickler(io.BytesIO(content), dict(model.named_parameters())).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, names: dict[int, str]) -> None:
        super().__init__(file)
        self._names = names

    def persistent_id(self, obj: Any) -> Any:
        """The name of a parameter; all else is pickled."""
        if isinstance(obj, torch.Tensor) and id(obj) in self._names:
            return _PARAMETER, self._names[id(obj)]
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parameters: dict[str, Any]) -> None:
        super().__init__(file)
        self._parameters = parameters

    def persistent_load(self, pid: Any) -> Any:
        """The parameter with a name."""
        return self._parameters[pid[1]]


def state_bytes(state: dict[str, Any]) -> bytes:
    """Returns a dictionary of state dictionaries and numbers, as `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def state_of(content: bytes) -> dict[str, Any]:
    """Returns the dictionary of `state_bytes`, with tensors in main memory. Runs no code that is in it."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return state
