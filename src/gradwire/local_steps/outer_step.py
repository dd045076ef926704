"""One round on flat vectors: what a worker has done, the step of the base weights, and where the worker goes on from.

Rows do as well: with weights [W, N] these are the rounds of W workers in one process.
"""

from __future__ import annotations

from torch import Tensor

from gradwire.local_steps.recipe import Recipe


def decay(recipe: Recipe, residual: Tensor) -> None:
    """e = decay e, before a round's delta is added to it."""
    if recipe.decay != 1:
        residual.mul_(recipe.decay)


def outer_step(recipe: Recipe, base: Tensor, mean: Tensor, momentum: Tensor | None) -> None:
    """base [N], float32, and its momentum, changed in place; mean [N]: u, over the workers, of what was sent."""
    if momentum is None:
        base.add_(mean, alpha=-recipe.outer_lr)
        return
    momentum.mul_(recipe.outer_momentum).add_(mean)
    if recipe.nesterov:
        base.add_(mean, alpha=-recipe.outer_lr).add_(momentum, alpha=-recipe.outer_lr * recipe.outer_momentum)
    else:
        base.add_(momentum, alpha=-recipe.outer_lr)


def merged(recipe: Recipe, base: Tensor, weights: Tensor, sent_from: Tensor | None) -> Tensor:
    """The worker's weights [N] after a round: the base, and with a delay what they have become in the meantime.

    weights: as they are now; sent_from: as they were when the round's delta was taken, None without a delay.
    """
    if sent_from is None:
        return base
    if recipe.mixing is None:
        return base + (weights - sent_from)
    return base.lerp(weights, recipe.mixing)
