"""A model as CUDA graphs: gradients and moments are those of the eager model, step after step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import per_sample
from gradwire.errors import AttachError, GradwireError
from gradwire.moments import Recorder
from gradwire.moments.cuda_graphs.graphed_forward import GraphedForward, stand_ins
from moments.cuda_graphs.reruns import StandIn

GPU = False  # or the fixture's


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a stand-in takes the place of the graph."""
    monkeypatch.setitem(globals(), "GPU", request.param == "cuda")


class Tied(nn.Module):
    """An embedding that is the output layer too, a batch norm and a convolution behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.middle = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.table(ids).transpose(1, 2)).transpose(1, 2))


def cnn() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 36, 5))


class Placed(nn.Module):
    """A parameter that is used by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, 4))
        self.after = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x * per_sample(self.places, x))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "cnn": (cnn, lambda: torch.randn(6, 3, 8, 8)),
    "tied": (Tied, lambda: torch.randint(0, 7, (5, 4))),
    "placed": (Placed, lambda: torch.randn(6, 4)),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), lambda: torch.randn(6, 4)),
}


def capture(recorder: Recorder, module: nn.Module, sample: Tensor) -> GraphedForward:
    if GPU:
        return GraphedForward(recorder, module, [sample])
    return GraphedForward(recorder, module, [sample], lambda whole, args, **_: StandIn(whole, args, recorder))


def recorder_of(model: nn.Module) -> Recorder:
    return Recorder(model, dict(model.named_parameters()))


def put(thing: Any) -> Any:
    return thing.cuda() if GPU else thing


