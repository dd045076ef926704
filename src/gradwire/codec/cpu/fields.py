"""fields.py as machine code for the CPU. Ranges are of words, so that threads share them."""

from __future__ import annotations

import numpy as np

from gradwire.compile.machine_code import Array, machine_code


@machine_code
def join(fields: Array, begin: int, each: int, bits: int) -> np.uint32:
    """One word of fields[begin : begin + each]."""
    word = np.uint32(0)
    for place in range(each):
        word |= np.uint32(fields[begin + place]) << np.uint32(bits * place)
    return word


@machine_code
def join_all(begin: int, end: int, fields: Array, bits: int, words: Array) -> None:
    """words[begin:end], all of them full."""
    each = 32 // bits
    for i in range(begin, end):
        words[i] = np.int32(join(fields, i * each, each, bits))


@machine_code
def pack(begin: int, end: int, fields: Array, bits: int, words: Array) -> None:
    """words[begin:end] of fields; with a width that the compiler knows its loops become straight code."""
    each = 32 // bits
    full = min(end, fields.size // each)
    if bits == 2:
        join_all(begin, full, fields, 2, words)
    elif bits == 3:
        join_all(begin, full, fields, 3, words)
    elif bits == 4:
        join_all(begin, full, fields, 4, words)
    elif bits == 8:
        join_all(begin, full, fields, 8, words)
    else:
        join_all(begin, full, fields, bits, words)
    if full < end:
        words[full] = np.int32(join(fields, full * each, fields.size - full * each, bits))


@machine_code
def split_all(begin: int, end: int, words: Array, bits: int, fields: Array) -> None:
    """The fields of words[begin:end], all of them full."""
    each, mask = 32 // bits, np.uint32((1 << bits) - 1)
    for i in range(begin, end):
        word = np.uint32(words[i])
        for place in range(each):
            fields[i * each + place] = word >> np.uint32(bits * place) & mask


@machine_code
def unpack(begin: int, end: int, words: Array, bits: int, fields: Array) -> None:
    """The fields of words[begin:end]; see pack."""
    each = 32 // bits
    full = min(end, fields.size // each)
    if bits == 1:
        split_all(begin, full, words, 1, fields)
    elif bits == 2:
        split_all(begin, full, words, 2, fields)
    elif bits == 3:
        split_all(begin, full, words, 3, fields)
    elif bits == 4:
        split_all(begin, full, words, 4, fields)
    elif bits == 8:
        split_all(begin, full, words, 8, fields)
    else:
        split_all(begin, full, words, bits, fields)
    if full < end:
        word = np.uint32(words[full])
        for place in range(fields.size - full * each):
            fields[full * each + place] = word >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
