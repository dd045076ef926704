"""The head of a message on a CPU: its checksum as machine code, written and looked at by numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.codec import header
from gradwire.codec.form import STEPS, Shape
from gradwire.codec.header import Parts
from gradwire.compile.machine_code import Array, machine_code
from gradwire.compile.threads import SMALL, equal_parts, shared

KEY, MULTIPLIER, HALF = np.uint64(header.KEY), np.uint64(header.MULTIPLIER), np.uint64(32)
OWN = header.CHECKSUM.start // 2  # the pair of words that the checksum is in


@machine_code
def mixed(pair: np.uint64, number: int) -> np.uint64:
    """What x_number adds to the checksum."""
    x = pair + np.uint64(number) * KEY
    x = (x ^ (x >> HALF)) * MULTIPLIER
    x = (x ^ (x >> HALF)) * MULTIPLIER
    return x ^ (x >> HALF)


@machine_code
def sum_pairs(begin: int, end: int, words: Array) -> np.uint64:
    """sum_i mix(x_i + i KEY) of the pairs begin .. end of words, modulo 2^64, without its own."""
    total, pairs = np.uint64(0), words[: words.size // 2 * 2].view(np.uint64)
    for first, last in ((begin, min(end, OWN)), (max(begin, OWN + 1), min(end, pairs.size))):
        for i in range(first, last):
            total += mixed(pairs[i], i)
    if end > pairs.size:
        total += mixed(np.uint64(np.uint32(words[words.size - 1])), pairs.size)
    return total


def _checksum(words: Array) -> int:
    """Of one message, modulo 2^64."""
    n_pairs = -(-len(words) // 2)
    if n_pairs < 2 * SMALL:
        return int(sum_pairs(0, n_pairs, words))
    return sum(map(int, shared(equal_parts(n_pairs, torch.get_num_threads()), sum_pairs, words))) % (1 << 64)


def checksum(messages: Tensor) -> Tensor:
    """As `reference.checksum`."""
    totals = [_checksum(words) for words in messages.numpy().reshape(-1, messages.shape[-1])]
    return torch.from_numpy(np.array(totals, dtype=np.uint64).view(np.int32).reshape(*messages.shape[:-1], 2))


def write_head(
    message: Array,
    shape: Shape,
    step: int,
    finite: bool,
    counts: Array,
    passed: Array,
    exponents: Array,
    orders: Array | None,
) -> None:
    """Everything before the body, of which the checksum is made, too; zeros until now."""
    message[:8] = shape.known
    message[4], message[5] = step % STEPS, finite
    message[shape.counts], message[shape.passed] = counts, passed
    message[shape.exponents].view(np.int8)[: len(exponents)] = exponents
    if orders is not None:
        message[shape.orders] = orders
    message[header.CHECKSUM].view(np.uint64)[0] = _checksum(message)


def seal(shape: Shape, step: int, parts: Parts) -> Tensor:
    """As `reference.seal`."""
    message, orders = np.zeros(shape.words, np.int32), None if parts.orders is None else parts.orders.numpy()
    message[shape.body] = parts.body.numpy()
    counts, passed, exponents = parts.counts.numpy(), parts.passed.numpy(), parts.exponents.numpy()
    write_head(message, shape, step, bool(parts.finite), counts, passed, exponents, orders)
    return torch.from_numpy(message)


def inspect(messages: Tensor, shape: Shape, step: int) -> Tensor:
    """As `reference.inspect`; but where nothing is wrong, which is nearly always, it is seen at once."""
    if is_sound(messages, shape, step):
        return torch.zeros(len(messages), len(header.PROBLEMS), dtype=torch.bool)
    return header.check(messages, shape, step, checksum)


def is_sound(messages: Tensor, shape: Shape, step: int) -> bool:
    """Whether `header.check` would find nothing."""
    if messages.shape[1:] != (shape.words,) or messages.dtype != torch.int32:
        return False
    given = messages.numpy()
    known = given[:, :8] == np.array(shape.known, np.int32)
    known[:, 4], known[:, 5] = given[:, 4] == step % STEPS, True  # the flags may be anything
    counts = given[:, shape.counts]
    if not known.all() or (counts < 0).any() or (given[:, shape.passed] < -1).any():
        return False
    if (counts.sum(1, dtype=np.int64) > shape.most).any():
        return False
    return all(_checksum(words) == int(words[header.CHECKSUM].view(np.uint64)[0]) for words in given)
