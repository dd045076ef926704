"""`local` and `LocalWire`: local steps, as a user holds them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.adapters import local_state
from gradwire.adapters.local_weights import unwrapped
from gradwire.adapters.outer_loop import OuterLoop
from gradwire.adapters.step_log import logged
from gradwire.errors import AttachError, GradwireError
from gradwire.exchange.counting import Writer
from gradwire.local_steps.local_stats import LocalStats
from gradwire.local_steps.recipe import Recipe, recipe_of
from gradwire.methods.base import Compressor

_attached: weakref.WeakKeyDictionary[nn.Module, OuterLoop] = weakref.WeakKeyDictionary()


def local(
    net: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    method: Recipe | Compressor | str,
    *,
    every: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    nesterov: bool | None = None,
    decay: float | None = None,
    fragments: int | None = None,
    delay: int | None = None,
    mixing: float | None = None,
    buffers: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> LocalWire:
    """Local steps: this worker trains alone, and after every so many steps what they add up to goes over the wire.

    The training loop stays as it is: hooks on the optimizer do the rest. Collective: every rank calls it alike, and all
    begin with the weights of the first.

        delta = base - weights;  e = decay e + delta;  message = compress(e);  e -= message
        base = outer_step(base, mean of the messages);  weights = base

    Args:
        net: the model, not wrapped, or wrapped in what this worker itself consists of (DDP, FSDP2).
        optimizer: any of torch's kind; of several, [first, second], the step of the last ends an inner step.
        method: such as VGC(alpha=0, density=1/32), its spec, or a recipe: "sparseloco", diloco(every=100).
        every: inner steps of a round, H.
        outer_lr, outer_momentum, nesterov: of the step that the base weights make with the mean.
        decay: what remains of the error feedback e from round to round.
        fragments: the layers are exchanged in so many parts, in turn, each once in `every` steps.
        delay: a round's sum may take so many inner steps, while training goes on.
        mixing: with a delay, weights = mixing * weights + (1 - mixing) * base; None: base + what was done meanwhile.
        buffers: "average" the batch-norm statistics at a round, or "keep" each worker's own.
        group: the workers, one rank of each; None: all ranks are workers.

    Returns the wire: its stats, its state, and `finish` for the end of training.
    """
    options = {
        "every": every,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "nesterov": nesterov,
        "decay": decay,
        "fragments": fragments,
        "delay": delay,
        "mixing": mixing,
        "buffers": buffers,
    }
    recipe = recipe_of(method, **options)
    if not dist.is_initialized():
        raise AttachError("local steps are exchanged between processes: torch.distributed.init_process_group first")
    inner = unwrapped(net)
    if inner in _attached and _attached[inner].attached:
        raise AttachError("this model trains by local steps already: wire.detach() it first")
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    loop = OuterLoop(net, optimizers, recipe, group or dist.group.WORLD)  # type: ignore[arg-type]
    _attached[inner] = loop
    return LocalWire(loop)


class LocalWire:
    """The handle of a model that trains by local steps."""

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop

    def __repr__(self) -> str:
        loop = self._loop
        return (
            f"LocalWire({loop.recipe!r}, {loop.n_parameters} parameters, {loop.world_size} workers, step {self.steps})"
        )

    @property
    def recipe(self) -> Recipe:
        return self._loop.recipe

    @property
    def compressor(self) -> Compressor:
        return self._loop.recipe.compressor

    @property
    def steps(self) -> int:
        """Inner steps so far."""
        return self._loop.inner

    def finish(self) -> None:
        """At the end of training: one last round, after which all workers hold the base weights. Collective."""
        self._live().finish()

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """In here the model has what all workers share: to evaluate, or to save the model. Averaged buffers too."""
        loop = self._loop
        views = [*(fragment.weights for fragment in loop.fragments), loop.buffers]
        shared = [*(fragment.base for fragment in loop.fragments), loop.buffers_base]
        with torch.no_grad():
            own = [view.read() for view in views]
            for view, values in zip(views, shared, strict=True):
                view.write(values)
        try:
            yield
        finally:
            with torch.no_grad():
                for view, values in zip(views, own, strict=True):
                    view.write(values)

    def stats(self) -> LocalStats:
        """What this worker sent since `local` or the last `reset_stats`."""
        loop, tally = self._loop, self._loop.tally
        total = loop.meter.stats(loop.residuals())
        return LocalStats.of(total, loop.recipe, loop.n_parameters, tally.inner, 1e3 * tally.waited, tally.lost)

    def rests(self) -> bool:
        """Whether no sum is on its way; the same on all workers."""
        return all(fragment.flight is None for fragment in self._loop.fragments)

    def wait(self) -> None:
        """Until what is on its way has come: the figures of `stats` have all that was begun then."""
        for fragment in self._live().fragments:
            if fragment.flight is not None:
                self._loop.arrived(fragment)

    def reset_stats(self) -> None:
        """Starts the totals anew; the training is not touched."""
        self._loop.reset_totals()

    def log_to(self, writer: Writer, every: int = 1, prefix: str = "gradwire") -> None:
        """Writes the figures of `stats()` to anything with add_scalar, every so many rounds."""
        loop = self._live()
        loop.on_round.append(logged(self.stats, writer, every, prefix, lambda: loop.tally.rounds, lambda: loop.inner))

    def state_dict(self) -> dict[str, Any]:
        """This worker's state by parameter name, its weights included; save it on every rank, with the optimizer's.

        Loads with weights_only=True. Waits for what is on its way.
        """
        return local_state.state_dict(self._loop)

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Goes on where `state` was saved, also in the middle of a round. Collective."""
        local_state.load_state_dict(self._live(), state, strict)

    def detach(self) -> None:
        """No more rounds: each worker keeps the weights that it has. Call `finish` before it for those of all."""
        self._live().detach()

    def _live(self) -> OuterLoop:
        if not self._loop.attached:
            raise GradwireError("this wire is detached: call gradwire.local again")
        return self._loop
