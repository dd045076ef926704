"""Eight bits of floating point and a scale a tensor (the formats: Micikevicius et al., arXiv:2209.05433)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.arithmetic.runs import tensors_of
from gradwire.codec import SMALLEST, numba_ready
from gradwire.layout import Layout
from gradwire.methods.base import Context
from gradwire.methods.fixed import Body, Fixed

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

    @property
    def alike(self) -> bool:
        return True

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"FP8: format must be one of {', '.join(FORMATS)}, got {self.format!r}")

    def body_words(self, layout: Layout) -> int:
        return len(layout) + -(-layout.numel // 4)

    def write(self, grad: Tensor, state: Any, context: Context) -> Body:
        runs = tensors_of(context.layout)
        words = torch.zeros(self.body_words(context.layout), dtype=torch.int32, device=grad.device)
        codes = words[len(runs) :].view(torch.uint8)[: runs.numel]
        scale = words[: len(runs)].view(torch.float32)
        if numba_ready(grad.device):
            from gradwire.methods.fp8 import cpu as compiled_fp8

            self._scales(compiled_fp8.largest(grad, runs), scale)
            compiled_fp8.round_to(self.format, grad, scale, codes, runs)
        else:
            self._scales(runs.largest(grad), scale)
            codes.copy_((grad / runs.spread(scale)).to(FORMATS[self.format]).view(torch.uint8))
        return Body(words, grad.abs_().sum())  # what was sent, to rounding

    def _scales(self, largest: Tensor, scale: Tensor) -> None:
        """At least the smallest number that is normal: of a denormal the codes could come out above the largest.

        By a tensor: a GPU multiplies with the inverse of a number from Python, which has other last bits.
        """
        most = torch.full_like(largest, torch.finfo(FORMATS[self.format]).max)
        torch.clamp(largest / most, min=SMALLEST, out=scale)

    def read(self, bodies: Tensor, context: Context) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The codes, and the scales over W. No product of the two is infinite."""
        runs = tensors_of(context.layout)
        scales = bodies[:, : len(runs)].contiguous().view(torch.float32)
        codes = bodies[:, len(runs) :].contiguous().view(torch.uint8)[:, : runs.numel]
        if numba_ready(bodies.device):
            from gradwire.methods.fp8 import cpu as compiled_fp8

            top = compiled_fp8.largest_codes(codes)
        else:
            top = torch.nn.functional.pad(codes & CODE, (0, 1)).amax(1)  # there may be no element
        most = torch.finfo(FORMATS[self.format]).max
        sound = ((scales > 0) & torch.isfinite(scales * most)).all(1) & (top <= LARGEST_CODE[self.format])
        return (codes, scales * (1 / len(bodies))), ~sound

    def add_all(self, said: tuple[Tensor, Tensor], out: Tensor, context: Context) -> None:
        runs, (codes, shares) = tensors_of(context.layout), said
        if numba_ready(out.device):
            from gradwire.methods.fp8 import cpu as compiled_fp8

            compiled_fp8.add(self.format, codes, shares, out, runs)
            return
        for row, share in zip(codes, shares, strict=True):
            out += row.view(FORMATS[self.format]).float() * runs.spread(share)
