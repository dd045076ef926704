"""Step 1, moments: per_sample, for a raw parameter that is broadcast over the batch (a position embedding, a scale)."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.layer_table import Layer, Uses
from gradwire.moments.passes import transformed
from gradwire.moments.swapped_forward import watch
from gradwire.moments.uses import Direct

if TYPE_CHECKING:
    from gradwire.moments.account import Account

# id(parameter) -> its tap; a plain dict of references, because torch.compile cannot trace a WeakValueDictionary
WATCHED: dict[int, weakref.ref[Tap]] = {}


def broadcast(shape: torch.Size, module: Any, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """c_b = the expanded parameter's gradient at sample b; gradient [.., B, ..], shape: the parameter's."""
    first = call.samples_first(gradient)
    yield "param", Direct(first.reshape(first.shape[0], *shape))  # its other axes kept their order


def watch_parameter(account: Account, axis: int | None) -> Tap:
    """Lets per_sample find the account of this parameter."""
    expanded = Layer({"": functools.partial(broadcast, account.param.shape)})
    tap = Tap(None, expanded, axis, {"param": account}, account.passes, account.name)
    WATCHED[id(account.param)] = weakref.ref(tap)
    return tap


def unwatch_parameter(tap: Tap) -> None:
    tap.live = False
    (account,) = tap.accounts.values()
    if id(account.param) in WATCHED and WATCHED[id(account.param)]() is tap:
        del WATCHED[id(account.param)]


def per_sample(param: Tensor, x: Tensor, batch_dim: int | None = None) -> Tensor:
    """The parameter expanded to x's samples, so that its moment is exact: `x + per_sample(self.pos, x)`.

    param is aligned with x on the right. On the sample axis (attach's batch_dim, 0 without a recorder) it must have
    size 1 or no axis at all, and gets x's size there: [.., 1, ..] -> [.., B, ..].
    """
    if not torch.compiler.is_compiling():
        param = getattr(param, "parameter", param)  # what stands for it while its module runs, see raw.py
    found = WATCHED.get(id(param))
    tap = None if found is None else found()
    following = tap is not None and tap.passes.following is not None
    if tap is not None and not following and (tap.accounts["param"].here is not param or transformed()):
        tap = None
    axis = batch_dim if batch_dim is not None else tap.axis if tap is not None else 0
    if axis is None:
        return param
    aligned = (1,) * (x.ndim - param.ndim) + tuple(param.shape)
    if not 0 <= axis < x.ndim or len(aligned) != x.ndim or aligned[axis] != 1:
        raise ValueError(
            f"per_sample needs a parameter without samples of its own along axis {axis}: it got one of shape "
            f"{tuple(param.shape)} for x of shape {tuple(x.shape)}; give it size 1 there, or name another batch_dim"
        )
    expanded = param.reshape(aligned).expand(*aligned[:axis], x.shape[axis], *aligned[axis + 1 :])
    if tap is None or not tap.live or not torch.is_grad_enabled() or not param.requires_grad:
        return expanded
    return watch(tap, expanded, ())
