"""What `ronde.jax` needs of JAX beyond its public interface, in one place: ordered effects and their tokens.

JAX keeps the token of each thread's last program and passes it to the next one. If a program fails while it is in
flight, its token fails with it, and JAX would pass it to every later program, which all would fail. So a program with
collectives starts when the one before it has ended, and gets a new token if that has failed. All ranks know the outcome
by then: none of them performs collectives that another one leaves out.
"""

from __future__ import annotations

import atexit
from typing import Any

import jax

VERSIONS = "0.10 to 0.12"

_SETS = (
    "lowerable_effects",
    "ordered_effects",
    "control_flow_allowed_effects",
    "remat_allowed_effects",
    "custom_derivatives_allowed_effects",
)

try:
    from jax._src import core as _core
    from jax._src import dispatch as _dispatch
    from jax._src import effects as _effects

    token: Any = _core.abstract_token
    _sets = [getattr(_effects, name) for name in _SETS]
    _Effect: Any = _effects.Effect
    _tokens: Any = _dispatch.runtime_tokens
    _get_token_input: Any = type(_tokens).get_token_input
    _kept = (_tokens.current_tokens, _tokens.output_runtime_tokens, _tokens.clear, _tokens.block_until_ready)
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"ronde.jax orders collectives by JAX's ordered effects, and JAX {jax.__version__} does not have them where "
        f"releases {VERSIONS} do ({error}); install one of these"
    ) from error


class _CollectiveEffect(_Effect):  # type: ignore[misc]
    """The effect of all collectives. There is one token of it in each program."""

    def __eq__(self, other: object) -> bool:
        return type(other) is _CollectiveEffect

    def __hash__(self) -> int:
        return hash(_CollectiveEffect)

    def __str__(self) -> str:
        return "RondeCollective"


def ordered_effect() -> Any:
    """Returns the effect of collectives, which JAX orders, including in loops, branches and custom derivatives."""
    for effects in _sets:
        effects.add_type(_CollectiveEffect)
    type(_tokens).get_token_input = _get_working_token
    type(_tokens).block_until_ready = _wait_once
    # Runs before JAX waits for tokens at exit: a failure that the program has handled is no news then.
    atexit.register(clear_failures)
    return _CollectiveEffect()


def clear_failures() -> None:
    """Makes JAX not report the failure of this thread's last program again, when it waits for programs."""
    _drop_failed(_tokens)


def _get_working_token(tokens: Any, effect: Any, devices: Any) -> Any:
    """Returns the token for the next program, after the end of the last one: a new token if that has failed."""
    if type(effect) is _CollectiveEffect and hasattr(kept := tokens.current_tokens.get(effect), "block_until_ready"):
        try:
            kept.block_until_ready()
        except Exception:
            # It is raised where the results are used.
            del tokens.current_tokens[effect]
    return _get_token_input(tokens, effect, devices)


def _wait_once(tokens: Any) -> None:
    """Waits for the programs in flight. Raises the first failure of one of them, and no failure a second time."""
    failure = None
    for each in [*tokens.current_tokens.values(), *tokens.output_runtime_tokens.values()]:
        try:
            each.block_until_ready()
        except Exception as error:
            failure = failure or error
    tokens.clear()
    if failure is not None:
        raise failure


def _has_failed(token_of_program: Any) -> bool:
    """Whether the program of a token has ended with a failure."""
    # Before the first program there is an array instead of a token.
    buffer = getattr(token_of_program, "_buf", None)
    if buffer is None or not buffer.is_ready():
        return False
    try:
        token_of_program.block_until_ready()
    except Exception:
        return True
    return False


def _drop_failed(tokens: Any) -> None:
    """Drops this thread's tokens if its last program with collectives has ended with a failure."""
    effect = _CollectiveEffect()
    if _has_failed(tokens.current_tokens.get(effect)):
        del tokens.current_tokens[effect]
        tokens.output_runtime_tokens.clear()
