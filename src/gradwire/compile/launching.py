"""Launches a Triton kernel that is already compiled without Triton's own search for it."""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined"

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

UNFUSED = {"enable_fp_fusion": False}  # a multiply-add rounds once, the reference twice
_compiled: dict[tuple[str, Hashable], Any] = {}


def is_known(name: str, kind: Hashable) -> bool:
    """Whether the kernel of this name has been compiled for this kind."""
    return (name, kind) in _compiled


def launch_again(
    name: str, kind: Hashable, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], **options: Any
) -> None:
    """kernel[grid](*arguments), constants included in their order.

    `kind` says all that the machine code depends on. Triton would find that out anew at every call, which with tensor
    maps takes the host longer than a small layer's kernel takes an H200.
    """
    known = _compiled.get((name, kind))
    if known is not None:
        known[grid](*arguments)
        return
    compiled = kernel[grid](*arguments, **options)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[name, kind] = compiled
