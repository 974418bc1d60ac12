"""Detects jobs of LSF and their hosts. Queries of CSM about cores and GPUs are not supported."""

from __future__ import annotations

import os


class LSFUtils:
    """Functions about LSF."""

    @staticmethod
    def using_lsf() -> bool:
        """Returns whether LSF started this process, by LSB_JOBID."""
        return "LSB_JOBID" in os.environ

    @staticmethod
    def get_compute_hosts() -> list[str]:
        """Returns the hosts of the job on which jsrun starts processes, from LSB_MCPU_HOSTS; empty without it.

        Where the batch node differs from the compute nodes, LSF lists it first, with one slot.
        """
        words = os.environ.get("LSB_MCPU_HOSTS", "").split()
        names, slots = words[::2], words[1::2]
        has_batch_node = len(names) > 1 and slots[0] == "1" and any(slot != "1" for slot in slots[1:])
        return names[1:] if has_batch_node else names
