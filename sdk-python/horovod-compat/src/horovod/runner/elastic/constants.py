"""Times and texts of elastic jobs. They are read when they are needed, so a program may change them."""

from __future__ import annotations

from typing import Any

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
ELASTIC_TIMEOUT_SECS = 600
DISCOVERY_SCRIPT_TIMEOUT_SECS = 60
NOTIFICATION_TIMEOUT_SECS = 30
DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS = 1
DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS = 3600
RESET_LIMIT_EXCEEDED_MESSAGE = "the number of resets during elastic job exceeded limit: {}"

_DEFAULTS = {name: value for name, value in globals().items() if name.isupper()}


def current(name: str, copies: dict[str, Any]) -> Any:
    """Returns a constant's value: that of a module which has a copy of it, if it was changed there.

    copies -- the module's variables
    """
    copied = copies.get(name, _DEFAULTS[name])
    return globals()[name] if copied == _DEFAULTS[name] else copied
