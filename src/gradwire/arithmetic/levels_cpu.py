"""Rounding by chance to levels of a scale, as machine code for the CPU: QSGD's equation, tile by tile of a packed body.

A code has the level in its lower bits and the sign above them; zero has none.
"""

from __future__ import annotations

import numpy as np

from gradwire.arithmetic.draws_cpu import draw
from gradwire.compile.machine_code import Array, machine_code

UNIT = np.float32(2.0**-24)
ZERO = np.float32(0)


@machine_code
def round_group(
    begin: int, end: int, grad: Array, scale: np.float32, first: np.uint32, second: np.uint32, bits: int, codes: Array
) -> int:
    """Codes of grad[begin:end], of one group; returns the sum of the levels."""
    sign, levels, total = np.int32(bits - 1), np.float32((1 << (bits - 1)) - 1), 0
    if scale == ZERO:
        codes[: end - begin] = 0
        return total
    part, places = grad[begin:end], codes[: end - begin]
    for i in range(part.size):
        size = min(abs(part[i]) / scale * levels, levels)
        whole = np.int32(size)
        chance = np.float32(np.int32(draw(begin + i, first, second) >> np.uint32(8))) * UNIT
        level = whole + np.int32(chance < size - np.float32(whole))
        total += int(level)
        places[i] = level | np.int32((part[i] < ZERO) & (level > 0)) << sign
    return total


@machine_code
def round_tile(
    begin: int,
    end: int,
    grad: Array,
    scales: Array,
    ends: Array,
    slots: Array,
    keys: Array,
    bits: int,
    codes: Array,
    sent: float,
) -> float:
    """Codes of grad[begin:end]; returns sent + the sum of scale * level."""
    words, at, group = keys.view(np.uint32), begin, np.searchsorted(ends, begin, side="right")
    while at < end:
        while ends[group] <= at:
            group += 1
        stop, scale, slot = min(ends[group], end), scales[group], slots[group]
        key = (words[0, slot], words[1, slot])
        sent += round_group(at, stop, grad, scale, *key, bits, codes[at - begin :]) * np.float64(scale)
        at = stop
    return sent


@machine_code
def add_group(codes: Array, unit: np.float32, levels: int, out: Array) -> None:
    """out += what the codes of one group say; unit: of one level."""
    below = np.uint8(levels)
    for i in range(out.size):
        value = np.float32(codes[i] & below) * unit
        out[i] += -value if codes[i] > below else value


@machine_code
def add_tile(begin: int, end: int, codes: Array, units: Array, ends: Array, levels: int, out: Array) -> None:
    """out[begin:end] += what the codes say; units [G]."""
    at, group = begin, np.searchsorted(ends, begin, side="right")
    while at < end:
        while ends[group] <= at:
            group += 1
        stop = min(ends[group], end)
        add_group(codes[at - begin : stop - begin], units[group], levels, out[at:stop])
        at = stop
