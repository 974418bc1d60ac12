"""Tensors of programs: made from a description and a seed, and packed for the parent."""

from __future__ import annotations

import zlib
from typing import Any

import torch

Spec = dict[str, Any]
"""Of a tensor: {"dtype", "shape", "layout", "style", "grad"}."""

LAYOUTS = ("rows", "turned", "strided", "offset", "part", "conj")


def dtype_of(name: str) -> torch.dtype:
    """The type that PyTorch calls `torch.NAME`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def make(spec: Spec, *key: object) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor and the memory that it is a view of. The same key gives the same elements in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    dtype, shape = dtype_of(spec["dtype"]), list(spec["shape"])
    layout = spec.get("layout", "rows")
    if layout == "turned" and shape:
        base = elements(dtype, shape[::-1], spec, generator)
        view = base.permute(*reversed(range(len(shape))))
    elif layout == "strided" and shape:
        base = elements(dtype, [*shape[:-1], 2 * shape[-1]], spec, generator)
        view = base[..., ::2]
    elif layout == "offset":
        base = elements(dtype, [torch.Size(shape).numel() + 3], spec, generator)
        view = base[3:].view(shape)
    elif layout == "part" and shape:
        base = elements(dtype, [shape[0] + 2, *shape[1:]], spec, generator)
        view = base[1:-1]
    elif layout == "conj" and dtype.is_complex:
        base = elements(dtype, shape, spec, generator)
        view = base.conj()
    else:
        base = view = elements(dtype, shape, spec, generator)
    if spec.get("grad") and (dtype.is_floating_point or dtype.is_complex):
        view.requires_grad_()
    return view, base


def elements(dtype: torch.dtype, shape: list[int], spec: Spec, generator: torch.Generator) -> torch.Tensor:
    """Small whole numbers, or with the style "real" others; with "special" some are not finite."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        parts = elements(torch.float64, [2, *shape], spec, generator)
        return torch.complex(parts[0], parts[1]).to(dtype)
    style = spec.get("style", "whole")
    if not dtype.is_floating_point:
        low, high = (0, 5) if style != "full" else (0, 200)
        return torch.randint(low, high, shape, generator=generator).to(dtype)
    if style in ("whole", "full"):
        made = torch.randint(-3, 4, shape, generator=generator).double()
    else:
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
    if style == "special" and made.numel():
        special = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0], dtype=torch.float64)
        where = torch.rand(shape, generator=generator) < 0.2
        made = torch.where(where, special[torch.randint(0, 4, shape, generator=generator)], made)
    return made.to(dtype)


def packed(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as the parent reads it; a sparse one by its indices and values."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return {"sparse": list(tensor.shape), "indices": packed(tensor.indices()), "values": packed(tensor.values())}
    # Without a copy a tensor of one element, which always counts as contiguous, keeps its stride.
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data}


def unpacked(given: dict[str, Any]) -> torch.Tensor:
    """The tensor that was packed, dense."""
    if "sparse" in given:
        return torch.sparse_coo_tensor(
            unpacked(given["indices"]), unpacked(given["values"]), given["sparse"], check_invariants=True
        )
    dtype = dtype_of(given["dtype"])
    if not given["data"]:
        return torch.empty(given["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(given["data"]), dtype=torch.uint8).view(dtype).reshape(given["shape"])
