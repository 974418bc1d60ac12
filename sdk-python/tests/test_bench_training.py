"""`ronde bench train`, with real jobs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from conftest import leave_out, ronde_binary

from ronde.bench.__main__ import main
from ronde.bench.network import Network

if TYPE_CHECKING:
    import pathlib


def test_training_with_a_codec_ends_with_the_same_weights(tmp_path: pathlib.Path) -> None:
    assert "ronde codec int8" in train_with_int8(tmp_path, hosts=1)


@pytest.mark.heavy
def test_training_between_hosts_counts_what_they_send(tmp_path: pathlib.Path) -> None:
    if reason := Network.why_not():
        leave_out("netns", reason)
    entries = train_with_int8(tmp_path, hosts=2)
    assert all(entry["cpu_seconds_per_step"] > 0 for entry in entries.values())
    sent = {way: entry["sent_bytes_per_step"] for way, entry in entries.items()}
    # Each of two hosts sends half of the gradients, and half of the sum.
    gradients = 2 * 4 * entries["ronde"]["parameters"]
    for way in ("ronde", "ddp on ronde", "ddp"):
        assert gradients < sent[way] < 1.5 * gradients, way
    assert gradients / 4 < sent["ronde codec int8"] < gradients / 2
    assert sent["barrier"] < gradients / 10


def train_with_int8(folder: pathlib.Path, hosts: int) -> dict[str, dict[str, Any]]:
    """Trains a small network on two ranks, with and without a codec. Returns the report's entries by mode."""
    ronde_binary()
    path = folder / "a.json"
    words = ["train", "--model", "cnn", "--batch", "2", "--ranks", "2", "--rounds", "1", "--codec", "int8"]
    assert main([*words, "--hosts", str(hosts), "--json", str(path)]) == 0
    (world,) = json.loads(path.read_text())["worlds"]
    training = world["training"]
    return {entry["way"]: {**entry, "parameters": training["parameters"]} for entry in training["entries"]}
