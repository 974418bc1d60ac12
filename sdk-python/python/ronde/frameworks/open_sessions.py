"""Ends the sessions that a function has left open, where its process goes on after it."""

from __future__ import annotations

import gc
import sys


def end_all() -> None:
    """Ends the session of each module for a framework that this process has loaded, and drops unused clients.

    Raises the failure of a JAX program in flight, after it has ended all sessions.
    """
    try:
        # First: JAX may have its own session, or programs in flight on that of the other frameworks.
        if jax := sys.modules.get("ronde.jax.session"):
            jax.shutdown()
    finally:
        # All other frameworks share this session.
        if basics := sys.modules.get("ronde.frameworks.basics"):
            basics.shutdown()
        # Closes clients that the function has made and that nothing refers to.
        gc.collect()
