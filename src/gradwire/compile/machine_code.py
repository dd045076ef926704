"""Numba as the loops of this package use it. Imported only by modules that are loaded when first needed."""

# Numba has no types for what it compiles.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

Array = np.ndarray[Any, Any]
F = TypeVar("F", bound=Callable[..., Any])


def machine_code(function: F) -> F:
    """Machine code that releases the GIL; no fast-math: every operation is rounded by itself, as in the reference."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return cast(F, njit(cache=True, **options)(function))
    except RuntimeError:  # neither the package's folder nor the user's can be written to: compiled in every process
        return cast(F, njit(**options)(function))


@intrinsic
def trailing_zeros(typing_context: Any, value: Any) -> Any:
    """Zeros below the lowest one of an int64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.int64(types.int64), generate
