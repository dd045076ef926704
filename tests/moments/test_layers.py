"""The contract of every layer with a formula: its moment is the sum of its samples' squared gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from .oracle import Root, assert_equal, by_sample, recorded

EXAMPLES = 14
BATCHES = [0, 1, 2, 5]


@dataclass
class Case:
    """One drawn layer with inputs; samples lie along `axis` of the output."""

    layer: nn.Module
    inputs: tuple[Any, ...]
    batch: int
    axis: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    rtol: float = 1e-10


Draw = Callable[..., Any]


def tensor(draw: Draw, *shape: int) -> Tensor:
    """Values of both signs; every other one not contiguous."""
    value = torch.randn(*shape, dtype=torch.float64)
    if draw(st.booleans()) and len(shape) > 1:
        return torch.randn(*shape[::-1], dtype=torch.float64).permute(*reversed(range(len(shape))))
    return value


def batch_of(draw: Draw) -> int:
    return draw(st.sampled_from(BATCHES))


def positions(draw: Draw, batch: int, features: int) -> tuple[Tensor, int]:
    """An input [.., B, .., F] and its sample axis."""
    between = draw(st.lists(st.integers(1, 4), max_size=2))
    axis = draw(st.integers(0, min(1, len(between))))
    shape = [*between[:axis], batch, *between[axis:], features]
    return tensor(draw, *shape), axis


def linear(draw: Draw) -> Case:
    batch, inputs, outputs = batch_of(draw), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    x, axis = positions(draw, batch, inputs)
    return Case(nn.Linear(inputs, outputs, bias=draw(st.booleans())), (x,), batch, axis)


def wide_linear(draw: Draw) -> Case:
    """Larger than the workspace, so sample by sample."""
    return Case(nn.Linear(260, 270), (tensor(draw, 3, 2, 260),), 3)


def transposed_linear(draw: Draw) -> Case:
    batch, inputs = draw(st.sampled_from([1, 2, 5])), draw(st.integers(1, 5))
    x = torch.randn(batch, 3, inputs, dtype=torch.float64)
    return Case(Conv1D(draw(st.integers(1, 5)), inputs), (x,), batch)


def convolution(kind: Any, dims: int) -> Callable[[Draw], Case]:
    def make(draw: Draw) -> Case:
        groups = draw(st.sampled_from([1, 2]))
        kernel = draw(st.integers(1, 3))
        stride = draw(st.integers(1, 2))
        padding = draw(st.sampled_from([0, 1, "same"])) if stride == 1 else 1
        mode = draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"] if dims < 3 else ["zeros"]))
        layer = kind(
            groups * draw(st.integers(1, 2)),
            groups * draw(st.integers(1, 2)),
            kernel,
            stride=stride,
            padding=padding,
            dilation=draw(st.integers(1, 2)),
            groups=groups,
            bias=draw(st.booleans()),
            padding_mode=mode,
        )
        batch = batch_of(draw) if mode == "zeros" else draw(st.sampled_from([1, 3]))
        x = tensor(draw, batch, layer.in_channels, *[draw(st.integers(5, 6)) for _ in range(dims)])
        if dims == 2 and draw(st.booleans()):
            x, layer = x.contiguous(memory_format=torch.channels_last), layer.to(memory_format=torch.channels_last)
        return Case(layer, (x,), batch)

    return make


def transposed_convolution(kind: Any, dims: int) -> Callable[[Draw], Case]:
    def make(draw: Draw) -> Case:
        groups, stride = draw(st.sampled_from([1, 2])), draw(st.integers(1, 2))
        layer = kind(
            groups * draw(st.integers(1, 2)),
            groups * draw(st.integers(1, 2)),
            draw(st.integers(1, 3)),
            stride=stride,
            padding=draw(st.integers(0, 1)),
            output_padding=draw(st.integers(0, stride - 1)),
            groups=groups,
            bias=draw(st.booleans()),
            dilation=draw(st.integers(1, 2)),
        )
        batch = draw(st.sampled_from([1, 2, 4]))
        return Case(layer, (tensor(draw, batch, layer.in_channels, *[4] * dims),), batch)

    return make


def layer_norm(draw: Draw) -> Case:
    batch, features = batch_of(draw), draw(st.integers(2, 5))
    x, axis = positions(draw, batch, features)
    two = axis == 0 and x.ndim > 2 and draw(st.booleans())
    shape = list(x.shape[-2:]) if two else [features]
    return Case(nn.LayerNorm(shape, bias=draw(st.booleans())), (x,), batch, axis)


def rms_norm(draw: Draw) -> Case:
    batch, features = batch_of(draw), draw(st.integers(2, 5))
    x, axis = positions(draw, batch, features)
    return Case(nn.RMSNorm(features, eps=draw(st.sampled_from([None, 1e-3]))), (x,), batch, axis)


def transformers_rms_norm(draw: Draw) -> Case:
    batch, features = batch_of(draw), draw(st.integers(2, 5))
    x, axis = positions(draw, batch, features)
    # it normalizes in float32 even in a float64 model
    return Case(LlamaRMSNorm(features, eps=1e-3), (x,), batch, axis, rtol=1e-5)


def images(draw: Draw, channels: int, dims: int, batches: list[int]) -> tuple[Tensor, int]:
    batch = draw(st.sampled_from(batches))
    return tensor(draw, batch, channels, *[draw(st.integers(2, 3)) for _ in range(dims)]), batch


def group_norm(draw: Draw) -> Case:
    x, batch = images(draw, 4, draw(st.integers(0, 3)), [1, 2, 5])
    return Case(nn.GroupNorm(draw(st.sampled_from([1, 2])), 4), (x,), batch)


def instance_norm(draw: Draw) -> Case:
    dims = draw(st.integers(1, 3))
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    x, batch = images(draw, 3, dims, [1, 2, 5])
    layer = kind(3, affine=True, track_running_stats=draw(st.booleans()))
    if layer.track_running_stats:
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return Case(layer.train(draw(st.booleans())), (x,), batch)


def frozen_batch_norm(draw: Draw) -> Case:
    dims = draw(st.integers(0, 3))
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
    x, batch = images(draw, 3, dims, BATCHES)
    layer = kind(3)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    return Case(layer.eval(), (x,), batch)


def prelu(draw: Draw) -> Case:
    x, batch = images(draw, 3, draw(st.integers(0, 2)), BATCHES)
    return Case(nn.PReLU(draw(st.sampled_from([1, 3]))), (x,), batch)


def embedding(draw: Draw) -> Case:
    batch, axis = batch_of(draw), draw(st.integers(0, 1))
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


def label_embedding(draw: Draw) -> Case:
    batch = draw(st.sampled_from([2, 5]))
    return Case(nn.Embedding(6, 3), (torch.full((batch,), 3),), batch)


class AddPositions(nn.Module):
    """x + positions, their ids without a batch axis: GPT-2's are [1, T], nanoGPT's [T]."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids, self.table = ids, nn.Embedding(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(self.ids)