def backward(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    (output.float().square().sum() / 3).backward()
    return output


@pytest.mark.parametrize("name", MODELS)
def test_steps_agree_with_the_eager_model(name: str) -> None:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    eager, graphed = put(make()), None
    graphed = copy.deepcopy(eager)
    plain, recorder = recorder_of(eager), recorder_of(graphed)
    capture(recorder, graphed, put(batch()))
    for buffer, own in zip(eager.buffers(), graphed.buffers(), strict=True):
        assert torch.equal(buffer, own)
    for step in range(4):
        for _ in range(1 + step % 2):  # every other step accumulates
            x = put(batch())
            outputs = [backward(model, x) for model in (eager, graphed)]
        torch.testing.assert_close(*outputs)
        for key, param in eager.named_parameters():
            torch.testing.assert_close(graphed.get_parameter(key).grad, param.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(recorder.moment(key), plain.moment(key), rtol=1e-4, atol=1e-5)
        for rows in zip(plain.coverage(), recorder.coverage(), strict=True):
            assert rows[0].kind == rows[1].kind
        for recorded, model in ((plain, eager), (recorder, graphed)):
            for key, param in model.named_parameters():
                recorded.consume(key, param.grad.flatten())
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.01 * param.grad
            model.zero_grad()


def test_a_tied_weight_under_autocast() -> None:
    """What is joined at the end of a backward is joined in float32, though the caller's autocast is on there."""
    torch.manual_seed(0)
    eager = put(Tied())
    graphed = copy.deepcopy(eager)
    plain, recorder = recorder_of(eager), recorder_of(graphed)
    with torch.autocast("cuda" if GPU else "cpu", torch.bfloat16):
        capture(recorder, graphed, put(torch.randint(0, 7, (5, 4))))
        for model in (eager, graphed):
            torch.manual_seed(1)
            backward(model, put(torch.randint(0, 7, (5, 4))))
    for key in plain.accounts:
        torch.testing.assert_close(recorder.moment(key), plain.moment(key), rtol=2e-2, atol=1e-3)
    assert [row.kind for row in recorder.coverage()] == [row.kind for row in plain.coverage()]


@pytest.mark.parametrize("name", MODELS)
def test_stand_ins_go_the_same_way(name: str) -> None:
    """Or the graph would have other kernels than the eager model, and slower ones."""

    def nodes(node: Any) -> list[str]:  # the output must live: torch 2.11 forgets a Function's neighbours with it
        return [
            type(node).__name__,
            *(one for next_, _ in node.next_functions if next_ is not None for one in nodes(next_)),
        ]

    model, x = put(MODELS[name][0]()), put(MODELS[name][1]())
    recorder = recorder_of(model)
    recorder.on_forward(model, (x,), {})
    output = model.forward(x)
    wanted = nodes(output.grad_fn)
    with stand_ins(model, recorder) as parameters:
        output = model.forward(x)
        assert nodes(output.grad_fn) == wanted
        assert [one.data_ptr() for one in parameters] == [one.data_ptr() for one in model.parameters()]
    assert all(account.here is account.param for account in recorder.accounts.values())


def test_other_shapes_and_eval_run_as_before() -> None:
    torch.manual_seed(0)
    model = put(cnn())
    recorder = recorder_of(model)
    graphed = capture(recorder, model, put(torch.randn(6, 3, 8, 8)))
    backward(model, put(torch.randn(4, 3, 8, 8)))
    model.eval()
    model(put(torch.randn(6, 3, 8, 8)))
    with torch.no_grad():
        model.train()(put(torch.randn(6, 3, 8, 8)))
    assert graphed.number == 0
    backward(model, put(torch.randn(6, 3, 8, 8)))
    assert graphed.number == 1


@pytest.mark.parametrize("first", [6, 4])
def test_a_pass_with_a_graph_and_one_without_in_one_backward(first: int) -> None:
    torch.manual_seed(0)
    eager = put(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)))
    model = copy.deepcopy(eager)
    plain, recorder = recorder_of(eager), recorder_of(model)
    graphed = capture(recorder, model, put(torch.randn(6, 3, 8, 8)))
    for _ in range(3):
        batches = [put(torch.randn(count, 3, 8, 8)) for count in (first, 10 - first)]
        for one in (eager, model):
            one.zero_grad()
            sum(one(batch).square().sum() for batch in batches).backward()
        for key, param in eager.named_parameters():
            torch.testing.assert_close(model.get_parameter(key).grad, param.grad, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(recorder.moment(key), plain.moment(key), rtol=1e-4, atol=1e-4)
        for recorded in (plain, recorder):
            for key, account in recorded.accounts.items():
                recorded.consume(key, account.param.grad.flatten())
    assert graphed.number == 3


def test_only_the_gradients_that_land_count() -> None:
    model = put(cnn())
    x = put(torch.randn(6, 3, 8, 8))
    recorder = recorder_of(model)
    capture(recorder, model, x)
    model(x).sum().backward(inputs=[model[0].weight, model[5].bias])
    assert not recorder.listening
    assert [name for name in recorder.accounts if recorder.accounts[name].seen()] == ["0.weight", "5.bias"]


def test_backward_of_an_overwritten_pass_is_refused() -> None:
    model = put(cnn())
    x = put(torch.randn(6, 3, 8, 8))
    capture(recorder_of(model), model, x)
    first, _ = model(x), model(x)
    with pytest.raises(GradwireError, match="written over"):
        first.sum().backward()


def test_gradient_that_is_thrown_away_does_not_count() -> None:
    model = put(cnn())
    x = put(torch.randn(6, 3, 8, 8))
    recorder = recorder_of(model)
    capture(recorder, model, x)
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert not any(recorder.accounts[name].seen() for name in recorder.accounts)


def test_use_outside_its_module_is_found_when_captured() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) @ self.inner.weight

    model = put(Twice())
    recorder = recorder_of(model)
    x = put(torch.randn(6, 4))
    capture(recorder, model, x)
    backward(model, x)
    kinds = {row.name: row.kind for row in recorder.coverage()}
    assert kinds["inner.weight"] != "exact"
    assert kinds["inner.bias"] == "exact"


def test_copies_and_release() -> None:
    model = put(cnn())
    x = put(torch.randn(6, 3, 8, 8))
    recorder = recorder_of(model)
    graphed = capture(recorder, model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        backward(other, x)
    assert graphed.number == 0
    recorder.release()
    backward(model, x)
    assert graphed.number == 0
    assert recorder.coverage()[0].kind == "exact"
    recorder.remove()
    assert "forward" not in model.__dict__


def test_refusals() -> None:
    model = put(cnn())
    recorder = recorder_of(model)
    x = put(torch.randn(6, 3, 8, 8))
    with pytest.raises(AttachError, match="by position"):
        capture(recorder, model, [x])  # type: ignore[arg-type]
    with pytest.raises(AttachError, match="trains"):
        capture(recorder, model.eval(), x)
    model.train()
    capture(recorder, model, x)
    with pytest.raises(AttachError, match="already"):
        capture(recorder, model, x)
