"""Shared memory for kernels that scatter inside a program: PTX instructions, since Triton 3.6 has no words for it.

Each is done for every element by whichever thread holds it, so nothing depends on how Triton lays a tensor out.
`tl.debug_barrier` has to stand between a write and another thread's access.
"""

# Kernels are typed by Triton, not by Python.
# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call,attr-defined,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reserve(n_words: tl.constexpr):
    """Memory of n_words words, at most 48 KiB, for the program: what the other functions are given."""
    return tl.inline_asm_elementwise(
        f"{{ .shared .align 16 .b32 reserved[{n_words}]; mov.u32 $0, reserved; }}",
        "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def clear(memory, n_words: tl.constexpr):
    """Zeros; n_words is a power of two, at least 4."""
    tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, $2;",
        "=r,r,r", [memory + 16 * tl.arange(0, n_words // 4), 0], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def put(memory, index, value, have):
    """memory[index] = value, of 32 bits, where `have`."""
    tl.inline_asm_elementwise(
        "{ .reg .pred go; setp.ne.s32 go, $3, 0; @go st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
        "=r,r,r,r", [memory + 4 * index, value, have.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add(memory, index, value, have):
    """memory[index] += value, float32, where `have`; no index twice."""
    tl.inline_asm_elementwise(
        "{ .reg .pred go; .reg .f32 sum; setp.ne.s32 go, $3, 0; @go ld.shared.f32 sum, [$1];"
        " @go add.rn.f32 sum, sum, $2; @go st.shared.f32 [$1], sum; mov.b32 $0, 0; }",
        "=r,r,f,r", [memory + 4 * index, value, have.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def increment(memory, index, have):
    """memory[index] += 1 where `have`, also where several have one index.

    No two threads may hold the same element, so there are at least as many elements as threads.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred go; setp.ne.s32 go, $2, 0; @go red.shared.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,r,r", [memory + 4 * index, have.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def get(memory, index):
    """memory[index] as int32."""
    return tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [memory + 4 * index], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def put_four(memory, index, a, b, c, d):
    """memory[index] = a, memory[index + 1] = b and so on, of 32 bits; index is a multiple of 4."""
    tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;",
        "=r,r,r,r,r,r", [memory + 4 * index, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def get_four(memory, index):
    """memory[index] to memory[index + 3] as int32; index is a multiple of 4."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [memory + 4 * index],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
