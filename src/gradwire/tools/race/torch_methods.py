"""What torch itself brings: all-reduces, its hooks of DistributedDataParallel, and local steps by its post-localSGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging import averagers
from torch.nn.parallel import DistributedDataParallel

from gradwire.plan.model import FLOAT_BYTES
from gradwire.tools.input_errors import InputError
from gradwire.tools.race.entry import RaceEntry, Sent

ONE_BUCKET = {"bucket_cap_mb": 1024}

Begin = Callable[[DistributedDataParallel], Sent]  # registers a hook
Alone = Callable[[nn.Module, torch.optim.Optimizer], RaceEntry]  # of local steps, which make what they need themselves


@dataclass(frozen=True)
class TorchMethod:
    """A row of the table: one of the two ways to begin, its options, its buckets."""

    begin: Callable[..., Sent] | None = None
    alone: Callable[..., RaceEntry] | None = None
    options: tuple[str, ...] = ()
    buckets: dict[str, Any] = field(default_factory=dict)


def find(spec: str, rest: str) -> tuple[Begin | None, Alone | None, dict[str, Any]]:
    """How `torch:rest` begins, and its buckets; an InputError where there is none of this name, or no such option."""
    name, _, options = rest.partition(":")
    if name not in TORCH:
        raise InputError(f"method {spec!r} does not exist. torch's: {', '.join(f'torch:{name}' for name in TORCH)}")
    known = TORCH[name]
    given = {}
    for option in filter(None, options.split(",")):
        key, _, value = (part.strip() for part in option.partition("="))
        if key not in known.options or not value.isdecimal() or int(value) < 1:
            takes = f"whole numbers from 1 for {', '.join(known.options)}" if known.options else "no options"
            raise InputError(f"method {spec!r}: {option!r} is not possible; torch:{name} takes {takes}")
        given[key] = int(value)
    begin = None if known.begin is None else partial(known.begin, **given)
    return begin, None if known.alone is None else partial(known.alone, **given), known.buckets


def _allreduce(model: DistributedDataParallel) -> Sent:
    """Plain DistributedDataParallel."""
    return lambda steps: steps * FLOAT_BYTES * _size(model)


def _fp16(model: DistributedDataParallel) -> Sent:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return lambda steps: steps * FLOAT_BYTES // 2 * _size(model)


def _bf16(model: DistributedDataParallel) -> Sent:
    """By its name torch refuses the hook on Gloo, whose sums take bfloat16 since."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and takes no text for them
        return default_hooks.bf16_compress_hook(None, bucket)  # type: ignore[arg-type]

    model.register_comm_hook(None, hook)
    return lambda steps: steps * FLOAT_BYTES // 2 * _size(model)


def _powersgd(model: DistributedDataParallel, rank: int = 1, start: int = 2) -> Sent:
    """start: steps of plain all-reduce before it; torch wants at least 2 of them."""
    first = max(2, start)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=first)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def sent(steps: int) -> int:
        plain = min(steps, first)
        return FLOAT_BYTES * (plain * _size(model) + int(state.total_numel_after_compression))

    return sent


def _postlocalsgd(model: nn.Module, optimizer: torch.optim.Optimizer, every: int = 4, start: int = 1) -> RaceEntry:
    """As its documentation has it: `start` steps of all-reduce, then the weights are averaged every so many steps.

    Each host is a machine of one worker, so nothing is summed within a machine.
    """
    ddp = DistributedDataParallel(model)
    state: Any = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
        None, None, start, post_local_gradient_allreduce=False
    )
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=every, warmup_steps=start)

    def after_step() -> None:
        averager.average_parameters(ddp.parameters())

    def sent(steps: int) -> int:
        averages = 1 + (steps - start - 1) // every if steps > start else 0
        return FLOAT_BYTES * _size(model) * (min(steps, start) + averages)

    return RaceEntry(ddp, sent, after_step, partial(_averaged, model), warm=partial(_sum_once, model))


@contextmanager
def _averaged(model: nn.Module) -> Iterator[None]:
    """The mean of what the workers have now: it is what would be averaged if training ended here."""
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            mean = parameter / dist.get_world_size()
            dist.all_reduce(mean)
            parameter.copy_(mean)
        yield
        for parameter, mine in zip(model.parameters(), own, strict=True):
            parameter.copy_(mine)


def _sum_once(model: nn.Module) -> None:
    """A sum as large as the average to come."""
    dist.all_reduce(torch.zeros(_size(model)))


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# PowerSGD's later sums of a bucket begin when the first has come, in another order on another rank: with more than one
# bucket it hangs on Gloo.
TORCH: dict[str, TorchMethod] = {
    "allreduce": TorchMethod(_allreduce),
    "fp16": TorchMethod(_fp16),
    "bf16": TorchMethod(_bf16),
    "powersgd": TorchMethod(_powersgd, options=("rank", "start"), buckets=ONE_BUCKET),
    "postlocalsgd": TorchMethod(alone=_postlocalsgd, options=("every", "start")),
}
