"""Step 6 as machine code for the CPU: all messages of a bucket from the compact format to words, in one call.

The Python around `compact_cpu.unpack` takes 50 microseconds a message, as long as a message of some thousand elements.
"""

from __future__ import annotations

import numpy as np

from gradwire.kernels.compiled_decode import join_words
from gradwire.machine import Array, compiled
from gradwire.wire.compact_cpu_unpack import bits_behind, check_orders, read, read_directory


@compiled
def unpack(
    begin: int,
    end: int,
    bodies: Array,
    orders: Array,
    sound: Array,
    geometry: Array,
    capacity: Array,
    sizes: tuple[int, int, int],
    hybrid: bool,
    chunk: int,
    words: Array,
    counts: Array,
    broken: Array,
) -> None:
    """The messages of ranks begin .. end - 1; broken [W]: those that hold anything that does not belong there."""
    for rank in range(begin, end):
        if sound[rank]:
            message = (bodies[rank], orders[rank], geometry, capacity, sizes, hybrid)
            broken[rank] = not _unpack_one(*message, chunk, words[rank], counts[rank])


@compiled
def _unpack_one(
    body: Array,
    orders: Array,
    geometry: Array,
    capacity: Array,
    sizes: tuple[int, int, int],
    hybrid: bool,
    chunk: int,
    words: Array,
    counts: Array,
) -> bool:
    """As `compact_cpu.unpack`; whether it is a message."""
    begin, length, count_bits, entry, entry_bits, tensor = geometry
    directory_bits, directory_words, payload_words = sizes
    padded = np.zeros(len(body) + 2, np.uint32)  # the reader looks two words beyond
    for i in range(len(body)):
        padded[i] = body[i]
    found = read_directory(
        padded, entry, entry_bits, directory_words, length, count_bits, tensor, capacity, payload_words
    )
    problem, first, ends = found
    if problem or check_orders(orders, hybrid):
        return False
    index, code = np.empty(first[-1], np.int64), np.empty(first[-1], np.int32)
    problems, payloads = np.zeros(len(begin), np.int64), padded[directory_words:]
    blocks = (begin, length, count_bits, tensor, first, ends)
    read(0, len(begin), payloads, index, code, *blocks, orders, hybrid, problems)
    if problems.any() or bits_behind(padded, directory_bits) or payloads[ends[-1] :].any():
        return False
    join_words(index, code, chunk, words, counts)
    return True
