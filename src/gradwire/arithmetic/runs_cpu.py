"""Runs of a bucket for machine code on the CPU: which part of it a thread has, and the largest element of each run."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.arithmetic.runs import Runs
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import equal_parts, shared

MAGNITUDE = np.int32(0x7FFFFFFF)
WORD = 32  # elements whose bits make a word


def parts(numel: int) -> list[tuple[int, int, int]]:
    """(number, begin, end) of every thread's elements, cut between whole words."""
    pieces = equal_parts(numel, torch.get_num_threads())
    step = -(-pieces[0][1] // WORD) * WORD
    return [(i, min(numel, i * step), min(numel, (i + 1) * step)) for i in range(len(pieces))]


def largest(flat: Tensor, runs: Runs) -> Tensor:
    """As Runs.largest."""
    pieces = parts(runs.numel)
    tops = np.zeros((len(pieces), len(runs)), np.int32)
    shared(pieces, largest_part, flat.numpy(), runs.ends, tops)
    return torch.from_numpy(tops.max(0)).view(torch.float32)


@machine_code
def largest_part(part: int, begin: int, end: int, flat: Array, ends: Array, tops: Array) -> None:
    """tops[part]: the bits of the largest |x| of each run."""
    run, at = np.searchsorted(ends, begin, side="right"), begin
    while at < end:
        stop = min(end, ends[run])
        tops[part, run] = largest_bits(flat[at:stop])
        run, at = run + 1, stop


@machine_code
def largest_bits(flat: Array) -> np.int32:
    """As integers, whose order is that of the magnitudes: so the loop is vectorized."""
    bits, top = flat.view(np.int32), np.int32(0)
    for i in range(bits.size):
        top = max(top, bits[i] & MAGNITUDE)
    return top
