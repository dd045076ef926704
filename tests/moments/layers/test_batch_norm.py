"""BatchNorm's own Function against torch's layer and a tap: its kernels in Triton's interpreter, the whole on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import interpreted
from gradwire.moments import Recorder
from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.layers import batch_norm

DEVICE = "cpu"  # or the fixture's
EPS = 0.3
# B, C, n: one of each kind of edge
SHAPES = [(3, 5, 7), (1, 1, 2), (33, 17, 1), (2, 130, 9), (4, 3, 700), (40, 36, 20)]


def plain_sums(gradient: Tensor, x: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, in float64 and [B, C, n]."""
    gradient, x, mean, deviation = (one.double() for one in (gradient, x, mean, deviation))
    products = (gradient * (x - mean[:, None])).sum(2)
    both = torch.stack([products * deviation, gradient.sum(2)])
    return both, torch.cat([both.sum(1), both.square().sum(1), products.sum(0)[None]])


def operands(shape: tuple[int, ...], dtype: torch.dtype, last: bool, device: str) -> tuple[Tensor, ...]:
    """last: channels side by side."""
    generator = torch.Generator().manual_seed(sum(shape))
    gradient, x = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x += 2
    if last:
        gradient, x = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (gradient, x))
    mean = x.float().mean((0, 2))
    deviation = torch.rsqrt(x.float().var((0, 2), unbiased=False) + EPS)
    return tuple(one.to(device) for one in (gradient, x, mean, deviation))


def compare_kernels(device: str) -> None:
    from gradwire.moments.gpu.batch_norm_sums import batch_norm_sums

    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for last in (False, True):
                given = operands(shape, dtype, last, device)
                for found, wanted in zip(batch_norm_sums(*given), plain_sums(*given), strict=True):
                    assert found.shape == wanted.shape
                    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)


def interpret(device: str) -> None:
    """Runs in a process of its own: the interpreter is chosen when Triton is imported."""
    from interpreter import mend  # of tests/codec

    mend()
    compare_kernels(device)


def test_interpreted(interpreting: interpreted.Asked) -> None:
    interpreted.ask(interpreting, "all")


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    compare_kernels("cuda")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def anywhere(request: pytest.FixtureRequest, full_precision: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too: with the definition for the kernels, and for the half of torch's backward that a CPU lacks."""
    monkeypatch.setitem(globals(), "DEVICE", request.param)
    if request.param == "cuda":
        return

    def input_gradient(
        gradient: Tensor, x: Tensor, weight: Tensor, mean: Tensor, deviation: Tensor, totals: Tensor
    ) -> Tensor:
        xhat = (x - mean[:, None, None]) * deviation[:, None, None]
        count = x.numel() // x.shape[1]
        share = (totals[1][:, None, None] + xhat * totals[0][:, None, None]).float() / count
        return (gradient - share) * (weight * deviation)[:, None, None]

    def sums_of(*given: Tensor) -> tuple[Tensor, ...]:
        gradient, x, *statistics = given
        return tuple(one.float() for one in plain_sums(gradient.flatten(2), x.flatten(2), *statistics))

    monkeypatch.setattr(batch_norm, "input_gradient", input_gradient)
    monkeypatch.setattr(batch_norm, "sums_of", sums_of)

    def serving(module: nn.Module, tap: Tap, x: Tensor) -> LayerCall | None:
        trains = module.training and type(x) is Tensor
        return tap.call("", x, tap.passes.now(), tap.wanted()) if trains else None

    monkeypatch.setattr(batch_norm, "serving", serving)


def network() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        made[1].weight.uniform_(0.5, 2)
        made[1].bias.uniform_(-1, 1)
    return made.to(DEVICE)


def test_layer_is_torchs_and_its_moments_the_taps(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = network(), torch.randn(5, 3, 9, 9, device=DEVICE, requires_grad=True)
    ours, tapped = copy.deepcopy(plain), copy.deepcopy(plain)
    recorders = [Recorder(model, dict(model.named_parameters()), strict=True) for model in (ours, tapped)]
    seen = []
    for model in (plain, ours, tapped):
        if model is tapped:
            monkeypatch.setattr(batch_norm, "serving", lambda *_: None)
        x.grad = None
        output = model(x)
        output.square().sum().backward()
        seen.append((output, x.grad))
    assert torch.equal(seen[0][0], seen[1][0])
    torch.testing.assert_close(seen[1][1], seen[0][1], rtol=1e-3, atol=1e-3)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, param.grad, rtol=1e-3, atol=1e-3)
    for own, buffer in zip(ours.buffers(), plain.buffers(), strict=True):
        assert torch.equal(own, buffer)
    for name in ("1.weight", "1.bias"):
        torch.testing.assert_close(*(recorder.moment(name) for recorder in recorders), rtol=1e-3, atol=1e-3)
    assert [row.kind for row in recorders[0].coverage()] == [row.kind for row in recorders[1].coverage()]


def test_layer_called_twice_has_its_cross_terms(anywhere: None) -> None:
    """Both calls are of the same samples: their contributions add up before they are squared."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) * self.norm(2 * x + x.flip(3))

    model, x = Twice().to(DEVICE), torch.randn(4, 3, 5, 5, device=DEVICE)
    recorder = Recorder(model, dict(model.named_parameters()))
    (model(x) * x).sum().backward()
    parts = [F.batch_norm(one, None, None, training=True) for one in (x, 2 * x + x.flip(3))]
    deltas = [x * parts[1], x * parts[0]]  # weight 1, bias 0: the gradient of each call's output
    each = sum((delta * part).sum((2, 3)) for delta, part in zip(deltas, parts, strict=True))
    torch.testing.assert_close(recorder.moment("norm.weight"), each.square().sum(0), rtol=1e-3, atol=1e-3)


def test_double_backward(anywhere: None) -> None:
    plain, x = network(), torch.randn(5, 3, 9, 9, device=DEVICE, requires_grad=True)
    ours = copy.deepcopy(plain)
    recorder = Recorder(ours, dict(ours.named_parameters()))
    found = []
    for model in (plain, ours):
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([param.grad.clone() for param in model.parameters()])
    for wanted, made in zip(*found, strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-2)
    recorder.remove()


if __name__ == "__main__":
    interpreted.serve({"all": interpret})
