"""Process sets: those of `ronde.torch`."""

from ronde.torch import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
