"""Flags as the bits of a word, for compiled loops that look only at who is flagged."""

# Numba has no types for what it compiles.
# mypy: disable-error-code="untyped-decorator,import-untyped"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

N_FLAGS = 64


@intrinsic
def lowest_bits(typing_context: Any, flags: Any, start: Any) -> Any:
    """Bit 0 of flags[start] .. flags[start + 63] as an int64: one or two instructions where there are vectors.

    flags: uint8, contiguous; start: uint64, not checked.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        vector = ir.VectorType(ir.IntType(8), N_FLAGS)
        bytes_ = builder.load(builder.bitcast(builder.gep(array.data, [arguments[1]]), vector.as_pointer()), align=1)
        low = builder.and_(bytes_, ir.Constant(vector, [1] * N_FLAGS))
        return builder.bitcast(
            builder.icmp_unsigned("!=", low, ir.Constant(vector, [0] * N_FLAGS)), ir.IntType(N_FLAGS)
        )

    return types.int64(flags, types.uint64), generate
