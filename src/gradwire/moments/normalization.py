"""Step 1, moments: normalizations: scale and shift by channel or feature, and PReLU's slope."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.moments.linear import wide
from gradwire.moments.registry import Uses, register
from gradwire.moments.site import Doubt, Site
from gradwire.moments.uses import Direct


def by_channel(tensor: Tensor) -> Tensor:
    """[B, C, *] -> [B, C]."""
    return tensor.flatten(2).sum(2) if tensor.ndim > 2 else tensor


def batched(gradient: Tensor, site: Site, dims: int | None = None) -> Tensor:
    """[B, C, *] as it is; doubts where the layer was given a single sample without a batch axis."""
    if dims is not None and gradient.ndim != dims:
        raise Doubt(f"its input has {gradient.ndim} dims and no batch axis; {dims} with one")
    return wide(site.samples_first(gradient, features=1))


def scaled(gradient: Tensor, normalized: Tensor, site: Site, kind: str = "exact") -> Uses:
    """weight: c_b = sum_t G xhat; bias: c_b = sum_t G; both [B, C, *]."""
    if "weight" in site.wanted:
        yield "weight", Direct(by_channel(gradient * normalized), kind)
    if "bias" in site.wanted:
        yield "bias", Direct(by_channel(gradient), kind)


@register(nn.LayerNorm, nn.RMSNorm)
def layer_norm(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """weight: c_b = sum_t G xhat; bias: c_b = sum_t G. G [.., B, .., *normalized_shape]."""
    shape = list(module.normalized_shape)
    gradient = wide(gradient)
    if "weight" in site.wanted:
        x = wide(saved[0])
        if isinstance(module, nn.LayerNorm):
            normalized = F.layer_norm(x, shape, eps=module.eps)
        else:
            normalized = F.rms_norm(x, shape, eps=module.eps)
        yield "weight", Direct(site.sums(gradient * normalized, features=len(shape)))
    if "bias" in site.wanted:
        yield "bias", Direct(site.sums(gradient, features=len(shape)))


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
def transformers_rms_norm(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """As RMSNorm, in float32 whatever comes in; known by name, so that transformers need not be imported."""
    normalized = F.rms_norm(saved[0].float(), list(module.weight.shape), eps=module.variance_epsilon)
    yield "weight", Direct(site.sums(wide(gradient) * normalized, features=1))


@register(nn.GroupNorm, own_axis=0)
def group_norm(module: nn.GroupNorm, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    gradient = batched(gradient, site)
    normalized = F.group_norm(wide(saved[0]), module.num_groups, eps=module.eps) if saved else gradient
    return scaled(gradient, normalized, site)


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, own_axis=0)
def instance_norm(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    gradient = batched(gradient, site, module._get_no_batch_dim() + 1)
    own = site.training or not module.track_running_stats
    if not saved:
        normalized = gradient
    elif own:
        normalized = F.instance_norm(wide(saved[0]), eps=module.eps)
    else:
        normalized = with_running_statistics(module, saved[0])
    return scaled(gradient, normalized, site)


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, own_axis=0)
def batch_norm(module: Any, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """By activation index: what flows back through sample b's activations, xhat being the batch's."""
    gradient = batched(gradient, site)
    own = site.training or module.running_mean is None
    if not saved:
        normalized = gradient
    elif own:
        normalized = F.batch_norm(wide(saved[0]), None, None, training=True, eps=module.eps)
    else:
        normalized = with_running_statistics(module, saved[0])
    return scaled(gradient, normalized, site, "by activation" if own else "exact")


def with_running_statistics(module: Any, x: Tensor) -> Tensor:
    """(x - running mean) / sqrt(running variance + eps), [B, C, *]."""
    mean, variance = (wide(stat) for stat in (module.running_mean, module.running_var))
    return F.batch_norm(wide(x), mean, variance, training=False, eps=module.eps)


@register(nn.PReLU)
def prelu(module: nn.PReLU, gradient: Tensor, saved: tuple[Tensor, ...], site: Site) -> Uses:
    """weight: c_b = sum_t G min(x, 0), by channel (axis 1) where there is a slope for each."""
    if site.axis not in (None, 0):
        raise Doubt(f"PReLU's channels are axis 1, so its samples are axis 0 and not {site.axis}")
    product = site.samples_first(wide(gradient) * wide(saved[0]).clamp(max=0))
    if module.num_parameters == 1:
        yield "weight", Direct(product.flatten(1).sum(1, keepdim=True) if product.ndim > 1 else product[:, None])
    elif product.ndim > 1:
        yield "weight", Direct(by_channel(product))
    else:
        raise Doubt("its input has no channel axis beside the batch")
