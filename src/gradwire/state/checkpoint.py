"""State at rest: by parameter name, rank by rank, and over to another number of workers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import CheckpointError, DisagreementError
from gradwire.exchange.courier import agree
from gradwire.layout import in_shape
from gradwire.methods.base import OWN, SAME

if TYPE_CHECKING:
    from gradwire.adapters.outer_loop import OuterLoop
    from gradwire.adapters.reducer import Reducer

FORMAT = 1
MOST_WORKERS = 1 << 20  # in a file: no work follows a larger number in it
HEAD: dict[str, type] = {
    "format": int,
    "compressor": str,
    "world_size": int,
    "rank": int,
    "step": int,
    "since_dense": int,
    "passed": dict,
    "powers": dict,
    "parameters": dict,
}


def state_dict(reducer: Reducer) -> dict[str, Any]:
    """One rank's state: numbers, strings and tensors only."""
    held, fields = dict(reducer.store.items()), reducer.store.powers
    named = reducer.parameters if fields else {}
    return {
        "format": FORMAT,
        "compressor": repr(reducer.compressor),
        "world_size": reducer.world_size,
        "rank": dist.get_rank(reducer.group),
        "step": reducer.steps,
        "since_dense": reducer.capacity.since_dense,
        "passed": dict(reducer.capacity.passed),
        "step_ns": reducer.budget.step_ns,
        "powers": dict(fields),
        # zeros where nothing is held back: the same names on every rank
        "parameters": {name: at_rest(held.get(name, {}), fields, parameter) for name, parameter in named.items()},
    }


def at_rest(held: Mapping[str, Tensor], powers: Mapping[str, int], parameter: Tensor) -> dict[str, Tensor]:
    """One parameter's fields as they go into a file: copies, as a view would take the whole bucket's storage along."""
    found: dict[str, Tensor] = {}
    for field, power in powers.items():
        value = held.get(field)
        if power == SAME:
            if value is not None:
                found[field] = value.clone()
        elif value is None:  # nothing is held back
            found[field] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        else:
            found[field] = in_shape(value, parameter).clone(memory_format=torch.contiguous_format)
    return found


def _in_flight(value: Tensor, parameter: Tensor) -> Tensor:
    """A flat copy on the parameter's device, in the order of its memory."""
    flat = torch.empty(value.numel(), dtype=torch.float32, device=parameter.device)
    in_shape(flat, parameter).copy_(value)
    return flat


def load_state_dict(reducer: Reducer, state: Mapping[str, Any], *, strict: bool = False) -> None:
    """Checks on every rank first, and changes nothing unless all can go on."""
    problem: CheckpointError | None = None
    try:
        check(state)
        if (state["world_size"], state["rank"]) != (reducer.world_size, dist.get_rank(reducer.group)):
            raise CheckpointError(
                f"this is the state of rank {state['rank']} of {state['world_size']}, not of rank "
                f"{dist.get_rank(reducer.group)} of {reducer.world_size}: save with gradwire.save and load with "
                "gradwire.load, or use gradwire.reshard"
            )
        fields = match(reducer.parameters, state, strict)
    except CheckpointError as error:
        problem = error
    except Exception as error:  # whatever a damaged file makes torch raise: the other ranks wait to hear of it
        problem = CheckpointError(f"damaged gradwire state: {error!r}")
    said = ""
    if problem is None:
        said = f", step {state['step']}, {state.get('step_ns')} ns, capacity {sorted(state['passed'].items())}"
    all_or_none(reducer, problem, said)
    reducer.store.set(fields, dict(state["powers"]))
    reducer.steps = state["step"]
    sizes = {name: parameter.numel() for name, parameter in reducer.parameters.items()}
    reducer.capacity.passed = {n: min(count, sizes[n]) for n, count in state["passed"].items() if n in sizes}
    reducer.capacity.since_dense = state["since_dense"]
    reducer.budget.restore(state.get("step_ns", 0))
    reducer.skip_step()
    if reducer.recorder is not None:
        reducer.recorder.passes.begin_step(reducer.steps)


def all_or_none(reducer: Reducer | OuterLoop, problem: CheckpointError | None, said: str = "") -> None:
    """All ranks go on, or all raise: the one with the problem says it, the others that there is one. Collective.

    said: what else must be the same.
    """
    try:
        agree(reducer.group, {"checkpoint": str(problem or "good") + said}, reducer.device)
    except DisagreementError as error:
        raise problem or CheckpointError(f"another rank cannot use its checkpoint: {error}") from problem
    if problem is not None:
        raise problem


