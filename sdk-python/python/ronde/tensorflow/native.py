"""The operations of the extension module in TensorFlow, and what they assume of it (docs/adr/0030).

Importing this registers the operations, once in a process, but starts nothing of TensorFlow: programs set devices and
threads after the import.
"""

from __future__ import annotations

import os
import threading
import types
from typing import Any

import tensorflow as tf

from ronde import _ronde

WORKS_WITH = ("2.19", "2.20", "2.21")
"""The versions of TensorFlow that tests run with."""
_OLDEST = (2, 16)


def _refusal(reason: str) -> ImportError:
    return ImportError(
        f"ronde.tensorflow does not work with TensorFlow {tf.__version__}: {reason}. Install a release of TensorFlow "
        f"{', '.join(WORKS_WITH)}, with which it is tested"
    )


def check_version(version: str) -> None:
    """Raises ImportError for a version that is older than the oldest one that has what the operations need."""
    parts = version.split(".")
    if len(parts) < 2 or not all(part.isdecimal() for part in parts[:2]) or tuple(map(int, parts[:2])) < _OLDEST:
        raise _refusal(f"its version, {version}, is older than {'.'.join(map(str, _OLDEST))}")


def _wrappers(names: list[str]) -> Any:
    """Returns a module with TensorFlow's own wrappers of operations, which work eagerly and in graphs."""
    try:
        from tensorflow.core.framework import op_def_pb2
        from tensorflow.python.framework import op_def_registry
        from tensorflow.python.framework.load_library import _pywrap_python_op_gen

        definitions = op_def_pb2.OpList(op=[op_def_registry.get(name) for name in names])
        source = _pywrap_python_op_gen.GetPythonWrappers(definitions.SerializeToString())
    except (ImportError, AttributeError, TypeError) as error:
        raise _refusal(f"its generator of wrappers is another one ({error})") from error
    module = types.ModuleType("ronde_tensorflow_operations")
    exec(source, module.__dict__)
    # AutoGraph then calls them as they are.
    module.__dict__["_IS_TENSORFLOW_PLUGIN"] = True
    return module


def _run_in_parallel(unordered: list[str]) -> None:
    """Makes operations of a `tf.function` run in parallel.

    Automatic control dependencies would make each wait for the one before it, as they are stateful. With the names in
    this set they run in any order, and also when nothing uses their result, because other ranks wait for them.
    """
    from tensorflow.python.framework import auto_control_deps

    known = getattr(auto_control_deps, "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS", None)
    if not isinstance(known, frozenset):
        raise _refusal("its automatic control dependencies have no set of stateful operations without an order")
    auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS = known | frozenset(unordered)


def _load() -> tuple[Any, frozenset[str]]:
    check_version(tf.__version__)
    library = os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2")
    try:
        names, unordered = _ronde.register_tensorflow(library)
    except ImportError as error:
        raise _refusal(str(error)) from error
    _run_in_parallel(unordered)
    return _wrappers(names), frozenset(unordered)


ops, UNORDERED = _load()
"""TensorFlow's wrappers of the operations, such as `ops.ronde_allreduce`, and the types that run in any order."""


class _SelfTest:
    lock = threading.Lock()
    has_passed = False


def self_test() -> None:
    """Runs an operation that ends in another thread, eagerly and in a graph, the first time.

    It starts TensorFlow, so it runs before the first collective, or when a `tf.function` with one is traced, and not
    when this module is imported. In a graph of TensorFlow 1 it does not run. Raises ImportError that names the versions
    that work.
    """
    if _SelfTest.has_passed:
        return
    with _SelfTest.lock, tf.init_scope():
        # A graph of TensorFlow 1 has nothing outside that could run it.
        if _SelfTest.has_passed or not tf.executing_eagerly():
            return
        try:
            with tf.device("/cpu:0"):
                answers = [ops.ronde_self_test(), *_self_test_in_graph()]
        except tf.errors.FailedPreconditionError as error:
            raise _refusal(error.message) from error
        # Read once: what is reported is what was compared.
        found, expected = [int(answer) for answer in answers], [_ronde.TENSORFLOW_SELF_TEST] * 3
        if found != expected:
            raise _refusal(f"the self-test gave {found}, not {expected}")
        _SelfTest.has_passed = True


@tf.function(autograph=False)
def _self_test_in_graph() -> list[tf.Tensor]:
    return [ops.ronde_self_test(), ops.ronde_self_test()]
