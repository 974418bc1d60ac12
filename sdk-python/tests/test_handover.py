"""States that are handed over to new workers: their chunks, digests and streams, alone and in jobs."""

from __future__ import annotations

from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")

from ronde.torch import optimizer_state  # noqa: E402
from ronde.torch.elastic import handover  # noqa: E402
from ronde.torch.elastic.chunks import CHUNK_BYTES, Part, chunks_of, digest_of  # noqa: E402
from ronde.torch.elastic.handover import Rank, Stream, streams_of  # noqa: E402

# === Chunks ===

TYPES = ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn"]


def example(dtype: str, *shape: int) -> Any:
    count = 1
    for each in shape:
        count *= each
    return torch.arange(count).remainder(7).to(getattr(torch, dtype)).reshape(shape)


def bits(tensor: Any) -> list[int]:
    found: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return found


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_of_all_types_are_read_and_written(dtype: str) -> None:
    there = [example(dtype, 3, 5), example(dtype, 4, 6).t(), example(dtype), example(dtype, 0, 2)]
    here = [torch.zeros_like(each) for each in there]
    sent = chunks_of([Part(str(number), each) for number, each in enumerate(there)])
    received = chunks_of([Part(str(number), each) for number, each in enumerate(here)])
    assert [each.nbytes for each in sent] == [each.nbytes for each in received]
    for source, target in zip(sent, received):
        assert target.digest() != source.digest()
        target.write(source.read())
        assert target.digest() == source.digest()
        assert target.differing(source.read()) == []
    assert [bits(each) for each in here] == [bits(each) for each in there]
    assert not here[1].is_contiguous()


def test_chunks_are_bounded_and_alike_on_all_ranks() -> None:
    sizes = [3, CHUNK_BYTES - 4, 2 * CHUNK_BYTES + 5, 0, 7]
    parts = [Part(str(size), torch.zeros(size, dtype=torch.uint8), is_buffer=size == 7) for size in sizes]
    chunks = chunks_of(parts)
    found = [[(piece.part.name, piece.end - piece.begin) for piece in chunk.pieces] for chunk in chunks]
    first, large = str(sizes[1]), str(sizes[2])
    expected = [[("3", 3), (first, sizes[1])], *[[(large, CHUNK_BYTES)]] * 2, [(large, 5)], [("7", 7)]]
    assert found == expected
    assert [chunk.is_buffer for chunk in chunks] == [False] * 4 + [True]
    assert all(chunk.nbytes <= CHUNK_BYTES for chunk in chunks)


def test_a_tensor_that_is_not_contiguous_gets_what_was_written_to_some_of_its_chunks() -> None:
    tensor = torch.zeros(2, CHUNK_BYTES, dtype=torch.uint8).t()
    part = Part("weight", tensor)
    first, _ = chunks_of([part])
    first.write(torch.ones(first.nbytes, dtype=torch.uint8))
    assert not tensor.any()
    part.release()
    assert int(tensor.sum()) == CHUNK_BYTES


def test_the_parts_that_differ_are_named() -> None:
    (chunk,) = chunks_of([Part(name, torch.zeros(9)) for name in "abc"])
    other = chunk.read().clone()
    other[-1] = 1
    other[0] = 1
    assert chunk.differing(other) == ["a", "c"]
    assert chunk.differing(chunk.read()) == []