def check(state: Any) -> None:
    """Refuses what is no gradwire state, before any of it is used."""
    if not isinstance(state, Mapping) or not HEAD.keys() <= state.keys():
        raise CheckpointError(f"not a gradwire state: expected a dict with {', '.join(HEAD)}")
    for key, kind in HEAD.items():
        if not isinstance(state[key], kind) or isinstance(state[key], bool):
            raise CheckpointError(f"damaged gradwire state: {key} is {type(state[key]).__name__}, not {kind.__name__}")
    if state["format"] != FORMAT:
        raise CheckpointError(f"gradwire state of format {state['format']}, this version reads {FORMAT}")
    if not 0 <= state["rank"] < state["world_size"] <= MOST_WORKERS or state["step"] < 0 or state["since_dense"] < 0:
        raise CheckpointError("damaged gradwire state: rank, world size or step out of range")
    step_ns = state.get("step_ns", 0)  # of a rate's budget alone
    if type(step_ns) is not int or not 0 <= step_ns < 1 << 63:
        raise CheckpointError(f"damaged gradwire state: step_ns is {step_ns!r}")
    for name, count in state["passed"].items():
        if not isinstance(name, str) or not isinstance(count, int) or count < 0:
            raise CheckpointError(f"damaged gradwire state: passed[{name!r}] is {count!r}")
    if not all(power in (OWN, SAME, 0, 1, 2) for power in state["powers"].values()):
        raise CheckpointError(f"damaged gradwire state: powers are {state['powers']}")
    for name, fields in state["parameters"].items():
        if not isinstance(name, str) or not isinstance(fields, Mapping):
            raise CheckpointError(f"damaged gradwire state: parameters[{name!r}] is no dict of tensors")
        for field, value in fields.items():
            if field not in state["powers"]:
                raise CheckpointError(f"damaged gradwire state: {field!r} of {name} has no power")
            if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.layout != torch.strided:
                raise CheckpointError(f"damaged gradwire state: {field!r} of {name} is no float32 tensor")
            if not bool(torch.isfinite(value).all()):
                raise CheckpointError(f"damaged gradwire state: {field} of {name} has values that are not finite")


def match(ours: Mapping[str, Tensor], state: Mapping[str, Any], strict: bool) -> dict[str, dict[str, Tensor]]:
    """The state of the parameters that this model has, flat and on its device."""
    saved = state["parameters"]
    missing, foreign = sorted(ours.keys() - saved.keys()), sorted(saved.keys() - ours.keys())
    if saved and not saved.keys() & ours.keys():
        raise CheckpointError(f"a checkpoint of another model: it has {foreign[:3]}..., this one has {missing[:3]}...")
    if saved and (missing or foreign):
        text = f"new here, starts from zero: {missing or 'none'}; not here, dropped: {foreign or 'none'}"
        if strict:
            raise CheckpointError(f"the checkpoint's layers are not this model's ({text}); strict=False accepts that")
        warnings.warn(f"gradwire: {text}", stacklevel=4)
    found: dict[str, dict[str, Tensor]] = {}
    for name in (name for name in ours if name in saved):
        found[name] = {}
        for field, value in saved[name].items():
            if state["powers"][field] in (OWN, SAME):
                found[name][field] = value.to(ours[name].device, copy=True)
                continue
            if value.shape != ours[name].shape:
                came, expected = tuple(value.shape), tuple(ours[name].shape)
                raise CheckpointError(f"{field} of {name} has shape {came} in the checkpoint, expected {expected}")
            found[name][field] = _in_flight(value, ours[name])
    return found


def reshard(states: Sequence[Mapping[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """The states of all W old ranks, in rank order, for W' = `world_size` new ones."""
    if world_size < 1 or not states:
        raise CheckpointError(f"reshard needs states and at least 1 worker, got {len(states)} and {world_size}")
    for state in states:
        check(state)
    old = len(states)
    if [(s["rank"], s["world_size"]) for s in states] != [(rank, old) for rank in range(old)]:
        raise CheckpointError(f"reshard needs the states of all ranks in order, got {[s['rank'] for s in states]}")
    if len({s["step"] for s in states}) > 1:
        raise CheckpointError(f"the states are of different steps: {[s['step'] for s in states]}")
    return [merged(states[0], states[rank::world_size], rank, world_size) for rank in range(world_size)]


def merged(like: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """One new rank's state out of the old ranks that come together in it: old rank w goes to new rank w mod W'.

    A field of power p becomes k^p times the sum, k = W'/W, so that the mean over the workers of what they hold back is
    kept. A new rank that no old one goes to starts from zero.
    """
    k = world_size / like["world_size"]
    parameters: dict[str, dict[str, Tensor]] = {}
    for name, fields in like["parameters"].items():
        parameters[name] = {}
        for field, value in fields.items():
            if like["powers"][field] == OWN:
                continue
            if like["powers"][field] == SAME:
                parameters[name][field] = value
                continue
            total = torch.zeros_like(value)
            for part in parts:
                total += part["parameters"][name][field]
            parameters[name][field] = total * k ** like["powers"][field]
    return {**like, "rank": rank, "world_size": world_size, "parameters": parameters}
