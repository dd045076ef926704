"""Step 5 of the methods that are sums (Dense, BF16, FP16): one all-reduce a bucket, without the courier."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gradwire.exchange.counting import Meter
from gradwire.layout import Layout
from gradwire.methods.base import Sum


@dataclass(frozen=True)
class Small:
    """Buckets of at most so many elements are summed, whatever the method of the others is."""

    numel: int
    method: Sum


def summed(
    buffer: Tensor, layout: Layout, method: Sum, group: dist.ProcessGroup, meter: Meter, on_arrival: Callable[[], None]
) -> Future[Tensor]:
    """The mean over the ranks in place of `buffer`: multiplied by 1/W before the sum, exactly as DDP does it."""
    start = time.perf_counter()
    buffer.mul_(1 / dist.get_world_size(group))
    tensor = buffer.to(method.wire_dtype(buffer.dtype))
    n_bytes = tensor.numel() * tensor.element_size()
    meter.count(n_bytes, n_bytes, buffer.numel() * buffer.element_size())
    meter.everything(layout)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None

    def arrived(future: Future[list[Tensor]]) -> Tensor:
        reduced: Tensor = future.value()[0]
        meter.add_time("exchange", time.perf_counter() - start)
        on_arrival()
        return reduced if reduced is buffer else buffer.copy_(reduced)

    return work.get_future().then(arrived)  # type: ignore[no-any-return]
