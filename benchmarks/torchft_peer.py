"""torchft's DiLoCo in a race: `python:benchmarks.torchft_peer.diloco`, where torchft is installed.

Every host is a replica of its own, over Gloo. Host 0 serves the lighthouse. Addresses are numbers: a host of a lab has
no name that another could look up.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.tools.race.entry import RaceEntry

EVERY = 15  # inner steps of a round, of both sides of the comparison
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # of the paper; plain averaging: 1 and 0
TIMEOUT = timedelta(minutes=10)  # longer than a round and a test


def diloco(model: nn.Module, optimizer: torch.optim.Optimizer) -> RaceEntry:
    """As the paper has it: Nesterov outside."""
    return _entry(model, optimizer, OUTER_LR, OUTER_MOMENTUM)


def averaging(model: nn.Module, optimizer: torch.optim.Optimizer) -> RaceEntry:
    """The same with an outer step that takes the mean as it is, which in a short training may do better."""
    return _entry(model, optimizer, 1.0, 0.0)


def _entry(model: nn.Module, optimizer: torch.optim.Optimizer, outer_lr: float, momentum: float) -> RaceEntry:
    from torchft.local_sgd import DiLoCo

    logging.getLogger("torchft").setLevel(logging.ERROR)  # it tells of every round, as its Rust does all the same
    manager, close = _manager(model)
    outer = torch.optim.SGD(model.parameters(), lr=outer_lr, momentum=momentum, nesterov=momentum > 0)
    loop = DiLoCo(manager, [model], optimizer, outer, sync_every=EVERY, pin_memory=False, use_bucketization=True)
    loop.__enter__()

    def end() -> None:
        loop.__exit__(None, None, None)
        close()

    base = loop._fragments[0].original_parameters
    return RaceEntry(model, shared=lambda: _base_weights(model, base), close=end)


def _manager(model: nn.Module) -> tuple[Any, Any]:
    """This host's, which finds the others by the lighthouse of host 0, and how it is shut down."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    rank, world, mine = dist.get_rank(), dist.get_world_size(), _address()
    lighthouse = LighthouseServer("[::]:0", min_replicas=world, join_timeout_ms=60_000) if rank == 0 else None
    port = torch.tensor([int(lighthouse.address().rpartition(":")[2]) if lighthouse else 0])
    dist.broadcast(port, 0)
    store = dist.TCPStore(mine, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=world,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=mine,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{int(port)}",
        replica_id=f"host{rank}",
        hostname=mine,
        init_sync=False,  # all begin with the same seed
    )
    _sum_once(manager, model)

    def close() -> None:
        """All of them, then what they have met by; the store lives as long as this function does."""
        dist.barrier()
        manager.shutdown(wait=False)
        dist.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()
        served.clear()

    served = [store]
    return manager, close


def _sum_once(manager: Any, model: nn.Module) -> None:
    """A round of zeros: the connections are open when the clock starts."""
    manager.start_quorum()
    manager.allreduce(torch.zeros(sum(p.numel() for p in model.parameters()))).wait()
    if not manager.should_commit():
        raise RuntimeError("torchft: the hosts did not come together")


def _address() -> str:
    """This host's, as host 0 sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])


@contextmanager
def _base_weights(model: nn.Module, base: Mapping[str, Tensor]) -> Iterator[None]:
    """The weights after the last round, which all hosts have alike."""
    own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(base[name])
        yield
        for name, parameter in model.named_parameters():
            parameter.copy_(own[name])
