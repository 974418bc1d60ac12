"""`python -m horovod.tensorflow.data.compute_worker FILE`: a process of a compute job, `ronde.tensorflow.data`'s."""

from ronde.tensorflow.data.compute_worker import command_line, main

__all__ = ["main"]

if __name__ == "__main__":
    main(**command_line())