@pytest.mark.parametrize("count", [1, 8, 4096, 4097, 3 * 4096 + 8])
def test_each_changed_byte_changes_the_digest(count: int) -> None:
    content = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    digest = digest_of(content)
    for place in {0, count // 3, count // 2, count - 1}:
        changed = content.clone()
        changed[place] ^= 0x80
        assert digest_of(changed) != digest
    assert digest_of(torch.cat([content, content.new_zeros(1)])) != digest
    assert digest_of(torch.cat([content.new_zeros(3), content])[3:]) == digest


def test_bytes_in_another_order_have_another_digest() -> None:
    """Words that are exchanged leave the sums of rows or of columns as they were, but not both."""
    words = torch.arange(1, 4 * 512 + 1).view(4, 512)
    digest = digest_of(words.view(-1).view(torch.uint8))
    for changed in (words.flip(0), words.flip(1), words.roll(1, 0), words.roll(1, 1)):
        assert digest_of(changed.contiguous().view(-1).view(torch.uint8)) != digest
    two = words.clone()
    two[1, 5], two[1, 9] = words[1, 9], words[1, 5]
    assert digest_of(two.view(-1).view(torch.uint8)) != digest


# === Streams ===


def ranks(*each: str) -> list[Rank]:
    """Ranks as `a` for one of sidecar a that has the state, `-a` for one that does not."""
    return [Rank(None if text.startswith("-") else "digest", text.lstrip("-")) for text in each]


def test_at_the_start_rank_0_sends_to_all() -> None:
    assert streams_of(ranks("a", "-a", "-b"), [[]] * 3, 2) == [Stream(0, (0, 1, 2), (0, 1))]


def test_a_new_rank_receives_from_a_neighbour() -> None:
    assert streams_of(ranks("a", "b", "b", "-b"), [[]] * 4, 3) == [Stream(1, (1, 3), (0, 1, 2))]


def test_a_new_sidecar_receives_from_several_others() -> None:
    found = streams_of(ranks("a", "a", "b", "c", "-d", "-d"), [[]] * 6, 5)
    assert found == [Stream(0, (0, 4, 5), (0, 3)), Stream(2, (2, 4, 5), (1, 4)), Stream(3, (3, 4, 5), (2,))]
    assert streams_of(ranks("a", "b", "c", "-d"), [[]] * 4, 1) == [Stream(0, (0, 3), (0,))]


def test_new_ranks_with_and_without_neighbours() -> None:
    found = streams_of(ranks("a", "b", "-b", "-c"), [[]] * 4, 2)
    assert found == [Stream(1, (1, 2), (0, 1)), Stream(0, (0, 3), (0,)), Stream(1, (1, 3), (1,))]


def test_the_number_of_sources_is_limited() -> None:
    found = streams_of(ranks(*map(str, range(20)), "-new"), [[]] * 21, 40)
    assert [stream.source for stream in found] == list(range(handover.SOURCES_MAX))


def test_chunks_that_differ_are_those_of_rank_0() -> None:
    """All ranks receive them; the others reach only new ranks."""
    found = streams_of(ranks("a", "b", "-c"), [[], [1], []], 3)
    assert found == [Stream(0, (0, 1, 2), (1,)), Stream(0, (0, 2), (0,)), Stream(1, (1, 2), (2,))]
    assert streams_of(ranks("a", "b"), [[], [1]], 3) == [Stream(0, (0, 1), (1,))]
    assert streams_of(ranks("a", "b"), [[], []], 3) == []


# === Optimizers ===


def test_optimizers_with_other_than_dense_tensors_are_recognized() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert optimizer_state.is_dense(optimizer_state.describe(optimizer))
    optimizer.state[parameter] = {"step": torch.zeros(()), "kept": [torch.zeros(3), 1, "text", {"a": None}]}
    assert optimizer_state.is_dense(optimizer_state.describe(optimizer))
    for other in (torch.zeros(3).to_sparse(), torch.zeros(3).numpy()):
        optimizer.state[parameter] = {"kept": [torch.zeros(3), {"a": other}]}
        assert not optimizer_state.is_dense(optimizer_state.describe(optimizer))


# === Jobs ===


@pytest.mark.parametrize(("count", "sidecars"), [(2, 2), (3, 1), (4, 2), (3, 3)])
def test_a_job_hands_its_state_over(world: Callable[..., str], count: int, sidecars: int) -> None:
    pytest.importorskip("cloudpickle")
    assert world("elastic_handover.py", count, sidecars).count("states are handed over") == count


def test_bytes_that_change_on_the_way_are_an_error_of_the_receiver(world: Callable[..., str]) -> None:
    pytest.importorskip("cloudpickle")
    with pytest.raises(AssertionError) as caught:
        world("elastic_handover.py", 3, 2, "corrupt")
    text = str(caught.value)
    assert "rank 2 has received other bytes of the state than rank 0 has, from rank 0: " in text
    assert "rank 2 on host localhost exited with code 1" in text


def test_times_are_measured(world: Callable[..., str]) -> None:
    """The program that measured the figures of docs/ELASTIC.md."""
    printed = world("handover_times.py", 3, 2, "--megabytes", "4", "--rounds", "1")
    assert printed.count('"ratio": ') == 5
