"""Which releases of Ray `ronde.ray` runs on."""

from __future__ import annotations

import re

# The first release whose Ray Train is version 2 unless a variable says otherwise.
OLDEST = (2, 51)


def check(release: str) -> None:
    """Raises ImportError if `ronde.ray` does not run on this release of Ray.

    release -- such as "2.60.0"
    """
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None or (int(match[1]), int(match[2])) < OLDEST or int(match[1]) > OLDEST[0]:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"Ray {release} is installed, but ronde.ray needs Ray {oldest} or a later release of {OLDEST[0]}.x; "
            f'install it in all nodes of the cluster: pip install "ray[train]>={oldest},<{OLDEST[0] + 1}"',
            name="ray",
        )
