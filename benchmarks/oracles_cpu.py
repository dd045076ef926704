"""Our methods against other projects' on the same gradients: element by element, or in distribution where they draw.

Differences are in roundings: 2^-24 of the largest element. Two processes over Gloo, as in methods_cpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import twins
from benchmarks.given import Given, scene
from benchmarks.methods_cpu import WORLD, Contender, ours, theirs
from benchmarks.ranks import on_ranks
from benchmarks.twins import Step, Twin
from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.methods import from_spec

Row = dict[str, Any]
STEPS = 8
ROUNDING = 2.0**-24
DRAWS = 400
N_DRAWN = 1 << 16  # elements of which every draw is looked at
LIKELY = 6.0  # standard errors that none of so many means differs by, but once in thousands of runs
DENSITY = 1 / 64  # of every tensor a whole number: GRACE rounds down, we round up


def grace_topk() -> Twin:
    options = {"compress_ratio": DENSITY}
    return Twin("GRACE top-k", twins.grace, ("topk", "residual", "allgather", options), project="grace")


def grace_warm_powersgd(model: nn.Module, spec: str) -> Step:
    """GRACE's PowerSGD, going on from its last Q, from the very Q that ours begins with."""
    twins.use("grace")
    from grace_dl.dist.communicator.allreduce import Allreduce
    from grace_dl.dist.compressor.powersgd import PowerSGDCompressor
    from grace_dl.dist.memory.residual import ResidualMemory

    method: Any = from_spec(spec)
    compressor = PowerSGDCompressor(method.rank, use_memory=True, world_size=dist.get_world_size())
    layout = Layout.of((name, parameter.shape) for name, parameter in model.named_parameters())
    for name, basis in method.init(layout, torch.device("cpu")).basis.items():
        compressor.q_memory[name] = basis.T.contiguous()
    return twins.each_gradient(model, Allreduce(compressor, ResidualMemory(), dist.get_world_size()).step)


POWERSGD = "powersgd:rank=4"
EQUAL: tuple[tuple[str, Twin, float], ...] = (  # ours, theirs, the most that they may differ by
    # torch rounds to float16 and then halves, which rounds its smallest numbers again: one rounding of float16
    ("fp16", Twin("torch fp16_compress_hook", twins.torch_fp16, hook=True), 2**13),
    (f"topk:density={DENSITY},exact=true", grace_topk(), 0),
    (POWERSGD, Twin("GRACE PowerSGD, same start", grace_warm_powersgd, (POWERSGD,), project="grace"), 256),
)
CLOSE: tuple[tuple[str, Twin], ...] = (  # other algorithms of the same bytes: how near each comes to the true mean
    ("powersgd:rank=1", Twin("epfml PowerSGD rank 1", twins.epfml_powersgd, (1,), project="powersgd")),
    (POWERSGD, Twin("epfml PowerSGD rank 4", twins.epfml_powersgd, (4,), project="powersgd")),
)


def run_both(spec: str, twin: Twin, visit: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """visit(ours, theirs, true mean), all [N], after every step."""
    given = scene(dist.get_rank())
    both = ours(spec, Given(given), twin.one_bucket), theirs(twin, Given(given))
    for step in range(STEPS):
        sample = given.samples[step % len(given.samples)]
        for contender in both:
            contender.run(sample)
        mean = torch.cat([grad.flatten() for grad in sample.grads])
        dist.all_reduce(mean)
        visit(*(result(contender) for contender in both), mean / WORLD)


def result(contender: Contender) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in contender.module.parameters()])


def difference(spec: str, twin: Twin) -> float:
    """The largest of all elements and steps, in roundings."""
    found: list[float] = []

    def visit(mine: Tensor, other: Tensor, mean: Tensor) -> None:
        found.append(float((mine - other).abs().max() / other.abs().max()) / ROUNDING)

    run_both(spec, twin, visit)
    return max(found)


