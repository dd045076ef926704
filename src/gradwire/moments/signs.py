"""Step 1, moments: the signs estimator, E[(sum_z s_z c_z)^2] = sum_z c_z^2 with random signs s_z."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradwire.moments.site import Doubt, Site
from gradwire.moments.tap import Tap
from gradwire.moments.uses import Direct


class Signed(torch.autograd.Function):
    """The identity on a module's outputs; its backward takes one more weight gradient, with random signs."""

    @staticmethod
    def forward(ctx: Any, tap: Tap, site: Site, axes: list[int | None], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*outputs)
        ctx.set_materialize_grads(False)
        ctx.tap, ctx.site, ctx.axes = tap, site, axes
        # copies: what an unknown module saved may be its own output, which an in-place ReLU behind it must not change
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        paused = ctx.tap.recorder.paused
        if paused & ctx.tap.signed.keys():
            # Another call of this module, upstream of the one being signed: its use is its own to sign.
            return (None,) * (3 + len(gradients))
        if ctx.tap.live and not paused:
            stage_signed(ctx.tap, ctx.site, ctx.axes, ctx.saved_tensors, gradients)
        return (None, None, None, *gradients)


def stage_signed(
    tap: Tap, site: Site, axes: list[int | None], outputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]
) -> None:
    """Stages (sum_z s_z c_z), one value an element, with the ledgers of a module's estimated parameters."""
    recorder = tap.recorder
    ledgers = [ledger for ledger in tap.signed.values() if ledger.param.requires_grad]
    recorder.enter_task()
    try:
        seed = recorder.seed
        flipped = [flip(seed, site, axis, g) for axis, g in zip(axes, gradients, strict=True) if g is not None]
    except Doubt as doubt:
        for ledger in ledgers:
            ledger.doubt(f"signs need a sample axis in the output: {doubt}")
        return
    if not ledgers:
        return
    roots = [output for output, g in zip(outputs, gradients, strict=True) if g is not None]
    recorder.paused = frozenset(ledger.name for ledger in ledgers)
    try:
        found = torch.autograd.grad(
            roots, [ledger.param for ledger in ledgers], flipped, retain_graph=True, allow_unused=True
        )
    finally:
        recorder.paused = frozenset()
    for ledger, value in zip(ledgers, found, strict=True):
        if value is not None:
            ledger.stage(site, Direct(value.detach()[None]), signed=True)


@lru_cache(maxsize=64)
def drawn(seed: int, batch: int) -> Tensor:
    """A random sign a sample, the same for all modules and passes of a backward, and when training is resumed."""
    return torch.randint(0, 2, (batch,), generator=torch.Generator().manual_seed(seed)) * 2 - 1


def flip(seed: int, site: Site, axis: int | None, gradient: Tensor) -> Tensor:
    """The gradient of an output, each sample's times its sign."""
    moved = replace(site, axis=axis).samples_first(gradient.detach())
    signs = drawn(seed, moved.shape[0]).to(moved)
    assert axis is not None
    return (moved * signs.view(-1, *[1] * (moved.ndim - 1))).movedim(0, axis)


def output_axes(module: nn.Module, tap: Tap, count: int) -> list[int | None]:
    """The sample axis of each output: a recurrent layer's states have theirs second."""
    if isinstance(module, nn.RNNBase):
        states: list[int | None] = [0 if module.batch_first else 1, 1, 1]
        return states[:count]
    if isinstance(module, nn.MultiheadAttention):
        outputs: list[int | None] = [0 if module.batch_first else 1, 0]  # the second are its weights
        return outputs[:count]
    return [tap.axis] * count


def watch_signed(module: nn.Module, tap: Tap, result: Any) -> Any:
    """Passes a module's outputs on, and has its estimated parameters' signed gradient taken in backward."""
    leaves, spec = pytree.tree_flatten(result)
    axes = output_axes(module, tap, len(leaves))
    chosen = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not chosen or len(axes) != len(leaves):
        return result
    watched = Signed.apply(tap, tap.site(), [axes[place] for place in chosen], *(leaves[place] for place in chosen))  # type: ignore[no-untyped-call]
    for place, leaf in zip(chosen, watched, strict=True):
        leaves[place] = leaf
    return pytree.tree_unflatten(leaves, spec)
