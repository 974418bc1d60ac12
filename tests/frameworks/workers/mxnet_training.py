"""Training with Gluon and with an optimizer of ronde.mxnet; the weights are those of one process with all samples."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import mxnet as mx
import numpy as np
import ronde.mxnet as hvd
from mxnet import autograd, gluon
from ronde.mxnet.optimizer import Reduction

STEPS, BATCH, FEATURES = 5, 4, 3


def samples(step: int, rank: int) -> tuple[Any, Any]:
    random = np.random.default_rng(step * 100 + rank)
    given = random.standard_normal((BATCH, FEATURES)).astype("float32")
    return given, (given @ np.arange(1, FEATURES + 1, dtype="float32")[:, None] + rank).astype("float32")


def network(seed: int) -> Any:
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(5, activation="tanh", in_units=FEATURES), gluon.nn.Dense(1, in_units=5))
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    net.hybridize()
    return net


def weights(net: Any) -> list[Any]:
    return [net.collect_params()[name].data().asnumpy() for name in sorted(net.collect_params().keys())]


def step(net: Any, given: Any, wanted: Any) -> None:
    with autograd.record():
        loss = gluon.loss.L2Loss()(net(mx.nd.array(given)), mx.nd.array(wanted))
    loss.backward()


def alone(optimizer: str, options: dict[str, Any]) -> list[Any]:
    """One process with the samples of all ranks."""
    net = network(0)
    trainer = gluon.Trainer(net.collect_params(), optimizer, dict(options))
    for number in range(STEPS):
        parts = [samples(number, rank) for rank in range(hvd.size())]
        given, wanted = (np.concatenate(each) for each in zip(*parts))
        step(net, given, wanted)
        trainer.step(BATCH * hvd.size())
    return weights(net)


def together(make: Any) -> list[Any]:
    # Different weights on each rank, until rank 0 gives its own.
    net = network(hvd.rank())
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = make(net.collect_params())
    for number in range(STEPS):
        step(net, *samples(number, hvd.rank()))
        trainer.step(BATCH)
    return weights(net)


def check(found: list[Any], expected: list[Any], tolerance: float = 2e-5) -> None:
    for mine, theirs in zip(found, expected):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)
    for mine in found:
        everybodys = hvd.allgather_object(mine.tobytes())
        assert len(set(everybodys)) == 1, "ranks have different weights"


def trainers() -> None:
    options = {"learning_rate": 0.05, "momentum": 0.9}
    expected = alone("sgd", options)
    for extra in (
        {},
        {"num_groups": 2},
        {"gradient_predivide_factor": 2.0, "prefix": "second."},
        {"num_groups": 99},
    ):
        check(
            together(lambda params, extra=extra: hvd.DistributedTrainer(params, "sgd", dict(options), **extra)),
            expected,
        )
    half = together(
        lambda params: hvd.DistributedTrainer(params, "sgd", dict(options), compression=hvd.Compression.fp16)
    )
    check(half, expected, 3e-2)
    assert any(not np.array_equal(mine, theirs) for mine, theirs in zip(half, expected)), "nothing was compressed"
    check(
        together(lambda params: hvd.DistributedTrainer(params, mx.optimizer.create("adam", learning_rate=0.01))),
        alone("adam", {"learning_rate": 0.01}),
        1e-3,
    )


def wrapped() -> None:
    """A DistributedOptimizer given to a DistributedTrainer does not reduce twice."""
    given = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.05, momentum=0.9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = together(lambda params: hvd.DistributedTrainer(params, given))
    assert any("does not take DistributedOptimizer" in str(each.message) for each in caught)
    check(found, alone("sgd", {"learning_rate": 0.05, "momentum": 0.9}))


def optimizers() -> None:
    """As MXNet's modules use an optimizer: by an updater, with parameters one by one, and several at once."""
    for extra in ({}, {"num_groups": 1}, {"gradient_predivide_factor": 4.0}):
        inner = mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, rescale_grad=1.0)
        optimizer = hvd.DistributedOptimizer(inner, **extra)
        assert isinstance(optimizer, mx.optimizer.Optimizer)
        update = mx.optimizer.get_updater(optimizer)
        mine = [mx.nd.ones((3, 2)), mx.nd.ones((4,))]
        theirs = [array.asnumpy() for array in mine]
        momentum = [np.zeros_like(array) for array in theirs]
        for number in range(3):
            gradients = [
                [np.full(array.shape, float(rank + number + index), "float32") for index, array in enumerate(mine)]
                for rank in range(hvd.size())
            ]
            own = [mx.nd.array(each) for each in gradients[hvd.rank()]]
            if number == 2:
                optimizer.set_learning_rate(0.2)
            for index in range(2):
                update(index, own[index], mine[index])
            for index in range(2):
                mean = np.mean([each[index] for each in gradients], axis=0)
                momentum[index] = 0.9 * momentum[index] - (0.2 if number == 2 else 0.1) * mean
                theirs[index] = theirs[index] + momentum[index]
        check([array.asnumpy() for array in mine], theirs)
        assert optimizer.learning_rate == inner.learning_rate == 0.2
        optimizer.rescale_grad = 0.5
        assert inner.rescale_grad == 0.5


