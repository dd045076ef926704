"""Bad input gets a clear error on every rank, none hangs, and nothing is lost."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from gradwire import VGC, Dense
from gradwire.adapters import reducer
from gradwire.errors import AttachError, DisagreementError, GradwireError, MessageError
from workers import WorkerError, Workers


def caught(function, kind=Exception):
    try:
        function()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def attach_wrong():
    model = scenes.ddp(scenes.net())
    messages = {
        "bare": caught(lambda: gradwire.attach(scenes.net(), VGC()), AttachError),
        "string": caught(lambda: gradwire.attach(model, "vcg"), ValueError),
        "class": caught(lambda: gradwire.attach(model, VGC), TypeError),
        "sparse": caught(lambda: gradwire.attach(scenes.ddp(nn.Embedding(4, 3, sparse=True)), VGC()), AttachError),
        "complex": caught(
            lambda: gradwire.attach(scenes.ddp(nn.Linear(3, 3, dtype=torch.complex64)), VGC()), AttachError
        ),
        "estimator": caught(lambda: gradwire.attach(scenes.ddp(scenes.net()), VGC(), estimator="magic"), ValueError),
        "strict": caught(lambda: gradwire.attach(scenes.ddp(nn.LSTM(3, 3)), VGC(), strict=True), GradwireError),
    }
    gradwire.attach(model, VGC())
    messages["twice"] = caught(lambda: gradwire.attach(model, VGC()), AttachError)
    hooked = scenes.ddp(scenes.net())
    hooked.register_comm_hook(None, scenes_hook)
    messages["hook"] = caught(lambda: gradwire.attach(hooked, VGC()), AttachError)
    return messages


def scenes_hook(state, bucket):
    raise AssertionError("never called")


def test_what_cannot_be_attached(spawn):
    messages = spawn(1, attach_wrong)[0]
    for key, text in {
        "bare": "wrap it first, model = DistributedDataParallel(net)",
        "string": "unknown compressor 'vcg'; known: dense, bf16,",
        "class": "expected a compressor",
        "sparse": "sparse=False",
        "complex": "view_as_real",
        "estimator": "groups",
        "strict": "weight_ih_l0",
        "twice": "attached already",
        "hook": "another one",
    }.items():
        assert text in messages[key], (key, messages[key])


def disagree(what):
    rank = dist.get_rank()
    compressor = VGC(alpha=1.0 + rank) if what == "compressor" else VGC()
    layer = nn.Linear(12, 5)
    model = nn.Sequential()
    model.add_module(f"layer{rank}" if what == "model" else "layer", layer)
    if what == "version":
        reducer.__version__ = f"0.1.{rank}"
    wrapped = scenes.ddp(model)
    begin = time.monotonic()
    message = caught(lambda: gradwire.attach(wrapped, compressor), DisagreementError)
    reducer.__version__ = "0.1.0"
    again = gradwire.attach(scenes.ddp(scenes.net()), VGC())  # the group is still in order
    return message, time.monotonic() - begin, repr(again)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("what", ["compressor", "model", "version"])
def test_ranks_that_disagree_all_raise(spawn, workers, what):
    for message, seconds, _ in spawn(workers, disagree, what):
        assert f"the same {'gradwire ' if what == 'version' else ''}{what}" in message
        assert "rank 0: " in message
        assert "rank 1: " in message
        assert seconds < 10


def change_alone():
    wire = gradwire.attach(scenes.ddp(scenes.net()), VGC(alpha=1.0))
    new = VGC(alpha=2.0 + dist.get_rank())
    message = caught(lambda: setattr(wire, "compressor", new), DisagreementError)
    return message, repr(wire.compressor)


def test_a_change_that_ranks_disagree_on_changes_nothing(spawn):
    for message, compressor in spawn(2, change_alone):
        assert "alpha=3.0" in message
        assert "alpha=1.0" in compressor


def second_backward(remedy):
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.0))
    optimizer = scenes.sgd(model)
    list(scenes.train(model, range(3), optimizer))
    before = wire.state_dict()["parameters"]
    x, y = scenes.batch(3)
    if remedy == "none":
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
    elif remedy == "no_sync":
        with model.no_sync():
            nn.functional.cross_entropy(model(x), y).backward()
        optimizer.zero_grad()
    elif remedy == "backward alone":
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        with model.no_sync():
            loss.backward()
    elif remedy in ("frozen", "frozen, through DDP"):
        model.requires_grad_(False)
        inputs = x.clone().requires_grad_()
        nn.functional.cross_entropy((model if "DDP" in remedy else model.module)(inputs), y).backward()
        model.requires_grad_(True)
    between = wire.state_dict()["parameters"]
    untouched = all(torch.equal(before[n]["residual"], between[n]["residual"]) for n in before)
    x, y = scenes.batch(3)
    optimizer.zero_grad()
    message = caught(lambda: nn.functional.cross_entropy(model(x), y).backward())
    after = wire.state_dict()["parameters"]
    kept = all(torch.equal(between[n]["residual"], after[n]["residual"]) for n in before)
    return message, untouched, kept, scenes.digest(p.grad for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("case", ["none", "backward alone"])
def test_a_second_synced_backward_is_refused_and_names_the_remedies(spawn, case):
    """no_sync() around the backward alone is no remedy: DDP decides in the forward whether it exchanges."""
    for message, _, kept, _ in spawn(2, second_backward, case):
        assert "put that forward and its backward both under `with model.no_sync():`" in message
        assert "requires_grad_(False)" in message
        assert "skip_step()" in message
        assert kept  # nothing of the foreign gradient got into r


def test_the_remedies_keep_the_foreign_gradient_out(spawn):
    straight = spawn(2, second_backward, "nothing between")
    for remedy in ("no_sync", "frozen", "frozen, through DDP"):
        for (message, untouched, _, prints), (_, _, _, expected) in zip(
            spawn(2, second_backward, remedy), straight, strict=True
        ):
            assert message == "no error"
            assert untouched
            assert prints == expected, remedy


def corrupt(rank_hit, sender):
    model = scenes.ddp(scenes.net())
    wire = gradwire.attach(model, VGC(alpha=1.0))
    optimizer = scenes.sgd(model)
    list(scenes.train(model, range(3), optimizer))
    old = wire.state_dict()["parameters"]
    courier = wire._reducer._pipeline._courier
    gather, calls = courier.gather, []

    def spoiled(message):
        flight = gather(message)
        calls.append(1)
        if dist.get_rank() == rank_hit and len(calls) == 5:
            flight.wait()[sender, -1] ^= 4
        return flight

    courier.gather = spoiled
    x, y = scenes.batch(3)
    grads = scenes.net()
    grads.load_state_dict(model.module.state_dict())
    nn.functional.cross_entropy(grads(x), y).backward()
    prints = scenes.digest(model.parameters())
    optimizer.zero_grad()
    message = caught(lambda: nn.functional.cross_entropy(model(x), y).backward())
    again = caught(lambda: nn.functional.cross_entropy(model(x), y).backward()) if message != "no error" else ""
    new = wire.state_dict()["parameters"]
    exact = []
    for name, p in grads.named_parameters():
        touched = ~torch.isclose(new[name]["residual"], old[name]["residual"], rtol=1e-5, atol=1e-7)
        whole = torch.isclose(new[name]["residual"], old[name]["residual"] + p.grad, rtol=1e-4, atol=1e-6)
        exact.append(bool((~touched | whole).all()))
    return message, again, all(exact), prints == scenes.digest(model.parameters())


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_a_corrupt_message_raises_and_takes_the_step_back(n_workers):
    """A worker alone gathers and decodes its own message as well."""
    sender = min(1, n_workers - 1)
    workers = Workers(n_workers, timeout=8)
    try:
        (message, again, exact, unchanged), *_ = workers.run(corrupt, 0, sender)
    finally:
        workers.close()
    assert f"rank {sender} is corrupt" in message
    assert again != "no error"
    assert exact  # every element holds what it held, or that and its gradient: nothing was sent and lost
    assert unchanged


def die_or_train(victim):
    model = scenes.ddp(scenes.net())
    gradwire.attach(model, VGC(alpha=1.0))
    optimizer = scenes.sgd(model)
    steps = scenes.train(model, range(1000), optimizer)
    for _ in range(5):
        next(steps)
    if dist.get_rank() == victim:
        import os

        os._exit(1)
    begin = time.monotonic()
    message = caught(lambda: list(steps))
    return message, time.monotonic() - begin


def test_when_a_worker_dies_the_others_end_with_an_error():
    workers = Workers(3, timeout=15)
    try:
        for pipe in workers.pipes:
            pipe.send((die_or_train, (1,)))
        for message, seconds in workers.results([0, 2]):
            assert message != "no error"
            assert seconds < 20
    finally:
        workers.close()


def never_comes(instead):
    """Rank 1 does something else, or waits longer than the others have patience."""
    model = scenes.ddp(scenes.net())
    begin = time.monotonic()
    if dist.get_rank() == 1:
        act = {"waits": lambda: time.sleep(6), "trains": lambda: list(scenes.train(model, range(2), scenes.sgd(model)))}
        return caught(act[instead]), time.monotonic() - begin, ""
    try:
        gradwire.attach(model, VGC())
    except GradwireError as error:
        return str(error), time.monotonic() - begin, type(error.__cause__).__name__
    return "no error", time.monotonic() - begin, ""


@pytest.mark.slow
@pytest.mark.parametrize("instead", ["waits", "trains"])
def test_a_rank_that_never_attaches_is_met_by_the_timeout_which_says_so(instead):
    workers = Workers(2, timeout=3)
    try:
        (message, seconds, cause), _ = workers.run(never_comes, instead)
    finally:
        workers.close()
    assert "rank 0 waited 3 s for the others in gradwire.attach (or wire.compressor = ..." in message
    assert "not all ranks call it, in the same order" in message
    assert cause == "RuntimeError"  # Gloo's own words
    assert 2 < seconds < 8


def joining():
    from torch.distributed.algorithms.join import Join

    model = scenes.ddp(scenes.net())
    gradwire.attach(model, VGC())
    x, y = scenes.batch(0)

    def step():
        with Join([model]):
            nn.functional.cross_entropy(model(x), y).backward()

    return caught(step)


def test_join_is_refused(spawn):
    assert "same number of batches" in spawn(1, joining)[0]


def test_a_broken_worker_is_reported(spawn):
    """The harness itself can fail."""
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        spawn(1, divide)


def divide():
    return 1 / 0


def test_message_error_is_a_gradwire_error():
    assert issubclass(MessageError, GradwireError)
    assert issubclass(DisagreementError, GradwireError)
    assert Dense() == Dense()
