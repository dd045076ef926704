"""Step 1, moments: BatchNorm, by activation index: what flows back through sample b's activations, xhat the batch's.

On a GPU a layer that trains is computed by a Function: the sums over the batch that its input gradient needs are made
sample by sample, so that the moments cost next to nothing. Elsewhere a tap beside torch's own backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.moments.gpu.chip import has_triton
from gradwire.moments.layer_call import LayerCall, Tap
from gradwire.moments.layer_table import Layer, Uses, add
from gradwire.moments.layers.normalization import by_channel
from gradwire.moments.normalization_sums import SHORT, flat
from gradwire.moments.passes import arrives, quietly
from gradwire.moments.swapped_forward import plain_forward
from gradwire.moments.uses import Direct

BY_ACTIVATION = "by activation"
MOST_ELEMENTS = 1 << 31  # of a sample: offsets within it are 32 bits


def beside(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """From the layer's input and output gradient."""
    own = call.training or module.running_mean is None
    given = None if own else (module.running_mean, module.running_var)
    return by_channel(gradient, saved, call, module.eps, 0, given, BY_ACTIVATION if own else "exact")


def from_sums(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """From what the Function below made: contributions [2, B, C], totals [5, C]."""
    call.samples_first(gradient, features=1)
    contributions, totals = saved
    for row, name in enumerate(("weight", "bias")):
        use = Direct(contributions[row], BY_ACTIVATION)
        use.summed, use.finished = totals[row], totals[2 + row]
        yield name, use


class Normalize(torch.autograd.Function):
    """F.batch_norm in training; its backward makes all gradients from one set of sums, and reports them by sample."""

    @staticmethod
    def forward(ctx: Any, tap: Tap, call: LayerCall, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        module: Any = tap.module
        statistics = (module.running_mean, module.running_var)
        with quietly(x.device):
            output, mean, deviation, _, _ = torch._batch_norm_impl_index(
                x, weight, bias, *statistics, True, module.momentum, module.eps, torch.backends.cudnn.enabled
            )
        ctx.save_for_backward(x, weight, mean, deviation)  # and not on ctx: a checkpoint frees only what is saved so
        ctx.set_materialize_grads(False)
        ctx.tap, ctx.call, ctx.eps = tap, call, module.eps
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        if gradient is None:
            return (None,) * 5
        saved = ctx.saved_tensors  # read once: a checkpoint gives each back only once
        if torch.is_grad_enabled():
            ctx.tap.report_beside("", gradient, (saved[0].detach(),), ctx.call)
            return None, None, *by_autograd(gradient, saved[0], saved[1], ctx.eps)
        x, weight, mean, deviation = saved
        with quietly(gradient.device):
            sums = sums_of(gradient, x, mean, deviation)
            ctx.tap.report("sums", gradient, sums, ctx.call)
            wanted = ctx.needs_input_grad[2] and arrives(ctx.next_functions[0][0])
            to_input = input_gradient(gradient, x, weight, mean, deviation, sums[1]) if wanted else None
        return None, None, to_input, sums[1][0].to(weight.dtype), sums[1][1].to(weight.dtype)


def sums_of(gradient: Tensor, x: Tensor, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """(contributions [2, B, C], totals [5, C])."""
    from gradwire.moments.gpu.batch_norm_sums import batch_norm_sums

    return batch_norm_sums(flat(gradient), flat(x), mean, deviation)


def input_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor, mean: Tensor, deviation: Tensor, totals: Tensor
) -> Tensor:
    """dX from the sums, by the half of torch's backward that follows its own (SyncBatchNorm's)."""
    count, weight = count_of(x.numel() // x.shape[1], x.device), weight.to(mean.dtype)  # one dtype but for x and G
    return torch.batch_norm_backward_elemt(gradient, x, mean, deviation, weight, totals[1], totals[4], count)


@functools.lru_cache(maxsize=256)
def count_of(number: int, device: torch.device) -> Tensor:
    """On the device, where that kernel reads it."""
    return torch.full((1,), number, dtype=torch.int32, device=device)


def by_autograd(gradient: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The layer once more, differentiated as torch does it: for a double backward."""
    bias = torch.zeros_like(weight).requires_grad_()
    leaves = (x.view_as(x), weight.view_as(weight), bias)  # views, so that no hook on a parameter fires
    with torch.autocast(gradient.device.type, enabled=False):
        output = F.batch_norm(leaves[0], None, None, leaves[1], bias, True, 0.0, eps)
        return torch.autograd.grad(output, leaves, gradient, create_graph=True, allow_unused=True)


def serving(module: Any, tap: Tap, x: Any) -> LayerCall | None:
    """Where the Function may stand in: it trains, both parameters are recorded, samples are where they should be."""
    if type(x) is not Tensor or not x.is_cuda or torch.compiler.is_compiling() or not module.training:
        return None
    wanted = tap.wanted()
    if module.momentum is None or len(wanted) < 2 or not has_triton():
        return None
    call = tap.call("", x, tap.passes.now(), wanted)
    fits = x.ndim > 2 and x.dtype in SHORT and x.shape[0] == call.samples and call.axis == 0 and call.doubt is None
    plain = fits and module.weight.dtype in SHORT and x.numel() > x.shape[1]
    return call if plain and 0 < x.numel() // x.shape[0] < MOST_ELEMENTS else None


def batch_norm_forward(module: Any, tap: Tap, *args: Any, **kwargs: Any) -> Any:
    call = serving(module, tap, args[0]) if len(args) == 1 and not kwargs else None
    if call is None:
        return plain_forward(module, tap, *args, **kwargs)
    module._check_input_dim(args[0])
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    output: Tensor = Normalize.apply(tap, call, args[0], module.weight, module.bias)  # type: ignore[no-untyped-call]
    return output


LAYER = Layer({"": beside, "sums": from_sums}, forward=batch_norm_forward, own_axis=0)
add(LAYER, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
