"""What Triton's interpreter lacks: shared memory, in numpy for the PTX of codec/gpu/shared_memory.py, and a mend."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

import swift

MEMORY = np.zeros(48 * 1024 // 4, np.int32)  # of the one program that runs


def data(value: Any) -> Any:
    return value.handle.data if isinstance(value, tl.tensor) else np.asarray(value)


def wrap(numbers: Any) -> tl.tensor:
    shape = list(numbers.shape)
    return tl.tensor(interpreter.TensorHandle(numbers, tl.int32), tl.block_type(tl.int32, shape) if shape else tl.int32)


def reserve(n_words: Any) -> int:
    assert n_words <= len(MEMORY)
    MEMORY[:] = 0x7FC01234  # as it may come: a NaN, and no small number
    return 0


def clear(memory: int, n_words: Any) -> None:
    MEMORY[: int(n_words)] = 0


def put(memory: int, index: tl.tensor, value: tl.tensor, have: tl.tensor) -> None:
    go = data(have).astype(bool)
    MEMORY[data(index)[go]] = data(value)[go].view(np.int32)


def add(memory: int, index: tl.tensor, value: tl.tensor, have: tl.tensor) -> None:
    go = data(have).astype(bool)
    at = data(index)[go]
    assert len(np.unique(at)) == len(at)
    MEMORY.view(np.float32)[at] += data(value)[go]


def increment(memory: int, index: tl.tensor, have: tl.tensor) -> None:
    np.add.at(MEMORY, data(index)[data(have).astype(bool)], 1)


def get(memory: int, index: tl.tensor) -> tl.tensor:
    return wrap(MEMORY[data(index)])


def put_four(memory: int, index: tl.tensor, *values: tl.tensor) -> None:
    assert not (data(index) % 4).any()
    for j, value in enumerate(values):
        MEMORY[data(index) + j] = data(value)


def get_four(memory: int, index: tl.tensor) -> tuple[tl.tensor, ...]:
    assert not (data(index) % 4).any()
    return tuple(wrap(MEMORY[data(index) + j]) for j in range(4))


def mend() -> None:
    """Triton 3.6's interpreter takes int() of an array of one element, which numpy 2.4 refuses; and it is slow."""
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    swift.install()


def install() -> None:
    from gradwire.codec.gpu import shared_memory

    mend()
    for function in (reserve, clear, put, add, increment, get, put_four, get_four):
        setattr(shared_memory, function.__name__, function)
