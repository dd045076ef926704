"""Local steps once more, slowly: whole modules, one tensor at a time, nothing of gradwire but the methods' codecs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradwire import VGC, Dense, TopK
from gradwire.exchange.room import Capacity
from gradwire.layout import Layout
from gradwire.local_steps.recipe import Recipe
from gradwire.methods.base import Context, Gather, Rounds

Named = dict[str, Tensor]


def cut(named: Named, names: list[str]) -> Tensor:
    return torch.cat([named[name].flatten() for name in names])


def put(named: Named, names: list[str], flat: Tensor) -> None:
    for name, part in zip(names, flat.split([named[name].numel() for name in names]), strict=True):
        named[name].copy_(part.view_as(named[name]))


def largest(values: Tensor, k: int) -> Tensor:
    """The k numbers of largest size, zeros elsewhere; number by number."""
    places = sorted(range(len(values)), key=lambda place: -abs(float(values[place])))[:k]
    chosen = torch.zeros_like(values)
    for place in places:
        chosen[place] = values[place]
    return chosen


class Exchange:
    """Of one fragment: what every worker gives, u, and what is left of it."""

    def __init__(self, recipe: Recipe, shapes: dict[str, tuple[int, ...]], workers: int) -> None:
        self.recipe, self.workers, self.number = recipe, workers, 0
        method: Any = recipe.compressor
        if isinstance(method, VGC):
            method = VGC(alpha=0, density=method.density, feedback=True)
        self.method, self.layout = method, Layout.of(shapes.items())
        self.capacity = Capacity(4 * self.layout.numel, workers, {slot.name: slot.numel for slot in self.layout})
        self.states = [method.init(self.layout, torch.device("cpu")) for _ in range(workers)]
        self.residual = [torch.zeros(self.layout.numel) for _ in range(workers)]

    def __call__(self, deltas: list[Tensor]) -> Tensor:
        way: Callable[[list[Tensor]], Tensor]
        if isinstance(self.method, Dense):
            way = self.dense
        elif isinstance(self.method, TopK):
            way = self.topk
        elif isinstance(self.method, Rounds):
            way = self.rounds
        else:
            way = self.gathered
        mean = way(deltas)
        self.number += 1
        return mean

    def dense(self, deltas: list[Tensor]) -> Tensor:
        return sum(delta / self.workers for delta in deltas)  # type: ignore[return-value]

    def topk(self, deltas: list[Tensor]) -> Tensor:
        mean = torch.zeros(self.layout.numel)
        for rank, delta in enumerate(deltas):
            self.residual[rank] = self.recipe.decay * self.residual[rank] + delta
            for slot in self.layout:
                sent = largest(slot.of(self.residual[rank]), max(1, int(self.method.density * slot.numel)))
                slot.of(self.residual[rank]).sub_(sent)
                slot.of(mean).add_(sent / self.workers)
        return mean

    def context(self, rank: int) -> Context:
        plan = self.capacity.plan(self.method.words, None, self.method.share) if self.method.needs_room else None
        room = self.capacity.of(self.layout, plan) if plan else ()
        return Context(self.layout, self.number, room, None, self.workers, False, rank)

    def gathered(self, deltas: list[Tensor]) -> Tensor:
        """The method's own messages; where it holds nothing back, what they do not say is kept here."""
        messages = []
        for rank, delta in enumerate(deltas):
            context, empty = self.context(rank), torch.zeros(0)
            if self.method.holds_back:
                self.states[rank].residual *= self.recipe.decay
                messages.append(self.method.encode(delta.clone(), empty, self.states[rank], context).data)
                continue
            whole = self.recipe.decay * self.residual[rank] + delta
            messages.append(self.method.encode(whole.clone(), empty, self.states[rank], context).data)
            self.method.decode(messages[-1][None], said := torch.zeros_like(whole), context)
            self.residual[rank] = whole - said
        assert isinstance(self.method, Gather)
        arrival = self.method.decode(torch.stack(messages), out := torch.zeros_like(deltas[0]), self.context(0))
        if arrival.passed is not None:
            self.capacity.note(self.layout, arrival.passed.tolist())
        return out

    def rounds(self, deltas: list[Tensor]) -> Tensor:
        talks = []
        for rank, delta in enumerate(deltas):
            self.states[rank].residual *= self.recipe.decay
            talks.append(self.method.rounds(delta.clone(), self.states[rank], self.context(rank)))
        given = [next(talk) for talk in talks]
        while True:
            total, given, means = sum(given), [], []
            for talk in talks:
                try:
                    given.append(talk.send(total.clone()))
                except StopIteration as end:
                    means.append(end.value.mean)
            if means:
                return means[0]


class Oracle:
    """Trains copies of `model`; fragments: names of each, in order."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, fragments: list[list[str]], workers: int, make: Callable[..., Any]
    ) -> None:
        self.recipe, self.fragments = recipe, fragments
        self.modules = [copy.deepcopy(model) for _ in range(workers)]
        self.optimizers = [make(list(module.parameters())) for module in self.modules]
        self.base = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.base.items()}
        self.exchanges = [
            Exchange(recipe, {name: tuple(self.base[name].shape) for name in names}, workers) for names in fragments
        ]
        self.flights: dict[int, list[tuple[int, Tensor, list[Tensor]]]] = {}
        self.steps = 0

    def step(self, loss: Callable[..., Tensor], *batch: Tensor) -> None:
        for rank, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss(module, *(tensor[rank] for tensor in batch)).backward()
            optimizer.step()
        self.steps += 1
        for number in range(len(self.fragments)):
            at = -(-(number + 1) * self.recipe.every // len(self.fragments))
            if self.steps % self.recipe.every == at % self.recipe.every:
                self.take(number)
        for flight in self.flights.pop(self.steps, []):
            self.land(*flight)

    def weights(self, rank: int) -> Named:
        return {name: p.data for name, p in self.modules[rank].named_parameters()}

    def take(self, number: int) -> None:
        names, ranks = self.fragments[number], range(len(self.modules))
        now = [cut(self.weights(rank), names) for rank in ranks]
        mean = self.exchanges[number]([cut(self.base, names) - own for own in now])
        self.flights.setdefault(self.steps + self.recipe.delay, []).append((number, mean, now))

    def land(self, number: int, u: Tensor, before: list[Tensor]) -> None:
        names, recipe = self.fragments[number], self.recipe
        base, m = cut(self.base, names), cut(self.momentum, names)
        m = recipe.outer_momentum * m + u
        if recipe.outer_momentum and not recipe.nesterov:
            base = base - recipe.outer_lr * m
        else:
            base = base - recipe.outer_lr * (u + recipe.outer_momentum * m)
        put(self.base, names, base)
        put(self.momentum, names, m)
        for rank, sent_from in enumerate(before):
            now = cut(self.weights(rank), names)
            if recipe.delay and recipe.mixing is not None:
                new = recipe.mixing * now + (1 - recipe.mixing) * base
            else:
                new = base + (now - sent_from)
            put(self.weights(rank), names, base if not recipe.delay else new)
