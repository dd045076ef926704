"""Step 1, moments: how the samples lie in a tensor's rows, followed through torch's operations without values.

The batch has a size that nothing else has, so a dim of that size is the batch; one of six times that size holds six
rows a sample, and in which order they lie follows from the views that made it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.moments.batch_axis import BY_DATA, MIXED, NOWHERE, REST, Where

aten = torch.ops.aten
# Divisible by 8, for models that split a batch, and by a prime that hardly any layer's width is.
UNUSUAL = tuple(8 * prime for prime in (37, 41, 43, 47, 53, 59, 61, 67))
# How much is chosen by the data: few, for models that loop over it.
DECIDED = (101, 103, 107, 109, 113, 127)
KINDS: dict[type, type] = {torch.SymBool: bool, torch.SymInt: int, torch.SymFloat: float}
Order = tuple[int, int] | None  # rows in front of and behind each sample's along a dim; None: they cannot be told
Orders = dict[int, Order]  # by the size of the dim
ATTRIBUTE, POSITIONS = "_gradwire_orders", "_gradwire_positions"
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
# What gives the rows of its first input another order, or picks some of them.
REORDER = (
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default),
    *(aten.take.default, aten.sort.default, aten.sort.stable, aten.topk.default, aten.roll.default),
    *(aten.flip.default, aten.argsort.default, aten.argsort.stable, aten.as_strided.default),
)
# What leaves every sample's share where it is, and what puts several together element by element.
MOVES = (
    *(*VIEWS, aten.embedding.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.detach.default, aten.alias.default),
    *(aten._to_copy.default, aten.clone.default),
)
ADDS = (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul_.Tensor)
PARTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor, aten.unbind.int, aten.chunk.default)


def numbers(tensor: Tensor) -> list[int]:
    """The lengths of its dims but for those that are decided by the data, which must not be asked."""
    return [size for size in tensor.shape if not isinstance(size, torch.SymInt)]


class RowOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows how the samples lie in dims that hold several rows of each.

    A dim as long as the batch is taken for it unless something here says otherwise, a longer one is known only where
    all that made it is: a view, by how many elements lie behind a sample's coordinate; whatever keeps a dim of that
    size; several batches one after another.
    """

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = number  # stands for what is read from the data
        self.asked = False  # whether something was
        self.batch, self.decided = UNUSUAL[0], DECIDED[0]
        self.misused = False  # positions were used for something else than to be added

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.equal.default:
            self.asked = True
            return bool(self.number)
        made = pytree.tree_map(self._told, func(*args, **(kwargs or {})))
        outputs = [one for one in pytree.tree_leaves(made) if isinstance(one, Tensor)]
        if not outputs:  # such as the device of a tensor
            return made
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        for output in outputs:
            if any(map(self._times, output.shape)) and (orders := self._orders(func, args, given, output)):
                setattr(output, ATTRIBUTE, orders)
        if any(hasattr(one, POSITIONS) for one in given):
            self._trace(func, given, made)
        return made

    def _told(self, made: Any) -> Any:
        """Something else in place of a number, or of a length, that is decided by the data."""
        if isinstance(made, torch.SymBool | torch.SymInt | torch.SymFloat):
            self.asked = True
            return KINDS[type(made)](self.number)
        if isinstance(made, Tensor) and len(numbers(made)) < made.ndim:
            shape = [self.decided if isinstance(size, torch.SymInt) else size for size in made.shape]
            return torch.empty(shape, dtype=made.dtype, device=made.device)
        return made

    def _trace(self, func: Any, given: Sequence[Tensor], made: Any) -> None:
        """Positions that were given the batch: each sample's must come to this sample alone."""
        batched = isinstance(made, Tensor) and self.where(made).doubt is None
        meets = any(self.where(one).doubt is None and not hasattr(one, POSITIONS) for one in given)
        if not batched or func not in (ADDS if meets else (*MOVES, *ADDS)):
            self.misused = True
        elif not meets:
            setattr(made, POSITIONS, True)

    def where(self, tensor: Tensor) -> Where:
        """The axis of the samples."""
        if any(isinstance(size, torch.SymInt) or (size and size % self.decided == 0) for size in tensor.shape):
            return Where(None, doubt=BY_DATA)
        axes = [axis for axis, size in enumerate(tensor.shape) if self._times(size)]
        if len(axes) != 1:
            return Where(None, doubt=MIXED if axes else NOWHERE)
        order = self.order(tensor, tensor.shape[axes[0]])
        if order is None:
            return Where(None, doubt=MIXED)
        outer, inner = order
        # how many there are may depend on the length of a sequence, which lie in front does not
        inner, outer = (REST if outer == 1 < inner else inner), (REST if inner == 1 < outer else outer)
        return Where(axes[0], outer, inner)

    def order(self, tensor: Tensor, size: int) -> Order:
        """How the samples lie along its dims of this size."""
        known: Orders = getattr(tensor, ATTRIBUTE, {})
        return known.get(size, (1, 1) if size == self.batch else None)

    def _orders(self, func: Any, args: Any, given: Sequence[Tensor], output: Tensor) -> Orders:
        """Those of its dims of which there is something to say."""
        if func in VIEWS:
            return self._viewed(args[0], output)
        found: Orders = {}
        for size in {size for size in numbers(output) if self._times(size)}:
            if func is aten.cat.default and self._whole_batches(args[0], size):
                found[size] = (len(args[0]), 1)
            elif func is aten.repeat.default and self.batch in args[1] and not any(map(self._times, args[0].shape)):
                found[size] = (1, self._times(size))  # the same once for every sample, as in an InstanceNorm
            elif func in PARTS and size == self.batch and self._in_a_row(args[0]):
                continue
            elif func in REORDER and size != self.batch and any(map(self._times, args[0].shape)):
                found[size] = None
            elif (order := self._kept(size, given)) != (1, 1):
                found[size] = order
        return found

    def _times(self, size: Any) -> int:
        """How many rows of each sample a dim of this size holds, 0 where it holds none."""
        return 0 if isinstance(size, torch.SymInt) or size % self.batch else size // self.batch

    def _whole_batches(self, parts: Sequence[Tensor], size: int) -> bool:
        """Whether so many batches are put one after another along the dim that is now of this size."""
        return self._times(size) == len(parts) > 1 and all(self._kept(self.batch, [part]) == (1, 1) for part in parts)

    def _in_a_row(self, whole: Tensor) -> bool:
        """Whether it holds whole batches one after another, of which a part is one."""
        orders = [self.order(whole, size) for size in whole.shape if self._times(size) > 1]
        return len(orders) == 1 and orders[0] is not None and orders[0][1] == 1

    def _kept(self, size: int, given: Sequence[Tensor]) -> Order:
        """That of the inputs with a dim of this size, if they agree; without any it must be the batch, made anew."""
        found = {self.order(one, size) for one in given if size in numbers(one)}
        if not found:
            made_anew = size == self.batch and not any(self._times(length) > 1 for one in given for length in one.shape)
            return (1, 1) if made_anew else None
        return found.pop() if len(found) == 1 else None

    def _viewed(self, before: Tensor, after: Tensor) -> Orders:
        """A view leaves every element where it is: so many elements lie behind one step of the sample's coordinate."""
        there = [axis for axis, size in enumerate(after.shape) if self._times(size)]
        origin = [axis for axis, size in enumerate(before.shape) if self._times(size)]
        unknown: Orders = {after.shape[axis]: None for axis in there}
        if len(there) != 1 or len(origin) != 1 or any(len(numbers(one)) < one.ndim for one in (before, after)):
            return unknown
        order, times = self.order(before, before.shape[origin[0]]), self._times(after.shape[there[0]])
        step = 0 if order is None else order[1] * math.prod(before.shape[origin[0] + 1 :])
        inner, rest = divmod(step, max(1, math.prod(after.shape[there[0] + 1 :])))
        if rest or not inner or times % inner:
            return unknown
        found = (times // inner, inner)
        return {} if found == (1, 1) else {after.shape[there[0]]: found}
