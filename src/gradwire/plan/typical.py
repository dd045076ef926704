"""What methods cost where nothing was measured: `gradwire plan --params ...`.

Times an element, from the committed results:
- cpu: benchmarks/results/cpu.csv (AMD EPYC, 2 cores). VGC and Strom: encode_cpu, a whole encode to the compact format
  and a whole decode of 8 messages at ratios of 10 to 10,000. All others: methods_cpu, a step of 2,634,762 parameters on
  two processes, less the 10 ms that its copy of a backward, DDP and the hand-over take (dense's step less its
  exchange); how that divides into encode and decode is an estimate.
- cuda: benchmarks/results/gpu.csv (NVIDIA H200). VGC and Strom: encode_gpu. All others: simulate_gpu, what a step of 8
  workers of 14,987,200 parameters takes more than with dense.
What they send is not from a table: it is counted in a step on a random gradient, or follows from the density.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.codec.header import FIXED, WORD_BYTES
from gradwire.exchange.room import above, padded
from gradwire.layout import Layout
from gradwire.methods import Compressor, from_spec
from gradwire.methods.table import METHODS
from gradwire.plan.costs import Dry
from gradwire.plan.model import FLOAT_BYTES, Cost, Work

# Of the elements are sent: experiments/results/paper-100, vgc:alpha=1.5, ratio 84 over the run, 104 in its last epoch.
DENSITY = 0.01
SIDE = 1024  # of the matrix whose bytes are counted
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: DDP's own


@dataclass(frozen=True)
class Typical:
    """ns an element; `sparse` and `message` are of every element sent, the latter by every worker."""

    encode: float
    decode: float = 0.0
    sparse: float = 0.0
    message: float = 0.0


CPU: Mapping[str, Typical] = {
    "dense": Typical(0.03),
    "bf16": Typical(0.15, 0.1),
    "fp16": Typical(0.5, 0.3),
    "fp8": Typical(2.4, 0.4, message=2.4),
    "adacomp": Typical(4.0, 1.5, message=70.0),
    "momentum_dct": Typical(16.0, 8.0),
    "onebit": Typical(1.5, 0.5, message=0.25),
    "powersgd": Typical(2.0, 4.0),
    "qsgd": Typical(3.5, 1.2, message=0.7),
    "randomk": Typical(3.5, 1.7),
    "signsgd": Typical(1.2, 0.4, message=0.25),
    "strom": Typical(0.9, 0.35, sparse=15.0, message=11.0),
    "terngrad": Typical(5.0, 1.4, message=0.9),
    "topk": Typical(3.5, 1.0, message=60.0),
    "vgc": Typical(0.9, 0.35, sparse=15.0, message=11.0),
}
CUDA: Mapping[str, Typical] = {
    **dict.fromkeys(METHODS, Typical(0.02, 0.011)),
    "dense": Typical(0.002),
    "bf16": Typical(0.002, 0.0015),
    "fp16": Typical(0.002, 0.0015),
    "momentum_dct": Typical(0.06, 0.028),
    "strom": Typical(0.0057, 0.0008, sparse=0.03, message=0.013),
    "vgc": Typical(0.0057, 0.0008, sparse=0.03, message=0.013),
}
SPARSE = ("adacomp", "strom", "topk", "vgc")  # `message` is of an element sent; of the others of every element
# a bucket: Python and the hand-over to the courier, by plan/costs.py on the machines above
OVERHEAD_MS = {"cpu": 0.4, "cuda": 0.5}
# cpu.csv moments_cpu, a Transformer (1.13 to 1.65 by model); gpu.csv steps_gpu, GPT-2 and ResNet-50 as graphs
MOMENTS = {"cpu": 1.2, "cuda": 1.02}


def cost_of(spec: str, device: str, density: float | None = None) -> Cost:
    """density: of the elements sent, for a method that does not say it."""
    compressor = from_spec(spec)
    name = spec.strip().partition(":")[0].lower()
    times = (CPU if device == "cpu" else CUDA)[name]
    dry = Dry(compressor, [Layout.of([("weight", (SIDE, SIDE))])], 2, torch.device("cpu"))
    share = compressor.share or density or DENSITY
    n_bytes, rounds = _sent(compressor, share, dry)
    head = FIXED * WORD_BYTES if dry.kind == "gather" else 0
    n_sums = compressor.kind == "sum"
    return Cost(
        spec=spec,
        kind=dry.kind,
        bytes_per_element=max(0.0, n_bytes - head) / SIDE**2,
        head_bytes=head,
        encode_ns=times.encode + times.sparse * share,
        decode_ns=times.decode,
        decode_message_ns=times.message * (share if name in SPARSE else 1.0),
        overhead_ms=0.01 if n_sums else OVERHEAD_MS[device],
        moments=MOMENTS[device] if compressor.needs_moments else 1.0,
        rounds=rounds,
        room=compressor.needs_room,
    )


def _sent(compressor: Compressor, density: float, dry: Dry) -> tuple[float, int]:
    """(bytes, collectives) of one bucket of SIDE x SIDE elements."""
    numel = SIDE**2
    if compressor.needs_room:
        method: Any = compressor
        count = round(density * numel)
        room = min(numel, padded(count) if compressor.share is None else above(count))
        return WORD_BYTES * (FIXED + method.words(numel, room)), 1
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
