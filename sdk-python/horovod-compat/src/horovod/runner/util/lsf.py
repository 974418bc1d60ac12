"""Detects jobs of LSF. `jsrun` and queries about the allocation are not supported yet."""

import os


class LSFUtils:
    """Functions about LSF."""

    @staticmethod
    def using_lsf() -> bool:
        """Returns whether LSF started this process, by LSB_JOBID."""
        return "LSB_JOBID" in os.environ
