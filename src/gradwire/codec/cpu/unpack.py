"""Step 6 as machine code for the CPU: all messages of a bucket from the compact format to words, in one call.

As `compact_cpu.unpack`, whose Python takes 50 microseconds a message, as long as a message of some thousand elements.
"""

from __future__ import annotations

import numpy as np

from gradwire.codec.cpu.compact_unpack import bits_behind, check_orders, read, read_directory
from gradwire.codec.cpu.decode import join_words
from gradwire.compile.machine_code import Array, compiled


@compiled
def unpack(
    first: int,
    last: int,
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
    """The messages of ranks first .. last - 1; broken [W]: those that hold anything that does not belong there."""
    begin, length, count_bits, entry, entry_bits, tensor = geometry
    directory_bits, directory_words, payload_words = sizes
    for rank in range(first, last):
        if not sound[rank]:
            continue
        broken[rank] = True  # until all of it is read
        body = np.zeros(bodies.shape[1] + 2, np.uint32)  # the reader looks two words beyond
        for i in range(bodies.shape[1]):
            body[i] = bodies[rank, i]
        directory = (entry, entry_bits, directory_words, length, count_bits, tensor, capacity, payload_words)
        problem, starts, ends = read_directory(body, *directory)
        if problem or check_orders(orders[rank], hybrid):
            continue
        index, code = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.int32)
        problems, payloads = np.zeros(len(begin), np.int64), body[directory_words:]
        blocks = (begin, length, count_bits, tensor, starts, ends)
        read(0, len(begin), payloads, index, code, *blocks, orders[rank], hybrid, problems)
        if problems.any() or bits_behind(body, directory_bits) or payloads[ends[-1] :].any():
            continue
        join_words(index, code, chunk, words[rank], counts[rank])
        broken[rank] = False
