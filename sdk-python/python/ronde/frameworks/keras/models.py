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

    load -- `load_model` of Keras
    wrap -- `DistributedOptimizer`
    """
    known = {kind.__name__: kind for kind in custom_optimizers or []}
    known.update(custom_objects or {})
    model = load(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        model.optimizer = wrap(optimizer)
    return model
