"""What groups.py computes, as machine code for the CPU; ranges are of groups, so that threads share them."""

from __future__ import annotations

import numpy as np

from gradwire.compile.machine_code import Array, machine_code

MAGNITUDE = np.int32(0x7FFFFFFF)


@machine_code
def largest(first: int, last: int, flat: Array, begins: Array, ends: Array, out: Array) -> None:
    """The largest |element| of each group. Its bits are compared: a maximum of integers is a vector's operation."""
    bits, result = flat.view(np.int32), out.view(np.int32)
    for group in range(first, last):
        part, top = bits[begins[group] : ends[group]], np.int32(0)
        for i in range(part.size):
            size = np.int32(part[i] & MAGNITUDE)
            top = size if size > top else top
        result[group] = top


@machine_code
def fold(values: Array, count: int) -> np.float64:
    """The sum of values[:count], which it overwrites: the second half of a power of two is added to the first.

    Zeros behind the last one change nothing, so the power need not be the one that `groups.rows` has.
    """
    if count == 0:
        return np.float64(0)
    half = 1
    while 2 * half < count:
        half *= 2
    while count > 1:
        first, second = values[:half], values[half:count]
        for i in range(second.size):
            first[i] += second[i]
        count, half = half, half // 2
    return np.float64(values[0])


@machine_code
def norms(first: int, last: int, flat: Array, begins: Array, ends: Array, out: Array) -> None:
    """The 2-norm of each group, in double precision and then rounded; not above the largest float32."""
    squares = np.empty(max(np.max(ends[first:last] - begins[first:last]), 1) if last > first else 1, np.float64)
    for group in range(first, last):
        part = flat[begins[group] : ends[group]]
        for i in range(part.size):
            value = np.float64(part[i])
            squares[i] = value * value
        out[group] = np.float32(min(np.sqrt(fold(squares, part.size)), np.float64(3.4028234663852886e38)))
