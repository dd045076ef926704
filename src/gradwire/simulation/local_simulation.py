"""W virtual workers that train alone for some steps, and exchange what these add up to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import AttachError, CheckpointError
from gradwire.exchange.counting import Meter
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout, in_shape
from gradwire.local_steps.error_feedback import method_of
from gradwire.local_steps.forgetting import forget_what_broke
from gradwire.local_steps.fragments import fragments_of, sent_after
from gradwire.local_steps.local_stats import STATUS_BYTES, LocalStats
from gradwire.local_steps.recipe import Recipe
from gradwire.methods import Compressor, compressor_of
from gradwire.simulation.fragment_rounds import FragmentRounds, LateRound
from gradwire.simulation.virtual_worker import Loss, VirtualWorker
from gradwire.simulation.worker_buffers import WorkerBuffers
from gradwire.simulation.worker_passes import Passes
from gradwire.simulation.worker_states import of_one, put_back, saved

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
KEYS = ("step", "taken", "base", "momentum", "weights", "fragments", "flights", "optimizers", "buffers", "random")


class LocalSimulation:
    """The handle. `model` has the base weights, and worker 0's buffers or their average: evaluate it at any time.

    optimizers: one a worker, on the parameters of its own, for schedules.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        loss: Loss,
        workers: int,
        optimizer: MakeOptimizer,
        clip: float,
        seed: int,
        capture: bool | None,
        messages: bool | None,
    ) -> None:
        self.model, self.recipe, self.workers, self.clip, self.steps = model, recipe, workers, clip, 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check(self.parameters)
        self.layout = Layout.of((name, p.shape) for name, p in self.parameters.items())
        self.device = next(iter(self.parameters.values())).device
        gpu = self.device.type == "cuda"
        self.base = torch.zeros(self.layout.numel, device=self.device)
        torch._foreach_copy_(self._shaped(self.base, self.layout), [p.detach() for p in self.parameters.values()])
        self.momentum = torch.zeros_like(self.base) if recipe.outer_momentum else None
        self.weights = self.base.repeat(workers, 1)
        self.gradients = torch.zeros_like(self.weights)
        self._meter, self._counted_from = Meter(self.layout.numel * workers), 0
        batched = gpu if messages is None else not messages
        self.fragments = [self._fragment(names, batched) for names in self._names()]

        averages = recipe.buffers == "average"
        rows = enumerate(zip(self.gradients, self.weights, strict=True))
        self.replicas = [
            VirtualWorker(model, self.layout, row, row[:0], {}, rank == 0 and not averages, weights)
            for rank, (row, weights) in rows
        ]
        self.buffers = WorkerBuffers(model, [one.module for one in self.replicas], averages)
        self.optimizers = [_made(optimizer, list(one.parameters.values())) for one in self.replicas]
        self.passes = Passes(self.replicas, loss, seed, gpu if capture is None else capture)

    def __repr__(self) -> str:
        size = f"{self.layout.numel} parameters, {self.workers} workers"
        return f"LocalSimulation({self.recipe!r}, {size}, step {self.steps})"

    @property
    def compressor(self) -> Compressor:
        return self.recipe.compressor

    @compressor.setter
    def compressor(self, given: Compressor | str) -> None:
        """The same method with other options, from the next round on; what is held back stays."""
        recipe = replace(self.recipe, method=compressor_of(given))
        if type(recipe.compressor) is not type(self.compressor):
            raise TypeError(f"a simulation of {self.compressor!r} goes on with the same method, not {given!r}")
        for fragment in self.fragments:
            fragment.ranks.use(method_of(recipe, recipe.fragments))
        self.recipe = recipe

    def step(self, *batch: Tensor) -> Tensor:
        """One inner step of all workers, and a round where one is due; batch [W, B, ...]. Returns their losses, [W]."""
        losses = self.passes(batch)
        for replica, optimizer in zip(self.replicas, self.optimizers, strict=True):
            replica.hand_over()
            if self.clip:
                nn.utils.clip_grad_norm_(replica.parameters.values(), self.clip)
            optimizer.step()
        self.steps += 1
        self._land([n for n, one in enumerate(self.fragments) if one.flight and one.flight.lands_at == self.steps])
        self._take(sent_after(self.steps, self.recipe.every, len(self.fragments)), self.recipe.delay)
        return losses

    def finish(self) -> None:
        """What is on its way arrives, and what was trained since goes in a last round. All workers are at the base."""
        self._land([number for number, one in enumerate(self.fragments) if one.flight])
        self._take([number for number, one in enumerate(self.fragments) if one.taken_at < self.steps], delay=0)
        self.weights.copy_(self.base)

    def _take(self, numbers: Sequence[int], delay: int) -> None:
        """The rounds of these fragments begin, and without a delay they end."""
        if not numbers:
            return
        good = self._sound_workers()
        for number in numbers:
            self.fragments[number].take(self.recipe, self.steps, delay, good)
            self._meter.count(*(self.workers * STATUS_BYTES,) * 2, 0)
        if self._is_last_in(numbers):
            self.buffers.take(delay)
            self._meter.count(*(self.workers * self.buffers.n_bytes,) * 2, 0)
        if not delay:
            self._land(numbers)

    def _land(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            fragment = self.fragments[number]
            fragment.land(self.recipe)
            layout = fragment.ranks.layout
            with torch.no_grad():
                torch._foreach_copy_(
                    [self.parameters[name] for name in layout.names], self._shaped(fragment.base, layout)
                )
        if self._is_last_in(numbers):
            self.buffers.land()

    def _is_last_in(self, numbers: Sequence[int]) -> bool:
        return len(self.fragments) - 1 in numbers

    def _sound_workers(self) -> list[bool]:
        """Whose weights are finite; the others begin anew at the base. The host waits for the GPU here, once a round.

        All weights, not a fragment's: what is left of them would spoil the fragment again in the next step.
        """
        least, most = torch.aminmax(self.weights, dim=1)
        good: list[bool] = (torch.isfinite(least) & torch.isfinite(most)).tolist()
        for rank in (rank for rank, sound in enumerate(good) if not sound):
            for fragment in self.fragments:
                fragment.restart(rank)
            forget_what_broke([self.optimizers[rank]])
            self.buffers.restart(rank)
        return good

    # ---- how it is made

    def _names(self) -> list[list[str]]:
        return fragments_of({slot.name: slot.numel for slot in self.layout}, self.recipe.fragments)

    def _fragment(self, names: Sequence[str], batched: bool) -> FragmentRounds:
        """These tensors follow one another: a fragment is a piece of every row."""
        slots = [slot for slot in self.layout if slot.name in set(names)]
        layout = Layout.of((slot.name, slot.shape) for slot in slots)
        piece = slice(slots[0].offset, slots[0].offset + layout.numel)
        assert layout.names == tuple(names)
        assert slots[-1].offset + slots[-1].numel == piece.stop
        options: Any = {"planned": True, "device": self.device, "batched": batched, "buckets": 1, "meter": self._meter}
        try:
            ranks = InProcess(method_of(self.recipe, self.recipe.fragments), layout, self.workers, **options)
        except AttachError as error:
            raise AttachError(
                f"{error}. Here a step is an exchange of one fragment, of every / fragments steps"
            ) from error
        momentum = None if self.momentum is None else self.momentum[piece]
        return FragmentRounds(ranks, self.base[piece], momentum, self.weights[:, piece])

    def _shaped(self, flat: Tensor, layout: Layout) -> list[Tensor]:
        """The parameters of a layout, as views of a flat vector."""
        return [in_shape(slot.of(flat), self.parameters[slot.name]) for slot in layout]

    # ---- what it has sent

    def stats(self) -> LocalStats:
        """What one worker sent, on average over all of them, since the beginning or the last `reset_stats`.

        delay: in inner steps.
        """
        states = [state for fragment in self.fragments for state in fragment.ranks.states]
        total = of_one(self._meter.stats([one.residual for one in states if hasattr(one, "residual")]), self.workers)
        return LocalStats.of(total, self.recipe, self.layout.numel, self.steps - self._counted_from)

    def reset_stats(self) -> None:
        """Starts the totals anew."""
        self._meter.reset()
        self._counted_from = self.steps

    # ---- state at rest

    def state_dict(self) -> dict[str, Any]:
        """Everything but parameters that are not trained. What is held back is by fragment and worker, all by name."""
        ranks = range(self.workers)
        return {
            "step": self.steps,
            "taken": [one.taken_at for one in self.fragments],
            "base": self._by_name(self.base, self.layout),
            "momentum": None if self.momentum is None else self._by_name(self.momentum, self.layout),
            "weights": [self._by_name(row, self.layout) for row in self.weights],
            "fragments": [[saved(one.ranks, rank, self.parameters) for rank in ranks] for one in self.fragments],
            "flights": [self._flight_at_rest(one) for one in self.fragments],
            "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers],
            "buffers": self.buffers.state_dict(),
            "random": self.passes.random_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was saved."""
        self._check_state(state)
        for fragment, workers, taken_at in zip(self.fragments, state["fragments"], state["taken"], strict=True):
            put_back(fragment.ranks, workers, self.parameters)
            fragment.taken_at = taken_at
        self._put(self.base, self.layout, state["base"])
        if self.momentum is not None:
            self._put(self.momentum, self.layout, state["momentum"])
        for row, values in zip(self.weights, state["weights"], strict=True):
            self._put(row, self.layout, values)
        for fragment, flight in zip(self.fragments, state["flights"], strict=True):
            fragment.flight = None if flight is None else self._flight_of(flight, fragment)
        for optimizer, one in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(one))
        self.steps = self._counted_from = state["step"]
        self._meter.reset()
        with torch.no_grad():
            torch._foreach_copy_(list(self.parameters.values()), self._shaped(self.base, self.layout))
        self.buffers.load_state_dict(state["buffers"])
        self.passes.set_random_state(state["random"])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or not set(KEYS) <= state.keys():
            raise CheckpointError(
                f"not the state of a simulation of local steps: expected a dict with {', '.join(KEYS)}"
            )
        workers, fragments = len(state["weights"]), len(state["fragments"])
        if (workers, fragments) != (self.workers, len(self.fragments)):
            ours = f"{self.workers} workers and {len(self.fragments)} fragments"
            raise CheckpointError(
                f"the state of {workers} workers and {fragments} fragments, this simulation has {ours}"
            )
        if (state["momentum"] is None) != (self.momentum is None):
            raise CheckpointError("outer_momentum is 0 in one of the state and this simulation, and not in the other")
        for values in (state["base"], *state["weights"]):
            shapes = {name: tuple(value.shape) for name, value in values.items()}
            if shapes != {slot.name: slot.shape for slot in self.layout}:
                raise CheckpointError("the state is of a model with other parameters, or of other shapes")

    def _by_name(self, flat: Tensor, layout: Layout) -> dict[str, Tensor]:
        views = zip(layout.names, self._shaped(flat, layout), strict=True)
        return {name: view.clone(memory_format=torch.contiguous_format) for name, view in views}

    def _put(self, flat: Tensor, layout: Layout, values: Mapping[str, Tensor]) -> None:
        for name, view in zip(layout.names, self._shaped(flat, layout), strict=True):
            view.copy_(values[name])

    def _flight_at_rest(self, fragment: FragmentRounds) -> dict[str, Any] | None:
        flight, layout = fragment.flight, fragment.ranks.layout
        if flight is None:
            return None
        return {
            "lands_at": flight.lands_at,
            "mean": None if flight.mean is None else self._by_name(flight.mean, layout),
            "sent_from": None if flight.sent_from is None else [self._by_name(row, layout) for row in flight.sent_from],
        }

    def _flight_of(self, state: Mapping[str, Any], fragment: FragmentRounds) -> LateRound:
        layout, mean, sent_from = fragment.ranks.layout, None, None
        if state["mean"] is not None:
            self._put(mean := torch.empty_like(fragment.base), layout, state["mean"])
        if state["sent_from"] is not None:
            sent_from = torch.empty_like(fragment.deltas)
            for row, values in zip(sent_from, state["sent_from"], strict=True):
                self._put(row, layout, values)
        return LateRound(state["lands_at"], mean, sent_from)


def _check(parameters: Mapping[str, Tensor]) -> None:
    if not parameters:
        raise AttachError("simulate: no parameter of the model is trained")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise AttachError(f"local steps want float32 parameters, {name} is {parameter.dtype}: use autocast")


def _made(make: MakeOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must make a torch.optim.Optimizer of a list of parameters, it made {optimizer!r}")
    return optimizer
