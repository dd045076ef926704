"""The contract of every layer with a formula: its moment is the sum of its samples' squared gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from ..contract import BATCHES, Case, Draw, each_batch, tensor

EPS = 0.3  # so large that a formula without it fails


def positions(draw: Draw, batch: int, features: int) -> tuple[Tensor, int]:
    """An input [.., B, .., F] and its sample axis."""
    between = draw(st.lists(st.integers(1, 4), max_size=2))
    axis = draw(st.integers(0, min(1, len(between))))
    shape = [*between[:axis], batch, *between[axis:], features]
    return tensor(draw, *shape), axis


def linear(draw: Draw, batch: int) -> Case:
    inputs, outputs = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    x, axis = positions(draw, batch, inputs)
    return Case(nn.Linear(inputs, outputs, bias=draw(st.booleans())), (x,), batch, axis)


def wide_linear(draw: Draw, batch: int) -> Case:
    """Larger than the workspace, so sample by sample."""
    return Case(nn.Linear(260, 270), (tensor(draw, batch, 2, 260),), batch)


def transposed_linear(draw: Draw, batch: int) -> Case:
    inputs = draw(st.integers(1, 5))
    x = torch.randn(batch, 3, inputs, dtype=torch.float64)
    return Case(Conv1D(draw(st.integers(1, 5)), inputs), (x,), batch)


def layer_norm(draw: Draw, batch: int) -> Case:
    features = draw(st.integers(2, 5))
    x, axis = positions(draw, batch, features)
    two = axis == 0 and x.ndim > 2 and draw(st.booleans())
    shape = list(x.shape[-2:]) if two else [features]
    return Case(nn.LayerNorm(shape, eps=EPS, bias=draw(st.booleans())), (x,), batch, axis)


def rms_norm(draw: Draw, batch: int) -> Case:
    features = draw(st.integers(2, 5))
    x, axis = positions(draw, batch, features)
    return Case(nn.RMSNorm(features, eps=draw(st.sampled_from([None, EPS]))), (x,), batch, axis)


def transformers_rms_norm(draw: Draw, batch: int) -> Case:
    features = draw(st.integers(2, 5))
    x, axis = positions(draw, batch, features)
    # it normalizes in float32 even in a float64 model
    return Case(LlamaRMSNorm(features, eps=EPS), (x,), batch, axis, rtol=1e-5)


def named(kind: type, path: str) -> type:
    """The class as a library has it that is not installed here: known by its path."""
    kind.__module__, _, kind.__qualname__ = path.rpartition(".")
    return kind


class Again(nn.LayerNorm):
    """timm.layers.LayerNormFp32: a forward of its own that says the same."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(torch.float64)
        return F.layer_norm(x.double(), self.normalized_shape, self.weight.double(), bias, self.eps).to(x.dtype)


class OfChannels(nn.LayerNorm):
    """torchvision's and timm's LayerNorm2d."""

    def forward(self, x: Tensor) -> Tensor:
        normalized = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return normalized.permute(0, 3, 1, 2)


class RootMeanSquare(nn.Module):
    """timm.layers.RmsNorm."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps = (features,), EPS
        self.weight = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def layer_norm_again(draw: Draw, batch: int) -> Case:
    features = draw(st.integers(2, 5))
    x, axis = positions(draw, batch, features)
    kind = named(Again, "timm.layers.norm.LayerNormFp32")
    return Case(kind(features, eps=EPS, bias=draw(st.booleans())), (x,), batch, axis)


def layer_norm_of_channels(draw: Draw, batch: int) -> Case:
    path = draw(st.sampled_from(["torchvision.models.convnext.LayerNorm2d", "timm.layers.norm.LayerNorm2d"]))
    return Case(named(OfChannels, path)(3, eps=EPS), (images(draw, batch, 3, 2),), batch)


def root_mean_square(draw: Draw, batch: int) -> Case:
    features = draw(st.integers(2, 5))
    x, axis = positions(draw, batch, features)
    return Case(named(RootMeanSquare, "timm.layers.norm.RmsNorm")(features), (x,), batch, axis)


def images(draw: Draw, batch: int, channels: int, dims: int) -> Tensor:
    return tensor(draw, batch, channels, *[draw(st.integers(2, 3)) for _ in range(dims)])


def group_norm(draw: Draw, batch: int) -> Case:
    x = images(draw, batch, 4, draw(st.integers(0, 3)))
    return Case(nn.GroupNorm(draw(st.sampled_from([1, 2])), 4, eps=EPS), (x,), batch)


def with_statistics(layer: Any) -> Any:
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    return layer


def instance_norm(tracks: bool, training: bool) -> Callable[[Draw, int], Case]:
    def make(draw: Draw, batch: int) -> Case:
        dims = draw(st.integers(1, 3))
        kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
        layer = kind(3, eps=EPS, affine=True, track_running_stats=tracks)
        layer = with_statistics(layer) if tracks else layer
        return Case(layer.train(training), (images(draw, batch, 3, dims),), batch)

    return make


def frozen_batch_norm(draw: Draw, batch: int) -> Case:
    dims = draw(st.integers(0, 3))
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
    return Case(with_statistics(kind(3, eps=EPS)).eval(), (images(draw, batch, 3, dims),), batch)


def prelu(draw: Draw, batch: int) -> Case:
    x = images(draw, batch, 3, draw(st.integers(0, 2)))
    return Case(nn.PReLU(draw(st.sampled_from([1, 3]))), (x,), batch)


def embedding(draw: Draw, batch: int) -> Case:
    axis = draw(st.integers(0, 1))
    layer = nn.Embedding(
        6,
        3,
        padding_idx=draw(st.sampled_from([None, 0, 2])),
        scale_grad_by_freq=draw(st.booleans()),
        max_norm=draw(st.sampled_from([None, 1.0])),
    )
    shape = (batch, 4) if axis == 0 else (4, batch)
    # named, so that a batch of one is not taken for positions
    return Case(layer, (torch.randint(0, 6, shape),), batch, axis, {"batch_dim": {"": axis, "layer": axis}})


def label_embedding(draw: Draw, batch: int) -> Case:
    return Case(nn.Embedding(6, 3), (torch.randint(0, 6, (batch,)),), batch)


class AddPositions(nn.Module):
    """x + positions, their ids without a batch axis: GPT-2's are [1, T], nanoGPT's [T]."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids, self.table = ids, nn.Embedding(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(self.ids)


