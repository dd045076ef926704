"""Local steps and whatever else is in a training loop, over real processes."""

from __future__ import annotations

import copy
import warnings
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
from workers import Pool

VGC = "vgc:alpha=0,density=0.1"


def same(found: list[Any]) -> bool:
    return all(one == found[0] for one in found)


# ---- accumulation, clipping, schedules, groups


def full_loop() -> tuple[str, int, float]:
    net = scenes.net()
    groups = [{"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    wire = gradwire.local(net, optimizer, VGC, every=2)
    for step in range(8):
        for part in range(3):
            x, y = scenes.batch(10 * step + part)
            (F.cross_entropy(net(x), y) / 3).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return scenes.digest(net.parameters()), wire.stats().rounds, schedule.get_last_lr()[0]


def test_accumulation_clipping_schedules_and_groups(spawn: Pool) -> None:
    found = spawn(2, full_loop)
    assert same(found)
    assert found[0][1] == 4  # rounds are counted in steps of the optimizer, not in backwards


# ---- a step that a GradScaler leaves out


class Fused(torch.optim.Optimizer):
    """As fused optimizers do it: `step` is called in any case, and looks at found_inf by itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.found_inf.item() == 0:
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad / self.grad_scale, alpha=0.1)


def scaled(kind: str, overflows: int) -> tuple[str, int, int, int]:
    """Worker 1 overflows in its first steps: it takes fewer of them, and `finish` ends the rounds of both."""
    net = scenes.net()
    optimizer = Fused(net.parameters()) if kind == "fused" else torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wire = gradwire.local(net, optimizer, VGC, every=3)
    for step in range(9):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        if step < overflows and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step < 3 and overflows < 9:
            assert bool(torch.isfinite(next(net.parameters())).all())
    steps = wire.steps
    wire.finish()
    stats = wire.stats()
    return scenes.digest(net.parameters()), steps, stats.rounds, stats.lost_rounds


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_step_that_a_scaler_leaves_out_is_no_step(spawn: Pool, kind: str) -> None:
    first, second = spawn(2, scaled, kind, 2)
    assert (first[1], second[1]) == (9, 7)
    assert first[0] == second[0]
    assert first[2] == second[2] >= 4  # three that were due, and the last ones of `finish`
    assert first[3] == second[3] == 0


def goes_on_after_finish() -> list[str]:
    """Worker 1 leaves out two steps; `finish` in mid-round, then both train on, each at a step number of its own."""
    net = scenes.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wire = gradwire.local(net, optimizer, VGC, every=4, fragments=3)
    seen = []
    for step in range(20):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y) * (float("inf") if step < 2 and dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step in (6, 19):
            wire.finish()
            seen.append(scenes.digest(net.parameters()))
    return seen


def test_fragments_take_turns_whatever_each_worker_has_left_out(spawn: Pool) -> None:
    first, second = spawn(2, goes_on_after_finish)
    assert first == second
    assert len(set(first)) == 2


# ---- other optimizers, several, Muon-like


class Orthogonal(torch.optim.Optimizer):
    """Muon in short: momentum, made orthogonal by five steps of Newton and Schulz."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(0.9).add_(p.grad)
                x = velocity / (velocity.norm() + 1e-7)
                for _ in range(5):
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                p.sub_(x, alpha=group["lr"])


def two_optimizers() -> tuple[str, int, bool]:
    net = scenes.net()
    first = Orthogonal([p for p in net.parameters() if p.dim() > 1])
    second = torch.optim.AdamW([p for p in net.parameters() if p.dim() == 1], lr=1e-2)
    wire = gradwire.local(net, [first, second], VGC, every=2)
    own = []
    for step in range(6):
        x, y = scenes.batch(step)
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        first.step()
        own.append(scenes.digest(net.parameters()))
        second.step()
    return scenes.digest(net.parameters()), wire.stats().rounds, len(set(own)) == 6


def test_several_optimizers_of_any_kind(spawn: Pool) -> None:
    found = spawn(2, two_optimizers)
    assert same(found)
    assert found[0][1:] == (3, True)


class Derived(torch.optim.AdamW):
    """torch calls its hooks twice a step: for this `step`, and for the one that it calls."""

    def step(self, closure: Any = None) -> Any:
        if closure == "raise":
            raise ArithmeticError
        return super().step(closure)


def derived() -> tuple[str, int]:
    net = scenes.net()
    optimizer = Derived(net.parameters(), lr=1e-2)
    wire = gradwire.local(net, optimizer, VGC, every=2)
    for step in range(5):
        local_scenes.take(net, optimizer, step)
        if step == 1:
            with pytest.raises(ArithmeticError):
                optimizer.step("raise")
    wire.finish()
    return scenes.digest(net.parameters()), wire.steps


def test_a_class_that_calls_the_step_of_its_base_takes_one_step(spawn: Pool) -> None:
    found = spawn(2, derived)
    assert same(found)
    assert found[0][1] == 5


def lbfgs() -> str:
    net = scenes.net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)
    gradwire.local(net, optimizer, "dense", every=2)
    for step in range(4):
        x, y = scenes.batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return scenes.digest(net.parameters())


def test_lbfgs(spawn: Pool) -> None:
    assert same(spawn(2, lbfgs))


# ---- copies, tied, frozen and unused parameters


class Odd(nn.Module):
    """A tied weight, a frozen layer, and one that no forward goes through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.embedding = nn.Embedding(9, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.middle, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.frozen(self.embedding(ids)))))


def odd() -> tuple[str, bool, bool, bool, list[str]]:
    net = Odd()
    frozen, mine = net.frozen.weight.clone(), net.unused.weight.clone()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    wire = gradwire.local(net, optimizer, VGC, every=2)
    begin = net.unused.weight.clone()  # of rank 0
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    copied = copy.deepcopy(net)
    for step in range(6):
        ids = torch.randint(9, (16,), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        optimizer.zero_grad()
        F.cross_entropy(net(ids), (ids + 1) % 9).backward()
        optimizer.step()
        ema.update_parameters(net)
    assert net.head.weight is net.embedding.weight
    assert not torch.equal(copied.middle.weight, net.middle.weight)  # a copy is not trained along
    names = sorted(wire.state_dict()["parameters"])
    untouched = torch.equal(net.unused.weight, begin)
    own_frozen = torch.equal(net.frozen.weight, frozen) and (dist.get_rank() == 0 or not torch.equal(begin, mine))
    averaged = not torch.equal(ema.module.middle.weight, net.middle.weight)
    return scenes.digest(p for p in net.parameters() if p.requires_grad), untouched, own_frozen, averaged, names


def test_tied_frozen_and_unused_parameters_and_copies(spawn: Pool) -> None:
    found = spawn(2, odd)
    assert len({digest for digest, *_ in found}) == 1
    for _, untouched, own_frozen, averaged, names in found:
        assert untouched
        assert own_frozen
        assert averaged
        assert names == ["embedding.weight", "middle.bias", "middle.weight", "unused.bias", "unused.weight"]


def compiled() -> tuple[str, list[str]]:
    net = scenes.net()
    compiled_net = torch.compile(net, backend="aot_eager")
    optimizer = local_scenes.adamw(compiled_net)
    wire = gradwire.local(compiled_net, optimizer, VGC, every=2)
    for step in range(4):
        local_scenes.take(compiled_net, optimizer, step)
    return scenes.digest(net.parameters()), sorted(wire.state_dict()["parameters"])


def test_a_compiled_model(spawn: Pool) -> None:
    found = spawn(2, compiled)
    assert same(found)
    assert found[0][1] == sorted(name for name, _ in scenes.net().named_parameters())


# ---- lower precision


def in_bfloat16(every: int) -> tuple[str, float, float]:
    """(bits, how far the base is from the weights after a round, how far it has come)."""
    net = scenes.net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    wire = gradwire.local(net, optimizer, "topk:density=0.2,exact=true", every=every)
    start = torch.cat([p.detach().float().flatten() for p in net.parameters()])
    for step in range(4 * every):
        x, y = scenes.batch(step)
        optimizer.zero_grad()
        F.cross_entropy(net(x.to(torch.bfloat16)).float(), y).backward()
        optimizer.step()
    fields = wire.state_dict()["parameters"]
    base = torch.cat([fields[name]["base"].flatten() for name, _ in net.named_parameters()])
    weights = torch.cat([p.detach().float().flatten() for p in net.parameters()])
    return (
        scenes.digest([weights]),
        float(((base - weights).abs() / base.abs().clamp(min=1e-9)).max()),
        float((base - start).abs().max()),
    )


def test_bfloat16_parameters_are_the_rounded_base(spawn: Pool) -> None:
    found = spawn(2, in_bfloat16, 3)
    assert same(found)
    assert 0 < found[0][1] <= 2.0**-8
    assert found[0][2] > 0.01


# ---- batch norm


def batch_norm(buffers: str | None, delay: int) -> tuple[Tensor, Tensor, int]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    net.register_buffer("table", torch.arange(3.0) + dist.get_rank())
    optimizer = local_scenes.adamw(net)
    options = {} if buffers is None else {"buffers": buffers}
    gradwire.local(net, optimizer, "dense", every=3, delay=delay, **options)
    for step in range(6 + delay):
        local_scenes.take(net, optimizer, step)
    return net[1].running_mean.clone(), net.table.clone(), int(net[1].num_batches_tracked)


def test_statistics_are_averaged_or_kept(spawn: Pool) -> None:
    first, second = spawn(2, batch_norm, None, 0)  # the default
    assert torch.equal(first[0], second[0])
    assert first[0].abs().max() > 0
    assert not torch.equal(first[1], second[1])  # other buffers are tables: each its own
    assert first[2] == 6
    kept = spawn(2, batch_norm, "keep", 0)
    assert not torch.equal(kept[0][0], kept[1][0])
    late = spawn(2, batch_norm, None, 2)
    assert not torch.equal(late[0][0], late[1][0])  # the mean, and what each has seen in the meantime
    assert (late[0][0] - late[1][0]).abs().max() < (kept[0][0] - kept[1][0]).abs().max()


# ---- workers of several ranks


def worker_groups() -> tuple[Any, Any]:
    """Four ranks, two workers of two: (this rank's worker, the ranks that are to exchange)."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return inside[rank // 2], between[rank % 2]


def ddp_inside() -> tuple[str, float]:
    inside, between = worker_groups()
    net = scenes.net()
    model = DistributedDataParallel(net, process_group=inside)
    optimizer = local_scenes.adamw(model)
    gradwire.local(model, optimizer, VGC, every=2, group=between)
    losses = [local_scenes.take(model, optimizer, step) for step in range(8)]
    return scenes.digest(net.parameters()), losses[0] - losses[-1]


def test_a_worker_that_is_ddp_itself(spawn: Pool) -> None:
    found = spawn(4, ddp_inside)
    assert len({digest for digest, _ in found}) == 1
    assert sum(gain for _, gain in found) > 0


def fsdp_inside(every: int) -> tuple[list[Tensor], int]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("worker", "shard"))
    net = scenes.net()
    fully_shard(net, mesh=mesh["shard"])
    optimizer = local_scenes.adamw(net)
    wire = gradwire.local(net, optimizer, "topk:density=0.2,exact=true", every=every, group=mesh["worker"].get_group())
    for step in range(2 * every):
        local_scenes.take(net, optimizer, step)
    sent = wire.stats().bytes_sent
    assert rank == dist.get_rank()
    return [p.full_tensor().detach() for p in net.parameters()], sent


def test_a_worker_that_is_sharded(spawn: Pool) -> None:
    """FSDP2: each rank exchanges its own shard with the other workers' ranks that hold the same."""
    found = spawn(4, fsdp_inside, 2)
    for whole, _ in found[1:]:
        for mine, theirs in zip(found[0][0], whole, strict=True):
            assert torch.equal(mine, theirs)
    assert found[0][1] > 0


# ---- numbers that are not finite


def broken(who: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """In inner step 5 the gradients of these workers are NaN; a round has three steps."""
    net = scenes.net()
    optimizer = local_scenes.adamw(net)
    wire = gradwire.local(net, optimizer, VGC, every=3, **options)
    base = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 13):
            x, y = scenes.batch(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            (loss * float("nan") if step == 5 and dist.get_rank() in who else loss).backward()
            optimizer.step()
            with wire.base_weights():
                base.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    words = [str(one.message) for one in caught if "not finite" in str(one.message)]
    finite = all(bool(torch.isfinite(p).all()) for p in net.parameters())
    state = all(bool(torch.isfinite(v).all()) for s in optimizer.state.values() for v in s.values())
    wire.finish()
    return {
        "base": base,
        "words": words,
        "finite": finite and state,
        "lost": wire.stats().lost_rounds,
        "digest": scenes.digest(net.parameters()),
    }


@pytest.mark.parametrize("options", [{}, {"outer_momentum": 0.9, "outer_lr": 0.5}, {"delay": 2}, {"fragments": 3}])
def test_a_worker_that_went_wrong_contributes_nothing(spawn: Pool, options: dict[str, Any]) -> None:
    first, second = spawn(2, broken, [1], options)
    assert first["digest"] == second["digest"]
    assert first["finite"]
    assert second["finite"]
    assert not first["words"]
    assert "contributes nothing to this round" in second["words"][0]
    assert (first["lost"], second["lost"]) == (0, 1)
    for mine, theirs in zip(first["base"], second["base"], strict=True):
        assert torch.equal(mine, theirs)
        assert bool(torch.isfinite(mine).all())
    if not options:
        assert not torch.equal(first["base"][5], first["base"][4])  # the other one's round counts


@pytest.mark.parametrize("options", [{}, {"outer_momentum": 0.9, "outer_lr": 0.5}])
def test_where_all_went_wrong_the_base_stays(spawn: Pool, options: dict[str, Any]) -> None:
    first, second = spawn(2, broken, [0, 1], options)
    for one in (first, second):
        assert one["finite"]
        assert one["lost"] == 1
        assert torch.equal(one["base"][5], one["base"][4])
        assert not torch.equal(one["base"][8], one["base"][5])  # and it goes on
    assert first["digest"] == second["digest"]


def broken_statistics() -> Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    optimizer = local_scenes.adamw(net)
    gradwire.local(net, optimizer, "dense", every=3)
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            net[1].running_var.fill_(float("inf"))
        local_scenes.take(net, optimizer, step)
    return net[1].running_var.clone()


def test_statistics_that_are_not_finite_are_left_out(spawn: Pool) -> None:
    first, second = spawn(2, broken_statistics)
    assert torch.equal(first, second)
    assert bool(torch.isfinite(first).all())


# ---- how it ends


def leftover() -> tuple[list[str], str, str]:
    net, optimizer, wire = local_scenes.trained(VGC, {"every": 5}, 7)
    own = scenes.digest(net.parameters())
    with wire.base_weights():
        base = scenes.digest(net.parameters())
    assert own == scenes.digest(net.parameters())
    wire.finish()
    finished = scenes.digest(net.parameters())
    wire.detach()
    local_scenes.take(net, optimizer, 99)
    with pytest.raises(gradwire.errors.GradwireError, match="detached"):
        wire.finish()
    return [own, scenes.digest(net.parameters())], base, finished


def test_finish_and_detach(spawn: Pool) -> None:
    first, second = spawn(2, leftover)
    assert first[0][0] != second[0][0]  # each worker is two steps into a round of its own
    assert first[1] == second[1]
    assert first[2] == second[2] != first[1]
    assert first[0][1] != second[0][1]  # alone again
