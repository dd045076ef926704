"""What the compact format costs: bits an element against Shannon's bound and the paper's 32, and its speed on one core.

Codes are real: the digits task is trained for some steps by VGC's own rule, with exact second moments, on one worker.
`rows()` measures whole messages of that run, then its codes at random places of larger tensors, ratios 10 to 10,000,
and of a ResNet-50's 161 tensors. A message's bits are its directory and its payloads; the head is left out, as in the
bound. "Room" is what is transferred: as many words as the worst places would need, on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from gradwire.codec import CHUNK, Rule, compact, reference, words
from gradwire.codec.form import Blocks
from gradwire.exchange.room import padded
from gradwire.layout import Layout
from gradwire.tools.train.digits import open_digits

BATCH = 16
BAR = 1.10  # of Shannon's bound
SPEED_BAR = 100.0  # million elements a second and core
Row = dict[str, Any]


@dataclass(frozen=True)
class Sent:
    """The elements of one message, places ascending."""

    layout: Layout
    index: Tensor
    code: Tensor

    def counts(self) -> list[int]:
        return torch.bincount(self.layout.slot_of(self.index), minlength=len(self.layout)).tolist()

    def blocks(self, headroom: bool = True) -> Blocks:
        """With the room that a run gives a message after one of the same counts, or with none to spare."""
        rooms = [padded(count) if headroom else count for count in self.counts()]
        return Blocks.of(self.layout, [min(room, slot.numel) for room, slot in zip(rooms, self.layout, strict=True)])


@cache
def digits(alpha: float, n_steps: int = 60, first: int = 30) -> tuple[Sent, ...]:
    """The messages of steps `first` .. `n_steps` of the digits task: Adam on what one worker sends."""
    torch.manual_seed(0)
    task = open_digits(None)
    model = task.make_model()
    layout = Layout.of((name, p.shape) for name, p in model.named_parameters())
    rule = Rule(alpha, 0.999, None, 0.0, False, "paper")
    residual, variance = torch.zeros(layout.numel), torch.zeros(layout.numel)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sent = []
    for step in range(n_steps):
        contributions = _contributions(model, task, torch.randint(task.samples, (BATCH,)))
        reference.accumulate(contributions.sum(0), contributions.square().sum(0), residual, variance, None)
        passes = reference.decide(residual, variance, None, rule)
        exponents, code, passes = reference.quantize(residual, passes, layout, rule)
        index = passes.nonzero().squeeze(1)
        update = torch.zeros(layout.numel)
        update[index] = reference.values(index, code[index], exponents, layout, rule)
        variance.mul_(rule.zeta)
        residual[index], variance[index] = 0.0, 0.0
        for slot, parameter in zip(layout, model.parameters(), strict=True):
            parameter.grad = slot.of(update).view(slot.shape)
        optimizer.step()
        if step >= first:
            sent.append(Sent(layout, index, code[index]))
    return tuple(sent)


def _contributions(model: torch.nn.Module, task: Any, chosen: Tensor) -> Tensor:
    """c_z of every sample of a batch, [B, N]."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(model, weights, (x[None],)), y[None]) / BATCH

    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, *task.batch(chosen))
    return torch.cat([each[name].flatten(1) for name in parameters], dim=1)


