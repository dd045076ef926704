"""Step 1, moments: one call of a watched layer: its pass, where its samples lie, and what its backward reports.

A tap hangs on a module (swapped_forward.py puts it there), and each call of the module is a `LayerCall`. In
backward the layer's formula turns (input, gradient) into uses, and each goes to its parameter's account.
"""

from __future__ import annotations

import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradwire.moments.account import Account
from gradwire.moments.passes import ModelPasses, Pass, current_task, quietly
from gradwire.moments.precision import position_sums
from gradwire.moments.uses import Doubt, Mismatch, Use

if TYPE_CHECKING:
    from gradwire.moments.layer_table import Layer

TAPS: weakref.WeakValueDictionary[int, Tap] = weakref.WeakValueDictionary()  # by key, for compiled graphs
_keys = itertools.count(1)
Asked = Mapping[str, torch.dtype]  # the gradients that a backward returns
NOTHING: Asked = types.MappingProxyType({})


@dataclass(slots=True)
class LayerCall:
    """One call: its forward pass, its samples, where they lie, and the parameters that want a gradient.

    Along `axis` of the output lie [outer, samples, inner] rows. Formulas see a batch of rows; what they find is folded.
    """

    passed: int
    samples: int | None
    axis: int | None
    training: bool
    wanted: frozenset[str]
    at_once: bool = False  # a compiled graph uses its buffers again: uses are finished when they are reported
    doubt: str | None = None
    recomputed: bool = False  # by a reentrant checkpoint, inside backward
    outer: int = 1
    inner: int = 1

    @property
    def batch(self) -> int | None:
        """How many rows there are."""
        return None if self.samples is None else self.outer * self.samples * self.inner

    def samples_first(self, tensor: Tensor, features: int = 0) -> Tensor:
        """[.., B, .., *features] -> [B, .., *features]; doubts when that axis is not B long."""
        if self.doubt is not None:
            raise Doubt(self.doubt)
        if self.axis is None:
            raise Doubt("batch_dim says that it has no sample axis")
        if self.batch is None:
            raise Doubt("the batch size is unknown: no tensor with a batch axis was given to the model's forward")
        if tensor.ndim - features <= self.axis:
            raise Doubt(f"a tensor of shape {tuple(tensor.shape)} has no sample axis {self.axis}")
        if tensor.shape[self.axis] != self.batch:
            raise Mismatch(f"axis {self.axis} is {tensor.shape[self.axis]} long, the batch is {self.batch}")
        return tensor if self.axis == 0 else tensor.movedim(self.axis, 0)

    def positions(self, tensor: Tensor, features: int = 1) -> Tensor:
        """[.., B, .., *features] -> [B, T, F], T = product of all other axes."""
        moved = self.samples_first(tensor, features)
        if moved.ndim == 3 and features == 1:
            return moved
        split = moved.ndim - features
        return moved.reshape(moved.shape[0], prod(moved.shape[1:split]), prod(moved.shape[split:]))

    def sums(self, tensor: Tensor) -> Tensor:
        """[.., B, .., F] -> [B, F], summed over all other axes."""
        moved = self.samples_first(tensor, features=1)
        return position_sums(moved, range(1, moved.ndim - 1))


