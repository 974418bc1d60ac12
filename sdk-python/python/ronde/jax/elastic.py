"""Training with JAX that restores its last commit and continues when a collective fails.

state = hvd.elastic.JaxState(parameters=parameters, optimizer=optimizer.init(parameters), epoch=0)

@hvd.elastic.run
def train(state): ...

train(state)
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import jax
import numpy

from ronde.elastic.loop import run_converted
from ronde.elastic.state import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State
from ronde.errors import RondeError
from ronde.frameworks.agreement import AgreeingState
from ronde.frameworks.process_sets import exchanged
from ronde.jax import session
from ronde.jax.training import broadcast_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ronde.client import Client
    from ronde.process_set import ProcessSet

__all__ = ["HostUpdateResult", "HostsUpdatedInterrupt", "JaxState", "ObjectState", "State", "run"]

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates `func(state, *args, **kwargs)` with the loop of `ronde.elastic.run_fn`, on the session of `init`.

    Errors of JAX that failed collectives raise are failures of collectives. After a restart of the session, functions
    of `jax.jit` are compiled again, as ranks and their number are parts of programs.
    """
    return run_on(func, session.init_again)


def run_on(func: Callable[..., Result], reset: Callable[[], None]) -> Callable[..., Result]:
    """`run` with another way to restart the session."""
    return run_converted(func, reset, converted)


@contextlib.contextmanager
def converted() -> Iterator[None]:
    """Raises an error of ronde for one of JAX that a failed collective raised, even if another error followed it."""
    try:
        yield
    except (RondeError, HostsUpdatedInterrupt):
        raise
    except Exception as error:
        if (failure := _cause_of(error)) is None:
            raise
        raise failure from error


def _cause_of(error: BaseException) -> RondeError | None:
    """Returns the failure of a collective that caused an error, such as one about an array that the program donated."""
    each: BaseException | None = error
    for _ in range(_CAUSES_MAX):
        if each is None:
            break
        if isinstance(each, RondeError):
            return each
        found = session.failure_of(each) if isinstance(each, jax.errors.JaxRuntimeError) else None
        if isinstance(found, RondeError):
            return found
        each = each.__cause__ or each.__context__
    return None


_CAUSES_MAX = 16


class JaxState(AgreeingState):
    """The state of a training run: keyword arguments, as attributes.

    Values with arrays of JAX or NumPy among their leaves are pytrees: parameters, an optimizer's state, keys of
    `jax.random`. A save copies their arrays, so a program may take them over (`donate_argnums`). They have the same
    structure, types and shapes on all ranks, whose ranks get them without pickle; arrays of NumPy may become arrays of
    JAX. All other values are as in `ronde.elastic.ObjectState`.

        state = JaxState(parameters=parameters, optimizer=optimizer.init(parameters), epoch=0)
        state.parameters, state.optimizer = step(state.parameters, state.optimizer, batch)

    Raises ValueError before `init`.
    """

    def __init__(self, **kwargs: Any) -> None:
        session.client()
        self._trees = {name: _copied(value) for name, value in kwargs.items() if _has_arrays(value)}
        super().__init__(**{name: value for name, value in kwargs.items() if name not in self._trees})
        for name in self._trees:
            setattr(self, name, kwargs[name])

    def save(self) -> None:
        """Saves a copy of the current state in memory, once the programs that compute it have ended.

        Raises the failure of such a program; what was saved last stays then.
        """
        copies = {name: _copied(getattr(self, name)) for name in self._trees}
        # A copy of what a program in flight computes fails with that program.
        self._trees = jax.block_until_ready(copies)
        super().save()

    def restore(self) -> None:
        """Restores the state that was saved last."""
        for name, value in self._trees.items():
            setattr(self, name, _copied(value))
        super().restore()

    def sync(self) -> None:
        """Gives all ranks the state of rank 0, and saves it.

        Raises ValueError on all ranks if pytrees differ in structure, types or shapes; the error names the attribute.
        """
        self._check_alike()
        for name in self._trees:
            setattr(self, name, broadcast_parameters(getattr(self, name), 0, f"ronde.elastic.{name}"))
        super().sync()
        self.save()

    def _check_alike(self) -> None:
        mine = {name: _leaves_of(getattr(self, name)) for name in self._trees}
        everybodys = exchanged(self._client(), mine, "jax.state")
        for rank, other in enumerate(everybodys):
            for name in sorted({*other, *everybodys[0]}):
                pairs = itertools.zip_longest(other.get(name, []), everybodys[0].get(name, []), fillvalue="no leaf")
                for found, first in pairs:
                    if found != first:
                        raise ValueError(
                            f"JaxState: {name} has {found} on rank {rank}, and {first} on rank 0. Make the same state "
                            "on all ranks before the training begins"
                        )

    def _client(self) -> Client:
        return session.client()

    def _members(self) -> ProcessSet | None:
        return None


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, (jax.Array, numpy.ndarray, numpy.generic)) for leaf in jax.tree.leaves(value))


def _copied(value: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, (jax.Array, numpy.ndarray)) else leaf, value)


def _leaves_of(value: Any) -> list[str]:
    """Returns the path, type and shape of each leaf of a pytree."""

    def described(path: Any, leaf: Any) -> str:
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        return f"{jax.tree_util.keystr(path) or 'a leaf'} {dtype}{list(numpy.shape(leaf))}"

    return [described(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(value)]
