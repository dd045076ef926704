"""The buffers that a round averages: running statistics of batch norm and its kin. Others are tables and counters."""

from __future__ import annotations

from torch import Tensor, nn


def statistics_of(net: nn.Module) -> dict[str, Tensor]:
    """By name, whatever torch.compile has wrapped. Asked for anew each time: a module may replace a buffer."""
    return {
        name.replace("_orig_mod.", ""): buffer
        for name, buffer in net.named_buffers()
        if name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()
    }