@dataclass(eq=False)
class Tap:
    """What hangs on a module whose forward was swapped. A copy of it is dead: it records nothing."""

    module: nn.Module | None
    layer: Layer | None
    axis: int | None
    accounts: dict[str, Account]
    passes: ModelPasses
    name: str
    named: bool = False  # by the caller, who told the axis
    signed: dict[str, Account] = field(default_factory=dict)  # estimated from this module's outputs, by random signs
    after: Callable[[nn.Module, Tap, Any], Any] | None = None
    fitting: dict[tuple[Any, ...], bool] = field(default_factory=dict)  # of what input its Function may stand in
    positions: bool = False  # an Embedding of which the caller says that it is given positions
    mismatch: str | None = None  # its sample axis was once not B long: then it never is but by chance
    live: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.input = None if self.module is None else first_input(self.module)
        self.key, self.live = next(_keys), True
        TAPS[self.key] = self

    def __deepcopy__(self, memo: object) -> Tap:
        return Tap.__new__(Tap)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled model must load where gradwire is not installed; False is as dead as a dead tap.
        return (bool, ())

    def wanted(self) -> frozenset[str]:
        """The parameters that want a gradient now: freezing may come and go between calls."""
        return frozenset([name for name, account in self.accounts.items() if account.param.requires_grad])

    # ---- in forward

    def call(self, part: str, output: Tensor, now: Pass, wanted: frozenset[str]) -> LayerCall:
        """A call that puts this out; its input does as well, where the samples lie along the same axis of that."""
        training = self.module is not None and self.module.training
        recomputed = current_task() != -1
        call = LayerCall(now.number, now.batch, self.axis, training, wanted, False, now.doubt, recomputed)
        self.locate(call, part, output)
        return call

    def locate(self, call: LayerCall, part: str, output: Tensor) -> None:
        """Tells a call where its samples lie: as the caller named it, as it was followed, or else where they fit."""
        batch_axis, embeds = self.passes.batch_axis, isinstance(self.module, nn.Embedding)
        found = None if self.named else batch_axis.find(self.name, part, output.ndim, embeds)
        own = None if self.layer is None else self.layer.own_axis
        if found is None:
            told = self.named or own is not None
            call.doubt = call.doubt or self.mismatch or (None if told else batch_axis.chance(output, call.samples))
            return
        call.doubt = call.doubt or found.doubt
        if found.doubt is None and own is not None and found.axis != own:
            call.doubt = call.doubt or f"its samples lie along axis {found.axis}, and it computes along axis {own}"
        call.axis = found.axis
        if found.axis is not None and call.samples is not None:
            rows = found.rows(output.shape[found.axis], call.samples)
            if rows is None:
                call.doubt = call.doubt or f"axis {found.axis} is {output.shape[found.axis]} long, not {call.samples}"
            else:
                call.outer, call.inner = rows

    # ---- in backward

    def report_beside(
        self, part: str, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall, asked: Asked = NOTHING
    ) -> dict[str, Tensor]:
        """`report` from a backward that may have gradients or autocast on."""
        if torch.is_grad_enabled() and self.live and not self.passes.paused:
            # A double backward passed through this layer: part of its gradient may come by another way.
            for name in call.wanted:
                self.accounts[name].verified = False
        with quietly(gradient.device):
            return self.report(part, gradient.detach(), saved, call, asked)

    def report(
        self, part: str, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall, asked: Asked = NOTHING
    ) -> dict[str, Tensor]:
        """Turns (input, gradient) into uses, reports them to the parameters' accounts, and makes the asked gradients.

        asked: the dtype of each; one that is missing in the answer is the caller's to make.
        """
        made: dict[str, Tensor] = {}
        if not self.live or self.passes.paused:
            return made
        if current_task() not in self.passes.tasks:
            self.passes.enter_task()
        try:
            for name, use in self.uses(part, gradient, saved, call):
                found = self.accounts[name].report(call, use, asked.get(name))
                if found is not None:
                    made[name] = found
        except Doubt as doubt:
            if isinstance(doubt, Mismatch) and not self.passes.batch_axis.followed:
                self.mismatch = str(doubt)
            for name in call.wanted:
                self.accounts[name].doubt(self.reason(str(doubt)))
        return made

    def uses(self, part: str, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> list[tuple[str, Use]]:
        """What the layer's formula makes of them, for the parameters that want a gradient."""
        assert self.layer is not None
        formula = self.layer.formulas[part]
        found = [(name, use) for name, use in formula(self.module, gradient, saved, call) if name in call.wanted]
        if call.samples is not None and call.outer * call.inner != 1:
            found = [(name, use.folded(call.outer, call.samples, call.inner)) for name, use in found]
        dtypes = (gradient.dtype, *[tensor.dtype for tensor in saved])
        for _, use in found:
            use.dtypes, use.output_gradients = dtypes, (gradient,)
        return found

    def reason(self, doubt: str) -> str:
        """With the layer's class, so that somebody finds it."""
        kind = "" if self.module is None else path_of(type(self.module))
        return doubt if kind in doubt else f"{kind}: {doubt}"

    def keeps(self) -> bool:
        """Whether a compiled graph must clone what it hands over: uses that may have to be merged."""
        return any(self.accounts[name].shared or not self.accounts[name].verified for name in self.wanted())


def path_of(kind: type) -> str:
    """A class as somebody would import it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def first_input(module: nn.Module) -> str:
    """The name of the first argument of a module's forward, by which it may be called."""
    return next(itertools.islice(inspect.signature(type(module).forward).parameters, 1, None), "")
