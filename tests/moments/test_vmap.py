"""Against torch.func.vmap(grad), the definition itself: every layer, with shapes and options drawn.

Convolutions are in test_vmap_convolutions.py, what vmap refuses in test_vmap_refused.py. BatchNorm in training is
compared with its own definition, test_models.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from gradwire import per_sample

from .contract import BATCHES, Case, Draw, tensor
from .layers.test_layers import LAYERS, AddPositions, images
from .oracle import Labelled, Moments, Root, assert_equal, recorded, trainable
from .test_tied import NETS

Make = Callable[[Draw, int], Case]
Drawn = TypeVar("Drawn")

# vmap's own, where it falls back to a loop
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def sample_axis(case: Case, value: Any, keyword: str = "") -> int | None:
    """None: every sample is given the whole."""
    if not isinstance(value, Tensor) or keyword == "attn_mask":
        return None
    return 0 if keyword == "key_padding_mask" else case.axis


def batch_of_one(value: Any, axis: int | None) -> Any:
    return value if axis is None else value.unsqueeze(axis)


def outputs(
    root: Root, case: Case, params: dict[str, Tensor], inputs: tuple[Any, ...], kwargs: Any, batch: int | None = None
) -> Tensor:
    probe = torch.empty(*[1] * case.axis, case.batch if batch is None else batch)
    output = functional_call(root, params, (probe, *inputs), kwargs)
    return output[0] if isinstance(output, tuple) else output


def loss_of(output: Tensor, weights: Tensor) -> Tensor:
    """A random linear form and a square, so that gradients differ in sign and in size."""
    return (output * weights + output.square() / 3).sum()


def by_vmap(case: Case, root: Root, weights: Tensor) -> Moments:
    """sum_b (d loss_b)^2, every sample a batch of one."""
    axes = tuple(sample_axis(case, value) for value in case.inputs)
    named = {key: sample_axis(case, value, key) for key, value in case.kwargs.items()}

    def loss(params: dict[str, Tensor], inputs: tuple[Any, ...], kwargs: dict[str, Any], weight: Tensor) -> Tensor:
        inputs = tuple(map(batch_of_one, inputs, axes))
        kwargs = {key: batch_of_one(value, named[key]) for key, value in kwargs.items()}
        return loss_of(outputs(root, case, params, inputs, kwargs, batch=1), weight.unsqueeze(case.axis))

    params = {name: param.detach() for name, param in trainable(root).items()}
    in_dims = (None, axes, named, case.axis)
    each = vmap(grad(loss), in_dims=in_dims)(params, case.inputs, case.kwargs, weights)
    return {name: value.square().sum(0) for name, value in each.items()}


def no_moment(root: Root) -> Moments:
    return {name: torch.zeros_like(param) for name, param in trainable(root).items()}


def rooted(case: Case) -> tuple[Root, Tensor]:
    """The layer in float64 and the weights of its loss."""
    root = Labelled(case.layer.double())
    with torch.no_grad():
        return root, torch.randn_like(outputs(root, case, {}, case.inputs, case.kwargs))


def compare(case: Case, twin: Case | None = None) -> None:
    """twin: the same function of the same parameters in a form that vmap takes."""
    root, weights = rooted(case)
    options = {"batch_dim": case.axis, **case.options}
    found = recorded(root, lambda: loss_of(outputs(root, case, {}, case.inputs, case.kwargs), weights), **options)
    truth = case if twin is None else twin
    # vmap over no samples is refused by most layers (test_vmap_refused.py), and a sum over none is zero
    wanted = by_vmap(truth, Labelled(truth.layer.double()), weights) if case.batch else no_moment(root)
    assert_equal(found, wanted, case.rtol)


@contextmanager
def one_thread() -> Iterator[None]:
    """The tensors are tiny, and on busy cores torch's threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def drawn(
    name: str, make: Callable[[Draw, int], Drawn], batch: int, use: Callable[[Drawn], None], examples: int = 6
) -> None:
    """A seed for each name and batch: derandomized draws would be the same few for all."""

    @seed(crc32(f"{name} {batch}".encode()))
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def each(data: st.DataObject) -> None:
        torch.manual_seed(data.draw(st.integers(0, 1000)))
        use(make(data.draw, batch))

    with one_thread():
        each()


def embedding(draw: Draw, batch: int) -> Case:
    """Without the options that vmap refuses or that couple samples."""
    axis, length = draw(st.integers(0, 1)), draw(st.integers(1, 5))
    layer = nn.Embedding(6, draw(st.integers(1, 4)), padding_idx=draw(st.sampled_from([None, 0, 2])))
    ids = torch.randint(0, 6, (batch, length) if axis == 0 else (length, batch))
    return Case(layer, (ids,), batch, axis, {"batch_dim": {"": axis, "layer": axis}})


def position_embedding(draw: Draw, batch: int) -> Case:
    """Samples first; second: see test_positions_with_samples_second."""
    length = draw(st.integers(1, 5))
    ids = draw(st.sampled_from([torch.arange(length), torch.arange(length)[None]]))
    told = {"batch_dim": {"layer.table": "positions"}}
    return Case(AddPositions(ids), (tensor(draw, batch, length, 3),), batch, options=told)


def bag(mode: str, draw: Draw, batch: int) -> Case:
    padding = draw(st.sampled_from([None, 1, 5]))
    layer = nn.EmbeddingBag(6, draw(st.integers(1, 4)), mode=mode.split()[-1], padding_idx=padding)
    ids = torch.randint(0, 6, (batch, draw(st.integers(1, 5))))
    weights = torch.randn(ids.shape, dtype=torch.float64) if mode == "weighted sum" else None
    return Case(layer, (ids, None, weights), batch)


