"""Models that `attach` cannot take, known by the names of their classes: what each is, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

INSTEAD = "use DistributedDataParallel(net) in its place and attach that"
MIXED_PRECISION = (
    "this DistributedDataParallel model has mixed_precision=, which casts its parameters and takes DDP's one hook: "
    "leave it out and run the forward under torch.autocast, with float16 and a GradScaler attach(..., scaler=scaler)"
)
LIGHTNING = (
    "a part of Lightning, whose Trainer wraps the model itself: with Trainer(strategy='ddp') attach "
    "trainer.strategy.model in on_train_start"
)


def refusal(model: Any) -> str:
    """Of anything that is no DistributedDataParallel."""
    if (known := _known(model)) is not None:
        return f"expected a DistributedDataParallel model, and this is {known}"
    return (
        f"expected a DistributedDataParallel model, got {type(model).__name__}: wrap it first, model = "
        "DistributedDataParallel(net) (with Accelerate model = accelerator.prepare(net); transformers' Trainer has it "
        "as trainer.model_wrapped), then gradwire.attach(model, ...)"
    )


def _known(model: Any) -> str | None:
    model = getattr(model, "_orig_mod", model)  # torch.compile
    for kind in type(model).__mro__:
        package = kind.__module__.partition(".")[0]
        known = KINDS.get((ALIASES.get(package, package), kind.__name__))
        if known is not None:
            return known if isinstance(known, str) else known(model)
    return None


def _sharded(model: Any) -> str:
    placements = [place for p in model.parameters() for place in getattr(p, "placements", ())]
    strategy = getattr(getattr(model, "sharding_strategy", None), "name", "")
    hybrid = any(place.is_replicate() for place in placements) or "HYBRID" in strategy
    return (
        f"{'HSDP (hybrid sharding)' if hybrid else 'FSDP'}: ranks hold and exchange shards, and there is no all-reduce "
        f"of DDP's that gradwire could stand in. If the model fits one device, {INSTEAD}"
    )


def _of_fabric(model: Any) -> str:
    inner = getattr(model._forward_module, "_orig_mod", model._forward_module)
    if isinstance(inner, DistributedDataParallel):
        return (
            "Lightning Fabric's wrapper: attach what it calls, gradwire.attach(model._forward_module, ...), and go on "
            "training the wrapper"
        )
    within = _known(inner) or f"{type(inner).__name__}, which is not distributed: Fabric(strategy='ddp') makes it so"
    return f"Lightning Fabric's wrapper of {within}"


# by package and class, of which the model's may be derived
KINDS: dict[tuple[str, str], str | Callable[[Any], str]] = {
    ("torch", "FullyShardedDataParallel"): _sharded,
    ("torch", "FSDPModule"): _sharded,
    ("torch", "ReplicateModule"): f"torch's replicate(), which has no hook for gradwire: {INSTEAD}",
    ("torch", "DDP"): f"torch's replicate(), whose hook cannot be reached: {INSTEAD}",
    ("torch", "DataParallel"): f"DataParallel, one process for all devices: start one for each and {INSTEAD}",
    ("deepspeed", "DeepSpeedEngine"): f"DeepSpeed's engine, which sums gradients by itself: {INSTEAD}",
    ("lightning", "_FabricModule"): _of_fabric,
    ("lightning", "LightningModule"): LIGHTNING,
    ("lightning", "Trainer"): LIGHTNING,
    ("lightning", "Strategy"): LIGHTNING,
}
ALIASES = {"pytorch_lightning": "lightning", "lightning_fabric": "lightning"}  # the same code, published twice
