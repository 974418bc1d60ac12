"""Which releases of PySpark `ronde.spark` runs on."""

from __future__ import annotations

import re

# The first release with barrier execution of `mapInArrow`, and the first that was never seen.
OLDEST, FIRST_UNKNOWN = (3, 5), (5, 0)


def check(release: str) -> None:
    """Raises ImportError if `ronde.spark` does not run on this release of PySpark.

    release -- such as "4.3.0"
    """
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) < FIRST_UNKNOWN:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"PySpark {release} is installed, but ronde.spark needs PySpark {oldest} or later, and earlier than "
            f'{FIRST_UNKNOWN[0]}; install it here, in the release of the cluster: pip install "pyspark>={oldest},'
            f'<{FIRST_UNKNOWN[0]}"',
            name="pyspark",
        )
