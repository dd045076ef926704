"""Eight bits of floating point and a scale a tensor (the formats: Micikevicius et al., arXiv:2209.05433)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.arithmetic.groups import groups_of
from gradwire.codec import SMALLEST, numba_ready
from gradwire.layout import Layout
from gradwire.methods.base import Context
from gradwire.methods.fixed import Body, Fixed, split

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
CODE = 0x7F  # the bits of a code without its sign
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}  # 448 and 57,344; above it are infinity and what is no number


@dataclass(frozen=True)
class FP8(Fixed):
    """sent = s fp8(g / s), to the nearest, with s = max|g| / (the format's largest number) for each tensor.

    format: "e4m3" (four bits of exponent, three of mantissa, up to 448) or "e5m2" (five and two, up to 57,344).
    On the wire: 8 bits an element and 32 bits a tensor.
    """

    format: str = "e4m3"

    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"FP8: format must be one of {', '.join(FORMATS)}, got {self.format!r}")

    def body_words(self, layout: Layout) -> int:
        return len(layout) + -(-layout.numel // 4)

    @property
    def _dtype(self) -> torch.dtype:
        return FORMATS[self.format]

    def write(self, grad: Tensor, state: Any, context: Context) -> Body:
        tensors = groups_of(context.layout, None)
        words = torch.zeros(self.body_words(context.layout), dtype=torch.int32, device=grad.device)
        codes = words[len(tensors) :].view(torch.uint8)[: tensors.numel]
        scale = words[: len(tensors)].view(torch.float32)
        self._scales(tensors.largest(grad), scale)
        if numba_ready(grad.device):
            from gradwire.methods.fp8 import cpu

            cpu.round_to(self._dtype, grad, scale, codes, tensors)
        else:
            codes.copy_((grad / tensors.spread(scale)).to(self._dtype).view(torch.uint8))
        return Body(words, grad.abs_().sum())  # what was sent, to rounding

    def _scales(self, largest: Tensor, scale: Tensor) -> None:
        """At least the smallest number that is normal: of a denormal the codes could come out above the largest.

        By a tensor: a GPU multiplies with the inverse of a number from Python, which has other last bits.
        """
        most = torch.full_like(largest, torch.finfo(self._dtype).max)
        torch.clamp(largest / most, min=SMALLEST, out=scale)

    def read(self, bodies: Tensor, context: Context) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The codes, and the scales over W. No product of the two is infinite."""
        scales, words = split(bodies, len(context.layout))
        codes = words.contiguous().view(torch.uint8)[:, : context.layout.numel]
        if numba_ready(bodies.device):
            from gradwire.methods.fp8 import cpu

            top = cpu.largest_codes(codes)
        else:
            top = torch.nn.functional.pad(codes & CODE, (0, 1)).amax(1)  # there may be no element
        most = torch.finfo(self._dtype).max
        sound = ((scales > 0) & torch.isfinite(scales * most)).all(1) & (top <= LARGEST_CODE[self.format])
        return (codes, scales * (1 / len(bodies))), ~sound

    def add_all(self, said: tuple[Tensor, Tensor], out: Tensor, context: Context) -> None:
        tensors, (codes, shares) = groups_of(context.layout, None), said
        if numba_ready(out.device):
            from gradwire.methods.fp8 import cpu

            cpu.add(self._dtype, codes, shares, out, tensors)
            return
        for row, share in zip(codes, shares, strict=True):
            out += row.view(self._dtype).float() * tensors.spread(share)
