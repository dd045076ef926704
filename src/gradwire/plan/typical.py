"""What methods cost where nothing was measured: `gradwire plan --params ...`.

The times are those of the method's row in METHODS (methods/table.py), which says where they come from.
What they send is not from a table: it is counted in a step on a random gradient, or follows from the density.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gradwire.codec.header import FIXED, WORD_BYTES
from gradwire.exchange.room import BUCKET, FIRST_BUCKET, above, padded
from gradwire.layout import Layout
from gradwire.local_steps.error_feedback import ErrorFeedback, method_of
from gradwire.local_steps.recipe import is_recipe, recipe_of
from gradwire.methods.base import Compressor
from gradwire.methods.table import METHODS, Typical, from_spec
from gradwire.plan.costs import Dry
from gradwire.plan.local_costs import typical_local
from gradwire.plan.model import FLOAT_BYTES, Cost, Work

# Of the elements are sent: experiments/results/paper-100, vgc:alpha=1.5, ratio 84 over the run, 104 in its last epoch.
DENSITY = 0.01
SIDE = 1024  # of the matrix whose bytes are counted

# Of a method whose row has no times: about the median of all other rows. The plan marks what is made of it.
GUESS = {"cpu": Typical(3.0, 1.1, message=0.7), "cuda": Typical(0.02, 0.011)}
# a bucket: Python and the hand-over to the courier, by plan/costs.py on the machines above
OVERHEAD_MS = {"cpu": 0.4, "cuda": 0.5}
# cpu.csv moments_cpu, a Transformer (1.13 to 1.65 by model); gpu.csv steps_gpu, GPT-2 and ResNet-50 as graphs
MOMENTS = {"cpu": 1.2, "cuda": 1.02}


def cost_of(spec: str, device: str, density: float | None = None) -> Cost:
    """Of a method, or of local steps. density: of the elements sent, for a method that does not say it."""
    if not is_recipe(spec):
        return _cost_of(from_spec(spec), spec, device, density)
    recipe = recipe_of(spec)
    cost = _cost_of(method_of(recipe, fragments=1), spec, device, density)
    return replace(cost, overhead_ms=OVERHEAD_MS[device], local=typical_local(recipe, device))


def _cost_of(compressor: Compressor, spec: str, device: str, density: float | None) -> Cost:
    """Error feedback around a method: it decodes its own message too."""
    own = isinstance(compressor, ErrorFeedback)
    known = next(row for row in METHODS.values() if row.method is type(getattr(compressor, "method", compressor)))
    measured = known.cpu if device == "cpu" else known.cuda
    times = measured or GUESS[device]
    dry = Dry(compressor, [Layout.of([("weight", (SIDE, SIDE))])], 2, torch.device("cpu"))
    share = compressor.share or density or DENSITY
    message_ns = times.message + times.message_sent * share
    n_bytes, rounds = _sent(compressor, share, dry)
    head = FIXED * WORD_BYTES if compressor.kind == "gather" else 0
    return Cost(
        spec=spec,
        kind=compressor.kind,
        bytes_per_element=max(0.0, n_bytes - head) / SIDE**2,
        head_bytes=head,
        encode_ns=times.encode + times.encode_sent * share + own * (times.decode + message_ns),
        decode_ns=times.decode,
        decode_message_ns=message_ns,
        overhead_ms=0.01 if compressor.kind == "sum" else OVERHEAD_MS[device],
        moments=MOMENTS[device] if compressor.needs_moments else 1.0,
        rounds=rounds,
        room=compressor.needs_room,
        guess=measured is None,
    )


def _sent(compressor: Compressor, density: float, dry: Dry) -> tuple[float, int]:
    """(bytes, collectives) of one bucket of SIDE x SIDE elements."""
    numel = SIDE**2
    if compressor.needs_room:
        count = round(density * numel)
        room = min(numel, padded(count) if compressor.share is None else above(count))
        return WORD_BYTES * (FIXED + compressor.words(numel, room)), 1
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    dry.step([gradient], [gradient.square()])
    return dry.times[-1].n_bytes, dry.times[-1].rounds


def work_of(n_parameters: int, forward_ms: float, backward_ms: float, after_ms: float) -> Work:
    """Buckets as DDP makes them: the first of 1 MiB, then of 25."""
    first, each = FIRST_BUCKET // FLOAT_BYTES, BUCKET // FLOAT_BYTES
    sizes: list[int] = []
    left = n_parameters
    while left:
        sizes.append(min(left, each if sizes else first))
        left -= sizes[-1]
    return Work(tuple(sizes), forward_ms, backward_ms, after_ms)
