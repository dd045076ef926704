"""Numba as the compiled loops of this package use it. Imported only by modules that are loaded when first needed."""

# Numba has no types for what it compiles.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

Array = np.ndarray[Any, Any]

# The GIL is released, and no fast-math: every operation is rounded by itself, as the reference does it.
compiled = njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)


@intrinsic
def trailing_zeros(typing_context: Any, value: Any) -> Any:
    """Zeros below the lowest one of an int64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], context.get_constant(types.boolean, True))

    return types.int64(types.int64), generate
