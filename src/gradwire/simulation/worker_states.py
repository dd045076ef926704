"""What virtual workers hold back, at rest: each one's is what `Wire.state_dict` is on its rank. What one has sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import CheckpointError
from gradwire.exchange.counting import Stats
from gradwire.exchange.in_process import InProcess
from gradwire.methods.base import of_slot, powers
from gradwire.state import checkpoint


def saved(ranks: InProcess, rank: int, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """One worker's state by parameter name; parameters: of the whole model."""
    state, capacity = ranks.states[rank], ranks.capacity
    fields = powers(state)
    return {
        "format": checkpoint.FORMAT,
        "compressor": repr(ranks.compressor),
        "world_size": ranks.world_size,
        "rank": rank,
        "step": ranks.number,
        "since_dense": capacity.since_dense,
        "passed": dict(capacity.passed),
        "powers": fields,
        "parameters": {
            slot.name: checkpoint.at_rest(of_slot(state, slot), fields, parameters[slot.name]) for slot in ranks.layout
        },
    }


def put_back(ranks: InProcess, states: Sequence[Mapping[str, Any]], parameters: Mapping[str, Tensor]) -> None:
    """All workers' states, as `saved` made them; nothing is changed unless all of them fit."""
    workers = ranks.world_size
    if len(states) != workers:
        raise CheckpointError(f"the state of {len(states)} workers, this simulation has {workers}")
    for rank, one in enumerate(states):
        checkpoint.check(one)
        if (one["rank"], one["world_size"]) != (rank, workers):
            raise CheckpointError(f"worker {rank} of the state is rank {one['rank']} of {one['world_size']}")
    ours = {name: parameters[name] for name in ranks.layout.names}
    for rank, found in enumerate([checkpoint.match(ours, one, strict=True) for one in states]):
        for slot in ranks.layout:
            for field, view in of_slot(ranks.states[rank], slot).items():
                known = found[slot.name].get(field)  # a field that the saved one had no use for begins at zero
                view.copy_(torch.zeros_like(view) if known is None else known)
    ranks.number = states[0]["step"]
    ranks.capacity.passed = dict(states[0]["passed"])
    ranks.capacity.since_dense = states[0]["since_dense"]


def of_one(total: Stats, workers: int) -> Stats:
    """What one worker sent, on average over all of them."""
    bytes_of = {name: round(getattr(total, name) / workers) for name in ("bytes_sent", "dense_bytes")}
    return replace(
        total,
        **bytes_of,
        bytes_received=bytes_of["bytes_sent"] * (workers - 1),
        elements_sent={name: round(count / workers) for name, count in total.elements_sent.items()},
        deferred=round(total.deferred / workers),
        residual_norm=total.residual_norm / workers**0.5,
    )
