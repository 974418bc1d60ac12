"""All-reduces in functions that XLA compiles, `tf.function(jit_compile=True)`, on CPUs.

XLA has no kernels for operations of other libraries. It calls ronde's handler instead, which is the target of a custom
call in a StableHLO module. Each call takes a number that the call before it has returned, so that XLA keeps the order
in which the calls were traced.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ronde import _ronde
from ronde.frameworks import world
from ronde.ops import Average

if TYPE_CHECKING:
    from collections.abc import Sequence

try:
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
except ImportError:  # then TensorFlow reports that it has no kernel for XLA
    GraphOrParentsInXlaContext = None

NO_REPLAY = (
    'on_failure="continue" is for ronde.torch: operations of TensorFlow\'s graphs cannot be replayed. Leave it out, '
    "and RONDE_ON_FAILURE, too; hvd.elastic.run restores the last commit instead"
)
WORKS_WITH = "2.21"
"""The version of TensorFlow that tests compile with."""
_MODULE_VERSION = 9
"""Of the operation XlaCallModule: the newest one of TensorFlow 2.19, which later releases accept."""
_ANY = -1
"""Of the handler's attributes `rank` and `size`: a program that depends on neither."""
_TYPES = {
    tf.uint8: "ui8",
    tf.int8: "i8",
    tf.uint16: "ui16",
    tf.int16: "i16",
    tf.int32: "i32",
    tf.int64: "i64",
    tf.float16: "f16",
    tf.bfloat16: "bf16",
    tf.float32: "f32",
    tf.float64: "f64",
    tf.bool: "i1",
}

_LAST_CALL = "_ronde_last_call"
"""The attribute of a graph that contains the number that its last call returns."""


class _State:
    lock = threading.Lock()
    has_passed = False
    session: Any = None
    """The extension module's session that compiled functions use."""


def is_traced() -> bool:
    """Returns whether a function that XLA compiles is being traced."""
    if GraphOrParentsInXlaContext is None or tf.executing_eagerly():
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def refuse(what: str) -> None:
    """Raises NotImplementedError if a function that XLA compiles is being traced."""
    if is_traced():
        raise NotImplementedError(
            f"{what} is not possible in a function with jit_compile=True: XLA compiles allreduce and grouped_allreduce "
            "only. Call it outside of that function"
        )


def allreduce(
    tensors: Sequence[Any],
    tensor_name: str,
    reduce_op: int,
    prescale_factor: str,
    postscale_factor: str,
    process_set_id: int,
) -> list[Any]:
    """Adds one call to the graph that reduces tensors, as a group if there are several. Differentiable.

    The arguments are the attributes of `RondeGroupedAllreduce`. Raises ValueError for a tensor whose shape is not
    known, and NotImplementedError with a TensorFlow that cannot call the handler and for a session with
    `on_failure="continue"`.
    """
    _prepare()
    attributes = {
        "kind": "allreduce",
        "op": reduce_op,
        "prescale": float(prescale_factor),
        "postscale": float(postscale_factor),
        "set": process_set_id,
    }

    @tf.custom_gradient
    def reduced(*given: Any) -> Any:
        def gradient(*gradients: Any) -> Any:
            name = numbered_gradient(tensor_name)
            # A result that nothing uses has none. All of them take part, so that ranks have equal groups.
            known = [
                tf.zeros_like(x) if each is None else tf.convert_to_tensor(each) for x, each in zip(given, gradients)
            ]
            return _call(known, {**attributes, "name": name})

        return _call(given, {**attributes, "name": tensor_name}), gradient

    return list(reduced(*tensors))


def numbered_gradient(name: str) -> str:
    """Returns the name of the all-reduce that is the gradient of one of this name."""
    from ronde.tensorflow.names import numbered

    return numbered(tf.compat.v1.get_default_graph(), f"{name}.gradient")


def _call(tensors: Sequence[Any], attributes: dict[str, Any]) -> list[Any]:
    """Adds a call of the handler, after the last one of the graph."""
    from tensorflow.compiler.tf2xla.python import xla

    graph = tf.compat.v1.get_default_graph()
    last = getattr(graph, _LAST_CALL, None)
    operands = [*tensors, tf.constant(0) if last is None else last]
    for each in operands:
        if not each.shape.is_fully_defined():
            raise ValueError(
                f"{attributes['name']}: a tensor in a function with jit_compile=True has shape {each.shape}, of which "
                "ronde needs all dimensions. Give the function an input_signature, or reduce it outside"
            )
    results = xla.call_module(
        operands,
        version=_MODULE_VERSION,
        module=_module(operands, {**_DEFAULTS, "types": ",".join(each.dtype.name for each in tensors), **attributes}),
        Tout=[each.dtype for each in operands],
        Sout=[each.shape for each in operands],
        platforms=["CPU"],
    )
    setattr(graph, _LAST_CALL, results[-1])
    return list(results[:-1])


