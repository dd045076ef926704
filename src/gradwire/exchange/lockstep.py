"""The collectives of W workers in one process: what each asks for is at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.exchange.step import Answer, Part, answered, exchange
from gradwire.methods.base import Rounds

Run = Callable[[Callable[..., Any]], list[Any]]


def in_lockstep(parts: Sequence[Part], run: Run | None = None) -> int:
    """Every worker's exchange, collective by collective; the bytes that one of them gave.

    What is made of messages or of one sum is the same on all: one makes it. run: does what it is given for every rank;
    one after another without it.
    """
    run = run or (lambda work: [work(rank) for rank in range(len(parts))])
    talks, first, n_bytes = [exchange(part) for part in parts], parts[0], 0
    asks = run(lambda rank: next(talks[rank]))
    while asks[0] is not None:
        n_bytes += asks[0].n_bytes
        messages, total = _stacked([ask.message for ask in asks]), _stacked([ask.summand for ask in asks])
        total = None if total is None else total.sum(0)
        if not isinstance(first.method, Rounds):
            answered(talks[0], Answer(messages, total))
            break
        asks = run(lambda rank, total=total: answered(talks[rank], Answer(None, total.clone())))
    if first.finite is not None and first.arrival is not None:
        first.arrival.finite = torch.stack([part.finite for part in parts if part.finite is not None]).all()
    return n_bytes


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(given) if given else None
