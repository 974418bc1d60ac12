"""Loading of models whose optimizers reduce gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def load_model(
    load: Callable[..., Any],
    wrap: Callable[[Any], Any],
    filepath: Any,
    custom_optimizers: Any,
    custom_objects: Any,
) -> Any:
    """Loads a model, and replaces its optimizer by one that reduces gradients.

    load     -- `load_model` of Keras
    wrap     -- `DistributedOptimizer`
    filepath -- a path, or an open `h5py.File`; for Keras 3 that of a file whose name ends in .h5, opened for
                reading
    """
    known = {kind.__name__: kind for kind in custom_optimizers or []}
    known.update(custom_objects or {})
    # Keras 3 loads HDF5 by the ending of the path only; Keras 2 takes the object.
    is_file = type(filepath).__module__.startswith("h5py.") and load.__module__.split(".")[0] == "keras"
    model = load(filepath.filename if is_file else filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        model.optimizer = wrap(optimizer)
    return model
