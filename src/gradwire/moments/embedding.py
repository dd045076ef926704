"""Step 1, moments: embeddings: tokens, positions without a batch axis, bags."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.moments.linear import wide
from gradwire.moments.registry import Uses, add
from gradwire.moments.site import Doubt, Site
from gradwire.moments.tap import Tap, watch
from gradwire.moments.uses import Picked, Rows


def is_positions(ids: Tensor) -> bool:
    return bool(torch.equal(ids, torch.arange(ids.numel(), device=ids.device, dtype=ids.dtype)))


def with_batch_axis(tap: Tap, module: nn.Embedding, ids: Tensor) -> Tensor:
    """Positions [1, T] or [T] -> [B, T]: called without a batch axis, their gradient comes summed over the samples."""
    batch = tap.recorder.batch if torch.compiler.is_compiling() else tap.recorder.now()[1]
    axis = tap.axis
    # an axis named by the caller is taken at its word; frequencies would count the copies
    if axis is None or batch is None or tap.named or module.scale_grad_by_freq:
        return ids
    if ids.ndim == 1 and axis == 0:  # where samples come second the caller inserts their axis himself
        alone = ids.shape[0] != batch
        if not alone and batch > 1 and not tap.labels and not torch.compiler.is_compiling():
            alone = is_positions(ids)
            tap.labels = not alone
        return ids.expand(batch, ids.shape[0]) if alone else ids
    if ids.ndim > max(axis, 1) and ids.shape[axis] == 1 and batch != 1:
        return ids.expand(*ids.shape[:axis], batch, *ids.shape[axis + 1 :])
    return ids


def embedding_forward(module: nn.Embedding, tap: Tap, input: Tensor) -> Tensor:
    """Embedding.forward, with a batch axis where one is missing."""
    ids = with_batch_axis(tap, module, input)
    output: Tensor = type(module).forward(module, ids)
    return watch(tap, output, (ids,))


def embedding(module: nn.Embedding, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """c_b[row] = sum of G_bt over the positions t with that id. ids [B, T], G [B, T, D]."""
    (ids,) = saved
    if site.compiled and ids.ndim == 1 and ids.numel() > 1 and is_positions(ids):
        raise Doubt("ids 0, 1, 2, ... as many as the batch may be positions; name its axis with batch_dim")
    values = site.positions(gradient)
    owned = site.samples_first(ids).reshape(values.shape[:2])
    owner = torch.arange(owned.shape[0], device=ids.device)[:, None].expand(owned.shape)
    yield "weight", rows(module, owner.reshape(-1), owned.reshape(-1), values.flatten(0, 1), owned.shape[0])


def rows(module: Any, owner: Tensor, ids: Tensor, values: Tensor, samples: int) -> Rows:
    """Values by row, less the padding, and by frequency where the layer scales so."""
    values = wide(values)
    if module.scale_grad_by_freq:
        values = values / torch.bincount(ids, minlength=module.num_embeddings)[ids][:, None]
    if module.padding_idx is not None:
        keep = ids != module.padding_idx
        owner, ids, values = owner[keep], ids[keep], values[keep]
    return Rows(owner, ids, values, samples, module.num_embeddings)


def bag_forward(
    module: nn.EmbeddingBag,
    tap: Tap,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """EmbeddingBag.forward; saves ids, then offsets and weights where given, said by the part's name."""
    output: Tensor = type(module).forward(module, input, offsets, per_sample_weights)
    part = ("offsets " if offsets is not None else "") + ("weights" if per_sample_weights is not None else "")
    return watch(tap, output, [tensor for tensor in (input, offsets, per_sample_weights) if tensor is not None], part)


def bag(offsets: bool, module: nn.EmbeddingBag, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """A sample is a bag: c_b[row] = w G_b for every member, w = 1, 1/members or its own weight."""
    if module.scale_grad_by_freq:
        raise Doubt("torch 2.13 on CPU scales a bag's rows by the frequencies of other rows, which no formula follows")
    gradient = wide(site.samples_first(gradient, features=1))
    ids, *rest = saved
    starts = rest.pop(0) if offsets else torch.arange(0, ids.numel(), max(1, ids.shape[-1]), device=ids.device)
    if not offsets and ids.shape[-1] == 0:
        starts = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
    flat = ids.reshape(-1)
    if module.mode == "max":
        yield "weight", picked(module, gradient, flat, starts, offsets)
        return
    starts = starts[: gradient.shape[0]]
    owner = torch.searchsorted(starts.contiguous(), torch.arange(flat.numel(), device=ids.device), right=True) - 1
    values = gradient[owner]
    if module.mode == "mean":
        real = torch.ones_like(flat) if module.padding_idx is None else (flat != module.padding_idx).long()
        members = torch.bincount(owner, weights=real.to(gradient.dtype), minlength=gradient.shape[0])
        values = values / members.clamp(min=1)[owner][:, None]
    if rest:
        values = values * wide(rest[0]).reshape(-1, 1)
    yield "weight", rows(module, owner, flat, values, gradient.shape[0])


def picked(module: nn.EmbeddingBag, gradient: Tensor, ids: Tensor, starts: Tensor, offsets: bool) -> Picked:
    """Mode max: the gradient of a column goes to the row that had the maximum."""
    last = offsets and module.include_last_offset
    padding = -1 if module.padding_idx is None else module.padding_idx
    _, _, sizes, chosen = torch.embedding_bag(
        module.weight, ids, starts, module.scale_grad_by_freq, 2, False, None, last, padding
    )
    chosen, sizes = chosen[: gradient.shape[0]].long(), sizes[: gradient.shape[0]]
    full = (sizes > 0)[:, None] & (chosen >= 0)
    return Picked(chosen.clamp(min=0), gradient * full, module.num_embeddings)


add(nn.Embedding, parameters=["weight"], formulas={"": embedding}, forward=embedding_forward)
add(
    nn.EmbeddingBag,
    parameters=["weight"],
    formulas={part: partial(bag, "offsets" in part) for part in ("", "offsets ", "weights", "offsets weights")},
    forward=bag_forward,
    own_axis=0,
)