def deferred() -> None:
    """Parameters whose shape the first batch determines get the values of the root then."""
    net = gluon.nn.Dense(2, prefix="late_")
    mx.random.seed(hvd.rank())
    net.initialize(mx.init.Uniform(1.0))
    hvd.broadcast_parameters(net.collect_params(), root_rank=hvd.size() - 1)
    output = net(mx.nd.ones((1, 3))).asnumpy()
    assert len(set(hvd.allgather_object(output.tobytes()))) == 1
    assert len(set(hvd.allgather_object(net.weight.data().asnumpy().tobytes()))) == 1


def dictionaries() -> None:
    mine = {"b": mx.nd.full((2,), hvd.rank()), "a": mx.nd.full((3, 1), hvd.rank() * 10)}
    hvd.broadcast_parameters(mine, root_rank=1)
    assert mine["b"].asnumpy().tolist() == [1.0] * 2
    assert mine["a"].asnumpy().tolist() == [[10.0]] * 3


def many() -> None:
    """Some are in flight at once, and not all."""
    in_flight, most, begin = [0], [0], hvd.client().broadcast_async

    class Counted:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._handle = begin(*arguments, **options)
            in_flight[0] += 1
            most[0] = max(most[0], in_flight[0])

        def wait(self) -> Any:
            in_flight[0] -= 1
            return self._handle.wait()

    mine = {f"array{number}": mx.nd.full((2,), hvd.rank() * 1000 + number) for number in range(200)}
    with mock.patch.object(hvd.client(), "broadcast_async", Counted):
        hvd.broadcast_parameters(mine, root_rank=1)
    assert 1 < most[0] <= 64, most
    assert all(mine[f"array{number}"].asnumpy().tolist() == [1000.0 + number] * 2 for number in range(200))


def sets() -> None:
    """Rank 0 trains with the last rank; the others for themselves, with their own gradients as they are."""
    # Two ranks are all ranks.
    members = [0, hvd.size() - 1] if hvd.size() > 2 else [0]
    some = hvd.add_process_set(members)
    net = gluon.nn.Dense(1, in_units=1, use_bias=False, prefix="set_")
    net.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, process_set=some)
    with autograd.record():
        loss = net(mx.nd.array([[hvd.rank() + 1.0]]))
    loss.backward()
    trainer.step(1)
    mean = np.mean([rank + 1.0 for rank in members]) if some.included() else hvd.rank() + 1.0
    np.testing.assert_allclose(net.weight.data().asnumpy(), [[1.0 - mean]], rtol=1e-6)
    hvd.remove_process_set(some)


def groups() -> None:
    """As many as asked for, of nearly the same size."""
    for asked, sizes in ((1, [5]), (4, [1, 1, 1, 2]), (99, [1, 1, 1, 1, 1])):
        reduction = Reduction("groups", 1.0, asked, hvd.global_process_set)
        with mock.patch.object(reduction, "_begun", wraps=reduction._begun) as begun:
            gradients = [mx.nd.full(3, hvd.rank() + number) for number in range(5)]
            reduction.apply([(str(number), gradient) for number, gradient in enumerate(gradients)])
        assert [len(call.args[2]) for call in begun.call_args_list] == sizes
        for number, gradient in enumerate(gradients):
            total = sum(range(hvd.size())) + hvd.size() * number
            np.testing.assert_array_equal(gradient.asnumpy(), np.full(3, total, "float32"))


def main() -> None:
    hvd.init(process_sets="dynamic")
    for part in (trainers, wrapped, optimizers, deferred, dictionaries, many, sets, groups):
        part()
    try:
        hvd.DistributedTrainer({}, "sgd", gradient_predivide_factor=0.0)
    except ValueError as error:
        assert "positive" in str(error)
    else:
        raise AssertionError("no ValueError")
    print(f"rank {hvd.rank()} of {hvd.size()}: training passed", flush=True)


if __name__ == "__main__":
    main()
