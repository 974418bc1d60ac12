"""Tensors of all kinds as sources and targets, without a sidecar."""

from __future__ import annotations

import array
import ctypes

import numpy
import pytest

from ronde.tensors import DTYPES, Bfloat16, Source, kind_of, source_of, target_of

DTYPE_NAMES = sorted(DTYPES - {"bfloat16"})


def content(source: Source) -> bytes:
    return ctypes.string_at(source.address, source.nbytes)


def fill(tensor: object, data: bytes) -> object:
    target = target_of(tensor)
    assert target.nbytes == len(data)
    ctypes.memmove(target.address, data, len(data))
    return target.finish()


def test_a_masked_array_is_refused_as_its_mask_would_be_ignored() -> None:
    masked = numpy.ma.MaskedArray([1.0, 2.0], mask=[False, True])
    for call in (source_of, target_of):
        with pytest.raises(ValueError, match=r"masked elements are not supported; .*array\.filled\(0\)"):
            call(masked)
    for whole in (masked.filled(0), numpy.ma.MaskedArray([1.0, 2.0])):
        assert source_of(whole).shape == (2,)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4)])
def test_numpy_arrays_are_described(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = numpy.ones(shape, dtype)
    source = source_of(tensor)
    assert (source.dtype, source.shape, source.nbytes) == (dtype, shape, tensor.nbytes)
    assert content(source) == tensor.tobytes()
    result = source.empty(shape).finish()
    assert isinstance(result, numpy.ndarray)
    assert (result.dtype, result.shape) == (tensor.dtype, shape)


@pytest.mark.parametrize(
    "tensor",
    [
        numpy.arange(12).reshape(3, 4).T,
        numpy.arange(12)[::-2],
        numpy.arange(12, dtype=">i4"),
        numpy.asfortranarray(numpy.arange(12.0).reshape(3, 4)),
    ],
    ids=["transposed", "reversed", "big-endian", "fortran"],
)
def test_other_layouts_are_copied_dense_and_written_back(tensor: numpy.ndarray) -> None:
    source = source_of(tensor)
    native = numpy.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("="))
    assert content(source) == native.tobytes()
    assert source.shape == tensor.shape
    out = tensor.copy(order="K") if tensor.dtype.isnative else tensor.copy()
    assert fill(out, (native + 1).tobytes()) is out
    numpy.testing.assert_array_equal(out, tensor + 1)


def test_a_strided_view_is_written_through() -> None:
    base = numpy.zeros(10, numpy.int16)
    fill(base[::2], numpy.arange(5, dtype=numpy.int16).tobytes())
    numpy.testing.assert_array_equal(base, [0, 0, 1, 0, 2, 0, 3, 0, 4, 0])


def test_read_only_arrays_are_sources_but_no_targets() -> None:
    tensor = numpy.arange(3)
    tensor.flags.writeable = False
    assert content(source_of(tensor)) == tensor.tobytes()
    with pytest.raises(ValueError, match="read-only"):
        target_of(tensor)


class WithInterface:
    def __init__(self, tensor: numpy.ndarray) -> None:
        self.tensor = tensor
        self.__array_interface__ = tensor.__array_interface__


class WithDlpack:
    def __init__(self, tensor: numpy.ndarray) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: object) -> object:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> object:
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("wrap", [WithInterface, WithDlpack, memoryview])
def test_arrays_of_other_libraries_are_accepted_and_give_numpy_results(wrap: type) -> None:
    tensor = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    source = source_of(wrap(tensor))
    assert (source.dtype, source.shape, content(source)) == ("float32", (2, 3), tensor.tobytes())
    assert isinstance(source.empty((1,)).finish(), numpy.ndarray)


def test_buffers_of_the_standard_library_are_accepted() -> None:
    source = source_of(array.array("i", [1, 2, 3]))
    assert (source.dtype, source.shape) == ("int32", (3,))
    assert source_of(b"abc").dtype == "uint8"


def test_bfloat16_needs_no_library() -> None:
    values = numpy.array([1.0, -0.0, 1.00390625, 1.01171875, 3.0e38, numpy.inf, numpy.nan, 1e-40], numpy.float32)
    tensor = Bfloat16.from_float32(values)
    # Rounded to nearest, ties to even.
    assert [hex(bits) for bits in tensor.bits] == [
        *["0x3f80", "0x8000", "0x3f80", "0x3f82", "0x7f62", "0x7f80", "0x7fc0", "0x1"],
    ]
    source = source_of(tensor)
    assert (source.dtype, source.shape, source.nbytes) == ("bfloat16", (8,), 16)
    assert content(source) == tensor.bits.tobytes()
    result = source.empty((2, 3)).finish()
    assert isinstance(result, Bfloat16)
    assert result.shape == (2, 3)
    out = Bfloat16(numpy.zeros(8, numpy.uint16))
    assert fill(out, content(source)) is out
    numpy.testing.assert_array_equal(out.to_float32()[:2], [1.0, -0.0])
    assert Bfloat16.from_float32(2.5).to_float32() == 2.5
    with pytest.raises(ValueError, match="uint16"):
        Bfloat16(values)


@pytest.mark.parametrize("like", [None, numpy.zeros(1)])
def test_results_of_another_ranks_type_are_numpy_arrays(like: object) -> None:
    result = kind_of(like)("int16", (2, 0)).finish()
    assert (result.dtype, result.shape) == (numpy.int16, (2, 0))
    assert isinstance(kind_of(like)("bfloat16", (3,)).finish(), Bfloat16)


@pytest.mark.parametrize("thing", [[1.0], 1.0, "text", None, {}])
def test_the_error_names_a_type_that_is_no_tensor(thing: object) -> None:
    with pytest.raises(ValueError, match=type(thing).__name__):
        source_of(thing)
    with pytest.raises(ValueError, match=type(thing).__name__):
        target_of(thing)


@pytest.mark.parametrize("dtype", ["complex64", "uint32", "uint64", "datetime64[s]", "O"])
def test_the_error_names_an_unsupported_dtype(dtype: str) -> None:
    tensor = numpy.zeros(2, dtype)
    with pytest.raises(ValueError, match=f"{tensor.dtype.name.replace('[', '.')[:9]}.* is not supported"):
        source_of(tensor)
