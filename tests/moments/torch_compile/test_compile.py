"""torch.compile in every order with DDP: the same moments as without, at every batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.moments import Recorder, per_sample

from ..oracle import consume_all


class Net(nn.Module):
    """Tied embedding and head, positions without a batch axis, a raw parameter, a batch norm, a dead use."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wpe = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.position = nn.Parameter(torch.randn(1, 1, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.wpe(torch.arange(ids.shape[1])[None])
        x = self.encoder(x + per_sample(self.position, x)).transpose(1, 2)
        self.conv(x)
        return self.head(self.norm(self.conv(x)).relu().transpose(1, 2))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def moments(recorder: Recorder, model: nn.Module, batches: list[Tensor]) -> list[dict[str, Tensor]]:
    found = []
    for ids in batches:
        model.zero_grad()
        model(ids).square().mean().backward()
        found.append({name: recorder.moment(name).clone() for name in recorder.accounts})
        consume_all(recorder)
    kinds = {row.name: row.kind for row in recorder.coverage()}
    assert kinds.pop("norm.weight") == kinds.pop("norm.bias") == "by activation"
    assert set(kinds.values()) == {"exact"}
    assert recorder.passes.current.number == len(batches)
    recorder.remove()
    return found


def check(make: Callable[[nn.Module], tuple[nn.Module, nn.Module]], sizes: tuple[int, ...] = (4, 4, 5)) -> None:
    torch.manual_seed(0)
    net = Net()
    names = dict(net.named_parameters())
    batches = [torch.randint(0, 11, (size, 6)) for size in sizes]
    wanted = moments(Recorder(net, names, strict=True), net, batches)
    root, model = make(net)
    found = moments(Recorder(root, names, strict=True), model, batches)
    for plain, compiled in zip(wanted, found, strict=True):
        for name in names:
            torch.testing.assert_close(compiled[name], plain[name], rtol=1e-3, atol=1e-3 * float(plain[name].max()))


def test_recorder_then_compile_whole_graph() -> None:
    check(lambda net: (net, torch.compile(net, backend="aot_eager", fullgraph=True)))


def test_compile_then_recorder_whole_graph() -> None:
    def make(net: nn.Module) -> tuple[nn.Module, nn.Module]:
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        return compiled, compiled

    check(make)


@pytest.mark.usefixtures("group")
def test_ddp_of_compiled() -> None:
    def make(net: nn.Module) -> tuple[nn.Module, nn.Module]:
        model = DistributedDataParallel(torch.compile(net, backend="aot_eager"))
        return model, model

    check(make)


@pytest.mark.usefixtures("group")
def test_compiled_ddp() -> None:
    def make(net: nn.Module) -> tuple[nn.Module, nn.Module]:
        model = DistributedDataParallel(net)
        return model, torch.compile(model, backend="aot_eager")

    check(make)


@pytest.mark.slow
def test_inductor() -> None:
    """Inductor uses buffers again after the operators: a use that only kept references would change."""
    check(lambda net: (net, torch.compile(net, fullgraph=True)), sizes=(4, 4))


def test_a_graph_compiled_before_never_passes_silently() -> None:
    """Compiled and run before the recorder came: either compiled again, or estimated; never a moment of nothing."""
    torch.manual_seed(0)
    net, ids = Net(), torch.randint(0, 11, (4, 6))
    model = torch.compile(net, backend="aot_eager")
    model(ids).sum().backward()
    net.zero_grad()
    recorder = Recorder(net, dict(net.named_parameters()))
    model(ids).square().mean().backward()
    consume_all(recorder)
    for name, account in recorder.accounts.items():
        assert recorder.moment(name).sum() > 0, name
        assert account.kind in ("exact", "by activation", "step")
    recorder.remove()


def test_autocast_under_compile() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(5, 3, 8)
    names = dict(net.named_parameters())
    found = []
    for model in (net, torch.compile(net, backend="aot_eager", fullgraph=True)):
        recorder = Recorder(net, names, strict=True)
        for _ in range(2):
            net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
            consume_all(recorder)
        found.append({name: recorder.moment(name).clone() for name in names})
        recorder.remove()
    for name in names:
        torch.testing.assert_close(found[1][name], found[0][name], rtol=0.05, atol=0.01 * float(found[0][name].max()))
