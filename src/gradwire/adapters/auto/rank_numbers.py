"""Numbers of all ranks, the same list on every rank: what is decided from them is decided alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gradwire.exchange.courier import Courier, Flight


class RankNumbers:
    """Asks all ranks for as many numbers; over the courier's group, whose collectives begin in the same order."""

    def __init__(self, courier: Courier, device: torch.device) -> None:
        self._courier = courier
        self._device = device if dist.get_backend(courier.group) == "nccl" else torch.device("cpu")

    def ask(self, numbers: Sequence[float]) -> Flight:
        """Begins; collective. Bytes as int32, because every backend carries those."""
        own = torch.tensor(numbers, dtype=torch.float64).view(torch.int32).to(self._device)
        return self._courier.gather(own)

    def answer(self, flight: Flight) -> list[list[float]]:
        """A row a rank."""
        rows: list[list[float]] = flight.wait().cpu().view(torch.float64).tolist()
        return rows
