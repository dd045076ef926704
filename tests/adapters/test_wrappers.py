"""Models that something else wraps: `attach` says what each is and what to do, and what it says works."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire
import scenes
from gradwire import VGC
from gradwire.errors import AttachError

INSTEAD = "use DistributedDataParallel(net) in its place and attach that"


def stand_in(package, name, base=nn.Module):
    """A class of that name in that module, where the library itself is not installed."""
    return type(name, (base,), {"__module__": package})


class Net(nn.Linear):
    def __init__(self):
        super().__init__(12, 5)


def fsdp1(strategy):
    from torch.distributed import fsdp

    return fsdp.FullyShardedDataParallel(
        scenes.net(),
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", (1, 2) if "HYBRID" in strategy else (2,)),
        sharding_strategy=fsdp.ShardingStrategy[strategy],
    )


def fsdp2(*shape):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(
        scenes.net(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    )


def replicate(module):
    library = pytest.importorskip(f"torch.distributed._composable.{module}")
    options = {} if module == "replicate" else {"mesh": init_device_mesh("cpu", (2,))}
    return library.replicate(scenes.net(), **options)


def mixed_precision():
    from torch.nn.parallel.distributed import _MixedPrecision

    return scenes.ddp(scenes.net(), mixed_precision=_MixedPrecision(torch.bfloat16, torch.bfloat16))


class Calls(nn.Module):
    """As Fabric's wrapper does it."""

    def __init__(self, forward_module):
        super().__init__()
        self._forward_module = forward_module

    def forward(self, *args):
        return self._forward_module(*args)


def fabric(inner, package="lightning.fabric.wrappers"):
    return stand_in(package, "_FabricModule", Calls)(inner)


def lightning(package="lightning.pytorch.core.module"):
    return type("Mine", (stand_in(package, "LightningModule"),), {})()


CASES = {
    "FSDP1": (lambda: fsdp1("FULL_SHARD"), "FSDP: ranks hold and exchange shards", INSTEAD),
    "HSDP by FSDP1": (lambda: fsdp1("HYBRID_SHARD"), "HSDP (hybrid sharding)", INSTEAD),
    "FSDP2": (lambda: fsdp2(2), "FSDP: ranks hold and exchange shards", INSTEAD),
    "HSDP by FSDP2": (lambda: fsdp2(1, 2), "HSDP (hybrid sharding)", INSTEAD),
    "compiled FSDP2": (lambda: torch.compile(fsdp2(2)), "FSDP: ranks hold and exchange shards", INSTEAD),
    "replicate": (lambda: replicate("replicate"), "torch's replicate()", INSTEAD),
    "replicate, the newer": (lambda: replicate("replicate_with_fsdp"), "torch's replicate()", INSTEAD),
    "DataParallel": (lambda: nn.DataParallel(scenes.net()), "one process for all devices", INSTEAD),
    "DeepSpeed": (lambda: stand_in("deepspeed.runtime.engine", "DeepSpeedEngine")(), "DeepSpeed's engine", INSTEAD),
    "Fabric": (lambda: fabric(scenes.ddp(scenes.net())), "Lightning Fabric's wrapper", "model._forward_module"),
    "Fabric's own package": (
        lambda: fabric(scenes.ddp(scenes.net()), "lightning_fabric.wrappers"),
        "Lightning Fabric's wrapper",
        "model._forward_module",
    ),
    "Fabric with FSDP": (lambda: fabric(fsdp2(2)), "Lightning Fabric's wrapper of FSDP", INSTEAD),
    "Fabric alone": (lambda: fabric(scenes.net()), "which is not distributed", "Fabric(strategy='ddp')"),
    "LightningModule": (lightning, "a part of Lightning", "trainer.strategy.model in on_train_start"),
    "pytorch_lightning": (
        lambda: lightning("pytorch_lightning.core.module"),
        "a part of Lightning",
        "trainer.strategy.model in on_train_start",
    ),
    "Lightning's strategy": (
        lambda: type("DDPStrategy", (stand_in("lightning.pytorch.strategies.strategy", "Strategy", object),), {})(),
        "a part of Lightning",
        "trainer.strategy.model",
    ),
    "mixed_precision": (mixed_precision, "mixed_precision=", "torch.autocast"),
    "no wrapper": (Net, "got Net", "wrap it first, model = DistributedDataParallel(net)"),
    "Accelerate": (Net, "got Net", "accelerator.prepare(net)"),
}


def refused():
    messages = {}
    for case, (make, _, _) in CASES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 and the older replicate are deprecated
            model = make()
        with pytest.raises(AttachError) as error:
            gradwire.attach(model, VGC())
        messages[case] = str(error.value)
    return messages, [name for name in ("lightning", "deepspeed", "accelerate") if name in sys.modules]


def test_each_says_what_it_is_and_what_to_do(spawn):
    for messages, imported in spawn(2, refused):
        for case, (_, what, remedy) in CASES.items():
            assert what in messages[case], (case, messages[case])
            assert remedy in messages[case], (case, messages[case])
            assert ("wrap it first" in messages[case]) == (case in ("no wrapper", "Accelerate"))
        assert not imported  # they are known by name


def through_the_wrapper():
    """What the message of Fabric's wrapper says, to the letter."""
    model = fabric(scenes.ddp(scenes.net()))
    wire = gradwire.attach(model._forward_module, VGC(alpha=1.0))
    prints = list(scenes.train(model, range(4), scenes.sgd(model)))
    return prints, wire.steps, type(model._forward_module) is DistributedDataParallel


def test_fabrics_wrapper_trains_with_what_it_calls_attached(spawn):
    straight = spawn(2, scenes.run, VGC(alpha=1.0), 4)
    for (prints, steps, is_ddp), expected in zip(spawn(2, through_the_wrapper), straight, strict=True):
        assert prints == expected
        assert steps == 4
        assert is_ddp


class Redirected(nn.Module):
    """As Lightning trains: the wrapper's forward comes out at training_step, and puts the real forward back."""

    def __init__(self):
        super().__init__()
        self.net = scenes.net()

    def training_step(self, x):
        return self.net(x)

    def forward(self, x):
        raise AssertionError("Lightning calls the step, and nobody called forward there")


def redirected(model, x):
    inner = model.module
    original = inner.forward

    def step(*args):
        inner.forward = original
        return inner.training_step(*args)

    inner.forward = step
    return model(x)


def by_redirection():
    model = scenes.ddp(Redirected())
    wire = gradwire.attach(model, VGC(alpha=1.0))
    prints = list(scenes.train(model, range(4), scenes.sgd(model), redirected))
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        rows = wire.coverage()
    return prints, {row.kind for row in rows}, shown.getvalue()


def test_lightnings_redirected_forward_is_called_once_a_step(spawn):
    straight = spawn(2, scenes.run, VGC(alpha=1.0), 4)
    for (prints, kinds, shown), expected in zip(spawn(2, by_redirection), straight, strict=True):
        assert prints == expected
        assert kinds == {"exact"}
        assert "Redirected was replaced by a function of test_wrappers" in shown


def autocast():
    """What the message of mixed_precision= says instead."""
    model = scenes.ddp(scenes.net())
    gradwire.attach(model, VGC(alpha=1.0))

    def forward(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    return list(scenes.train(model, range(4), scenes.sgd(model), forward))


def test_autocast_in_the_place_of_mixed_precision(spawn):
    one, other = spawn(2, autocast)
    assert one == other
    assert len(set(one)) == 4
