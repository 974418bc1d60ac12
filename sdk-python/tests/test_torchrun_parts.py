"""The parts of `torchrun --rdzv-backend ronde`: options, the agents' store, the directory for workers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError

import ronde_entry_points
from ronde import _ronde, agent_directory, own_sidecar
from ronde.agent_directory import AgentDirectory
from ronde.errors import RondeError, TimedOutError
from ronde.torchrun import configuration, handler, sidecars
from ronde.torchrun.configuration import Configuration, Node
from ronde.torchrun.link import _split
from ronde.torchrun.replica import (
    CLOSES,
    OPERATION_BYTES_MAX,
    STORE_BYTES_MAX,
    Batch,
    Operation,
    Replica,
    decode,
)

TWO = "alpha:7400,beta:7400"
SECRET = {"job_secret_file": "/s"}


def nested(values: Any) -> Any:
    """Lists and objects as those of a batch, of any values."""
    row = st.tuples(st.sampled_from(["set", "add", "?"]), values, values, values, values)
    batch = st.fixed_dictionaries({"operations": st.lists(row | values, max_size=2), "leaves": values})
    return st.lists(values, max_size=6) | batch


def read(
    endpoint: str = "", nodes: tuple[int, int] = (1, 1), variables: dict[str, str] | None = None, **options: Any
) -> Configuration:
    parameters = RendezvousParameters("ronde", endpoint, "night", nodes[0], nodes[1], None, **options)
    return configuration.read(parameters, variables or {})


# === Options ===


def test_one_node_needs_neither_endpoint_nor_credentials() -> None:
    assert read(timeout=900) == Configuration("night", timeout=900)
    assert read("localhost:0") == Configuration("night")
    assert read().size == 1


def test_nodes_are_those_of_the_endpoint_in_its_order() -> None:
    found = read("alpha, [fd00::1]:7500 ,10.0.0.3:1", (3, 3), timeout="60", node_rank="2", **SECRET)
    assert found.nodes == (Node("alpha", 7400), Node("fd00::1", 7500), Node("10.0.0.3", 1))
    assert (found.rank, found.timeout, found.size) == (2, 60.0, 3)
    assert [str(node) for node in found.nodes] == ["alpha:7400", "[fd00::1]:7500", "10.0.0.3:1"]
    assert found.nodes[1].at(2) == "[fd00::1]:7502"


def test_variables_stand_in_for_options() -> None:
    found = read(TWO, (2, 2), {"PET_NODE_RANK": "1", "RONDE_SIDECAR_CERTS": "/c"})
    assert (found.rank, found.certs, found.job_secret_file) == (1, "/c", None)
    found = read(TWO, (2, 2), {"PET_NODE_RANK": "1", "RONDE_SIDECAR_CERTS": "/c"}, node_rank=0, **SECRET)
    assert (found.rank, found.certs, found.job_secret_file) == (0, None, "/s")
    assert read(TWO, (2, 2), **SECRET).rank is None


@pytest.mark.parametrize(
    ("endpoint", "nodes", "options", "text"),
    [
        (TWO, (1, 4), SECRET, "names 2 nodes, but --nnodes is 4"),
        (TWO, (1, 2), {"certs": "/c"}, r"--nnodes 1:2 is a range, .*give --rdzv-conf job_secret_file=FILE instead"),
        (",".join(f"n{node}" for node in range(17)), (1, 17), SECRET, "there are at most 16"),
        ("alpha:65000,beta:65500", (1, 2), SECRET, "use 96 ports each"),
        (TWO, (1, 2), {**SECRET, "last_call_timeout": "0"}, "last_call_timeout of --rdzv-conf is '0'"),
        ("", (2, 2), SECRET, r"names 0 nodes, but --nnodes is 2\. .*--rdzv-endpoint alpha:7400,beta:7400"),
        ("alpha:7400", (2, 2), SECRET, "names 1 nodes, but --nnodes is 2"),
        (TWO, (1, 1), {}, "names 2 nodes, but --nnodes is 1"),
        ("alpha,alpha:7400", (2, 2), SECRET, "names a node twice"),
        ("alpha:7400,beta:", (2, 2), SECRET, "'beta:', which is not HOST:PORT"),
        ("alpha:7400,beta:0", (2, 2), SECRET, "'beta:0', which is not HOST:PORT"),
        ("alpha:7400,fd00::1:7400", (2, 2), SECRET, "IPv6 address in brackets"),
        (TWO, (2, 2), {}, "need credentials .*job_secret_file=FILE.*certs=DIR.*docs/KEYS.md"),
        (TWO, (2, 2), {**SECRET, "certs": "/c"}, r"certificates \(/c\) and a secret \(/s\); give one"),
        (TWO, (2, 2), {**SECRET, "node_rank": "2"}, "node_rank of --rdzv-conf is '2'; .* from 0 to 1"),
        (TWO, (2, 2), {**SECRET, "node_rank": "-1"}, "node_rank of --rdzv-conf is '-1'"),
        (TWO, (2, 2), {**SECRET, "timeout": "soon"}, "timeout of --rdzv-conf is 'soon'"),
        (TWO, (2, 2), {**SECRET, "timeout": "0"}, "timeout of --rdzv-conf is '0'"),
        (TWO, (2, 2), {**SECRET, "store_type": "file"}, "has store_type, which --rdzv-backend ronde does not have"),
    ],
)
def test_options_that_do_not_fit_are_named(
    endpoint: str, nodes: tuple[int, int], options: dict[str, str], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        read(endpoint, nodes, **options)


def test_the_own_node_is_the_only_one_with_an_address_of_this_host() -> None:
    # TEST-NET-2 is of no host.
    nodes = (Node("198.51.100.1", 7400), Node("127.0.0.1", 7400))
    assert sidecars.own_rank(Configuration("night", nodes)) == 1
    for others, how in [
        ((Node("198.51.100.1", 7400), Node("198.51.100.2", 7400)), "none have"),
        ((Node("127.0.0.1", 7400), Node("localhost", 7500)), "nodes 0, 1 have"),
    ]:
        with pytest.raises(RondeError, match=f"{how} an address of this host.*node_rank=N or PET_NODE_RANK=N"):
            sidecars.own_rank(Configuration("night", others))


def test_sidecars_take_variables_that_are_meant_for_them() -> None:
    given = {"HOME": "/h", "RONDE_SIDECAR_LANES": "2", "RONDE_SIDECAR_TRANSPORT": "tls", "RONDE_SIDECAR_CERTS": "/c"}
    assert sidecars.for_agents(given) == {"HOME": "/h", "RONDE_SIDECAR_TRANSPORT": "tls"}
    of_workers = {"HOME": "/h", "RONDE_SIDECAR_LANES": "2", "RONDE_SIDECAR_TRANSPORT": "tls"}
    assert own_sidecar.variables_with_peers(given) == of_workers
    assert own_sidecar.variables_alone({**given, "RONDE_SIDECAR_LISTEN": "10.0.0.1"}) == of_workers


def test_a_jobs_name_is_valid_and_differs_between_ids() -> None:
    names = {sidecars.job_of(run_id) for run_id in ["none", "None", "a/b", "a b", "", "x" * 100, "x" * 99]}
    assert len(names) == 7
    assert all(re.fullmatch(r"[a-z0-9_.-]{1,63}", name) for name in names)


def test_messages_name_nodes_instead_of_sidecars() -> None:
    nodes = [Node("alpha", 7400), Node("beta", 7400)]
    assert handler.named("sidecar 1 did not connect", nodes) == "node 1 (beta:7400) did not connect"
    assert handler.named("ranks 0, 1 are missing", nodes) == "node 0 (alpha:7400), 1 (beta:7400) are missing"
    assert handler.named("sidecar 7 and rank 12", nodes) == "sidecar 7 and rank 12"


# === The store ===


def test_replicas_that_apply_the_same_operations_are_equal() -> None:
    operations = [
        Operation("set", "a", b"1"),
        Operation("add", "a", amount=4),
        Operation("append", "b", b"x"),
        Operation("append", "b", b"y"),
        Operation("compare_set", "c", b"new"),
        Operation("compare_set", "c", b"newer", b"other"),
        Operation("compare_set", "c", b"newest", b"new"),
        Operation("compare_set", "d", b"new", b"expected"),
        Operation("delete", "b"),
        Operation("delete", "b"),
        Operation("add", "n", amount=-2),
    ]
    results = [None, 5, None, None, b"new", b"new", b"newest", b"expected", True, False, -2]
    sent = decode(Batch(tuple(operations), CLOSES).encode())
    assert sent == Batch(tuple(operations), CLOSES)
    replicas = [Replica(), Replica()]
    for replica in replicas:
        assert [replica.apply(operation) for operation in sent.operations] == results
    assert replicas[0].values == replicas[1].values == {"a": b"5", "c": b"newest", "n": b"-2"}


def test_an_operation_that_fails_changes_nothing() -> None:
    replica = Replica()
    replica.apply(Operation("set", "text", b"x"))
    for operation, text in [
        (Operation("add", "text", amount=1), "not a number"),
        (Operation("set", "large", b"x" * OPERATION_BYTES_MAX), "is larger than"),
    ]:
        error = replica.apply(operation)
        assert isinstance(error, ValueError)
        assert text in str(error)
    assert replica.values == {"text": b"x"}


def test_the_store_is_bounded() -> None:
    replica, value = Replica(), b"x" * (OPERATION_BYTES_MAX - 8)
    results = [replica.apply(Operation("set", f"{number:08}", value)) for number in range(65)]
    assert results[:64] == [None] * 64
    assert isinstance(results[64], MemoryError)
    assert sum(len(key) + len(each) for key, each in replica.values.items()) == STORE_BYTES_MAX
    assert replica.apply(Operation("delete", "00000000")) is True
    assert replica.apply(Operation("set", "00000064", value)) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04N.",
        b"[]",
        b"{}",
        b'{"operations":[],"leaves":"never"}',
        b'{"operations":[["execute","k","","",0]],"leaves":null}',
        b'{"operations":[["set",1,"","",0]],"leaves":null}',
        b'{"operations":[["set","k","?","",0]],"leaves":null}',
        b'{"operations":[["add","k","","","1"]],"leaves":null}',
        b'{"operations":[["set","k"]],"leaves":null}',
        b'{"operations":[["set","k",null,"",0]],"leaves":null}',
        b"[" * 100_000,
    ],
)
def test_batches_that_cannot_be_parsed_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"batch|leave"):
        decode(data)


@given(st.binary(max_size=64) | st.recursive(st.none() | st.integers() | st.text(max_size=3), nested, max_leaves=9))
def test_arbitrary_bytes_are_a_batch_or_a_value_error(data: Any) -> None:
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    with contextlib.suppress(ValueError):
        assert decode(text) == decode(decode(text).encode())
    with contextlib.suppress(ValueError):
        assert len(_split(text, 1)) == 1
    with contextlib.suppress(RendezvousStateError):
        handler._hello(text, 0, [Node("alpha", 7400)])


def test_parts_of_an_exchange_have_the_length_that_they_name() -> None:
    assert _split(b"\x02" + b"\0" * 7 + b"ab" + b"\0" * 8, 2) == [b"ab", b""]
    for data, count in [(b"\x02" + b"\0" * 7 + b"a", 1), (b"\0\0", 1), (b"\xff" * 8, 1), (b"\0" * 8, 2)]:
        with pytest.raises(ValueError, match="exchange"):
            _split(data, count)


def test_hellos_are_checked() -> None:
    nodes = [Node("alpha", 7400), Node("beta", 7400)]
    good = handler.Hello("1", "night", ("alpha:7400", "beta:7400"), "torchrun-0f", "0" * 64, 1)
    handler._check_same([good, good], nodes)
    for changed, text in [
        ({"run_id": "day"}, "--rdzv-id is 'day' on node 1 .*, but 'night' on node 0"),
        ({"nodes": ("beta:7400", "alpha:7400")}, "--rdzv-endpoint is 'beta:7400,alpha:7400' on node 1"),
        ({"release": "2"}, "release of ronde is '2' on node 1"),
    ]:
        with pytest.raises(RendezvousStateError, match=text):
            handler._check_same([good, good._replace(**changed)], nodes)
    for data in [b"", b"{}", b"[1]", b'["1","n",[],"../x","%s",1]' % (b"0" * 64), b'["1","n",[],"torchrun-0","x",1]']:
        with pytest.raises(RendezvousStateError, match=r"the agent of node 1 \(beta:7400\) sent a message"):
            handler._hello(data, 1, nodes)


# === The directory for workers ===


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = AgentDirectory()
    monkeypatch.setenv(agent_directory.VARIABLE, str(made.path))
    yield made
    made.remove()


def launched(**changed: str) -> _ronde.LaunchedBy:
    variables = {
        "TORCHELASTIC_RUN_ID": "night",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        **changed,
    }
    found = _ronde.LaunchedBy.detect({name: value for name, value in variables.items() if value})
    assert found is not None
    return found


def test_both_modules_name_one_variable() -> None:
    assert ronde_entry_points.AGENT == agent_directory.VARIABLE


def test_a_worker_gets_the_agents_answer(directory: AgentDirectory) -> None:
    assert directory.path.stat().st_mode & 0o077 == 0
    answers: list[Any] = []
    worker = threading.Thread(target=lambda: answers.append(agent_directory.settings(launched(), 20)))
    worker.start()
    while directory.request() is None:
        pass
    assert directory.request() == (4, 2)
    directory.answer("/run/s", "j")
    worker.join(20)
    assert answers == [{"socket": "/run/s", "job": "j", "rank": 1, "sidecar_uid": os.geteuid()}]


def test_a_worker_reports_what_the_agent_waits_for(directory: AgentDirectory) -> None:
    directory.report_wait("no worker of node 1 (beta:7400) has begun a session")
    with pytest.raises(TimedOutError, match=r"within 0 s: no worker of node 1 \(beta:7400\) has begun") as raised:
        agent_directory.settings(launched(), 0.1)
    assert raised.value.cause == "start"


def test_a_worker_raises_the_agents_failure(directory: AgentDirectory) -> None:
    directory.report_failure("a port is taken", "settings")
    with pytest.raises(RondeError, match="a port is taken") as raised:
        agent_directory.settings(launched(), 20)
    assert raised.value.cause == "settings"


def test_a_worker_whose_agent_has_ended_does_not_wait(directory: AgentDirectory) -> None:
    directory.remove()
    with pytest.raises(RondeError, match="the agent has ended"):
        agent_directory.settings(launched(), 20)


def test_a_worker_whose_agent_was_killed_does_not_wait(
    directory: AgentDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_directory, "is_alive", lambda process: process.pid != os.getpid())
    with pytest.raises(RondeError, match="agent on this node has ended, and no sidecar serves its workers"):
        agent_directory.settings(launched(), 20)
    directory.answer("/run/s", "j")
    assert agent_directory.settings(launched(), 20)["socket"] == "/run/s"


def test_a_directory_that_others_can_enter_is_not_used(directory: AgentDirectory) -> None:
    directory.path.chmod(0o755)
    with pytest.raises(RondeError, match="must be private"):
        agent_directory.settings(launched(), 20)


@pytest.mark.parametrize("missing", ["LOCAL_WORLD_SIZE", "RANK"])
def test_a_worker_without_torchruns_variables_is_an_error(directory: AgentDirectory, missing: str) -> None:
    with pytest.raises(RondeError, match="RANK, WORLD_SIZE or LOCAL_WORLD_SIZE is missing"):
        agent_directory.settings(launched(**{missing: ""}), 20)


@pytest.mark.parametrize("answer", [b"[1]", b"\x80\x04N."])
def test_what_no_worker_wrote_is_rejected(directory: AgentDirectory, answer: bytes) -> None:
    (directory.path / "request").write_bytes(answer)
    (directory.path / "request").chmod(0o600)
    with pytest.raises(RondeError, match="not one that ronde of this release wrote"):
        directory.request()


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Configuration("night").run_id = "day"  # type: ignore[misc]
