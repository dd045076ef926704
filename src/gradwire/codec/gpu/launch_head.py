"""The head of a message for CUDA: launchers. Nothing here waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codec import header
from gradwire.codec.gpu import head as heads
from gradwire.codec.gpu.launch_decode import checksum

LOOKED_AT = 256  # words at a time
_FLAGS = 5


def seal(shape: header.Shape, step: int, parts: header.Parts) -> Tensor:
    """As `header.write`."""
    if shape.format == header.BARE:
        return header.write(shape, step, parts, checksum)
    finite, counts, passed, exponents, orders, body = parts
    message = torch.empty(shape.words, dtype=torch.int32, device=body.device)
    message[shape.body] = body
    given = (finite, counts, passed, exponents, passed if orders is None else orders)
    heads.head_kernel[(1,)](
        message,
        *(part.contiguous() for part in given),
        *_numbers(shape, step),
        compact=orders is not None,
        width=LOOKED_AT,
    )
    message[header.CHECKSUM] = checksum(message)
    return message


def inspect(messages: Tensor, shape: header.Shape, step: int) -> Tensor:
    """As `header.check`."""
    if shape.format == header.BARE:
        return header.check(messages, shape, step, checksum)
    header.refuse_length(messages, shape)
    problems = torch.empty(len(messages), len(header.PROBLEMS), dtype=torch.uint8, device=messages.device)
    total = checksum(messages).view(torch.int64)
    heads.inspect_kernel[(len(messages),)](
        messages, messages.stride(0), total, problems, *_numbers(shape, step), shape.most, width=LOOKED_AT
    )
    return problems.view(torch.bool)


def _numbers(shape: header.Shape, step: int) -> list[int]:
    """The words that are the same on every rank, without the flags."""
    fixed = shape.fixed(step)
    return fixed[:_FLAGS] + fixed[_FLAGS + 1 :]
