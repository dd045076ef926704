"""Embeddings called without a batch axis: the model is never changed, and positions are expanded where it is safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.moments import Recorder

from ..oracle import assert_equal, by_sample, recorded, trainable


class Model(nn.Module):
    """x = use(table, features of the ids)."""

    def __init__(self, use: Callable[[nn.Embedding, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.wpe, self.use = nn.Embedding(9, 6), nn.Embedding(8, 6), use

    def forward(self, ids: Tensor) -> Tensor:
        return self.use(self.wpe, self.tokens(ids)).tanh()


UNCHANGED: dict[str, Callable[[nn.Embedding, Tensor], Tensor]] = {
    "added": lambda wpe, x: x + wpe(torch.arange(x.shape[1])),
    "unsqueeze": lambda wpe, x: x + wpe(torch.arange(x.shape[1])).unsqueeze(0),
    "view": lambda wpe, x: x + wpe(torch.arange(x.shape[1])).view(1, x.shape[1], -1),
    "repeat": lambda wpe, x: x + wpe(torch.arange(x.shape[1]))[None].repeat(x.shape[0], 1, 1),
    "prototypes": lambda wpe, x: x @ wpe(torch.arange(3)).t(),
    "distances": lambda wpe, x: x[:, :, None] - wpe(torch.arange(3)),
    "sum": lambda wpe, x: x + wpe(torch.arange(3)).sum(0),
    "one id": lambda wpe, x: x * wpe(torch.tensor([3])),
    "no axis": lambda wpe, x: x * wpe(torch.tensor(3)),
    "prototypes [1, C]": lambda wpe, x: x @ wpe(torch.arange(3)[None])[0].t(),
    "labels": lambda wpe, x: x[:, 0] + wpe(torch.arange(x.shape[0])),
}


# whose every use is to be added to each sample, or multiplied with it, so that they can be given the batch
ADDED = ("added", "one id", "labels")


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", UNCHANGED)
def test_the_model_computes_what_it_did(name: str, batch: int) -> None:
    torch.manual_seed(0)
    net, ids = Model(UNCHANGED[name]), torch.randint(0, 9, (batch, 5))
    plain = net(ids)
    recorder = Recorder(net, trainable(net))
    watched = net(ids)
    assert torch.equal(plain, watched)
    watched.square().sum().backward()
    row = next(row for row in recorder.coverage() if row.name == "wpe.weight")
    recorder.remove()
    if name in ADDED:
        assert row.kind == "exact"
    else:
        assert row.kind == "step"
        assert 'say batch_dim={its module: "positions"}' in row.why


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize(
    ("use", "options"),
    [
        (lambda wpe, x: x + wpe(torch.arange(x.shape[1])[None]), {}),
        (lambda wpe, x: x + wpe(torch.arange(x.shape[1])[None]), {"batch_dim": {"wpe": "positions"}}),
        (lambda wpe, x: x + wpe(torch.arange(x.shape[1])), {}),
        (lambda wpe, x: x + wpe(torch.arange(x.shape[1])), {"batch_dim": {"wpe": "positions"}}),
        (lambda wpe, x: x * wpe(torch.tensor([3])), {}),
        (lambda wpe, x: x[:, 0] + wpe(torch.arange(x.shape[0]) % 2), {}),
    ],
    ids=["GPT-2", "GPT-2, told", "nanoGPT", "nanoGPT, told", "one id", "labels"],
)
def test_positions_and_labels_are_exact(use: Any, options: dict[str, Any], batch: int) -> None:
    torch.manual_seed(0)
    net, ids = Model(use).double(), torch.randint(0, 9, (batch, 5))
    wanted = by_sample(net, lambda: list(net(ids).square().flatten(1).sum(1)))
    if use(nn.Embedding(8, 6), torch.zeros(batch, 5, 6)).ndim == 3:
        wanted = by_sample(net, lambda: [net(ids[b : b + 1]).square().sum() for b in range(batch)])
    assert_equal(recorded(net, lambda: net(ids).square().sum(), **options), wanted)


def test_labels_0_to_b_stay_labels() -> None:
    net = Model(lambda wpe, x: x[:, 0] + wpe(torch.arange(x.shape[0]))).double()
    ids = torch.randint(0, 9, (2, 5))
    wanted = by_sample(net, lambda: list(net(ids).square().sum(1)))
    assert_equal(recorded(net, lambda: net(ids).square().sum()), wanted)


def test_an_axis_that_once_did_not_fit_is_not_believed_when_it_does() -> None:
    """A relative bias [T, T, H], with T = B by chance, in a model that goes by numpy and cannot be followed."""

    def biased(wpe: nn.Embedding, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]) if x.detach().numpy().sum() > -1e9 else torch.zeros(1)
        return x @ wpe((places[:, None] - places).abs()).sum(0).t()

    net = Model(biased)
    recorder = Recorder(net, trainable(net))
    for batch in (4, 5):
        net.zero_grad()
        net(torch.randint(0, 9, (batch, 5))).square().sum().backward()
    row = next(row for row in recorder.coverage() if row.name == "wpe.weight")
    assert (row.kind, row.why) == ("step", "torch.nn.modules.sparse.Embedding: axis 0 is 5 long, the batch is 4")
    recorder.remove()


@pytest.mark.parametrize(
    ("batch_dim", "text"),
    [
        ("positions", "is for an Embedding by its name"),
        ({"use": "positions"}, "no such module"),
        ({"wpe": "position"}, 'must be a dim, None or "positions"'),
        ({"": "positions"}, "is for an Embedding by its name"),
    ],
)
def test_batch_dim_is_checked(batch_dim: Any, text: str) -> None:
    net = Model(UNCHANGED["added"])
    with pytest.raises(ValueError, match=text):
        Recorder(net, trainable(net), batch_dim=batch_dim)


def test_positions_under_compile() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (3, 5))
    for use, options in (
        (lambda wpe, x: x + wpe(torch.arange(x.shape[1])[None]), {}),
        (UNCHANGED["added"], {"batch_dim": {"wpe": "positions"}}),
    ):
        net = Model(use).double()
        wanted = by_sample(net, lambda net=net: [net(ids[b : b + 1]).square().sum() for b in range(3)])
        compiled = torch.compile(net, backend="aot_eager")
        assert_equal(recorded(net, lambda compiled=compiled: compiled(ids).square().sum(), **options), wanted)
    torch._dynamo.reset()
