"""What torch.func.vmap refuses, and why; the same function is compared with it in a form that it takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gradwire.moments.layer_table import LAYERS, layer_of

from .contract import BATCHES, Case, Draw
from .layers.test_layers import AddPositions, images, with_statistics
from .oracle import assert_equal, recorded
from .test_vmap import ROWS, by_vmap, compare, drawn, loss_of, outputs, rooted
from .test_vmap_convolutions import ROWS as CONVOLUTIONS

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

# the case as the contract has it, and the same function of the same parameters without what is refused
Twins = tuple[Case, Case]


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def with_the_same(layer: nn.Module, other: nn.Module) -> nn.Module:
    other.load_state_dict(dict(layer.named_parameters()))
    return other


def renormalized(draw: Draw, batch: int) -> Twins:
    layer, ids = nn.Embedding(6, 3, max_norm=1.0).double(), torch.randint(0, 6, (batch, draw(st.integers(1, 5))))
    layer(ids)  # changes the table, once for all
    twin = with_the_same(layer, nn.Embedding(6, 3).double())
    return Case(layer, (ids,), batch), Case(twin, (ids,), batch)


def tracking(draw: Draw, batch: int) -> Twins:
    dims = draw(st.integers(1, 3))
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    layer = with_statistics(kind(3, affine=True, track_running_stats=True))
    twin, x = with_the_same(layer, kind(3, affine=True)), images(draw, batch, 3, dims)
    return Case(layer, (x,), batch), Case(twin, (x,), batch)


def ragged(mode: str, draw: Draw, batch: int) -> Twins:
    """Bags of unequal length, never as many ids as bags; the twin fills them up with row 6, the padding."""
    layer = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=6)
    lengths = [draw(st.integers(0, 3)) for _ in range(batch - 1)] + [batch + 1]
    bags = [torch.randint(0, 6, (length,)) for length in lengths]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    filled = pad_sequence(bags, batch_first=True, padding_value=6)
    return Case(layer, (torch.cat(bags), starts), batch), Case(layer, (filled,), batch)


# why vmap refuses, in its own words
REFUSED: dict[str, tuple[Callable[[Draw, int], Twins], str]] = {
    "Embedding, max_norm": (renormalized, "embedding_renorm_.* is not possible"),
    "InstanceNorm, tracking": (tracking, "running_mean or running_var, which will be updated in place"),
    "EmbeddingBag, sum, offsets": (partial(ragged, "sum"), "same size in the mapped dimension"),
    "EmbeddingBag, mean, offsets": (partial(ragged, "mean"), "same size in the mapped dimension"),
    "EmbeddingBag, max, offsets": (partial(ragged, "max"), "same size in the mapped dimension"),
}


@pytest.mark.parametrize("batch", [batch for batch in BATCHES if batch])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_equal_to_its_twin(name: str, batch: int) -> None:
    make, why = REFUSED[name]

    def both(twins: Twins) -> None:
        case, twin = twins
        with pytest.raises((RuntimeError, ValueError), match=why):
            by_vmap(case, *rooted(case))
        compare(case, twin)

    drawn(name, make, batch, both)


EMPTY: dict[str, tuple[Case, str]] = {
    "Conv2d": (Case(nn.Conv2d(2, 3, 2), (floats(0, 2, 4, 4),), 0), "groups to be greater than 0"),
    "Embedding": (Case(nn.Embedding(6, 3), (torch.zeros(0, 4, dtype=torch.int64),), 0), "invalid gradient"),
    "EmbeddingBag": (Case(nn.EmbeddingBag(6, 3), (torch.zeros(0, 4, dtype=torch.int64),), 0), "0 elements"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_no_samples_are_refused(name: str) -> None:
    """By vmap alone: the layers take them, and the moment is zero."""
    case, why = EMPTY[name]
    with pytest.raises(RuntimeError, match=why):
        by_vmap(case, *rooted(case))
    compare(case)


@pytest.mark.parametrize("kind", [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])
def test_no_samples_are_refused_by_instance_norm_itself(kind: type[nn.Module]) -> None:
    layer = kind(3, affine=True)
    with pytest.raises(IndexError):
        layer(torch.randn(0, 3, *[4] * (layer._get_no_batch_dim() - 1)))


@pytest.mark.parametrize("batch", [batch for batch in BATCHES if batch])
def test_frequencies_divide_what_vmap_finds(batch: int) -> None:
    """scale_grad_by_freq couples the samples: a row's gradient is divided by its count in the whole batch."""

    def scaled(draw: Draw, batch: int) -> Case:
        return Case(nn.Embedding(6, 3), (torch.randint(0, 6, (batch, draw(st.integers(1, 5)))),), batch)

    def divides(case: Case) -> None:
        root, weights = rooted(case)
        counts = torch.bincount(case.inputs[0].reshape(-1), minlength=6).clamp(min=1)[:, None]
        wanted = {name: moment / counts.square() for name, moment in by_vmap(case, root, weights).items()}
        case.layer.scale_grad_by_freq = True
        assert_equal(recorded(root, lambda: loss_of(outputs(root, case, {}, case.inputs, {}), weights)), wanted)

    drawn("scale_grad_by_freq", scaled, batch, divides)


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_positions_with_samples_second(batch: int) -> None:
    """ids [T, 1] for x [T, B, D]; 4 samples of 4 positions: the wrong axis fits."""
    torch.manual_seed(0)
    told = {"batch_dim": {"": 1, "layer.table": "positions"}}
    compare(Case(AddPositions(torch.arange(4)[:, None]), (floats(4, batch, 3),), batch, 1, told))


def test_every_formula_is_compared() -> None:
    """A layer that is registered needs a row."""
    found: set[int] = set()

    def note(case: Case) -> None:
        found.update(id(layer_of(module)) for module in case.layer.modules())

    for name, make in (ROWS | CONVOLUTIONS).items():
        drawn(name, make, 2, note, examples=1)
    assert [path for path, layer in LAYERS.items() if id(layer) not in found] == []
