"""Times the fused weight gradient + second moment of all convolutions of ResNet-50 and the CIFAR VGG against cuDNN."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCH = 64
FLUSH_BYTES = 256 << 20  # several times the 60 MB of L2: a layer's tensors were not just read in a real step either


@dataclass(frozen=True)
class Layer:
    """One distinct convolution; count: how often the network has it."""

    network: str
    channels: int
    size: int
    outputs: int
    kernel: int
    stride: int
    count: int
    groups: int = 1

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def weight_shape(self) -> list[int]:
        return [self.outputs, self.channels // self.groups, self.kernel, self.kernel]

    @property
    def geometry(self) -> tuple[list[int], list[int], list[int], int]:
        return [self.stride] * 2, [self.padding] * 2, [1, 1], self.groups

    @property
    def name(self) -> str:
        return f"{self.channels}->{self.outputs} {self.kernel}x{self.kernel}/{self.stride} @{self.size}"


def resnet50() -> list[Layer]:
    """The 53 convolutions as 22 distinct ones."""
    layers = [Layer("resnet50", 3, 224, 64, 7, 2, 1), Layer("resnet50", 64, 56, 64, 1, 1, 1)]
    before, size = 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        stride = 1 if width == 64 else 2
        if stride == 2:
            layers.append(Layer("resnet50", before, size, width, 1, 1, 1))
            layers.append(Layer("resnet50", width, size, width, 3, 2, 1))
            layers.append(Layer("resnet50", before, size, 4 * width, 1, 2, 1))
        size //= stride
        layers.append(Layer("resnet50", 4 * width, size, width, 1, 1, blocks - 1))
        layers.append(Layer("resnet50", width, size, width, 3, 1, blocks - (stride == 2)))
        layers.append(Layer("resnet50", width, size, 4 * width, 1, 1, blocks + (stride == 1)))
        before = 4 * width
    return layers


def vgg() -> list[Layer]:
    """The 13 convolutions of the CIFAR network as 10 distinct ones."""
    rows = ((3, 32, 64, 1), (64, 32, 64, 1), (64, 16, 128, 1), (128, 16, 128, 1), (128, 8, 256, 1), (256, 8, 256, 2))
    rows += ((256, 4, 512, 1), (512, 4, 512, 2), (512, 2, 512, 3))
    return [Layer("vgg", channels, size, outputs, 3, 1, count) for channels, size, outputs, count in rows]


def mobile() -> list[Layer]:
    """Depthwise convolutions of the mobile networks."""
    rows = ((32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (192, 28, 3, 1), (576, 14, 3, 1), (960, 7, 3, 1))
    rows += ((240, 28, 5, 1), (672, 14, 5, 1))
    return [Layer("depthwise", channels, size, channels, k, s, 1, groups=channels) for channels, size, k, s in rows]


def tensors(layer: Layer, dtype: torch.dtype, channels_last: bool) -> tuple[Tensor, Tensor]:
    """(output gradient, input), random."""
    out = (layer.size + 2 * layer.padding - layer.kernel) // layer.stride + 1
    layout = torch.channels_last if channels_last else torch.contiguous_format
    gradient = torch.randn(BATCH, layer.outputs, out, out, device="cuda").to(dtype)
    x = torch.randn(BATCH, layer.channels, layer.size, layer.size, device="cuda").to(dtype)
    return gradient.contiguous(memory_format=layout), x.contiguous(memory_format=layout)


def time_ms(call: Callable[[], Any], repeats: int = 15) -> float:
    """Median device time of a replayed graph with a cold L2: no host time in it, which a real step hides as well."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(2):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        flush.zero_()
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def reference(layer: Layer, gradient: Tensor, x: Tensor, channels_last: bool) -> Callable[[], Tensor]:
    """cuDNN's weight gradient alone."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    weight = torch.empty(layer.weight_shape, device="cuda", dtype=x.dtype).contiguous(memory_format=layout)
    stride, padding, dilation, groups = layer.geometry

    def call() -> Tensor:
        return torch.ops.aten.convolution_backward(
            gradient, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
        )[1]

    return call


def reference_ms(call: Callable[[], Tensor]) -> float:
    """The better of cuDNN's own choice and its search: the honest opponent."""
    times = []
    for search in (False, True):
        torch.backends.cudnn.benchmark = search
        times.append(time_ms(call))
    torch.backends.cudnn.benchmark = False
    return min(times)


def fused(layer: Layer, gradient: Tensor, x: Tensor, channels_last: bool) -> Callable[[], tuple[Tensor, Tensor]]:
    """Weight gradient and second moment by the operator."""
    from gradwire.moments.gpu.convolution_moment import launch

    geometry = dict(zip(("stride", "padding", "dilation", "groups"), layer.geometry, strict=True))
    return lambda: launch(gradient, x, torch.Size(layer.weight_shape), geometry, x.dtype, channels_last)


def truth(layer: Layer, gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both sums in float32 without tf32, sample by sample."""
    sums = [torch.zeros(layer.weight_shape, device="cuda") for _ in range(2)]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for index in range(BATCH):
            one = slice(index, index + 1)
            contribution = reference(layer, gradient[one].float(), x[one].float(), False)()
            sums[0] += contribution
            sums[1] += contribution * contribution
    return sums[0], sums[1]


def measure(layer: Layer, dtype: torch.dtype, channels_last: bool) -> dict[str, Any]:
    """One row of the table."""
    gradient, x = tensors(layer, dtype, channels_last)
    call = fused(layer, gradient, x, channels_last)
    errors = [
        float((found.float() - right).norm() / right.norm())
        for found, right in zip(call(), truth(layer, gradient, x), strict=True)
    ]
    against = reference_ms(reference(layer, gradient, x, channels_last))
    spent = time_ms(call)
    layout = "channels_last" if channels_last else "contiguous"
    kind = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "tf32"}[dtype]
    return {
        "what": f"{layer.network} {layer.name} {kind} {layout}",
        "against": "cuDNN weight gradient alone",
        "network": layer.network,
        "B": BATCH,
        "C": layer.channels,
        "H": layer.size,
        "W": layer.size,
        "O": layer.outputs,
        "K": layer.kernel,
        "stride": layer.stride,
        "groups": layer.groups,
        "dtype": f"{kind} {layout}",
        "count": layer.count,
        "time_ms": spent,
        "reference_ms": against,
        "ratio": spent / against,
        "error": max(errors),
    }


def summed(rows: list[dict[str, Any]], network: str, dtype: str) -> dict[str, Any]:
    """All convolutions of a network, each as often as it occurs."""
    mine = [row for row in rows if row["network"] == network and row["dtype"] == dtype]
    spent, against = (sum(row["count"] * row[key] for row in mine) for key in ("time_ms", "reference_ms"))
    return {
        "what": f"{network} all convolutions {dtype}",
        "against": "cuDNN weight gradients alone",
        "network": network,
        "B": BATCH,
        "dtype": dtype,
        "count": sum(row["count"] for row in mine),
        "time_ms": spent,
        "reference_ms": against,
        "ratio": spent / against,
    }


def rows() -> Iterator[dict[str, Any]]:
    """Every layer, then every network as a whole; needs a CUDA device."""
    jobs = [(layer, torch.bfloat16, True) for layer in (*resnet50(), *mobile())]
    for dtype in (torch.bfloat16, torch.float32):
        jobs += [(layer, dtype, channels_last) for channels_last in (True, False) for layer in vgg()]
    found = []
    for job in jobs:
        found.append(measure(*job))
        yield found[-1]
    for network, dtype in dict.fromkeys((row["network"], row["dtype"]) for row in found):
        yield summed(found, network, dtype)
