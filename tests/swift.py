"""Triton's interpreter in a third of the time, with the same results: it makes the same things over and over.

For a process that has nothing to do but interpret. Measured with Triton 3.6 on codec/test_triton.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


def no_lost_checks() -> None:
    """Half of the time goes into checks of overflow whose result nobody looks at unless `debug` is set."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class Kept:
    """In place of what would take tl's functions back after a launch."""

    def restore(self) -> None:
        pass


def patch_once() -> None:
    """tl's functions are exchanged for the interpreter's at every call of every function: here once for each module."""
    original, known = interpreter._patch_lang, set()

    def patched(function: Any) -> Kept:
        modules = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if not modules <= known:
            original(function)
            known.update(modules)
        return Kept()

    interpreter._patch_lang = patched


def know_types() -> None:
    """Types of blocks, shapes and numpy's types are made once each."""
    block, tensor, blocks, shapes = tl.block_type.__init__, tl.tensor.__init__, {}, {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), *(int(getattr(size, "value", size)) for size in shape)
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = self.__dict__  # holds the type, so that no other can have its id
        self.__dict__ = blocks[key]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    tl.block_type.__init__, tl.tensor.__init__ = make_block, make_tensor
    original, dtypes = interpreter._get_np_dtype, {}

    def numpy_type(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = original(type)
        return dtypes[name]

    interpreter._get_np_dtype = numpy_type


def install() -> None:
    no_lost_checks()
    patch_once()
    know_types()
