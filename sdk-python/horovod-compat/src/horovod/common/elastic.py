"""States of jobs that can begin again, and the loop around a function of one: those of `ronde.elastic`."""

from ronde.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
