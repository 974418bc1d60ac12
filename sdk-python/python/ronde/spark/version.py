"""Which releases of PySpark `ronde.spark` runs on."""

from __future__ import annotations

import re

# The first release with barrier execution of `mapInArrow`, and the first that was never seen.
OLDEST, FIRST_UNKNOWN = (3, 5), (5, 0)
# The first release with TLS between the processes of Spark (SPARK-44937). Earlier ones ignore `spark.ssl.rpc.*`.
FIRST_WITH_TLS = (4, 0)


def number_of(release: str) -> tuple[int, int] | None:
    """Returns the first two numbers of a release, such as (4, 3) for "4.3.0"; None if it does not begin with them."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return None if match is None else (int(match[1]), int(match[2]))


def check(release: str) -> None:
    """Raises ImportError if `ronde.spark` does not run on this release of PySpark.

    release -- such as "4.3.0"
    """
    number = number_of(release)
    if number is None or not OLDEST <= number < FIRST_UNKNOWN:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(
            f"PySpark {release} is installed, but ronde.spark needs PySpark {oldest} or later, and earlier than "
            f'{FIRST_UNKNOWN[0]}; install it here, in the release of the cluster: pip install "pyspark>={oldest},'
            f'<{FIRST_UNKNOWN[0]}"',
            name="pyspark",
        )
