"""Real Gloo processes for tests: started once for each number of workers, given one function after another."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

TIMEOUT = 60  # seconds, of the process group and of one call
# Imported once, by the process that all workers are forked from: two to three seconds of a core a worker. DDP needs
# torch._dynamo, kernels need numba. None of them starts a thread when it is imported.
READY = ["torch.distributed", "torch._dynamo", "torch.distributed.checkpoint", "gradwire", "gradwire.codec.cpu.codec"]


class WorkerError(AssertionError):
    """A function raised in a worker; carries its traceback."""


def _serve(rank: int, world_size: int, store: str, timeout: float, backend: str, pipe: Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        function, args = pipe.recv()
        try:
            torch.manual_seed(1234)  # the same start whatever ran before
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Workers:
    """`run(f, *args)` calls f(*args) in every process and returns the results by rank."""

    def __init__(self, world_size: int, timeout: float = TIMEOUT, backend: str = "gloo") -> None:
        self.world_size = world_size
        context: Any = mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")  # a fork may lose a GPU
        mp.set_forkserver_preload(READY)
        store = Path(tempfile.mkdtemp()) / "store"
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            args = (rank, world_size, str(store), timeout, backend, theirs)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.broken = False

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, args))
        return self.results(range(self.world_size))

    def results(self, ranks: Any) -> list[Any]:
        answers = {}
        for rank in ranks:
            if not self.pipes[rank].poll(TIMEOUT + 30):
                self.broken = True
                raise WorkerError(f"rank {rank} of {self.world_size} did not answer")
            answers[rank] = self.pipes[rank].recv()
        failed = {rank: text for rank, (good, text) in answers.items() if not good}
        if failed:
            self.broken = True
            raise WorkerError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()))
        return [value for _, value in answers.values()]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class Pool:
    """Workers by number, made when asked for and anew when a test broke them."""

    def __init__(self) -> None:
        self._workers: dict[int, Workers] = {}

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        workers = self._workers.get(world_size)
        if workers is None or workers.broken:
            if workers is not None:
                workers.close()
            workers = self._workers[world_size] = Workers(world_size)
        return workers.run(function, *args)

    def close(self) -> None:
        for workers in self._workers.values():
            workers.close()


os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