def position_embedding(draw: Draw) -> Case:
    batch, length = draw(st.sampled_from([1, 3, 4])), 4
    axis, ids = draw(st.sampled_from([(0, torch.arange(4)), (0, torch.arange(4)[None]), (1, torch.arange(4)[:, None])]))
    x = tensor(draw, *((batch, length) if axis == 0 else (length, batch)), 3)
    return Case(AddPositions(ids), (x,), batch, axis)


def embedding_bag(draw: Draw) -> Case:
    batch, mode = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(["sum", "mean", "max"]))
    last = draw(st.booleans())
    layer = nn.EmbeddingBag(
        6,
        3,
        mode=mode,
        padding_idx=draw(st.sampled_from([None, 1])),
        include_last_offset=last,
    )
    weigh = mode == "sum" and draw(st.booleans())
    if draw(st.booleans()):
        lengths = torch.tensor([draw(st.integers(0, 3)) for _ in range(batch)])
        ids = torch.randint(0, 6, (int(lengths.sum()),))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        inputs: tuple[Any, ...] = (ids, offsets if last else offsets[:-1])
    else:
        ids = torch.randint(0, 6, (batch, draw(st.integers(1, 3))))
        inputs = (ids, None)
    weights = torch.randn(ids.shape, dtype=torch.float64) if weigh else None
    return Case(layer, (*inputs, weights), batch)


def attention(draw: Draw) -> Case:
    first, batch, source, target = draw(st.booleans()), draw(st.sampled_from([1, 3])), 4, 3
    how = draw(st.sampled_from(["self", "cross", "apart", "kdim"]))
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


LAYERS: dict[str, Callable[[Draw], Case]] = {
    "Linear": linear,
    "Linear, wide": wide_linear,
    "transformers.Conv1D": transposed_linear,
    "Conv1d": convolution(nn.Conv1d, 1),
    "Conv2d": convolution(nn.Conv2d, 2),
    "Conv3d": convolution(nn.Conv3d, 3),
    "ConvTranspose1d": transposed_convolution(nn.ConvTranspose1d, 1),
    "ConvTranspose2d": transposed_convolution(nn.ConvTranspose2d, 2),
    "ConvTranspose3d": transposed_convolution(nn.ConvTranspose3d, 3),
    "LayerNorm": layer_norm,
    "RMSNorm": rms_norm,
    "transformers.LlamaRMSNorm": transformers_rms_norm,
    "GroupNorm": group_norm,
    "InstanceNorm": instance_norm,
    "BatchNorm, eval": frozen_batch_norm,
    "PReLU": prelu,
    "Embedding": embedding,
    "Embedding, labels": label_embedding,
    "Embedding, positions": position_embedding,
    "EmbeddingBag": embedding_bag,
    "MultiheadAttention": attention,
}


def run(case: Case, reduction: str) -> None:
    root = Root(case.layer.double())
    probe = torch.empty(*[1] * case.axis, case.batch)
    share = 1 / max(1, case.batch) if reduction == "mean" else 1.0
    weights: list[Tensor] = []

    def losses() -> list[Tensor]:
        """One a sample: a random linear form and a square, so that gradients differ in sign and in size."""
        output = root(probe, *case.inputs, **case.kwargs)
        output = output[0] if isinstance(output, tuple) else output
        if not weights:
            weights.append(torch.randn(output.shape, dtype=torch.float64))
        each = (output * weights[0] + output.square() / 3).movedim(case.axis, 0)
        return [share * sample.sum() for sample in each]

    def whole() -> Tensor:
        found = losses()
        return torch.stack(found).sum() if found else root(probe, *case.inputs, **case.kwargs).sum()

    options = {"batch_dim": case.axis, **case.options}
    wanted = by_sample(root, losses)
    assert_equal(recorded(root, whole, **options), wanted, case.rtol)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", LAYERS)
def test_moment_is_the_sum_of_squared_sample_gradients(name: str, reduction: str) -> None:
    @settings(
        max_examples=2 if "wide" in name else EXAMPLES // 2,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        torch.manual_seed(data.draw(st.integers(0, 1000)))
        run(LAYERS[name](data.draw), reduction)

    check()
