"""Which GPU a rank uses."""

from __future__ import annotations

from ronde.spark.task import get_available_devices


def cuda_device(local_rank: int, visible: int) -> int:
    """Returns the number of a rank's GPU among those that PyTorch or TensorFlow sees: Spark's, else by local rank.

    visible -- how many GPUs the framework sees. With one, as where Spark sets CUDA_VISIBLE_DEVICES, it is that one

    Raises ValueError if Spark has assigned a GPU whose address is no number below `visible`.
    """
    assigned = assigned_gpus()
    if visible == 1:
        return 0
    if not assigned:
        return local_rank % visible
    address = assigned[0]
    if not address.isdigit() or int(address) >= visible:
        raise ValueError(f"Spark has assigned GPU {address!r}, but this process sees GPUs 0 to {visible - 1}")
    return int(address)


def check_alike(have_gpu: list[int]) -> None:
    """Raises RuntimeError if some ranks have a GPU and others do not.

    have_gpu -- for each rank 1 or 0
    """
    ranks = {kind: [rank for rank, known in enumerate(have_gpu) if known == kind] for kind in (0, 1)}
    if ranks[0] and ranks[1]:
        raise RuntimeError(
            f"all processes must have the same kind of device, but ranks {ranks[1]} have a GPU and ranks {ranks[0]} do "
            "not; give each task of Spark a GPU (spark.task.resource.gpu.amount), or set use_gpu=False"
        )


def assigned_gpus() -> list[str]:
    """Returns the addresses of the GPUs that Spark has assigned to this task; none outside of a task."""
    try:
        return get_available_devices()
    except RuntimeError:
        return []
