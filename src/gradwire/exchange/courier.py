"""Step 5: the ordered courier over torch.distributed, and the agreement that comes before any sized message."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import DisagreementError, GradwireError

# torch 2.13 renames all_gather_into_tensor and warns about the old name, which is the only one before it
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

Work = queue.SimpleQueue[Callable[[], None] | None]

DIRECT_BYTES = 8 << 10  # of a message: what is larger goes over Gloo's ring
ALONE = (
    "rank {} waited {:.0f} s for the others in gradwire.attach (or wire.compressor = ..., detach, load_state_dict): "
    "the likely reason is that not all ranks call it, in the same order, or that one has ended ({})"
)
TEXT = 160  # bytes of each fact that are shown when ranks disagree
FACT = 32 + TEXT  # bytes of each fact that are compared


@dataclass(eq=False)
class Flight:
    """Messages on their way."""

    _message: Tensor  # kept until it has been read
    _out: Tensor
    _work: Any
    _under_way: set[Flight] = field(default_factory=set)  # those that nobody has waited for to the end

    def wait(self) -> Tensor:
        """Every rank's message, [W, words]."""
        self._work.wait()
        self._under_way.discard(self)
        return self._out


@dataclass
class _All:
    """Several pieces of work as one."""

    works: list[Any]

    def wait(self) -> None:
        while self.works:  # each once: Gloo would wait for a second message
            self.works.pop().wait()


def begin_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup) -> Any:
    """Begins an all-gather of `own` into `out`; the result's `wait()` ends it.

    Gloo has a ring, whose last message comes after W - 1 hops. Small messages go straight to every rank instead, to
    the next one first, so that no two ranks send to the same: as many bytes on every link, and one hop. Of large ones
    several arrive at a rank at once all the same, and wait for each other longer than on the ring. A GPU's go over the
    ring whatever their size: only in collectives does Gloo bring them to the host, a send takes their address for one.
    """
    if dist.get_backend(group) != "gloo" or own.device.type != "cpu" or own.nbytes > DIRECT_BYTES:
        return all_gather(out, own, group=group, async_op=True)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    rows = out.view(world_size, -1)
    rows[rank] = own
    nexts = [(rank + hop) % world_size for hop in range(1, world_size)]
    works = [dist.irecv(rows[other], group=group, group_src=other) for other in reversed(nexts)]
    return _All(works + [dist.isend(own, group=group, group_dst=other) for other in nexts])


class Courier:
    """One thread and one process group of its own, shared by all models on the same original group.

    Takes work in the order DDP hands it over, the same on every rank, and runs it piece by piece. A collective started
    from a future's callback would run in an order of its own: torch's PowerSGD hook deadlocks on Gloo for that reason.
    So collectives are begun in that order, and what follows them is new work at the end of the queue: a bucket that is
    ready is encoded and sent while the one before it is on its way.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        local = len(ranks) < dist.get_world_size()  # other ranks do not come here: only the members meet
        backend = dist.get_backend(group)
        own = dist.new_group(ranks, timeout=_timeout(group), backend=backend, use_local_synchronization=local)
        self.world_size, self.rank = len(ranks), dist.get_rank(group)
        self._held = [own]  # nowhere else: at the end `_stop` lets go of it, whoever still has the courier
        self._under_way: set[Flight] = set()
        self._work: Work = queue.SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._work,), name="gradwire-courier", daemon=True)
        thread.start()
        # when nobody needs it any more, and at the latest when Python exits
        weakref.finalize(self, _stop, self._work, thread, self._held if backend == "gloo" else [])

    def submit(self, work: Callable[[], None]) -> None:
        """Queues `work`, which must handle its own exceptions: nobody is told of them here."""
        self._work.put(work)

    def gather(self, message: Tensor) -> Flight:
        """Sends this rank's message and asks for all others'; called from the courier's own thread.

        Kept until it has been waited for: Gloo sends when the other rank asks, and nothing if the message was let go of
        by then, as after an error here. The other one would wait for it until the timeout.
        """
        out = message.new_empty(self.world_size * message.numel())
        work = begin_gather(out, message, self._held[0])
        flight = Flight(message, out.view(self.world_size, -1), work, self._under_way)
        self._under_way.add(flight)
        return flight

    def sum(self, tensor: Tensor) -> Flight:
        """tensor = its sum over the ranks; called from the courier's own thread."""
        return Flight(tensor, tensor, dist.all_reduce(tensor, group=self._held[0], async_op=True))


def _run(work: Work) -> None:
    while (piece := work.get()) is not None:
        try:
            piece()
        except BaseException:
            traceback.print_exc()  # the others still wait for their turn
        del piece  # or the last one would be kept until the next comes


def _stop(work: Work, thread: threading.Thread, held: list[dist.ProcessGroup]) -> None:
    """A thread that is still inside C++ when Python ends takes the whole process down (SIGABRT).

    That is the courier's, and Gloo's, which may still hold the last message and wants Python's lock to let go of it.
    Gloo joins its threads when nobody has the group any more.
    """
    work.put(None)
    thread.join(timeout=5)  # not for ever: it may wait for a rank that is gone
    if held and not thread.is_alive():
        with contextlib.suppress(Exception):  # the program may have destroyed all groups already
            dist.destroy_process_group(held[0])
        held.clear()


_couriers: weakref.WeakKeyDictionary[dist.ProcessGroup, Courier] = weakref.WeakKeyDictionary()


def courier_of(group: dist.ProcessGroup) -> Courier:
    """The courier of this process group; collective when it is the first time."""
    if group not in _couriers:
        _couriers[group] = Courier(group)
    return _couriers[group]


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The original group's timeout: a rank that never comes is met as plain DDP would meet it."""
    kind = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    options = getattr(group._get_backend(torch.device(kind)), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def device_of(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where this group's collectives take their tensors; `device`: this rank's."""
    return device if dist.get_backend(group) == "nccl" else torch.device("cpu")


def gathered(mine: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """As many bytes of every rank, in rank order. Collective; `device`: this rank's."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device_of(group, device))
    received = sent.new_empty(dist.get_world_size(group) * len(sent))
    all_gather(received, sent, group=group)
    return [bytes(row.tolist()) for row in received.cpu().chunk(dist.get_world_size(group))]


def agree(group: dist.ProcessGroup, facts: Mapping[str, str], device: torch.device) -> None:
    """Raises on every rank when any fact differs between ranks. Collective, of a fixed size; `device`: this rank's.

    Unequal sizes make Gloo abort one rank and hand another truncated data without an error; so this comes first.
    """
    mine = b"".join(_digest(key, value) for key, value in facts.items())
    began = time.monotonic()
    try:
        rows = gathered(mine, group, device)
    except RuntimeError as error:
        raise GradwireError(ALONE.format(dist.get_rank(group), time.monotonic() - began, error)) from error
    for number, key in enumerate(facts):
        column = [row[number * FACT :][:FACT] for row in rows]
        if len(set(column)) > 1:
            shown = (
                f"rank {rank}: {fact[-TEXT:].rstrip(bytes(1)).decode(errors='replace')}"
                for rank, fact in enumerate(column)
            )
            raise DisagreementError(f"the ranks do not have the same {key}. " + "; ".join(shown))


def _digest(key: str, value: str) -> bytes:
    """32 bytes that tell two values apart and the beginning of the value, to show."""
    text = value.encode(errors="backslashreplace")  # a file's name in an error may be no UTF-8
    return hashlib.sha256(key.encode() + b"\n" + text).digest() + text[:TEXT].ljust(TEXT, b"\0")
