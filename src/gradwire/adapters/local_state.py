"""Local steps at rest: base weights, error feedback, outer momentum and the worker's own weights, by parameter name.

What all workers have alike is saved by each of them, so that every file is whole. On another number of workers the
error feedback goes over as r does; a round that was under way is given up, and every worker begins at the base weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.adapters.outer_loop import Fragment, OuterLoop, Round, RoundOutcome
from gradwire.errors import CheckpointError
from gradwire.layout import Layout
from gradwire.local_steps.outer_step import outer_step
from gradwire.methods.base import OWN, SAME, powers
from gradwire.state import checkpoint

# our fields beside those of the method's state
VECTORS = {"base": SAME, "outer_momentum": SAME, "mean": SAME, "weights": OWN, "sent_from": OWN}
COUNTS = ("inner", "exchanges")
MOST = 1 << 62  # steps: no work follows a larger number


def state_dict(loop: OuterLoop) -> dict[str, Any]:
    """Numbers, strings and tensors only."""
    parameters: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for layout, flats in _vectors(loop):
            for slot in layout:
                parameters[slot.name] = {name: slot.of(flat).view(slot.shape).clone() for name, flat in flats.items()}
    for fragment in loop.fragments:
        for field in _alike(fragment):
            for name, value in getattr(fragment.bucket.state, field).items():
                parameters[name][field] = value.clone()
    flights = {str(number): f.flight for number, f in enumerate(loop.fragments) if f.flight is not None}
    return {
        "format": checkpoint.FORMAT,
        "compressor": repr(loop.method),
        "world_size": loop.world_size,
        "rank": loop.rank,
        "step": loop.exchanges,
        "since_dense": 0,
        "passed": {name: count for fragment in loop.fragments for name, count in fragment.capacity.passed.items()},
        "powers": {**powers(loop.fragments[0].bucket.state), **VECTORS},
        "parameters": parameters,
        "local": {
            "inner": loop.inner,
            "exchanges": loop.exchanges,
            "since_dense": [fragment.capacity.since_dense for fragment in loop.fragments],
            "flights": {number: [flight.number, flight.due] for number, flight in flights.items()},
            "good": {number: flight.outcome.good for number, flight in flights.items() if flight.outcome is not None},
        },
    }


def _alike(fragment: Fragment) -> list[str]:
    """The fields of the method's state that are a dict by name."""
    return [field for field, power in powers(fragment.bucket.state).items() if power == SAME]


def _vectors(loop: OuterLoop) -> Iterator[tuple[Layout, dict[str, Tensor]]]:
    """The flat vectors of each fragment, and of the buffers; what is on its way is waited for."""
    for fragment in loop.fragments:
        state = fragment.bucket.state
        flats = {field: getattr(state, field) for field, power in powers(state).items() if power != SAME}
        flats |= {"base": fragment.base, "weights": fragment.weights.read()}
        if fragment.momentum is not None:
            flats["outer_momentum"] = fragment.momentum
        if (flight := fragment.flight) is not None and flight.sent_from is not None:
            flats |= {"mean": loop.arrived(fragment).mean, "sent_from": flight.sent_from}
        yield fragment.weights.layout, flats
    buffers = {"base": loop.buffers_base, "weights": loop.buffers.read()}
    if (flight := loop.fragments[-1].flight) is not None and flight.buffers_then is not None:
        assert flight.outcome is not None
        if flight.outcome.statistics is not None:
            buffers |= {"mean": flight.outcome.statistics, "sent_from": flight.buffers_then}
    yield loop.buffers.layout, buffers


def load_state_dict(loop: OuterLoop, state: Mapping[str, Any], strict: bool = False) -> None:
    """Checks on every rank first, and changes nothing unless all can go on."""
    problem: CheckpointError | None = None
    try:
        checkpoint.check(state)
        _check(loop, state)
        fields = checkpoint.match(_like(loop), state, strict)
    except CheckpointError as error:
        problem = error
    except Exception as error:  # whatever a damaged file makes torch raise: the other ranks wait to hear of it
        problem = CheckpointError(f"damaged gradwire state: {error!r}")
    checkpoint.all_or_none(loop, problem, "" if problem else f", {state['local']} {sorted(state['passed'].items())}")
    with torch.no_grad():
        _put(loop, state, fields)


def _like(loop: OuterLoop) -> dict[str, Tensor]:
    """Of every parameter and buffer the shape, and no memory."""
    layouts = [*(fragment.weights.layout for fragment in loop.fragments), loop.buffers.layout]
    return {slot.name: torch.empty(1, device=loop.device).expand(slot.shape) for one in layouts for slot in one}