def position_embedding(draw: Draw, batch: int) -> Case:
    length = 4
    axis, ids = draw(st.sampled_from([(0, torch.arange(4)), (0, torch.arange(4)[None]), (1, torch.arange(4)[:, None])]))
    x = tensor(draw, *((batch, length) if axis == 0 else (length, batch)), 3)
    told = {"": axis, "layer.table": "positions"}
    return Case(AddPositions(ids), (x,), batch, axis, {"batch_dim": told})


def attention(how: str, draw: Draw, batch: int) -> Case:
    first, source, target = draw(st.booleans()), 4, 3
    layer = nn.MultiheadAttention(
        4,
        2,
        bias=draw(st.booleans()),
        add_bias_kv=draw(st.booleans()),
        add_zero_attn=draw(st.booleans()),
        batch_first=first,
        **({"kdim": 3, "vdim": 5} if how == "kdim" else {}),
    )
    for param in layer.parameters():
        nn.init.normal_(param)

    def sequence(length: int, features: int = 4) -> Tensor:
        return tensor(draw, *((batch, length) if first else (length, batch)), features)

    memory = sequence(source)
    inputs = {
        "self": (memory, memory, memory),
        "cross": (sequence(target), memory, memory),
        "apart": (sequence(target), memory, sequence(source)),
        "kdim": (sequence(target), sequence(source, 3), sequence(source, 5)),
    }[how]
    length = source if how == "self" else target
    hidden = torch.rand(length, source) < 0.3
    hidden[:, 0] = False
    mask = draw(st.sampled_from([None, hidden, torch.randn(length, source).double()]))
    kwargs = {"need_weights": draw(st.booleans()), "attn_mask": mask}
    if draw(st.booleans()) and (mask is None or mask.dtype == torch.bool):
        kwargs["key_padding_mask"] = torch.arange(source).expand(batch, source) >= source - 1
    return Case(layer, inputs, batch, 0 if first else 1, kwargs=kwargs)


LAYERS: dict[str, Callable[[Draw, int], Case]] = {
    "Linear": linear,
    "Linear, wide": wide_linear,
    "transformers.Conv1D": transposed_linear,
    "LayerNorm": layer_norm,
    "RMSNorm": rms_norm,
    "transformers.LlamaRMSNorm": transformers_rms_norm,
    "timm.LayerNormFp32": layer_norm_again,
    "torchvision.LayerNorm2d": layer_norm_of_channels,
    "timm.RmsNorm": root_mean_square,
    "GroupNorm": group_norm,
    "InstanceNorm": instance_norm(False, True),
    "InstanceNorm, tracking": instance_norm(True, True),
    "InstanceNorm, eval": instance_norm(True, False),
    "BatchNorm, eval": frozen_batch_norm,
    "PReLU": prelu,
    "Embedding": embedding,
    "Embedding, labels": label_embedding,
    "Embedding, positions": position_embedding,
    "MultiheadAttention, self": partial(attention, "self"),
    "MultiheadAttention, cross": partial(attention, "cross"),
    "MultiheadAttention, apart": partial(attention, "apart"),
    "MultiheadAttention, kdim": partial(attention, "kdim"),
}


# torch itself refuses an empty batch here; attention takes one without a padding mask, see test_attention.py
NEVER_EMPTY = ("InstanceNorm", "MultiheadAttention")
CASES = [(name, batch) for name in LAYERS for batch in BATCHES if batch or not name.startswith(NEVER_EMPTY)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("name", "batch"), CASES)
def test_moment_is_the_sum_of_squared_sample_gradients(name: str, batch: int, reduction: str) -> None:
    each_batch(LAYERS[name], batch, reduction)