def errors(spec: str, twin: Twin) -> tuple[float, float]:
    """How much of the sum of all true means has not arrived after the last step, by ours and by theirs."""
    sums: list[Tensor] = []

    def visit(*three: Tensor) -> None:
        sums[:] = [a + b for a, b in zip(sums, three, strict=True)] if sums else list(three)

    run_both(spec, twin, visit)
    mine, other, mean = sums
    return tuple(float((one - mean).norm() / mean.norm()) for one in (mine, other))


def drawn(draw: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of every element over many draws."""
    total, squares = torch.zeros(N_DRAWN, dtype=torch.float64), torch.zeros(N_DRAWN, dtype=torch.float64)
    for _ in range(DRAWS):
        values = draw().double()
        total += values
        squares += values.square()
    mean = total / DRAWS
    return mean, (squares / DRAWS - mean.square()).clamp(min=0) * (DRAWS / (DRAWS - 1))


def draws_of(spec: str, make: Callable[[], Any]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Ours and GRACE's draws of one tensor's gradient, without processes."""
    torch.manual_seed(0)
    given = scene(0).samples[0].grads[2].flatten()[:N_DRAWN].clone()
    ranks, compressor = InProcess(from_spec(spec), Layout.of([("weight", (N_DRAWN,))])), make()
    return drawn(lambda: ranks([given]).mean), drawn(lambda: compressor.decompress(*compressor.compress(given, "")))


def grace_qsgd() -> Any:
    twins.use("grace")
    from grace_dl.dist.compressor.qsgd import QSGDCompressor

    return QSGDCompressor(7, 512)


def grace_terngrad() -> Any:
    twins.use("grace")
    from grace_dl.dist.compressor.terngrad import TernGradCompressor

    return TernGradCompressor()


DRAWN = (("qsgd:bits=4,group=512", "GRACE QSGD", grace_qsgd), ("terngrad", "GRACE TernGrad", grace_terngrad))


def rows() -> Iterator[Row]:
    yield from equal_rows()
    yield from close_rows()
    yield from drawn_rows()


def equal_rows() -> Iterator[Row]:
    for spec, twin, bar in EQUAL:
        what = f"{spec}, largest difference of {STEPS} steps"
        if twin.missing:
            yield {"what": what, "against": twin.missing}
            continue
        value = max(on_ranks(WORLD, difference, spec, twin))
        found = {"value": value, "reference": 1.0, "unit": "roundings", "bar": bar, "holds": value <= bar}
        yield {"what": what, "against": twin.name} | found


def close_rows() -> Iterator[Row]:
    for spec, twin in CLOSE:
        what = f"{spec}, not arrived after {STEPS} steps"
        if twin.missing:
            yield {"what": what, "against": twin.missing}
            continue
        mine, other = on_ranks(WORLD, errors, spec, twin)[0]
        yield {"what": what, "against": twin.name, "value": mine, "reference": other, "unit": "of the gradient"}


def drawn_rows() -> Iterator[Row]:
    for spec, name, make in DRAWN:
        if twins.folder_of("grace") is None:
            yield {"what": f"{spec}, mean of {DRAWS} draws", "against": f"{name}: not installed"}
            continue
        (mean, variance), (their_mean, their_variance) = draws_of(spec, make)
        # where nothing is left to chance only roundings differ
        error = ((variance + their_variance) / DRAWS).sqrt() + 8 * ROUNDING * their_mean.abs().max()
        apart = float(((mean - their_mean).abs() / error).max())
        means = {"value": apart, "reference": 1.0, "unit": "standard errors", "bar": LIKELY, "holds": apart <= LIKELY}
        yield {"what": f"{spec}, means of {DRAWS} draws, largest difference", "against": name} | means
        both = float(variance.sum()), float(their_variance.sum())
        ratio = max(both) / min(both)
        spread = {"value": both[0], "reference": both[1], "ratio": ratio, "bar": 1.02, "holds": ratio <= 1.02}
        yield {"what": f"{spec}, variance, the larger by the smaller", "against": name} | spread
