"""Helper functions that scripts import: build flags, versions, lists, temporary variables."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sysconfig
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Item = TypeVar("Item")
Result = TypeVar("Result")
EXTENSIONS = ["torch", "tensorflow", "mxnet"]

_VERSION = re.compile(
    r"v?(?P<release>\d+(\.\d+)*)([-_.]?(?P<stage>alpha|a|beta|b|preview|pre|c|rc)[-_.]?(?P<candidate>\d*))?"
    r"([-_.]?post[-_.]?(?P<post>\d*))?([-_.]?dev[-_.]?(?P<dev>\d*))?(\+[\w.-]+)?",
    re.IGNORECASE,
)
_STAGES = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}
_DEV, _FINAL, _NEWEST = -1, 3, float("inf")


def _cache(f: Callable[..., Result]) -> Callable[..., Result]:
    """Returns a function that calls `f` once for each combination of arguments, which must be hashable."""
    return functools.lru_cache(maxsize=None)(f)


def get_ext_suffix() -> str:
    """Returns the suffix of native modules for this Python, such as ".cpython-311-x86_64-linux-gnu.so"."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Returns the path of a native module beside the file `pkg_path`, from folders and its name without suffix."""
    *folders, name = args
    return os.path.join(os.path.dirname(pkg_path), *folders, name + get_ext_suffix())


def check_extension(ext_name: str, *_: Any, **__: Any) -> None:
    """Does nothing for `horovod.torch`, `horovod.tensorflow` and `horovod.mxnet`. Raises ImportError for others."""
    if ext_name.rpartition(".")[2] not in EXTENSIONS:
        raise ImportError(f"{ext_name} is not there: horovod-compat answers for PyTorch, TensorFlow and MXNet only")


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Compares a framework's release with the one that a native library was built for.

    No library here is built for a release of a framework, so it returns None for every version. If `exception` is
    given, the import failed for another reason, and this function raises it.
    """
    del name, version
    if exception is not None:
        raise exception


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether the module for a framework, such as "torch", can be imported.

    verbose -- whether to print the reason
    """
    return _module_of(ext_base_name, verbose) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether the framework detects a GPU."""
    if not extension_available(ext_base_name, verbose):
        return False
    framework = importlib.import_module(ext_base_name)
    if ext_base_name == "tensorflow":
        return bool(framework.config.list_physical_devices("GPU"))
    return bool(framework.context.num_gpus() if ext_base_name == "mxnet" else framework.cuda.is_available())


def mpi_built(verbose: bool = False) -> bool:
    """Returns `ronde.torch.mpi_built()`. This and the functions below return False without a framework."""
    return bool(_ask("mpi_built", verbose))


def gloo_built(verbose: bool = False) -> bool:
    """Returns `ronde.torch.gloo_built()`."""
    return bool(_ask("gloo_built", verbose))


def nccl_built(verbose: bool = False) -> bool:
    """Returns whether `ronde.torch.nccl_built()` is not 0."""
    return bool(_ask("nccl_built", verbose))


def ddl_built(verbose: bool = False) -> bool:
    """Returns `ronde.torch.ddl_built()`."""
    return bool(_ask("ddl_built", verbose))


def ccl_built(verbose: bool = False) -> bool:
    """Returns `ronde.torch.ccl_built()`."""
    return bool(_ask("ccl_built", verbose))


def _ask(name: str, verbose: bool) -> Any:
    for framework in EXTENSIONS:
        if (found := _module_of(framework, verbose)) is not None:
            return getattr(found, name)()
    return False


def _module_of(ext_base_name: str, verbose: bool) -> Any:
    """Returns the module for a framework; None if it cannot be imported."""
    if ext_base_name not in EXTENSIONS:
        return None
    try:
        return importlib.import_module(f"horovod.{ext_base_name}")
    except ImportError as error:
        if verbose:
            print(f"horovod.{ext_base_name} cannot be imported: {error}")
        return None


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Returns a function of `op` and the deprecated `average` that returns the reduce operator, by default Average.

    reduce_ops -- an object with the attributes Average and Sum, such as `HorovodBasics`

    The function warns about `average` (DeprecationWarning) and raises ValueError if both are given.
    """

    def op_of(op: Any, average: bool | None) -> Any:
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("average is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=2)
        return reduce_ops.Average if average else reduce_ops.Sum

    return op_of


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns whether the version `ver` is `target` or newer, by Python's version order (2.1.0rc1 is before 2.1.0).

    target -- a version of the form major.minor.patch

    Ignores the part after a `+`. Raises ValueError for an object that is not a str, an invalid version, or another form
    of target.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(
            f"versions are texts, not {ver!r} ({type(ver).__name__}), {target!r} ({type(target).__name__})"
        )
    if len(target.split(".")) != 3:
        raise ValueError(f"the version to compare with is {target!r}; give it in the form of major.minor.patch")
    return _version_key(ver) >= _version_key(target)


def _version_key(text: str) -> tuple[list[int], tuple[int, int], int, float]:
    """Returns the sort key of a version: release, its stage, post-releases, development releases."""
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a version such as 2.1.0")
    release = [int(part) for part in match["release"].split(".")]
    while release[-1:] == [0]:
        release.pop()
    stage = (_FINAL, 0)
    if match["stage"] is not None:
        stage = (_STAGES[match["stage"].lower()], int(match["candidate"] or 0))
    elif match["dev"] is not None and match["post"] is None:
        stage = (_DEV, 0)
    post = -1 if match["post"] is None else int(match["post"] or 0)
    return release, stage, post, _NEWEST if match["dev"] is None else int(match["dev"] or 0)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Returns whether the number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """Splits items into parts, in order, whose sizes differ by at most one; the longer ones come first."""
    length, longer = divmod(len(items), num_parts)
    starts = [part * length + min(part, longer) for part in range(num_parts + 1)]
    return [items[start:end] for start, end in zip(starts, starts[1:])]


def is_iterable(value: Any) -> bool:
    """Returns whether `iter` accepts the value."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Sets environment variables, or removes those given as None, while the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
