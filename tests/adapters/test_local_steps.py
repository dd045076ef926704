"""Local steps over real processes: what all workers have alike, and that nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import local_scenes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire.errors import AttachError
from workers import Pool, WorkerError

EVERY_METHOD = [
    "dense",
    "bf16",
    "fp16",
    "fp8",
    "vgc:alpha=0,density=0.05",
    "vgc:alpha=0,floor=0.01",
    "vgc:alpha=0,max_bytes_per_step=300",
    "vgc:alpha=0,tau=0.01",
    "strom:tau=0.01",
    "topk:density=0.05",
    "randomk",
    "powersgd:rank=2",
    "qsgd",
    "terngrad",
    "onebit",
    "signsgd",
    "signsgd:feedback=false",
    "adacomp",
    "momentum_dct",
    "diloco",
    "streaming_diloco:every=3,fragments=2,delay=1",
]


def after_rounds(method: str, options: dict[str, Any]) -> tuple[str, list[float], float, int]:
    """Seven steps, every round ended; the bits of the weights, first and last loss, residual, bytes."""
    net = scenes.net(seed=dist.get_rank())
    optimizer = local_scenes.adamw(net)
    wire = gradwire.local(net, optimizer, method, **options)
    losses = [local_scenes.take(net, optimizer, step) for step in range(7)]
    wire.finish()
    stats = wire.stats()
    return scenes.digest(net.parameters()), [losses[0], losses[-1]], stats.residual_norm, stats.bytes_sent


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_replicas_are_equal_and_learn(spawn: Pool, method: str) -> None:
    options = {} if "every" in method else {"every": 3}
    found = spawn(3, after_rounds, method, options)
    assert len({digest for digest, *_ in found}) == 1
    first, last = (sum(losses[at] for _, losses, *_ in found) for at in (0, 1))
    assert last < first
    assert found[0][3] > 0


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_replicas_are_equal_whatever_their_number(spawn: Pool, workers: int) -> None:
    for method in ("vgc:alpha=0,density=0.05", "dense"):
        assert len({digest for digest, *_ in spawn(workers, after_rounds, method, {"every": 2})}) == 1


def every_round(method: str, options: dict[str, Any], steps: int) -> list[str]:
    """The bits of the base weights after each step."""
    net = scenes.net()
    optimizer = local_scenes.adamw(net)
    wire = gradwire.local(net, optimizer, method, **options)
    seen = []
    for step in range(steps):
        local_scenes.take(net, optimizer, step)
        with wire.base_weights():
            seen.append(scenes.digest(net.parameters()))
    return seen


def test_replicas_are_equal_after_each_round(spawn: Pool) -> None:
    found = spawn(3, every_round, "vgc:alpha=0,density=0.1", {"every": 3, "fragments": 2, "delay": 1}, 13)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 6  # and they move


# ---- what it is the same as


def plain_ddp(steps: int) -> dict[str, Tensor]:
    model = DistributedDataParallel(scenes.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        local_scenes.take(model, optimizer, step)
    return local_scenes.weights(model.module)


def local_every_step(steps: int) -> dict[str, Tensor]:
    net, _, _ = local_scenes.trained(
        gradwire.Dense(), {"every": 1}, steps, lambda net: torch.optim.SGD(net.parameters(), lr=0.1)
    )
    return local_scenes.weights(net)


def test_every_step_with_dense_and_sgd_is_plain_ddp(spawn: Pool) -> None:
    for plain, local in zip(spawn(3, plain_ddp, 8), spawn(3, local_every_step, 8), strict=True):
        start = local_scenes.weights(scenes.net())
        assert any((plain[name] - start[name]).abs().max() > 0.01 for name in start)  # it trains
        for name, weight in plain.items():
            torch.testing.assert_close(local[name], weight, rtol=0, atol=2e-6)  # rounding of b - (b - w), eight times


def one_and_several(delays: list[dict[str, Any]]) -> list[str]:
    return [
        scenes.digest(local_scenes.trained("vgc:alpha=0,density=0.1", {"every": 3, **more}, 9)[0].parameters())
        for more in delays
    ]


def test_no_delay_is_the_plain_one_bit_for_bit(spawn: Pool) -> None:
    plain, zero, mixed, late = spawn(2, one_and_several, [{}, {"delay": 0}, {"delay": 0, "mixing": 0.5}, {"delay": 1}])[
        0
    ]
    assert plain == zero == mixed != late


# ---- conservation


def accounts(method: str, steps: int, every: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(b0 - b) + mean of e, and the mean of all that the workers' own steps came to, with decay 1."""
    net = scenes.net()
    begin = local_scenes.weights(net)
    optimizer = local_scenes.adamw(net)
    walked = {name: torch.zeros_like(p) for name, p in begin.items()}
    before = {}

    def note(*_: object) -> None:  # comes before the wire's own hook: a round has not been carried out yet
        for name, p in net.named_parameters():
            walked[name] += before[name] - p.detach()

    optimizer.register_step_post_hook(note)
    wire = gradwire.local(net, optimizer, method, every=every, decay=1.0)
    for step in range(steps):
        before = local_scenes.weights(net)
        local_scenes.take(net, optimizer, step)
    fields = wire.state_dict()["parameters"]
    found, expected = {}, {}
    for name, start in begin.items():
        held = fields[name].get("residual", torch.zeros_like(start)).clone()
        own = walked[name].clone()
        for tensor in (held, own):
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
        found[name], expected[name] = start - fields[name]["base"] + held, own
    return found, expected


