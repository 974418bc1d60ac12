"""Whether this process runs in a job of LSF. `jsrun` is not there yet, nor are questions about the allocation."""

import os


class LSFUtils:
    """Functions about LSF."""

    @staticmethod
    def using_lsf() -> bool:
        """Whether LSF has started this process, by LSB_JOBID."""
        return "LSB_JOBID" in os.environ
