"""Step 1, moments: embeddings: tokens, positions without a batch axis, bags."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.moments.linear import wide
from gradwire.moments.registry import Uses, add
from gradwire.moments.site import Doubt, Mismatch, Site
from gradwire.moments.tap import Tap, watch
from gradwire.moments.uses import Picked, Rows


def with_batch_axis(tap: Tap, module: nn.Embedding, ids: Tensor) -> Tensor:
    """Positions without a batch axis, [T] or [1, T] -> [B, T]: else their gradient comes summed over the samples.

    A longer output may change the model. So only where it was followed that positions are just added to what has the
    batch, or where the caller says so, batch_dim={module: "positions"}; and where nothing could be followed, for ids
    [1, T] in a model that is called on token ids [B, T].
    """
    batch = tap.recorder.now().batch
    # frequencies would count the copies
    if batch is None or module.scale_grad_by_freq:
        return ids
    if tap.positions:
        axis = tap.recorder.root_axis
        if ids.ndim == 1 and axis == 0:  # where samples come second the caller inserts their axis himself
            return ids.expand(batch, ids.shape[0])
        if ids.ndim == 2 and axis in (0, 1) and ids.shape[axis] == 1:
            return ids.expand(batch, -1) if axis == 0 else ids.expand(-1, batch)
        return ids
    shared = ids.ndim == 1 or (ids.ndim == 2 and ids.shape[0] == 1)
    if tap.named or tap.recorder.root_axis != 0 or not shared or not added_to_all(tap, ids, batch):
        return ids
    return ids.expand(batch, ids.shape[-1])


def added_to_all(tap: Tap, ids: Tensor, batch: int) -> bool:
    """Whether these are positions that are the same for all samples, and nothing but added to what has the batch."""
    recorder = tap.recorder
    if recorder.following is not None:
        return recorder.following.spreads(tap, ids)
    if recorder.batch_axis.followed:
        return tap.name in recorder.batch_axis.positions
    return ids.ndim == 2 and ids.shape[1] == recorder.now().tokens and ids.shape[1] > 1 and batch > 1


def embedding_forward(module: nn.Embedding, tap: Tap, input: Tensor) -> Tensor:
    """Embedding.forward, with a batch axis where one is missing."""
    ids = with_batch_axis(tap, module, input)
    if ids is not input and tap.recorder.following is not None:
        tap.recorder.following.mark(ids)
    output: Tensor = type(module).forward(module, ids)
    return watch(tap, output, (ids,))


def embedding(module: nn.Embedding, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """c_b[row] = sum of G_bt over the positions t with that id. ids [B, T], G [B, T, D]."""
    (ids,) = saved
    single = ids.ndim < 2 or ids.shape[0] == 1
    if site.axis == 0 and site.batch is not None and single and (ids.ndim == 0 or ids.shape[0] != site.batch):
        raise Mismatch(
            f"its ids of shape {tuple(ids.shape)} have no axis of {site.batch} samples in front; if they are "
            'positions, added to every sample alike, say batch_dim={its module: "positions"}'
        )
    values = site.positions(gradient)
    owned = site.samples_first(ids).reshape(values.shape[:2])
    owner = torch.arange(owned.shape[0], device=ids.device)[:, None].expand(owned.shape)
    found = rows(module, owner.reshape(-1), owned.reshape(-1), values.flatten(0, 1), owned.shape[0])
    found.regular = True
    yield "weight", found


def rows(module: Any, owner: Tensor, ids: Tensor, values: Tensor, samples: int) -> Rows:
    """Values by row, 0 for the padding, and by frequency where the layer scales so."""
    values = wide(values)
    if module.scale_grad_by_freq:
        values = values / torch.bincount(ids, minlength=module.num_embeddings)[ids][:, None]
    if module.padding_idx is not None:
        values = values.masked_fill((ids == module.padding_idx)[:, None], 0)
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
    _, _, sizes, chosen = torch.embedding_bag(
        module.weight, ids, starts, module.scale_grad_by_freq, 2, False, None, last, module.padding_idx
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