def scattered(shapes: list[tuple[int, ...]], ratio: int) -> Sent:
    """Real codes, those of digits at alpha = 1.5, at random places of tensors of other sizes."""
    generator = torch.Generator().manual_seed(ratio)
    layout = Layout.of((f"tensor{k}", shape) for k, shape in enumerate(shapes))
    real = torch.cat([message.code for message in digits(1.5)])
    counts = [(slot.numel + int(torch.randint(ratio, (), generator=generator))) // ratio for slot in layout]
    places = [
        slot.offset + torch.randint(slot.numel, (count,), generator=generator).unique()
        for slot, count in zip(layout, counts, strict=True)
    ]
    index = torch.cat(places)
    return Sent(layout, index, real[torch.randint(len(real), index.shape, generator=generator)])


def resnet50() -> list[tuple[int, ...]]:
    """The shapes of its 161 parameters, in order."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for depth, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(depth):
            convolutions = [(width, width_in, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            convolutions += [(4 * width, width_in, 1, 1)] if block == 0 else []
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]
            width_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def entropy_bits(weights: Tensor) -> float:
    """H of the distribution that the weights are proportional to."""
    p = weights[weights > 0].double() / weights.sum()
    return float(-(p * p.log2()).sum())


def shannon_bits(sent: Sent) -> float:
    """sum over tensors of n_k [H(p_k) / p_k + H(code)] = N_k H(p_k) + n_k H(code)."""
    total = 0.0
    for slot, codes in zip(sent.layout, torch.split(sent.code, sent.counts()), strict=True):
        total += slot.numel * entropy_bits(torch.tensor([len(codes), slot.numel - len(codes)]))
        total += len(codes) * entropy_bits(torch.bincount(codes, minlength=16)) if len(codes) else 0.0
    return total


def used_bits(sent: Sent, headroom: bool = True) -> int:
    """Directory and payloads, without the zeros behind them."""
    blocks = sent.blocks(headroom)
    _, body = compact.pack(sent.index, sent.code, blocks)
    return 32 * (blocks.directory_words + int(compact.ends_of(body, blocks)[-1]))


def row(what: str, against: str, value: float, reference: float, bar: float | None, holds: bool | None) -> Row:
    names = ("what", "against", "value", "reference", "ratio", "bar", "holds")
    return dict(zip(names, (what, against, value, reference, value / reference, bar, holds), strict=True))


def bits_row(what: str, messages: list[Sent]) -> Row:
    n = sum(len(sent.index) for sent in messages)
    value, bound = (sum(map(bits, messages)) / n for bits in (used_bits, shannon_bits))
    return row(f"bits an element, {what}", "Shannon", value, bound, BAR, value <= BAR * bound)


def room_rows(what: str, sent: Sent) -> Iterator[Row]:
    """The room of a message that is exactly full: against the bound (no promise: it is for the worst places), and
    against the paper's word an element."""
    value, bound = 32 * sent.blocks(headroom=False).words / len(sent.index), shannon_bits(sent) / len(sent.index)
    yield row(f"room an element, {what}", "Shannon", value, bound, None, None)
    yield row(f"room an element, {what}", "words", value, 32.0, 1.0, value <= 32.0)


def speed_row(what: str, call: Callable[[], object], n: int) -> Row:
    """Million elements a second of CPU time, the best of 9."""
    times = []
    for _ in range(9):
        begin = time.thread_time()
        call()
        times.append(time.thread_time() - begin)
    value = n / min(times) / 1e6
    return row(what, "bar", value, SPEED_BAR, 1.0, value >= SPEED_BAR)


def speed_rows() -> Iterator[Row]:
    from gradwire.codec.cpu import codec as cpu

    for ratio, numel in ((10, 1 << 24), (1000, 1 << 28)):
        sent = scattered([(numel,)], ratio)
        blocks, n, one = sent.blocks(), len(sent.index), torch.ones(1, dtype=torch.bool)
        given, counts = words.pack(sent.index, sent.code, CHUNK), torch.tensor([len(sent.index)])
        orders, body = cpu.pack(given, counts, torch.empty(0), blocks, CHUNK)
        pack = f"pack, million elements a second and core, ratio {ratio}"
        yield speed_row(pack, lambda g=given, c=counts, b=blocks: cpu.pack(g, c, g, b, CHUNK), n)
        read = (orders[None], body[None], one, blocks, CHUNK)
        yield speed_row(f"un{pack}", lambda read=read: cpu.unpack(*read), n)


def rows() -> Iterator[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for alpha in (0.5, 1.0, 1.5, 2.0):
        messages = list(digits(alpha))
        n = sum(len(sent.index) for sent in messages) / len(messages)
        yield bits_row(f"digits, alpha {alpha}, ratio {messages[0].layout.numel / n:.0f}, {n:.0f} sent", messages)
    for ratio in (10, 100, 1000, 10000):
        two = scattered([(ratio << 14,), (ratio << 13,)], ratio)
        yield bits_row(f"two tensors, ratio {ratio}", [two])
        yield from room_rows(f"two tensors, ratio {ratio}", two)
    for ratio in (10, 100, 1000, 10000):
        many = scattered(resnet50(), ratio)
        yield bits_row(f"ResNet-50, ratio {ratio}", [many])
        yield from room_rows(f"ResNet-50, ratio {ratio}", many)
    yield from speed_rows()
    torch.set_num_threads(threads)
