"""Steps of the methods that are sums (Dense, BF16, FP16): DDP's own all-reduce, a bucket, without the courier."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.exchange.counting import Counts, Mark, Meter
from gradwire.exchange.step import Answer, Part, answered, exchange


def summed(part: Part, group: dist.ProcessGroup, meter: Meter, on_arrival: Callable[[], None]) -> Future[Tensor]:
    """The mean over the ranks in place of the gradient: the collective's own future."""
    start, n_dense, layout = Mark(time.perf_counter()), part.grad.nbytes, part.context.layout
    talk = exchange(part)
    ask = next(talk)
    meter.count(ask.n_bytes, ask.n_bytes, n_dense)
    meter.elements(layout, Counts())
    work = dist.all_reduce(ask.summand, group=group, async_op=True)
    assert work is not None

    def arrived(future: Future[list[Tensor]]) -> Tensor:
        answered(talk, Answer(total=future.value()[0]))
        meter.laps([("exchange", start, Mark(time.perf_counter()))])
        on_arrival()
        return part.out

    return work.get_future().then(arrived)  # type: ignore[no-any-return]