@pytest.mark.parametrize(
    "method",
    ["dense", "topk:density=0.1", "vgc:alpha=0,density=0.1", "qsgd", "fp8", "powersgd:rank=1", "randomk:density=0.1"],
)
def test_base_and_error_feedback_account_for_every_step(spawn: Pool, method: str) -> None:
    found, expected = spawn(2, accounts, method, 9, 3)[0]
    for name, own in expected.items():
        assert own.abs().max() > 0.01
        torch.testing.assert_close(found[name], own, rtol=0, atol=3e-6)  # rounding of weights up to 1, nine times


# ---- what is refused


def refusals() -> dict[str, str]:
    net = scenes.net()
    optimizer = local_scenes.adamw(net)
    found = {}

    def refused(name: str, *args: Any, **options: Any) -> None:
        with pytest.raises((AttachError, ValueError, TypeError)) as error:
            gradwire.local(*args, **options)
        found[name] = str(error.value)

    refused("no every", net, optimizer, gradwire.Dense())
    refused("variance", net, optimizer, "vgc:alpha=1.5", every=3)
    refused("rate", net, optimizer, "vgc:alpha=0,budget=1Mbit/s", every=3)
    refused("late", net, optimizer, "dense", every=3, delay=3)
    refused("fragments", net, optimizer, "dense", every=3, fragments=50)
    refused("unknown", net, optimizer, "sparse", every=3)
    refused("little", net, optimizer, "vgc:alpha=0,max_bytes_per_step=20", every=3)
    refused("other optimizer", net, local_scenes.adamw(nn.Linear(2, 2)), "dense", every=3)
    refused("double", nn.Linear(2, 2).double(), local_scenes.adamw(nn.Linear(2, 2)), "dense", every=3)
    refused("frozen", nn.Linear(2, 2).requires_grad_(False), optimizer, "dense", every=3)
    wire = gradwire.local(net, optimizer, "dense", every=3)
    refused("twice", net, optimizer, "dense", every=3)
    wire.detach()
    gradwire.local(net, optimizer, "dense", every=3).detach()
    return found


def test_refusals_say_what_to_do(spawn: Pool) -> None:
    found = spawn(2, refusals)[0]
    words = {
        "no every": "every=",
        "variance": "alpha=0",
        "rate": "max_bytes_per_step",
        "late": "less than every",
        "fragments": "5 layers",
        "unknown": "known: dense",
        "little": "heads of its messages",
        "other optimizer": "all optimizers",
        "double": "float32",
        "frozen": "no parameter",
        "twice": "detach",
    }
    assert found.keys() == words.keys()
    for name, word in words.items():
        assert word in found[name], found[name]


def other_recipe() -> None:
    net = scenes.net()
    gradwire.local(net, local_scenes.adamw(net), "dense", every=3 + dist.get_rank())


def test_ranks_that_disagree_are_told(spawn: Pool) -> None:
    with pytest.raises(WorkerError, match="do not have the same recipe of local steps"):
        spawn(2, other_recipe)


def test_without_a_process_group_it_says_what_is_missing() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(AttachError, match="init_process_group"):
        gradwire.local(net, local_scenes.adamw(net), "dense", every=3)


def test_the_example_runs() -> None:
    example = Path(__file__).parents[2] / "examples" / "local_steps.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "200 inner steps in 20 rounds" in done.stdout.splitlines()[-1]


# ---- figures


def figures() -> tuple[Any, dict[int, dict[str, float]]]:
    net = scenes.net()
    optimizer = local_scenes.adamw(net)
    wire = gradwire.local(net, optimizer, "dense", every=3, fragments=2)
    seen: dict[int, dict[str, float]] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            seen.setdefault(step, {})[tag] = value

    wire.log_to(Writer())
    for step in range(7):
        local_scenes.take(net, optimizer, step)
    F.mse_loss(torch.zeros(1), torch.zeros(1))
    stats = wire.stats()
    assert "7 inner steps in 2 rounds" in str(stats)
    assert "every=3" in repr(wire)
    wire.reset_stats()
    assert wire.stats().bytes_sent == 0
    return stats, seen


def test_stats_by_round_and_by_step(spawn: Pool) -> None:
    stats, seen = spawn(2, figures)[0]
    numel = sum(p.numel() for p in scenes.net().parameters())
    flags = 12  # beside every exchange: who contributes, who finishes, whose buffers are finite
    # after steps 2, 3, 5 and 6
    assert (stats.steps, stats.rounds, stats.exchanges) == (7, 2, 4)
    assert stats.bytes_sent == 2 * 4 * numel + 4 * flags
    assert stats.dense_bytes == 7 * 4 * numel
    assert stats.bytes_a_step == stats.bytes_sent / 7
    assert stats.lost_rounds == 0
    assert sorted(seen) == [3, 6]
    assert seen[6]["gradwire/rounds"] == 2
