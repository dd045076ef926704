"""What a method costs here: encode and decode, timed on the gradients that the parameters have now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.adapters.reducer import Reducer
from gradwire.layout import Layout
from gradwire.methods import Compressor
from gradwire.plan import costs
from gradwire.plan.model import Cost, Prediction

MOMENTS = 1.15  # what second moments cost a forward and backward, until a step with them is timed
DENSITY = 0.01  # of the elements pass, until it is seen how many do
WRONG = {False: 0.3, True: 0.15}  # by so much a method may be faster than predicted, beside one that was timed; a sum
# of a cost, that ranks find each for itself
NUMBERS = ("bytes_per_element", "head_bytes", "encode_ns", "decode_ns", "decode_message_ns", "overhead_ms", "moments")


def dry_run(reducer: Reducer, layouts: Sequence[Layout], compressor: Compressor) -> Cost:
    """Of this rank alone; nothing is sent and no state of the reducer is touched."""
    gradients = [_gradient(reducer, layout) for layout in layouts]
    found = costs.measure(compressor, layouts, gradients, [_moment(one) for one in gradients], reducer.world_size)
    return replace(found, moments=MOMENTS if compressor.needs_moments else 1.0)


def _gradient(reducer: Reducer, layout: Layout) -> Tensor:
    parameters = (reducer.parameters[slot.name] for slot in layout)
    grads = (torch.zeros_like(one) if one.grad is None else one.grad.detach() for one in parameters)
    return torch.cat([grad.float().flatten() for grad in grads])


def _moment(gradient: Tensor) -> Tensor:
    """Of a gradient that is nearly all noise: so few elements are unambiguous in every step."""
    generator = torch.Generator(gradient.device).manual_seed(0)
    clear = torch.rand(gradient.shape, generator=generator, device=gradient.device) < DENSITY
    return torch.where(clear, 0.0, 4 * gradient.square())


def likely_error(spec: str, errors: Mapping[str, float], methods: Mapping[str, Compressor]) -> float:
    """Measured / predicted of this method: most likely as of the last of its like, until it is measured itself.

    What is wrong with a sum may be wrong with all. A compressor says nothing of a sum: where workers share cores, its
    encode and decode take longer than predicted.
    """
    if spec in errors:
        return errors[spec]
    alike = [error for one, error in errors.items() if methods[one].kind == "sum" == methods[spec].kind == "sum"]
    others = [] if methods[spec].kind == "sum" else list(errors.values())
    return [1.0, *others, *alike][-1]


def rival(
    predictions: Mapping[str, Prediction],
    errors: Mapping[str, float],
    methods: Mapping[str, Compressor],
    below_ms: float,
) -> str | None:
    """The likeliest of the methods that may take less, and that nobody has timed: those in `errors` were."""
    may_take = {
        spec: (1 - WRONG[methods[spec].kind == "sum"]) * prediction.step_ms
        for spec, prediction in predictions.items()
        if spec not in errors
    }
    near = [spec for spec, may_ms in may_take.items() if may_ms < below_ms]
    return min(near, key=may_take.__getitem__, default=None)