_DEFAULTS = {
    "kind": "allreduce",
    "op": Average,
    "prescale": 1.0,
    "postscale": 1.0,
    "codec": "",
    "root": 0,
    "set": 0,
    "rank": _ANY,
    "size": _ANY,
    "splits": "",
    "name": "",
    "site": "",
}
"""The attributes that the handler reads."""


def _module(operands: Sequence[Any], attributes: dict[str, Any]) -> str:
    """Returns a StableHLO module whose call returns what has the types and shapes of the operands."""
    types = [f"tensor<{''.join(f'{size}x' for size in each.shape)}{_TYPES[each.dtype]}>" for each in operands]
    given = ", ".join(f"%arg{index}: {each}" for index, each in enumerate(types))
    names = ", ".join(f"%arg{index}" for index in range(len(types)))
    listed = ", ".join(types)
    returned = ", ".join(f"%0#{index}" for index in range(len(types)))
    config = ", ".join(f"{name} = {_literal(value)}" for name, value in attributes.items())
    return (
        f"module @ronde {{ func.func public @main({given}) -> ({listed}) {{\n"
        f"  %0:{len(types)} = stablehlo.custom_call @ronde_collective({names}) {{api_version = 4 : i32, "
        f"has_side_effect = true, backend_config = {{{config}}}}} : ({listed}) -> ({listed})\n"
        f"  return {returned} : {listed}\n}} }}"
    )


def _literal(value: Any) -> str:
    if isinstance(value, str):
        # A byte of a longer character in UTF-8 is no letter by itself.
        plain = {byte for byte in range(128) if chr(byte).isalnum()}
        return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:02X}" for byte in value.encode()) + '"'
    if isinstance(value, float):  # in hexadecimal, which is exact
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X} : f64"
    return f"{value} : i64"


# AutoGraph would make tensors of the self-test's numbers, and of its condition a branch that is traced either way.
@tf.autograph.experimental.do_not_convert
def _prepare() -> None:
    """Registers the handler and binds the session, the first time that a collective is compiled. Runs the self-test.

    Raises NotImplementedError with a TensorFlow that cannot call the handler, and for a session with
    `on_failure="continue"`.
    """
    if _is_replaced():
        raise NotImplementedError(NO_REPLAY)
    with _State.lock:
        if not _State.has_passed:
            try:
                _ronde.xla_register(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_cc.so.2"))
                _self_test()
            except (ImportError, AttributeError, tf.errors.OpError) as error:
                raise NotImplementedError(
                    f"functions with jit_compile=True cannot have collectives with TensorFlow {tf.__version__}: "
                    f"{error}. Install a release of TensorFlow {WORKS_WITH}, or leave jit_compile=True out around them"
                ) from error
            _State.has_passed = True
    follow()


def _self_test() -> None:
    """Compiles and runs a call that is complete after the handler has returned. Raises ImportError if it fails."""
    with tf.init_scope(), tf.device("/cpu:0"):
        if not tf.executing_eagerly():
            return
        answer = int(_compiled_self_test())
    if answer != _ronde.XLA_SELF_TEST:
        raise ImportError(f"the self-test gave {answer}, not {_ronde.XLA_SELF_TEST}")


@tf.function(jit_compile=True, autograph=False)
def _compiled_self_test() -> Any:
    return _call([tf.constant(0)], {"kind": "self_test", "name": "self_test"})[0]


def follow() -> None:
    """Makes compiled functions use the process's session, if there are some."""
    if not world.is_begun() or _is_replaced():
        _State.session = None
        return
    session = world.current().client.native_session
    if _State.has_passed and _State.session is not session:
        _ronde.xla_bind(session)
        _State.session = session


def _is_replaced() -> bool:
    """Returns whether the process's session may be replaced while operations are in flight, as those of ronde.torch."""
    return world.is_begun() and world.current().client.replay is not None
