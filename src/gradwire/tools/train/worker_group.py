"""The workers of a run as one of them sees them: its rank, its device, and the few things they do together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gradwire.tools.input_errors import InputError
from gradwire.tools.train.task import Task

LAUNCHER = "GRADWIRE_LAUNCHER"  # the pid of the process that has started a worker
STORE = "GRADWIRE_STORE"  # a folder that nobody else may open: the workers of one machine meet in it
TIMEOUT_S = 300.0  # that a worker waits for the others


@dataclass(frozen=True)
class WorkerGroup:
    """One worker's place among `world` workers."""

    rank: int
    world: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this worker writes the files."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all workers."""
        total = tensor.to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all workers, stacked by rank; they must have one shape."""
        mine = tensor.to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone)

    def tell(self, *numbers: int) -> list[int]:
        """Rank 0's numbers, on every rank."""
        message = torch.tensor(numbers, device=self.device)
        dist.broadcast(message, 0)
        return [int(number) for number in message.tolist()]

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """The model, trained by all workers."""
        gpu = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=gpu)

    def score(self, task: Task, model: nn.Module) -> dict[str, float]:
        """The task's scores on the held-out data, each worker testing its share of it."""
        for buffer in model.buffers():  # those of rank 0, as DDP does before a step: all test with one set of them
            dist.broadcast(buffer, 0)
        model.eval()
        with torch.no_grad():
            totals = task.evaluate(model, slice(self.rank, None, self.world))
        model.train()
        return task.score(self.sum(totals))

    def synchronize(self) -> None:
        """Wait for this worker's GPU, so that a clock read now means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait for all workers."""
        dist.barrier()


@contextmanager
def own_buffers(model: nn.Module) -> Iterator[None]:
    """A test takes the buffers of rank 0, on all ranks; afterwards each has its own again, which local steps need."""
    buffers = list(model.buffers())
    own = [buffer.clone() for buffer in buffers]
    yield
    for buffer, mine in zip(buffers, own, strict=True):
        buffer.copy_(mine)


def inside_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a worker that torchrun has started."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def choose_device(wanted: str, local_rank: int, local_world: int) -> torch.device:
    """A GPU of its own for every worker on this machine, or the CPU for all of them."""
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and n_gpus < local_world:
        raise InputError(f"--device cuda: {local_world} workers on this machine need a GPU each, there are {n_gpus}")
    if wanted == "cpu" or n_gpus < local_world:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def divide_cores(local_world: int, environment: Mapping[str, str] = os.environ) -> None:
    """A fair part of this machine's cores for every worker, unless OMP_NUM_THREADS says how many: torch has read it.

    Whoever set it knows what else runs here: the hosts of a lab have one worker each and share the cores all the same.
    """
    if not environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))


@contextmanager
def joined(device_name: str, timeout_s: float = TIMEOUT_S) -> Iterator[WorkerGroup]:
    """Join the process group torchrun has described in the environment, and leave it at the end."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = choose_device(device_name, local_rank, local_world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    divide_cores(local_world)
    if rank != 0:
        warnings.simplefilter("ignore")  # rank 0 warns for all
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timeout,
        rank=rank,
        world_size=world,
        store=meeting_store(world, timeout),
        device_id=device if device.type == "cuda" else None,
    )
    yield WorkerGroup(rank, world, device)
    dist.destroy_process_group()  # not after an error: the others may never come, and the process ends anyway


def meeting_store(world: int, timeout: timedelta) -> Store | None:
    """Where the workers of this attempt find each other; None: where torchrun's variables say.

    torchrun's agent may serve one store for all attempts, with the addresses of workers that have died in it (torch
    2.13: what comes after a restart fails or hangs). On one machine the number of restarts keeps them apart. On several
    it does not: every agent counts its own.
    """
    attempt = restarts()
    if STORE in os.environ:
        return FileStore(f"{os.environ[STORE]}/workers-{attempt}", world)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
        port = int(os.environ["MASTER_PORT"])
        shared = TCPStore(os.environ["MASTER_ADDR"], port, world, is_master=False, timeout=timeout)
        return PrefixStore(f"attempt-{attempt}", shared)
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise InputError(
            "torchrun would not survive a restart: its store keeps the addresses of workers that have died. On every "
            "machine put TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, or leave out --max-restarts"
        )
    return None


def restarts() -> int:
    """How often torchrun's agent on this machine has started its workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
