"""The parameters and buffers of a model as flat vectors, by name, for local steps: what an inner optimizer changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import AttachError
from gradwire.layout import Layout

WHOLE = (torch.float32, torch.bfloat16, torch.float16)


def unwrapped(net: nn.Module) -> nn.Module:
    """Without torch.compile and DDP around it."""
    while True:
        inner = getattr(net, "_orig_mod", net.module if isinstance(net, DistributedDataParallel) else net)
        if inner is net:
            return net
        net = inner


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer changes, by name; a tied one stands once."""
    found = {name.replace("_orig_mod.", ""): p for name, p in net.named_parameters() if p.requires_grad}
    if not found:
        raise AttachError("no parameter of the model is trained")
    for name, parameter in found.items():
        if parameter.dtype not in WHOLE:
            raise AttachError(f"{name} is {parameter.dtype}: local steps take float32, bfloat16 and float16 parameters")
    return found


def local_part(tensor: Tensor) -> Tensor:
    """The tensor itself; of one that is sharded (FSDP2) this rank's shard. The same memory, without a gradient."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)
    part: Tensor = tensor if to_local is None else to_local()
    return part


class FlatView:
    """Tensors in one flat float32 vector: read from it, write to it. Asked anew each time, as sharded ones may move."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.layout = Layout.of((name, local_part(tensor).shape) for name, tensor in tensors.items())
        self.dtypes = {tensor.dtype for tensor in tensors.values()}

    def _parts(self) -> list[Tensor]:
        return [local_part(tensor) for tensor in self._tensors.values()]

    def read(self) -> Tensor:
        """[N], a copy."""
        parts = [part.reshape(-1) for part in self._parts()]
        return torch.cat(parts).float() if parts else torch.zeros(0)

    def write(self, flat: Tensor) -> None:
        """Every tensor becomes its part of flat [N], in its own precision."""
        parts = self._parts()
        if parts:
            torch._foreach_copy_(parts, self.cut(flat, parts))

    def cut(self, flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        return [slot.of(flat).view(part.shape) for slot, part in zip(self.layout, like, strict=True)]

    def rounded(self, flat: Tensor) -> Tensor:
        """flat [N] as the tensors hold it once it is written to them."""
        if self.dtypes <= {torch.float32}:
            return flat
        parts = self.cut(flat, self._parts())
        return torch.cat(
            [part.to(t.dtype).float().view(-1) for part, t in zip(parts, self._tensors.values(), strict=True)]
        )
