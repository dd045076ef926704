"""The methods of other projects, one function each, run in the same processes on the same gradients as ours.

torch's hooks come with torch. The others are read from the folder that the environment variable GRADWIRE_PEERS names,
with a checkout of each project under the name given here; what is not there is a row that says so:

    grace      https://github.com/sands-lab/grace       (grace_dl.dist, BSD-2-Clause)
    powersgd   https://github.com/epfml/powersgd        (powersgd, MIT)
    DeMo       https://github.com/bloc97/DeMo           (demo.py, no licence; it needs einops)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

FOLDER = "GRADWIRE_PEERS"
ONE_BUCKET_MB = 1024

Step = Callable[[], None]


@dataclass(frozen=True)
class Twin:
    """Somebody else's method: `make(model, *args)` gives what follows a backward, or attaches itself to DDP."""

    name: str
    make: Callable[..., Any]
    args: tuple[Any, ...] = ()
    project: str | None = None  # the folder it is read from; None: torch's own
    hook: bool = False  # of DistributedDataParallel
    one_bucket: bool = False  # it hangs on Gloo with several
    optimizes: bool = False  # it updates the parameters too

    @property
    def missing(self) -> str | None:
        """Why it cannot run here."""
        return None if self.project is None or folder_of(self.project) else f"{self.name}: not installed"


def folder_of(project: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    return Path(folder, project) if folder and Path(folder, project).is_dir() else None


def use(project: str) -> None:
    """Makes a project importable."""
    folder = folder_of(project)
    assert folder is not None  # `missing` was asked before
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def torch_fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def torch_powersgd(model: DistributedDataParallel, rank: int) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def grace(model: nn.Module, compressor: str, memory: str, communicator: str, options: dict[str, Any]) -> Step:
    """As its examples use it: every parameter's gradient by itself, after the backward."""
    use("grace")
    from grace_dl.dist.helper import grace_from_params

    names = {"compressor": compressor, "memory": memory, "communicator": communicator}
    worker = grace_from_params({**names, "world_size": dist.get_world_size(), **options})
    return each_gradient(model, worker.step)


def grace_powersgd(model: nn.Module, rank: int) -> Step:
    """Its own helper gives PowerSGD neither the rank nor the number of workers, and the sum instead of the mean."""
    use("grace")
    from grace_dl.dist.communicator.allreduce import Allreduce
    from grace_dl.dist.compressor.powersgd import PowerSGDCompressor
    from grace_dl.dist.memory.powersgd import PowerSGDMemory

    compressor = PowerSGDCompressor(rank, use_memory=True, world_size=dist.get_world_size())
    worker = Allreduce(compressor, PowerSGDMemory(compressor.q_memory, rank), dist.get_world_size())
    return each_gradient(model, worker.step)


def each_gradient(model: nn.Module, exchange: Callable[[Tensor, str], Tensor]) -> Step:
    def step() -> None:
        for name, parameter in model.named_parameters():
            parameter.grad = exchange(parameter.grad, name)

    return step


def epfml_powersgd(model: nn.Module, rank: int) -> Step:
    """Two iterations a step, as in the paper."""
    use("powersgd")
    from powersgd import Config, PowerSGD

    parameters = list(model.parameters())
    config = Config(rank=rank, num_iters_per_step=2, start_compressing_after_num_steps=0)
    aggregator = PowerSGD(parameters, config)
    errors: list[Tensor] = []

    def step() -> None:
        grads = [parameter.grad for parameter in parameters]
        if errors:  # it leaves in its input what it did not send; a user accumulates the next gradient onto that
            torch._foreach_add_(grads, errors)
        for parameter, mean in zip(parameters, aggregator.aggregate(grads), strict=True):
            parameter.grad = mean
        errors[:] = grads

    return step


def demo(model: nn.Module, k: int, chunk: int) -> Step:
    """The whole optimizer: it exchanges in its step."""
    use("DeMo")
    from demo import DeMo

    optimizer = DeMo(model.parameters(), lr=1e-3, compression_topk=k, compression_chunk=chunk)
    return optimizer.step


@dataclass
class Tally:
    """Counts what this process hands to collectives, whoever calls them: the same ruler for everybody."""

    n_bytes: int = 0
    _kept: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __enter__(self) -> Tally:
        from gradwire.exchange import courier as exchange

        places = [(dist, name, number) for name, number in (("all_reduce", 0), ("all_gather", 1), ("broadcast", 0))]
        for owner, name, number in [*places, (exchange, "begin_gather", 1)]:
            original = getattr(owner, name)
            self._kept.append((owner, name, original))
            setattr(owner, name, self._counting(original, number))
        return self

    def _counting(self, original: Callable[..., Any], number: int) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            tensor = args[number]
            self.n_bytes += tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

        return counting

    def __exit__(self, *_: object) -> None:
        for owner, name, original in self._kept:
            setattr(owner, name, original)
        self._kept.clear()
