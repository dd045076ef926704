"""Steps 2 to 4 and 6 on the CPU, 16 M elements: accumulate + decide + pack, and unpack + add, against the copy floor.

The floor is what a memory copy takes for the bytes that must move. Encode: g, m, r, v read, r, v written, 24 bytes an
element. Decode: 4 bytes an element written. Interleaved medians, so that a busy machine slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gradwire.codec import CHUNK, Inputs, reference
from gradwire.codec.cpu import codec as cpu
from gradwire.layout import Layout
from gradwire.methods import Context
from gradwire.methods.vgc import VGC

N = 1 << 24
LAYOUT = Layout.of([(f"tensor{i}", (N // 16,)) for i in range(16)])
REPEATS = 9


def time_ms(work: Callable[[], object]) -> float:
    time.sleep(0.02)  # OpenMP's threads spin for milliseconds after a torch operation and would be measured with it
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def interleaved(*works: Callable[[], object]) -> list[float]:
    """The median milliseconds of each."""
    for work in works:
        work()
    rounds = [[time_ms(work) for work in works] for _ in range(REPEATS)]
    return [median(column) for column in zip(*rounds, strict=True)]


class Case:
    """A bucket of which one element in `ratio` passes, and its state."""

    def __init__(self, ratio: int) -> None:
        torch.manual_seed(0)
        self.grad, self.ratio = torch.randn(N), ratio
        self.moment = torch.where(torch.rand(N) < 1 / ratio, 0.0, 1e9)
        self.residual, self.variance, self.spare = torch.zeros(N), torch.zeros(N), torch.empty(N)
        self.capacity = tuple(int(1.2 * slot.numel / ratio) + 64 for slot in LAYOUT)

    def encode(self, kernel: Any = cpu) -> None:
        rule = VGC(alpha=1.0).rule
        inputs = Inputs(self.grad, self.moment, self.residual, self.variance)
        kernel.select(inputs, LAYOUT, rule, self.capacity, 0, CHUNK)

    def clear(self) -> None:
        """Between two encodes: what passes must pass again, and the caches are cold."""
        self.residual.zero_()
        self.variance.zero_()

    def copy(self) -> None:
        """24 bytes an element: three copies."""
        for source in (self.grad, self.moment, self.residual):
            self.spare.copy_(source)

    def message(self, wire: str) -> tuple[VGC, Context, Tensor]:
        self.clear()
        vgc, context = VGC(alpha=1.0, wire=wire), Context(LAYOUT, 0, self.capacity)
        state = vgc.init(LAYOUT, torch.device("cpu"))
        return vgc, context, vgc.encode(self.grad, self.moment, state, context).data


def rows() -> Iterator[dict[str, Any]]:
    for ratio in (10, 100, 1_000, 10_000):
        case = Case(ratio)
        _, encode, floor = interleaved(case.clear, case.encode, case.copy)
        name = f"accumulate + decide + pack words, 16 M elements, ratio {ratio:,}"
        yield bar(name, "copy floor", encode, floor, 1.5)
        yield from whole(case)
    case = Case(100)
    plain = min(time_ms(lambda: case.encode(reference)) for _ in range(2))
    encode = min(time_ms(case.encode) for _ in range(2))
    yield bar("the same by compiled kernels, ratio 100", "plain torch", encode, plain, None)


def whole(case: Case) -> Iterator[dict[str, Any]]:
    """A message from gradient to bytes, and eight of them back, head and checksum included."""
    for wire in ("compact", "words"):
        vgc, context, data = case.message(wire)
        state, out = vgc.init(LAYOUT, torch.device("cpu")), torch.empty(N)
        messages = data.repeat(8, 1)

        def encode() -> None:
            vgc.encode(case.grad, case.moment, state, context)  # noqa: B023

        def clear() -> None:
            state.residual.zero_()  # noqa: B023
            state.variance.zero_()  # noqa: B023

        def decode() -> None:
            vgc.decode(messages, out, context)  # noqa: B023

        _, encoded, decoded, floor, copied = interleaved(
            clear, encode, decode, case.copy, lambda: case.spare.copy_(case.grad)
        )
        yield bar(f"whole encode to {wire}, ratio {case.ratio:,}", "copy floor", encoded, floor, None)
        yield bar(f"whole decode of 8 {wire}, ratio {case.ratio:,}", "half a copy", decoded, copied / 2, None)


def bar(what: str, against: str, time_ms: float, reference_ms: float, bar: float | None) -> dict[str, Any]:
    ratio = time_ms / reference_ms
    holds = bar is None or ratio <= bar
    return {"what": what, "against": against, "time_ms": time_ms, "reference_ms": reference_ms} | {
        "ratio": ratio, "bar": bar, "holds": holds,
    }  # fmt: skip
