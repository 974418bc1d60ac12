"""A selection of PyTorch's own tests of torch.distributed on ronde; `make torch-suite` runs all, and those on Gloo."""

from __future__ import annotations

import pytest
from conftest import ronde_binary

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's tests need it: tests/setup/environment.py torch-suite")

from torch_suite.__main__ import run

# One or two of each kind of call; most take less than a second.
SELECTION = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_all_gather",
    "test_all_gather_coalesced_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_max",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all_complex",
    "test_all_to_all_single_unequal_split_complex",
    "test_barrier_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_create_graph",
    "test_destroy_full_group",
    "test_gather_checks",
    "test_gather_full_group",
    "test_get_backend",
    "test_get_future",
    "test_get_rank_size_full_group",
    "test_irecv",
    "test_isend",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_reduce_full_group_min",
    "test_reduce_sum_twice",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.mark.parametrize("size", [2, 3])
def test_pytorchs_own_tests_pass(size: int) -> None:
    ronde_binary()
    results = run("ronde", size, SELECTION)
    bad = {name: each for name, each in results.items() if each["outcome"] != "passed"}
    others = [f"{name} {each['outcome']}:\n{each['reason']}" for name, each in bad.items()]
    assert not others, "\n\n".join(others)
    assert len(results) == len(SELECTION)
