"""Step 5: the ordered courier over torch.distributed, and the agreement that comes before any sized message."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import queue
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import DisagreementError

# torch 2.13 renames all_gather_into_tensor and warns about the old name, which is the only one before it
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

TEXT = 160  # bytes of each fact that are shown when ranks disagree


class Courier:
    """One thread and one process group of its own, shared by all models on the same original group.

    Takes work in the order DDP hands it over, the same on every rank, and runs it piece by piece. A collective started
    from a future's callback would run in an order of its own: torch's PowerSGD hook deadlocks on Gloo for that reason.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        local = len(ranks) < dist.get_world_size()  # other ranks do not come here: only the members meet
        self.group = dist.new_group(
            ranks, timeout=_timeout(group), backend=dist.get_backend(group), use_local_synchronization=local
        )
        self.world_size = len(ranks)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradwire-courier", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # or the last step's tensors would live until the next one

    def _stop(self) -> None:
        """At exit: a thread that is still inside C++ when Python ends takes the whole process down (SIGABRT).

        That is our own thread, and Gloo's, which may still hold the last message: without the group they are joined.
        """
        self._work.put(None)
        self._thread.join(timeout=5)  # not for ever: it may wait for a rank that is gone
        if not self._thread.is_alive() and dist.get_backend_config(self.group).startswith("gloo"):
            with contextlib.suppress(Exception):  # the program may have destroyed all groups already
                dist.destroy_process_group(self.group)
            del self.group

    def submit(self, work: Callable[[], None]) -> None:
        """Queues `work`, which must handle its own exceptions."""
        self._work.put(work)

    def gather(self, message: Tensor) -> Tensor:
        """Every rank's message, [W, words]; called from the courier's own thread."""
        out = message.new_empty(self.world_size * message.numel())
        all_gather(out, message, group=self.group)
        return out.view(self.world_size, -1)

    def sum(self, tensor: Tensor) -> None:
        """tensor = its sum over the ranks; called from the courier's own thread."""
        dist.all_reduce(tensor, group=self.group)


_couriers: WeakKeyDictionary[dist.ProcessGroup, Courier] = WeakKeyDictionary()


def courier_of(group: dist.ProcessGroup) -> Courier:
    """The courier of this process group; collective when it is the first time."""
    if group not in _couriers:
        _couriers[group] = Courier(group)
    return _couriers[group]


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The original group's timeout: a rank that never comes is met as plain DDP would meet it."""
    options = getattr(group._get_backend(torch.device(_device_type(group))), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def _device_type(group: dist.ProcessGroup) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def agree(group: dist.ProcessGroup, facts: Mapping[str, str]) -> None:
    """Raises on every rank when any fact differs between ranks. Collective, of a fixed size.

    Unequal sizes make Gloo abort one rank and hand another truncated data without an error; so this comes first.
    """
    mine = b"".join(_digest(key, value) for key, value in facts.items())
    device = torch.device(_device_type(group))
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    world_size = dist.get_world_size(group)
    received = sent.new_empty(world_size * len(sent))
    all_gather(received, sent, group=group)
    rows = received.view(world_size, len(facts), -1).cpu()
    for number, key in enumerate(facts):
        column = [bytes(row.tolist()) for row in rows[:, number]]
        if len(set(column)) > 1:
            shown = (
                f"rank {rank}: {fact[32:].rstrip(bytes(1)).decode(errors='replace')}"
                for rank, fact in enumerate(column)
            )
            raise DisagreementError(f"the ranks do not have the same {key}. " + "; ".join(shown))


def _digest(key: str, value: str) -> bytes:
    """32 bytes that tell two values apart and the beginning of the value, to show."""
    return hashlib.sha256(f"{key}\n{value}".encode()).digest() + value.encode()[:TEXT].ljust(TEXT, b"\0")
