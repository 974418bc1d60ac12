"""`DistributedGradientTape` and `PartialDistributedGradientTape`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ronde.frameworks.keras.optimizer import variables_of_layers
from ronde.frameworks.process_sets import ProcessSet, global_process_set
from ronde.ops import Average
from ronde.tensorflow.compression import Compression, Compressor
from ronde.tensorflow.reduction import Options, reduce_gradients


class _Tape(tf.GradientTape):
    """A tape whose `gradient` reduces over all ranks."""

    _ronde_options: Options

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """Returns the gradients of all ranks together, in the structure of `sources`.

        As `tf.GradientTape.gradient`. A source without a gradient has None on all ranks.

        use_generic_names -- ignored: gradients are named by their order in `sources`
        """
        del use_generic_names
        gradients = super().gradient(target, sources, output_gradients, **options)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        variables = tf.nest.flatten(sources, expand_composites=False)
        reduced = reduce_gradients(flat, variables, self._ronde_options)
        return tf.nest.pack_sequence_as(sources, reduced, expand_composites=False)

    def register_local_source(self, source: Any) -> None:
        """Leaves the gradient of a variable as it is on this rank, or divides it by the number of ranks."""
        self._ronde_options.register_local(source)


def DistributedGradientTape(  # noqa: N802 -- Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns the tape with a `gradient` that reduces over all ranks.

    gradtape        -- the tape, before or after its recording
    device_dense, device_sparse -- the devices for the reduction of tensors, and of slices
    compression     -- such as `Compression.fp16`
    sparse_as_dense -- whether `tf.IndexedSlices` are converted to tensors first
    op              -- Average, Sum or Adasum
    gradient_predivide_factor -- with Average: divides each gradient by it before, and multiplies the result after
    num_groups, groups -- reduces gradients in that many groups, or those of each list of variables as a group
    process_set     -- the ranks that train together
    scale_local_gradients -- whether gradients of local sources are divided by the number of ranks

    Several distributed tapes of one tape each keep their own options. Raises ValueError for options that exclude each
    other, and for a tape that is distributed already.
    """
    if isinstance(gradtape, _Tape):
        raise ValueError("this tape is a DistributedGradientTape already; wrap it once")
    options = Options(
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    kind = type(gradtape)
    bases = (_Tape, kind) if kind is not tf.GradientTape else (_Tape,)
    # Options are those of a new class: all tapes of one recording have the same attributes.
    wrapped: Any = object.__new__(type(kind.__name__, bases, {"_ronde_options": options}))
    # The same recording, which goes on in both.
    wrapped.__dict__ = gradtape.__dict__
    return wrapped


def PartialDistributedGradientTape(  # noqa: N802 -- Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As `DistributedGradientTape`; the gradients of `local_layers`, a layer of Keras or a list of them, stay local.

    Raises ValueError for anything else among the layers, and as `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables_of_layers(local_layers):
        tape.register_local_source(variable)
    return tape


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Returns whether TensorFlow has a GPU. The arguments are Horovod's, and have no effect."""
    del ext_base_name, verbose
    return bool(tf.config.list_physical_devices("GPU"))


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Returns whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