def _check(loop: OuterLoop, state: Mapping[str, Any]) -> None:
    if (state["world_size"], state["rank"]) != (loop.world_size, loop.rank):
        raise CheckpointError(
            f"this is the state of rank {state['rank']} of {state['world_size']}, not of rank {loop.rank} of "
            f"{loop.world_size}: save with gradwire.save and load with gradwire.load, or use gradwire.reshard"
        )
    own = state.get("local")
    if not isinstance(own, Mapping) or not {*COUNTS, "since_dense", "flights", "good"} <= own.keys():
        raise CheckpointError("this state is not of local steps: it was saved by a wire of gradwire.attach")
    numbers = [*(own[name] for name in COUNTS), *own["since_dense"], *own["good"].values()]
    numbers += [number for flight in own["flights"].values() for number in flight]
    if not all(type(number) is int and 0 <= number < MOST for number in numbers):
        raise CheckpointError(f"damaged gradwire state: local steps have {dict(own)}")
    if len(own["since_dense"]) != len(loop.fragments):
        raise CheckpointError(
            f"the state has {len(own['since_dense'])} fragments, this model {len(loop.fragments)}: give the same, "
            "fragments=..."
        )
    names = {str(number) for number in range(len(loop.fragments))}
    if not (own["flights"].keys() <= names and own["good"].keys() == own["flights"].keys()):
        raise CheckpointError(f"damaged gradwire state: local steps have {dict(own)}")
    for name, like in _like(loop).items():
        for field, value in state["parameters"].get(name, {}).items():
            if field in VECTORS and value.shape != like.shape:
                raise CheckpointError(f"{field} of {name} has shape {tuple(value.shape)}, expected {tuple(like.shape)}")


def _put(loop: OuterLoop, state: Mapping[str, Any], fields: Mapping[str, Mapping[str, Tensor]]) -> None:
    own = state["local"]
    loop.inner, loop.exchanges = own["inner"], own["exchanges"]
    for number, fragment in enumerate(loop.fragments):
        _put_fragment(loop, fragment, fields, own, str(number))
        fragment.capacity.passed = {
            n: state["passed"][n] for n in fragment.weights.layout.names if n in state["passed"]
        }
        fragment.capacity.since_dense = own["since_dense"][number]
    buffers = _Saved(loop.buffers.layout, fields)
    loop.buffers_base = buffers("base", loop.buffers_base)
    loop.buffers.write(buffers("weights", loop.buffers_base))


class _Saved:
    """The vectors of one layout out of a checkpoint."""

    def __init__(self, layout: Layout, fields: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.layout, self.fields = layout, fields

    def has(self, field: str) -> bool:
        return len(self.layout) > 0 and all(field in self.fields.get(name, {}) for name in self.layout.names)

    def __call__(self, field: str, otherwise: Tensor) -> Tensor:
        """[N]; of a tensor that the checkpoint does not have: what stands in `otherwise`."""
        found = otherwise.clone()
        for slot in self.layout:
            if (value := self.fields.get(slot.name, {}).get(field)) is not None:
                slot.of(found).copy_(value.reshape(-1))
        return found


def _put_fragment(
    loop: OuterLoop, fragment: Fragment, fields: Mapping[str, Mapping[str, Tensor]], own: Mapping[str, Any], number: str
) -> None:
    saved, state = _Saved(fragment.weights.layout, fields), fragment.bucket.state
    for field, power in powers(state).items():
        if power != SAME:
            value = getattr(state, field)
            value.copy_(saved(field, torch.zeros_like(value)))
    for field in _alike(fragment):
        getattr(state, field).update({n: fields[n][field] for n in saved.layout.names if field in fields.get(n, {})})
    fragment.base = saved("base", fragment.base)
    if fragment.momentum is not None:
        fragment.momentum = saved("outer_momentum", torch.zeros_like(fragment.base))
    fragment.flight = None
    if number in own["flights"] and saved.has("mean"):
        mean = saved("mean", fragment.base)
        if saved.has("sent_from"):
            fragment.flight = _flight(loop, fragment, saved, own, number)
        elif own["good"][number]:  # on another number of workers nobody goes on from where it was sent
            outer_step(loop.recipe, fragment.base, mean, fragment.momentum)
    fragment.weights.write(saved("weights", fragment.base))


def _flight(loop: OuterLoop, fragment: Fragment, saved: _Saved, own: Mapping[str, Any], number: str) -> Round:
    """A round that is on its way, and whose outcome is known."""
    exchange, due = own["flights"][number]
    flight = Round(exchange, due, saved("sent_from", fragment.base))
    flight.outcome = RoundOutcome(saved("mean", fragment.base), own["good"][number], 0, None)
    buffers = _Saved(loop.buffers.layout, saved.fields)
    if fragment.last and buffers.has("mean") and buffers.has("sent_from"):
        flight.outcome.statistics = buffers("mean", loop.buffers_base)
        flight.buffers_then = buffers("sent_from", loop.buffers_base)
    return flight
