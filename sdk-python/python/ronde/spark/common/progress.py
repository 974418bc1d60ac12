"""How far a run is, and how far it is to go."""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """Epochs of a run, as its checkpoint has them.

    done    -- how many are complete
    begun   -- how many were when the last `fit` began that was not the completion of an interrupted one
    planned -- how many there were to be at the end of that
    """

    done: int = 0
    begun: int = 0
    planned: int = 0

    def continued(self, epochs: int) -> Progress:
        """Returns the progress of a `fit` with so many epochs: an interrupted one with as many is completed."""
        if self.done < self.planned and self.planned - self.begun == epochs:
            return self
        return Progress(self.done, self.done, self.done + epochs)
