"""Could an LSTM have exact moments? Its backward by a formula of its own against torch's, on a CPU.

torch's LSTM does not hand out the gradients of its gates, so a formula needs a forward that keeps the gates and a
backward that goes through time again, outside torch's fused one; then the moments are those of two Linears over time.
The bar is what such a formula may cost: 1.5 times torch's backward. It is missed, so LSTM and GRU, which is built
alike, stay estimated. The first row of a size is without moments: what leaving the fused backward costs alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Row = dict[str, Any]
SIZES = ((32, 35, 200), (64, 64, 256))  # samples, steps of time, width: of a language model, of a speech model
ROUNDS, WARM = 9, 2
BAR = 1.5


class Formula(torch.autograd.Function):
    """One layer from a zero state, x [T, B, I]: outputs and gradients are nn.LSTM's, to rounding."""

    moments: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, u: Tensor, b1: Tensor, b2: Tensor, exact: bool) -> Tensor:
        steps, samples, width = x.shape[0], x.shape[1], u.shape[1]
        gates = torch.addmm(b1 + b2, x.flatten(0, 1), w.t()).view(steps, samples, 4 * width)
        outputs, cells = x.new_zeros(steps + 1, samples, width), x.new_zeros(steps + 1, samples, width)
        squashed = x.new_empty(steps, samples, width)
        for t in range(steps):
            gate = gates[t].addmm_(outputs[t], u.t())
            gate[:, : 2 * width].sigmoid_()
            gate[:, 2 * width : 3 * width].tanh_()
            gate[:, 3 * width :].sigmoid_()
            enter, keep, new, out = gate.split(width, 1)
            torch.mul(keep, cells[t], out=cells[t + 1]).addcmul_(enter, new)
            torch.mul(out, torch.tanh(cells[t + 1], out=squashed[t]), out=outputs[t + 1])
        ctx.save_for_backward(x, w, u, gates, outputs, cells, squashed)
        ctx.exact = exact
        return outputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, u, gates, outputs, cells, squashed = ctx.saved_tensors
        deltas = through_time(grad, u, gates, cells, squashed)
        grads, moments = zip(*(weight(deltas, rows, ctx.exact) for rows in (x, outputs[:-1])), strict=True)
        bias = deltas.sum(0)
        Formula.moments = (*moments, bias.square().sum(0))
        return (deltas @ w, *grads, bias.sum(0), bias.sum(0), None)


def through_time(grad: Tensor, u: Tensor, gates: Tensor, cells: Tensor, squashed: Tensor) -> Tensor:
    """The gradients of the gates before they are squashed, [T, B, 4 H]."""
    width = u.shape[1]
    enter, keep, new, out = gates.split(width, 2)
    slopes = gates * (1 - gates)
    slopes[..., 2 * width : 3 * width] = 1 - new * new
    for number, factor in enumerate((new, cells[:-1], enter, squashed)):
        slopes[..., number * width : (number + 1) * width] *= factor
    of_cell, deltas = out * (1 - squashed * squashed), torch.empty_like(gates)
    of_output, carried = torch.zeros_like(grad[0]), torch.zeros_like(grad[0])
    for t in range(len(grad) - 1, -1, -1):
        here = grad[t] + of_output
        carried = torch.addcmul(carried, here, of_cell[t])
        torch.mul(slopes[t, :, : 3 * width].unflatten(1, (3, width)), carried[:, None],
                  out=deltas[t, :, : 3 * width].unflatten(1, (3, width)))  # fmt: skip
        torch.mul(slopes[t, :, 3 * width :], here, out=deltas[t, :, 3 * width :])
        carried = carried * keep[t]
        of_output = deltas[t] @ u
    return deltas


def weight(deltas: Tensor, rows: Tensor, exact: bool) -> tuple[Tensor, Tensor | None]:
    """Gradient and moment of a weight from what goes in and out of it, [T, B, .]."""
    if not exact:
        return deltas.flatten(0, 1).t() @ rows.flatten(0, 1), None
    each = torch.bmm(deltas.permute(1, 2, 0), rows.transpose(0, 1))  # [B, 4 H, I]
    return each.sum(0), each.square_().sum(0)


def backward_ms(forward: Callable[[Tensor], Tensor], x: Tensor) -> float:
    loss = forward(x).square().sum()
    begin = time.perf_counter()
    loss.backward()
    return 1e3 * (time.perf_counter() - begin)


def rows() -> list[Row]:
    """One layer, one thread; both sides in turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for size in SIZES for row in rows_of(*size)]
    finally:
        torch.set_num_threads(before)


def rows_of(samples: int, steps: int, width: int) -> list[Row]:
    torch.manual_seed(0)
    layer = nn.LSTM(width, width)
    weights, x = list(layer.parameters()), torch.randn(steps, samples, width, requires_grad=True)
    check(layer, weights, x)
    contenders: dict[str, Callable[[Tensor], Tensor]] = {
        "torch": lambda given: layer(given)[0],
        "a formula of its own, without moments": lambda given: Formula.apply(given, *weights, False),
        "a formula of its own, with exact moments": lambda given: Formula.apply(given, *weights, True),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(WARM + ROUNDS):
        for name, forward in contenders.items():
            took = backward_ms(forward, x)
            if turn >= WARM:
                times[name].append(took)
    reference, *others = (statistics.median(taken) for taken in times.values())
    names = list(contenders)[1:]
    return [
        {
            "what": f"LSTM backward {samples} x {steps} x {width}, {name}",
            "against": "torch's LSTM backward",
            "time_ms": took,
            "reference_ms": reference,
            **({"bar": BAR, "holds": took <= BAR * reference} if "moments" in name and "without" not in name else {}),
        }
        for name, took in zip(names, others, strict=True)
    ]


def check(layer: nn.LSTM, weights: list[nn.Parameter], x: Tensor) -> None:
    """What is timed is right: outputs and gradients are torch's, the moments those of single samples."""
    few = x[:5, :3].detach()
    torch.testing.assert_close(Formula.apply(few, *weights, True), layer(few)[0], rtol=1e-4, atol=1e-5)
    of_one = [torch.autograd.grad(layer(few[:, b : b + 1])[0].square().sum(), weights) for b in range(few.shape[1])]
    found = torch.autograd.grad(Formula.apply(few, *weights, True).square().sum(), weights)
    for place, gradient in enumerate(found):
        expected = torch.stack([grads[place] for grads in of_one])
        torch.testing.assert_close(gradient, expected.sum(0), rtol=1e-3, atol=1e-4)
        moment = Formula.moments[min(place, 2)]
        assert moment is not None
        torch.testing.assert_close(moment, expected.square().sum(0), rtol=1e-3, atol=1e-4)
