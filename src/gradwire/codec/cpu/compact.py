"""The compact format on a CPU: `pack` and `unpack` of compact.py, compiled by Numba, block by block in parallel.

Same bytes and same refusals. Import this module only where Numba is installed. One core of an EPYC (Zen 4, 2.6 GHz)
packs 130 to 160 million elements a second and unpacks 175 (benchmarks/wire_bits.py); a call costs 30 microseconds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.compact import UNSENDABLE, check_lengths, refusal
from gradwire.codec.compact_blocks import Blocks
from gradwire.codec.cpu import compact_pack as packing
from gradwire.codec.cpu import compact_unpack as unpacking
from gradwire.compile.threads import SMALL, shared

CPU = torch.device("cpu")


def pack(index: Tensor, code: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Places int64 [n], ascending, and codes int32 [n] to orders int32 [K] and the body, int32 [blocks.words]."""
    tables, code_bits = blocks.tables(CPU), 1 if blocks.hybrid else 3
    places, codes = index.contiguous().numpy(), code.contiguous().numpy()
    begin, count_bits, tensor = tables.begin.numpy(), tables.count_bits.numpy(), tables.tensor.numpy()
    first = np.append(np.searchsorted(places, begin), len(places))
    stats, parts = np.zeros((blocks.count, 10), np.int64), _parts(len(places), blocks)
    shared(parts, packing.survey, places, codes, begin, tables.length.numpy(), first, stats)
    problem, orders, becomes = packing.choose(stats, tensor, tables.capacity.numpy(), blocks.hybrid)
    problem = problem or int(first[0] != 0)
    if problem:
        raise ValueError(UNSENDABLE[problem])
    body = torch.zeros(blocks.words, dtype=torch.int32)
    words = body.numpy().view(np.uint32)
    entry = tables.entry.numpy()
    ends = packing.write_directory(words, first, stats, becomes, count_bits, entry, tensor, code_bits)
    assert ends[-1] <= blocks.payload_words, "room_words proves that this cannot be; compiled code would write beyond"
    geometry = (begin, count_bits, tensor, first, ends)
    shared(parts, packing.write, words[blocks.directory_words :], places, codes, *geometry, stats, becomes, code_bits)
    return torch.from_numpy(orders), body


def unpack(orders: Tensor, body: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Places int64 [n], ascending, and codes int32 [n]. Any bits may come: MessageError if they are no message."""
    check_lengths(orders, body, blocks)
    tables = blocks.tables(CPU)
    length, count_bits, tensor = tables.length.numpy(), tables.count_bits.numpy(), tables.tensor.numpy()
    order = orders.contiguous().numpy()
    words = np.zeros(len(body) + 2, np.uint32)  # the reader looks two words beyond
    words[:-2] = body.numpy().view(np.uint32)
    entries = (tables.entry.numpy(), tables.entry_bits.numpy(), blocks.directory_words)
    limits = (tables.capacity.numpy(), blocks.payload_words)
    problem, first, ends = unpacking.read_directory(words, *entries, length, count_bits, tensor, *limits)
    problem = unpacking.check_orders(order, blocks.hybrid) or problem
    if problem:
        raise refusal(problem)
    index, code = np.empty(first[-1], np.int64), np.empty(first[-1], np.int32)
    problems = np.zeros(blocks.count, np.int64)
    geometry = (tables.begin.numpy(), length, count_bits, tensor, first, ends)
    payloads = words[blocks.directory_words :]
    shared(_parts(len(index), blocks), unpacking.read, payloads, index, code, *geometry, order, blocks.hybrid, problems)
    if problems.any():
        raise refusal(int(problems[problems != 0].min()))
    if unpacking.bits_behind(words, blocks.entries[-1]) or payloads[ends[-1] :].any():
        raise refusal(9)
    return torch.from_numpy(index), torch.from_numpy(code)


def _parts(n: int, blocks: Blocks) -> list[tuple[int, int]]:
    """Blocks (begin, end) for each thread that is worth it; blocks have about as many elements each."""
    n_parts = max(1, min(torch.get_num_threads(), n // SMALL))
    return [(blocks.count * part // n_parts, blocks.count * (part + 1) // n_parts) for part in range(n_parts)]
