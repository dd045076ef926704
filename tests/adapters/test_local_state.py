"""Local steps saved and gone on with: bit for bit, also in the middle of a round; on another number of workers."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import local_scenes
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
import scenes
from gradwire.errors import CheckpointError
from workers import Pool

VGC = "vgc:alpha=0,density=0.1"
ALL: list[tuple[str, dict[str, Any]]] = [
    (VGC, {"every": 4}),
    (VGC, {"every": 4, "fragments": 3, "delay": 2, "outer_momentum": 0.9, "outer_lr": 0.5}),
    ("dense", {"every": 3, "delay": 2, "mixing": 0.5}),
    ("qsgd", {"every": 2, "fragments": 2}),
    ("powersgd:rank=2", {"every": 3}),
    ("vgc:alpha=0,floor=0.01", {"every": 2}),
    ("diloco", {"every": 4}),
]


def normed() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5))


def on_the_disk(content: Any) -> Any:
    """As it comes back from a file."""
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits(net: nn.Module, wire: Any) -> str:
    fields = wire.state_dict()["parameters"]
    saved = [value for name in sorted(fields) for _, value in sorted(fields[name].items())]
    return scenes.digest([*net.state_dict().values(), *saved])


def resumed(method: str, options: dict[str, Any], at: int, steps: int) -> tuple[str, str]:
    """The bits after `steps` inner steps, without an interruption and with one after `at`."""
    found = []
    for stops in (False, True):
        net = normed()
        optimizer = local_scenes.adamw(net)
        wire = gradwire.local(net, optimizer, method, **options)
        for step in range(steps):
            if stops and step == at:
                states = {"model": net, "optimizer": optimizer, "wire": wire}
                saved = on_the_disk({name: one.state_dict() for name, one in states.items()})
                wire.detach()
                net = normed()
                net.load_state_dict(saved["model"])
                for parameter in net.parameters():
                    nn.init.constant_(parameter, 0.5)  # the wire's state has them
                optimizer = local_scenes.adamw(net)
                optimizer.load_state_dict(saved["optimizer"])
                wire = gradwire.local(net, optimizer, method, **options)
                wire.load_state_dict(saved["wire"])
            local_scenes.take(net, optimizer, step)
        wire.finish()
        found.append(bits(net, wire))
        wire.detach()
    return found[0], found[1]


@pytest.mark.parametrize(("method", "options"), ALL, ids=[f"{m} {o}" for m, o in ALL])
def test_resume_is_no_interruption(spawn: Pool, method: str, options: dict[str, Any]) -> None:
    for at in (4, 7):  # at the end of a round of four, and in the middle of it
        for whole, interrupted in spawn(2, resumed, method, options, at, 11):
            assert whole == interrupted


# ---- through torch.distributed.checkpoint, and on another number of workers


def begin(method: str, options: dict[str, Any], folder: str, steps: int) -> dict[str, Any]:
    net, _, wire = local_scenes.trained(method, options, steps)
    gradwire.save(wire, folder)
    return {"bits": bits(net, wire), "fields": wire.state_dict()["parameters"], "steps": wire.steps}


def go_on(method: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    net = scenes.net(seed=5)
    optimizer = local_scenes.adamw(net)
    wire = gradwire.local(net, optimizer, method, **options)
    gradwire.load(wire, folder)
    loaded, fields, steps = bits(net, wire), wire.state_dict()["parameters"], wire.steps
    for step in range(4):
        local_scenes.take(net, optimizer, step)
    wire.finish()
    return {"bits": loaded, "fields": fields, "steps": steps, "end": scenes.digest(net.parameters())}


@pytest.mark.parametrize("options", [{"every": 4}, {"every": 4, "fragments": 2, "delay": 2}])
def test_saved_for_all_ranks(spawn: Pool, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = str(tmp_path / "wire")
    saved = spawn(2, begin, VGC, options, folder, 6)
    loaded = spawn(2, go_on, VGC, options, folder)
    for before, after in zip(saved, loaded, strict=True):
        assert before["bits"] == after["bits"]
        assert after["steps"] == 6
    assert saved[0]["bits"] != saved[1]["bits"]  # each rank has its own
    assert loaded[0]["end"] == loaded[1]["end"]


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("options", [{"every": 4}, {"every": 4, "delay": 2, "outer_momentum": 0.9}])
def test_on_another_number_of_workers(spawn: Pool, tmp_path: Path, workers: int, options: dict[str, Any]) -> None:
    """k = W'/W: e' = k (sum of those that come together); all begin at the base weights."""
    folder, k = str(tmp_path / "wire"), workers / 2
    saved = [one["fields"] for one in spawn(2, begin, VGC, options, folder, 5)]
    found = spawn(workers, go_on, VGC, options, folder)
    for rank, one in enumerate(found):
        for name, fields in one["fields"].items():
            parts = [saved[old][name]["residual"] for old in range(rank, 2, workers)]
            expected = k * sum(parts) if parts else torch.zeros_like(fields["residual"])
            assert torch.equal(fields["residual"], expected)
            assert torch.equal(fields["weights"], fields["base"])
            assert torch.equal(fields["base"], found[0]["fields"][name]["base"])
    assert len({one["end"] for one in found}) == 1
    mean_before = sum(one["0.weight"]["residual"] for one in saved) / 2
    mean_after = sum(one["fields"]["0.weight"]["residual"] for one in found) / workers
    torch.testing.assert_close(mean_after, mean_before)
    if "delay" in options:  # what was on its way has been applied
        assert not torch.equal(found[0]["fields"]["0.weight"]["base"], saved[0]["0.weight"]["base"])


# ---- what is refused, before anything is changed


def damaged(which: str) -> str:
    net, _, wire = local_scenes.trained(VGC, {"every": 4, "delay": 2}, 5)
    state = copy.deepcopy(wire.state_dict())
    fields = state["parameters"]["0.weight"]
    changes: dict[str, Any] = {
        "shape": lambda: fields.update(base=torch.zeros(3)),
        "not finite": lambda: fields["residual"].fill_(float("nan")),
        "step": lambda: state["local"].update(inner=-1),
        "step is no number": lambda: state["local"].update(inner="5"),
        "flights": lambda: state["local"].update(flights={"7": [0, 1]}),
        "no local": lambda: state.pop("local"),
        "fragments": lambda: state["local"].update(since_dense=[0, 0]),
        "rank": lambda: state.update(rank=1 - state["rank"]),
        "one rank": lambda: fields.update(base=torch.zeros(3)) if dist.get_rank() else None,
    }
    changes[which]()
    before = bits(net, wire)
    with pytest.raises(CheckpointError) as error:
        wire.load_state_dict(state)
    assert bits(net, wire) == before
    return str(error.value)


WORDS = {
    "shape": "has shape",
    "not finite": "not finite",
    "step": "local steps have",
    "step is no number": "damaged",
    "flights": "local steps have",
    "no local": "gradwire.attach",
    "fragments": "fragments=",
    "rank": "gradwire.reshard",
    "one rank": "",
}


@pytest.mark.parametrize("which", WORDS)
def test_a_damaged_state_changes_nothing(spawn: Pool, which: str) -> None:
    for text in spawn(2, damaged, which):
        assert WORDS[which] in text


def of_attach() -> str:
    net = scenes.net()
    model = scenes.ddp(net)
    state = gradwire.attach(model, VGC).state_dict()
    other = scenes.net()
    wire = gradwire.local(other, local_scenes.adamw(other), VGC, every=2)
    with pytest.raises(CheckpointError) as error:
        wire.load_state_dict(state)
    return str(error.value)


def test_a_state_of_attach_is_refused(spawn: Pool) -> None:
    assert "not of local steps" in spawn(2, of_attach)[0]
