"""Every method on a GPU: the means, bytes and states of the CPU."""

from __future__ import annotations

import pytest
import torch

from gradwire.exchange.in_process import InProcess
from gradwire.methods import MomentumDCT, PowerSGD, Sum, TopK
from methods.rows import ROWS
from methods.test_contract import GATHERED, LAYOUT, check_refusals, gradient

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("name", ROWS)
def test_a_gpu_does_what_the_cpu_does(name: str) -> None:
    """Bit for bit, but for methods with matrix products and for sums in half precision."""
    compressor = ROWS[name].compressor
    rounds = isinstance(compressor, PowerSGD | MomentumDCT | Sum)
    cpu, gpu = (InProcess(compressor, LAYOUT, 3, device=torch.device(kind)) for kind in ("cpu", "cuda"))
    for step in range(4):
        grads = [gradient(step, rank) for rank in range(3)]
        wanted, found = cpu(grads), gpu([grad.cuda() for grad in grads], [grad.square().cuda() / 4 for grad in grads])
        assert found.n_bytes == wanted.n_bytes
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if rounds else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(found.mean.cpu(), wanted.mean, **tolerance)
        for ours, theirs in zip(gpu.snapshot(), cpu.snapshot(), strict=True):
            for one, two in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one.cpu(), two, **tolerance)


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_value_on_a_gpu(name: str) -> None:
    ranks = InProcess(ROWS[name].compressor, LAYOUT, 2, device=torch.device("cuda"))
    grads = [gradient(0, rank).cuda() for rank in range(2)]
    grads[1][7] = torch.nan
    done = ranks(grads)
    assert not done.finite
    for undo in done.undo:
        undo()
    assert all(bool(torch.isfinite(tensor).all()) for state in ranks.snapshot() for tensor in state)


@pytest.mark.parametrize("name", GATHERED)
def test_a_refused_message_changes_nothing_on_a_gpu(name: str) -> None:
    """Where nobody waits to know whether it will be."""
    compressor = ROWS[name].compressor
    assert check_refusals(compressor, torch.device("cuda")) == check_refusals(compressor, torch.device("cpu"))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if getattr(row.compressor, "alike", False)])
def test_a_graph_of_all_workers_on_a_gpu(name: str) -> None:
    """Of methods whose steps are all alike: what the same workers do without a graph, and a bad value is taken back."""
    compressor, cuda = ROWS[name].compressor, torch.device("cuda")
    plain, graph = (InProcess(compressor, LAYOUT, 3, device=cuda, batched=kind) for kind in (False, True))
    held = torch.zeros(3, LAYOUT.numel, device=cuda)
    for step in range(6):
        grads = torch.stack([gradient(step, rank) for rank in range(3)]).cuda()
        if step == 4:
            grads[1, 7] = torch.inf
        held.copy_(grads)
        found, wanted = graph.exchange(held, held), plain(list(grads))
        assert (found.finite, found.n_bytes) == (wanted.finite, wanted.n_bytes)
        if found.finite:
            torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-4, atol=1e-5)
        else:
            for undo in [*found.undo, *wanted.undo]:
                undo()
        for ours, theirs in zip(graph.snapshot(), plain.snapshot(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert graph.repeated is not None
    assert graph.meter.stats([]).elements_sent == plain.meter.stats([]).elements_sent


def test_a_graph_goes_on_with_other_options_on_a_gpu() -> None:
    """What a density that falls over a run does, and a simulation that goes on from a checkpoint: new tables."""
    cuda, first = torch.device("cuda"), TopK(density=0.2, exact=True)
    plain, graph = (InProcess(first, LAYOUT, 3, device=cuda, batched=kind) for kind in (False, True))
    plain.number = graph.number = 5
    held = torch.zeros(3, LAYOUT.numel, device=cuda)
    for step in range(10):
        if step == 5:
            for ranks in (plain, graph):
                ranks.use(TopK(density=0.1, exact=True))
        grads = torch.stack([gradient(step, rank) for rank in range(3)]).cuda()
        held.copy_(grads)
        found, wanted = graph.exchange(held, held), plain(list(grads))
        assert found.n_bytes == wanted.n_bytes
        assert torch.equal(found.mean, wanted.mean)
    assert graph.repeated is not None
