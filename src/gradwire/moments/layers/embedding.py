"""Step 1, moments: embeddings: tokens, positions without a batch axis, bags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.moments.joined_uses import Disjoint
from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.layer_table import Layer, Uses, add
from gradwire.moments.layers.linear import Positions
from gradwire.moments.precision import wide, wide_products
from gradwire.moments.swapped_forward import watch
from gradwire.moments.uses import Doubt, Mismatch, Use


def by_row(values: Tensor, ids: Tensor, rows: int) -> Tensor:
    """[rows, D]: the sum of the values [N, D] of each id, as an embedding's backward makes it: always in one order.

    `index_add_` on a GPU adds in any order, and a resumed run must have the same bits.
    """
    return torch.ops.aten.embedding_dense_backward(values, ids, rows, -1, False)  # type: ignore[no-any-return]


@dataclass
class Rows(Use):
    """c_b[row] = sum of the values n with owner[n] = b and ids[n] = row; owner, ids [N], values [N, D]."""

    owner: Tensor
    ids: Tensor
    values: Tensor
    samples: int
    rows: int
    regular: bool = False  # every sample has as many entries, one sample after another

    def __post_init__(self) -> None:
        self.values = wide(self.values)

    def sample(self, index: int) -> Tensor:
        mine = self.owner == index
        return by_row(self.values[mine], self.ids[mine], self.rows)

    def total(self) -> Tensor:
        return by_row(self.values, self.ids, self.rows)

    def along(self, probe: Tensor | None) -> Tensor:
        if probe is None:
            return super().along(probe)
        return self.values.new_zeros(self.rows).index_add_(0, self.ids, self.values @ probe.to(self.values.dtype))

    def _accumulate(self, out: Tensor) -> None:
        """Segment sums over (sample, row), squared: never B x rows x D, and nobody waits for how many there are."""
        n_values = self.ids.numel()
        ordered, order = torch.sort(self.owner * self.rows + self.ids)
        begins = torch.ones_like(ordered)
        begins[1:] = ordered[1:] != ordered[:-1]
        segment = torch.empty_like(ordered).scatter_(0, order, begins.cumsum(0) - 1)
        row = torch.zeros_like(ordered).scatter_(0, segment, self.ids)  # a segment that is not there adds 0 to row 0
        sums = by_row(self.values, segment, n_values)
        out += by_row(sums.square_(), row, self.rows)

    def folded(self, outer: int, samples: int, inner: int) -> Rows:
        owner = self.owner // inner % max(1, samples)
        return Rows(owner, self.ids, self.values, samples, self.rows, self.regular and outer == 1)

    @staticmethod
    def join(uses: Sequence[Any]) -> Use:
        samples, table = uses[0].samples, uses[0].rows
        regular = all(use.regular for use in uses) and samples > 0

        def joined(name: str) -> Tensor:
            parts = [getattr(use, name) for use in uses]
            if not regular:
                return torch.cat(parts)
            return torch.cat([part.unflatten(0, (samples, -1)) for part in parts], 1).flatten(0, 1)

        return Rows(joined("owner"), joined("ids"), joined("values"), samples, table, regular)

    def join_other(self, other: Use) -> Use | None:
        """With the output layer that it is tied to, where all samples have as many entries."""
        if isinstance(other, Positions) and self.regular and other.left.shape[2] == self.rows:
            return HeadAndTable(other, self)
        return None


class HeadAndTable(Disjoint):
    """A matrix that is also a table of rows, an output layer tied to an embedding: c_b = H_b + E_b, [V, D].

        sum_b c_b^2 = sum_b H_b^2 + sum_b E_b^2 + 2 sum_b H_b E_b        H_b = G_b^T X_b

    E_b has a row for each token only, so that of H_b in the last sum those rows suffice: T x T x D products a sample
    and not T x V x D, and never a matrix of the weight's size for each sample.
    """

    def __init__(self, head: Positions, table: Rows) -> None:
        super().__init__([head, table])
        self.head, self.table = head, table

    def _accumulate(self, out: Tensor) -> None:
        super()._accumulate(out)
        if not self.samples:
            return
        # sample by sample: all of them together would be B x T x T
        pairs = zip(self.table.ids.chunk(self.samples), self.table.values.chunk(self.samples), strict=True)
        crossed = [self._rows(b, ids) * values for b, (ids, values) in enumerate(pairs)]
        out += by_row(torch.cat(crossed).mul_(2), self.table.ids, self.table.rows)

    def _rows(self, sample: int, ids: Tensor) -> Tensor:
        """H_b of the rows that sample b used, [T, D]: one for every token, also for one that came before."""
        columns = self.head.left[sample].index_select(1, ids)
        return wide_products(columns[None], self.head.right[sample][None], self.head.dtype)[0]


@dataclass
class Picked(Use):
    """c_b[ids[b, d], d] = values[b, d]: one row for every column (EmbeddingBag, mode max); ids, values [B, D]."""

    ids: Tensor
    values: Tensor
    rows: int

    def __post_init__(self) -> None:
        self.samples = self.ids.shape[0]
        self.values = wide(self.values)

    def sample(self, index: int) -> Tensor:
        return self._dense(self.ids[index : index + 1], self.values[index : index + 1])

    def total(self) -> Tensor:
        return self._dense(self.ids, self.values)

    def _dense(self, ids: Tensor, values: Tensor) -> Tensor:
        return values.new_zeros(self.rows, values.shape[-1]).scatter_add_(0, ids, values)

    def _accumulate(self, out: Tensor) -> None:
        out += self._dense(self.ids, self.values.square())


def with_batch_axis(tap: Tap, module: nn.Embedding, ids: Tensor) -> Tensor:
    """Positions without a batch axis, [T] or [1, T] -> [B, T]: else their gradient comes summed over the samples.

    A longer output may change the model. So only where it was followed that positions are just added to what has the
    batch, or where the caller says so, batch_dim={module: "positions"}; and where nothing could be followed, for ids
    [1, T] in a model that is called on token ids [B, T].
    """
    batch, axis, shape = tap.passes.now().batch, tap.passes.root_axis, list(ids.shape)
    # frequencies would count the copies
    if batch is None or module.scale_grad_by_freq:
        return ids
    if ids.ndim == 1 and axis == 0:  # where samples come second the caller inserts their axis himself
        shape = [batch, *shape]
    elif ids.ndim == 2 and axis in (0, 1) and shape[axis] == 1:
        shape[axis] = batch
    else:
        return ids
    are_positions = tap.positions or (axis == 0 and not tap.named and added_to_all(tap, ids, batch))
    return ids.expand(shape) if are_positions else ids


def added_to_all(tap: Tap, ids: Tensor, batch: int) -> bool:
    """Whether these are positions that are the same for all samples, and nothing but added to what has the batch."""
    passes = tap.passes
    if passes.following is not None:
        return passes.following.spreads(tap, ids)
    if passes.batch_axis.followed:
        return tap.name in passes.batch_axis.positions
    return ids.ndim == 2 and ids.shape[1] == passes.now().tokens and ids.shape[1] > 1 and batch > 1


def embedding_forward(module: nn.Embedding, tap: Tap, input: Tensor) -> Tensor:
    """Embedding.forward, with a batch axis where one is missing."""
    ids = with_batch_axis(tap, module, input)
    if ids is not input and tap.passes.following is not None:
        tap.passes.following.mark(ids)
    output: Tensor = type(module).forward(module, ids)
    return watch(tap, output, (ids,))


def embedding(module: nn.Embedding, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """c_b[row] = sum of G_bt over the positions t with that id. ids [B, T], G [B, T, D]."""
    (ids,) = saved
    single = ids.ndim < 2 or ids.shape[0] == 1
    if call.axis == 0 and call.batch is not None and single and (ids.ndim == 0 or ids.shape[0] != call.batch):
        raise Mismatch(
            f"its ids of shape {tuple(ids.shape)} have no axis of {call.batch} samples in front; if they are "
            'positions, added to every sample alike, say batch_dim={its module: "positions"}'
        )
    values = call.positions(gradient)
    owned = call.samples_first(ids).reshape(values.shape[:2])
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


def bag(offsets: bool, module: nn.EmbeddingBag, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """A sample is a bag: c_b[row] = w G_b for every member, w = 1, 1/members or its own weight."""
    if module.scale_grad_by_freq:
        raise Doubt("torch 2.13 on CPU scales a bag's rows by the frequencies of other rows, which no formula follows")
    gradient = wide(call.samples_first(gradient, features=1))
    ids, *rest = saved
    starts = rest.pop(0) if offsets else torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
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


add(Layer({"": embedding}, ["weight"], embedding_forward), nn.Embedding)
BAGS = {part: partial(bag, "offsets" in part) for part in ("", "offsets ", "weights", "offsets weights")}
add(Layer(BAGS, ["weight"], bag_forward, own_axis=0), nn.EmbeddingBag)
