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
    def get_slots() -> list[tuple[str, int]]:
        """Returns all hosts of the job and their slots, from LSB_MCPU_HOSTS; empty without it.

        Raises ValueError if it has another form.
        """
        words = os.environ.get("LSB_MCPU_HOSTS", "").split()
        if len(words) % 2 or not all(slots.isdecimal() and int(slots) > 0 for slots in words[1::2]):
            raise ValueError(f"LSB_MCPU_HOSTS is {' '.join(words)!r}, not hosts and their slots; give hosts with -H")
        return [(host, int(slots)) for host, slots in zip(words[::2], words[1::2])]

    @staticmethod
    def get_compute_hosts() -> list[str]:
        """Returns the hosts of the job on which jsrun starts processes, from LSB_MCPU_HOSTS; empty without it.

        Where the batch node differs from the compute nodes, LSF lists it first, with one slot.
        """
        words = os.environ.get("LSB_MCPU_HOSTS", "").split()
        names, slots = words[::2], words[1::2]
        has_batch_node = len(names) > 1 and slots[0] == "1" and any(slot != "1" for slot in slots[1:])
        return names[1:] if has_batch_node else names