def attention(make: Make, draw: Draw, batch: int) -> Case:
    case = make(draw, batch)
    if not batch:  # torch itself refuses a padding mask of no samples
        case.kwargs.pop("key_padding_mask", None)
    return case


def transformer(kind: Any, draw: Draw, batch: int) -> Case:
    first, width = draw(st.booleans()), 2 * draw(st.integers(1, 3))
    activation = draw(st.sampled_from(["relu", "gelu"]))
    layer = kind(width, 2, 5, 0.0, activation, batch_first=first, norm_first=draw(st.booleans()))
    lengths = [draw(st.integers(1, 4)) for _ in range(1 if kind is nn.TransformerEncoderLayer else 2)]
    inputs = [tensor(draw, *((batch, length) if first else (length, batch)), width) for length in lengths]
    return Case(layer, tuple(inputs), batch, 0 if first else 1)


class Broadcast(nn.Module):
    """A position embedding, a scale used twice and a number, all raw parameters."""

    def __init__(self, axis: int, length: int, features: int) -> None:
        super().__init__()
        self.axis = axis
        self.position = nn.Parameter(torch.randn(*((1, length) if axis == 0 else (length, 1)), features))
        self.scale, self.offset = nn.Parameter(torch.randn(features)), nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        position, scale, offset = (per_sample(p, x, self.axis) for p in (self.position, self.scale, self.offset))
        return ((x + position).tanh() * scale + offset).tanh() * per_sample(self.scale, x, self.axis)


def broadcast(draw: Draw, batch: int) -> Case:
    axis, length, features = draw(st.integers(0, 1)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    x = tensor(draw, *((batch, length) if axis == 0 else (length, batch)), features)
    return Case(Broadcast(axis, length, features), (x,), batch, axis)


def shared(name: str, draw: Draw, batch: int) -> Case:
    """A net that uses a parameter more than once, on positions of drawn number."""
    kind, example = NETS[name]
    x = example()
    shape = (batch, *[draw(st.integers(1, 5)) for _ in x.shape[1:-1]], x.shape[-1])
    if not x.is_floating_point():
        return Case(kind(), (torch.randint(0, 6, (batch, draw(st.integers(1, 7)))),), batch)
    if name.startswith("convolution"):
        return Case(kind(), (images(draw, batch, 2, 2),), batch)
    return Case(kind(), (tensor(draw, *shape),), batch)


# every row of the contract, so that a new layer is compared here too; what vmap refuses of them is in REFUSED
ROWS: dict[str, Make] = {name: make for name, make in LAYERS.items() if name != "InstanceNorm, tracking"}
ROWS |= {name: partial(attention, make) for name, make in LAYERS.items() if name.startswith("MultiheadAttention")}
ROWS |= {"Embedding": embedding, "Embedding, positions": position_embedding, "per_sample": broadcast}
ROWS |= {f"EmbeddingBag, {mode}": partial(bag, mode) for mode in ("sum", "weighted sum", "mean", "max")}
ROWS |= {kind.__name__: partial(transformer, kind) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)}
ROWS |= {f"shared: {name}": partial(shared, name) for name in NETS}

# torch itself refuses these without a sample
NEVER_EMPTY = ("InstanceNorm",)
CASES = [(name, batch) for name in ROWS for batch in BATCHES if batch or not name.startswith(NEVER_EMPTY)]


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_moment_is_that_of_vmap(name: str, batch: int) -> None:
    drawn(name, ROWS[name], batch, compare)


# what the rows above must have drawn: properties of a case, and how many values each takes
OPTIONS: dict[str, tuple[Callable[[Any, Case], tuple[Any, ...]], tuple[int, ...]]] = {
    "Linear": (lambda layer, case: (layer.bias is None, case.inputs[0].ndim, case.axis), (2, 3, 2)),
    "LayerNorm": (lambda layer, case: (layer.bias is None, case.inputs[0].ndim, case.axis), (2, 3, 2)),
    "RMSNorm": (lambda layer, case: (layer.eps, case.axis), (2, 2)),
    "GroupNorm": (lambda layer, case: (layer.num_groups, case.inputs[0].ndim), (2, 4)),
    "InstanceNorm": (lambda layer, case: (type(layer),), (3,)),
    "Embedding": (lambda layer, case: (layer.padding_idx, case.axis), (3, 2)),
    "EmbeddingBag, max": (lambda layer, case: (layer.padding_idx,), (3,)),
    "MultiheadAttention, self": (lambda layer, case: (layer.batch_first, layer.in_proj_bias is None), (2, 2)),
    "MultiheadAttention, cross": (lambda layer, case: (layer.batch_first, case.kwargs["need_weights"]), (2, 2)),
    "MultiheadAttention, kdim": (lambda layer, case: (layer.batch_first, layer.bias_k is None), (2, 2)),
    "TransformerEncoderLayer": (lambda layer, case: (case.axis, layer.norm_first), (2, 2)),
    "per_sample": (lambda layer, case: (case.axis,), (2,)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_draws_reach_every_option(name: str) -> None:
    describe, wanted = OPTIONS[name]
    seen: list[tuple[Any, ...]] = []
    for batch in BATCHES:
        if (name, batch) in CASES:
            drawn(name, ROWS[name], batch, lambda case: seen.append(describe(case.layer, case)))
    assert tuple(len(set(values)) for values in zip(*seen, strict=True)) == wanted
