"""The adapter: the only file that knows DistributedDataParallel. `attach`, buckets <-> parameters."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the real classes.
import weakref
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.other_wrappers import MIXED_PRECISION, refusal
from gradwire.adapters.reducer import Reducer
from gradwire.errors import WRAPPED_ANEW, AttachError, GradwireError
from gradwire.methods.base import Compressor

ATTRIBUTE = "_gradwire_switch"  # of the net, whatever wraps it: there the next wrapping finds the reducer


class HookState:
    """The hook's state. A hook registers once in a DDP model's life, so it delegates to the reducer there is now."""

    def __init__(self, model: DistributedDataParallel, reducer: Reducer) -> None:
        self.model, self.reducer = weakref.ref(model), reducer

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled model is not attached, and loads where gradwire is not installed."""
        return bool, ()


def _hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    reducer, model = state.reducer, state.model()
    assert model is not None  # it calls us
    if model._join_config.enable:
        raise GradwireError("gradwire does not work under Join: give every rank the same number of batches")
    if reducer.over:
        raise GradwireError(WRAPPED_ANEW)
    return reducer.exchange(bucket)


def _register(model: DistributedDataParallel, state: HookState) -> None:
    """Every bucket goes to the state's reducer from now on."""
    try:
        model.register_comm_hook(state, _hook)
    except RuntimeError as error:
        raise AttachError(f"DDP refuses a communication hook: {error}. Does the model have another one?") from error


def named_parameters(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP exchanges, by the name they have without DDP and torch.compile."""
    ignored = model.parameters_to_ignore
    return {
        name.replace("_orig_mod.", ""): parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def attach_reducer(model: nn.Module, compressor: Compressor, scaler: Any, moments: dict[str, Any]) -> Reducer:
    """Checks the model and puts a reducer between it and its process group. A model that is refused stays plain DDP."""
    ddp = getattr(model, "_orig_mod", model)  # torch.compile(DDP(net))
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(refusal(model))
    net = getattr(ddp.module, "_orig_mod", ddp.module)
    found: HookState | None = net.__dict__.get(ATTRIBUTE) or None
    own = found is not None and found.model() is ddp
    if found is not None and own and found.reducer.attached:
        raise AttachError("this model is attached already: set wire.compressor = ..., or wire.detach() it first")
    _check_parameters(ddp)
    if found is not None and own and not found.reducer.over:
        state = found
        state.reducer.reopen(scaler, moments)
    else:
        state = _unhooked(ddp, scaler, moments)
        if found is not None:
            state.reducer.take_over(found.reducer)
    reducer = state.reducer
    try:
        reducer.use(compressor)
        if state is not found:
            _register(ddp, state)
    except BaseException:
        reducer.close()
        raise
    net.__dict__[ATTRIBUTE] = state
    return reducer


def _unhooked(model: DistributedDataParallel, scaler: Any, moments: dict[str, Any]) -> HookState:
    """A reducer beside the model; `_register` puts it in between."""
    if other := model._get_ddp_logging_data().get("comm_hook"):  # type: ignore[no-untyped-call]
        if other == _hook.__qualname__:
            raise AttachError(
                "this model was attached before its net was wrapped anew: wrap it once more, or keep the newer"
            )
        raise AttachError(f"DDP takes one communication hook, and the model has another one: {other}")
    return HookState(model, Reducer(model, model.process_group, named_parameters(model), scaler, moments))


def _check_parameters(model: DistributedDataParallel) -> None:
    if model.mixed_precision is not None:
        raise AttachError(MIXED_PRECISION)
    parameters = named_parameters(model)
    exchanged = model._get_ddp_logging_data()["num_parameter_tensors"]  # type: ignore[no-untyped-call]
    if len(parameters) != exchanged:
        raise AttachError(
            f"{len(parameters)} tensors require a gradient, and {exchanged} did when DDP was made: freeze or unfreeze "
            "first, then wrap the model in DistributedDataParallel, then attach"
        )
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise AttachError(f"{name} is complex ({parameter.dtype}): use torch.view_as_real parameters instead")
    for name, module in model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise AttachError(f"{name or 'the model'} makes sparse gradients: build it with sparse=False")
