"""Imports MXNet. Raises ImportError that says what to do where it is not installed, or does not fit its NumPy."""

import numpy

from ronde.frameworks.requirement import of_wheel

_FITTING = f'pip install "mxnet==1.9.1" "numpy<1.24" "setuptools<70" ({of_wheel("mxnet")})'

try:
    import mxnet
except ModuleNotFoundError as error:
    if error.name == "mxnet":
        raise ImportError(f"this module needs MXNet, which is not installed: {_FITTING}", name="mxnet") from error
    raise ImportError(
        f"MXNet is installed, but cannot be imported: {error}. Its last release needs older packages: {_FITTING}",
        name="mxnet",
    ) from error
except AttributeError as error:
    # Names of NumPy that 1.24 has removed.
    raise ImportError(
        f"MXNet is installed, but cannot be imported with NumPy {numpy.__version__}: {error}. Its last release needs "
        f"older packages: {_FITTING}",
        name="mxnet",
    ) from error

try:
    from mxnet.gluon.parameter import ParameterDict  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"MXNet {getattr(mxnet, '__version__', 'of an unknown version')} is installed, but this module is for MXNet "
        f"1.9.1: {error}. MXNet 2 has other interfaces and is not supported: {_FITTING}",
        name="mxnet",
    ) from error
