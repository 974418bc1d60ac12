"""PyTorch's tensors as sources and targets, without a sidecar."""

from __future__ import annotations

import ctypes

import numpy
import pytest

torch = pytest.importorskip("torch")

from ronde.tensors import DTYPES, Source, source_of, target_of  # noqa: E402


def content(source: Source) -> bytes:
    return ctypes.string_at(source.address, source.nbytes)


def fill(tensor: object, data: bytes) -> object:
    target = target_of(tensor)
    assert target.nbytes == len(data)
    ctypes.memmove(target.address, data, len(data))
    return target.finish()


@pytest.mark.parametrize("dtype", sorted(DTYPES - {"uint16"}))
def test_every_type(dtype: str) -> None:
    tensor = torch.ones(2, 3).to(getattr(torch, dtype))
    source = source_of(tensor)
    assert (source.dtype, source.shape, source.address) == (dtype, (2, 3), tensor.data_ptr())
    result = source.empty((4, 1)).finish()
    assert (result.dtype, tuple(result.shape)) == (tensor.dtype, (4, 1))


def test_gradients_and_strides_do_not_matter() -> None:
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).t()
    source = source_of(tensor)
    assert content(source) == tensor.detach().contiguous().numpy().tobytes()
    assert source.shape == (3, 2)


def test_results_go_straight_into_dense_tensors() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    assert target_of(tensor).address == tensor.data_ptr()


def test_results_reach_other_layouts_too() -> None:
    tensor = torch.zeros(2, 3, requires_grad=True)
    view = tensor.detach().t()
    assert fill(view, numpy.arange(6, dtype=numpy.float32).tobytes()) is view
    assert tensor.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_a_leaf_that_requires_gradients_can_be_written() -> None:
    tensor = torch.zeros(4, 3, requires_grad=True)
    fill(tensor, numpy.ones(12, numpy.float32).tobytes())
    assert tensor.sum().item() == 12


def test_the_error_names_an_unsupported_tensor() -> None:
    with pytest.raises(ValueError, match="complex64 is not supported"):
        source_of(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="sparse"):
        source_of(torch.zeros(2, 2).to_sparse())
