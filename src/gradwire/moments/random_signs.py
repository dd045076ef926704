"""Step 1, moments: the signs estimator, E[(sum_z s_z c_z)^2] = sum_z c_z^2 with random signs s_z."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.uses import Direct, Doubt


class Signed(torch.autograd.Function):
    """The identity on a module's outputs; its backward takes one more weight gradient, with random signs."""

    @staticmethod
    def forward(ctx: Any, tap: Tap, calls: list[LayerCall], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*outputs)
        ctx.set_materialize_grads(False)
        ctx.tap, ctx.calls = tap, calls
        # copies: what an unknown module saved may be its own output, which an in-place ReLU behind it must not change
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        paused = ctx.tap.passes.paused
        if paused & ctx.tap.signed.keys():
            # Another call of this module, upstream of the one being signed: its use is its own to sign.
            return (None,) * (2 + len(gradients))
        if ctx.tap.live and not paused:
            report_signed(ctx.tap, ctx.calls, ctx.saved_tensors, gradients)
        return (None, None, *gradients)


def report_signed(
    tap: Tap, calls: list[LayerCall], outputs: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]
) -> None:
    """Reports (sum_z s_z c_z), one value an element, to the accounts of a module's estimated parameters."""
    passes = tap.passes
    accounts = [one for one in tap.signed.values() if one.param.requires_grad and not one.verified]
    passes.enter_task()
    try:
        seed = passes.seed
        flipped = [flip(seed, call, g) for call, g in zip(calls, gradients, strict=True) if g is not None]
    except Doubt as doubt:
        for account in accounts:
            account.doubt(f"signs need a sample axis in the output: {doubt}")
        return
    if not accounts:
        return
    roots = [output for output, g in zip(outputs, gradients, strict=True) if g is not None]
    passes.paused = frozenset(account.name for account in accounts)
    try:
        found = torch.autograd.grad(
            roots, [account.param for account in accounts], flipped, retain_graph=True, allow_unused=True
        )
    finally:
        passes.paused = frozenset()
    for account, value in zip(accounts, found, strict=True):
        if value is not None:
            account.report(calls[0], Direct(value.detach()[None]), signed=True)


@lru_cache(maxsize=64)
def drawn(seed: int, batch: int) -> Tensor:
    """A random sign a sample, the same for all modules and passes of a backward, and when training is resumed."""
    return torch.randint(0, 2, (batch,), generator=torch.Generator().manual_seed(seed)) * 2 - 1


def flip(seed: int, call: LayerCall, gradient: Tensor) -> Tensor:
    """The gradient of an output, each sample's times its sign."""
    moved = call.samples_first(gradient.detach())
    assert call.axis is not None
    assert call.samples is not None
    signs = drawn(seed, call.samples).to(moved)[:, None].expand(call.outer, -1, call.inner).reshape(-1)
    return (moved * signs.view(-1, *[1] * (moved.ndim - 1))).movedim(0, call.axis)


def output_axes(module: nn.Module, tap: Tap, count: int) -> Sequence[int | None]:
    """The sample axis of each output: a recurrent layer's states have theirs second."""
    first = 0 if getattr(module, "batch_first", True) else 1
    if isinstance(module, nn.RNNBase):
        return [first, 1, 1][:count]
    if isinstance(module, nn.MultiheadAttention):
        return [first, 0][:count]  # the second are its weights
    return [tap.axis] * count


def signed_call(tap: Tap, part: str, output: Tensor, axis: int | None) -> LayerCall:
    """axis: the samples', where they were not followed."""
    call = tap.call(part, output, tap.passes.now(), frozenset())
    if tap.named or not tap.passes.batch_axis.followed:
        call.axis = axis
    return call


def watch_signed(module: nn.Module, tap: Tap, result: Any) -> Any:
    """ModelPasses a module's outputs on, and has its estimated parameters' signed gradient taken in backward."""
    leaves, spec = pytree.tree_flatten(result)
    axes = output_axes(module, tap, len(leaves))
    chosen = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tap.passes.following is not None:
        for place in chosen:
            tap.passes.following.note(tap, f"output {place}", leaves[place])
        return result
    if not chosen or len(axes) != len(leaves):
        return result
    calls = [signed_call(tap, f"output {place}", leaves[place], axes[place]) for place in chosen]
    watched = Signed.apply(tap, calls, *(leaves[place] for place in chosen))  # type: ignore[no-untyped-call]
    for place, leaf in zip(chosen, watched, strict=True):
        leaves[place] = leaf
    return pytree.tree_unflatten(leaves, spec)
