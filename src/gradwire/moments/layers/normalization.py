"""Step 1, moments: normalizations: scale and shift by channel or feature, and PReLU's slope."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradwire.moments.layer_call import LayerCall
from gradwire.moments.layer_table import Uses, register
from gradwire.moments.normalization_sums import channel_sums, normalized_sums
from gradwire.moments.precision import exact_dtype, position_sums, wide
from gradwire.moments.uses import Direct, Doubt

Statistics = tuple[Tensor, Tensor]  # mean and variance of each channel


def by_feature(
    gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall, shape: torch.Size, eps: float, centered: bool
) -> Uses:
    """weight: c_b = sum_t G xhat; bias: c_b = sum_t G; xhat: rows of `shape`, normalized."""
    gradient = call.positions(gradient, len(shape))
    weighted = "weight" in call.wanted
    x = call.positions(saved[0], len(shape)) if weighted else gradient
    weight, bias = normalized_sums(gradient, x, eps, centered, weighted, "bias" in call.wanted)
    for name, found in (("weight", weight), ("bias", bias)):
        if found is not None:
            yield name, Direct(found.reshape(found.shape[0], *shape))


# Known by name, so that no library need be imported: subclasses that say the same in a forward of their own.
TIMM = "timm.layers.norm."


@register(nn.LayerNorm, nn.RMSNorm, *(TIMM + name for name in ("LayerNorm", "LayerNormFp32", "RmsNorm", "RmsNormFp32")))
def layer_norm(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """G [.., B, .., *normalized_shape]. Without an eps RMSNorm has that of the dtype it computes in."""
    eps = torch.finfo(exact_dtype(gradient)).eps if module.eps is None else module.eps
    return by_feature(gradient, saved, call, module.normalized_shape, eps, isinstance(module, nn.LayerNorm))


@register(
    "torchvision.models.convnext.LayerNorm2d",
    *(TIMM + name for name in ("LayerNorm2d", "LayerNorm2dFp32", "LayerNormExp2d", "RmsNorm2d", "RmsNorm2dFp32")),
    own_axis=0,
)
def channels_norm(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """As layer_norm over the channels of images [B, C, H, W]."""
    return layer_norm(module, gradient.movedim(1, -1), tuple(x.movedim(1, -1) for x in saved), call)


@register(
    *(
        f"transformers.models.{family}.modeling_{family}.{name}"
        for family, name in (
            ("llama", "LlamaRMSNorm"),
            ("mistral", "MistralRMSNorm"),
            ("mixtral", "MixtralRMSNorm"),
            ("qwen2", "Qwen2RMSNorm"),
            ("qwen3", "Qwen3RMSNorm"),
            ("t5", "T5LayerNorm"),
        )
    )
)
def transformers_rms_norm(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """As RMSNorm, in float32 whatever comes in; known by name, so that transformers need not be imported."""
    saved = tuple(x.float() if x.dtype == torch.float64 else x for x in saved)
    return by_feature(gradient, saved, call, module.weight.shape, module.variance_epsilon, centered=False)


def by_channel(
    gradient: Tensor,
    saved: tuple[Tensor, ...],
    call: LayerCall,
    eps: float,
    groups: int,
    given: Statistics | None = None,
    kind: str = "exact",
) -> Uses:
    """weight: c_b = sum_t G xhat; bias: c_b = sum_t G; G, x [B, C, *]; groups, given: as channel_sums has them."""
    gradient = call.samples_first(gradient, features=1)
    if "weight" in call.wanted:
        weight, bias = channel_sums(gradient, saved[0], eps, groups, given)
        yield "weight", Direct(weight, kind)
    else:
        bias = position_sums(gradient, range(2, gradient.ndim))
    if "bias" in call.wanted:
        yield "bias", Direct(bias, kind)


@register(nn.GroupNorm, TIMM + "GroupNorm", TIMM + "GroupNorm1", own_axis=0)
def group_norm(module: nn.GroupNorm, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    return by_channel(gradient, saved, call, module.eps, module.num_groups)


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, own_axis=0)
def instance_norm(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """Every channel of a sample is a group of its own."""
    dims = module._get_no_batch_dim() + 1
    if gradient.ndim != dims:
        raise Doubt(f"its input has {gradient.ndim} dims and no batch axis; {dims} with one")
    own = call.training or not module.track_running_stats
    given = None if own else (module.running_mean, module.running_var)
    return by_channel(gradient, saved, call, module.eps, module.num_features, given)


@register(nn.PReLU)
def prelu(module: nn.PReLU, gradient: Tensor, saved: tuple[Tensor, ...], call: LayerCall) -> Uses:
    """weight: c_b = sum_t G min(x, 0), by channel (axis 1) where there is a slope for each."""
    if call.axis not in (None, 0):
        raise Doubt(f"PReLU's channels are axis 1, so its samples are axis 0 and not {call.axis}")
    product = call.samples_first(wide(gradient) * wide(saved[0]).clamp(max=0))
    if module.num_parameters == 1:
        yield "weight", Direct(product.flatten(1).sum(1, keepdim=True) if product.ndim > 1 else product[:, None])
    elif product.ndim > 1:
        yield "weight", Direct(position_sums(product, range(2, product.ndim)))
    else:
        raise Doubt("its input has no channel axis beside the batch")
