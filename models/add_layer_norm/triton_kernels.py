"""Triton kernels of the fused operator for CUDA. Imported on first use only.

Forward and backward are memory-bound: each tensor is read or written once, and a row stays in
registers. Mean and variance are float32 for every dtype. Results are deterministic, and the results
of a row do not depend on other rows: block size and number of warps depend on D alone, the
gradients of weight and bias are summed in a fixed order, and there are no atomics.

Memory traffic for N rows of D elements of e bytes, in bytes: forward 4NDe (read x and residual;
write y and sum); backward 3NDe (read dy and sum; write dx), or 4NDe with a gradient of the sum
(read dsum too), plus the partial sums of dweight and dbias.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Maximum width of a row, which must fit in the registers of one program.
MAX_FORWARD_D = 16384
MAX_BACKWARD_D = 8192
# Maximum numbers of programs in the backward pass and of columns of them all. Each program writes
# one partial sum of dweight and dbias. Independent of the number of multiprocessors, so that every
# device sums in the same order; the 132 of an H100 or H200 run all programs at once.
MAX_PARTIALS, _MAX_COLUMNS = 2048, 1024 * 1024
# Maximum numbers of rows loaded ahead and of bytes for them in shared memory: for each column, so
# that a multiprocessor has room for all of its programs, and for each program. A program can have
# 99 KiB on every device since Ampere, and needs some for other things.
_MAX_ROWS_AHEAD, _MAX_COLUMN_BYTES, _MAX_PROGRAM_BYTES = 2, 16, 64 * 1024
# Partial sums that a program of `_reduce_kernel` adds at once, its columns, warps and stages.
REDUCED_ROWS, REDUCED_COLUMNS, REDUCING_WARPS, REDUCING_STAGES = 256, 16, 8, 4


@triton.jit
def _mean(values, D):
    """Return the mean of a row of values `(BLOCK,)` that are 0 beyond D.

    `/` errs by up to 2 units in the last place, so that the mean of a constant row would differ
    from its elements.
    """
    return tl.div_rn(tl.sum(values, 0), tl.cast(D, tl.float32))


@triton.jit
def _deviations(s, mask, D, CENTRED: tl.constexpr):
    """Return a row's deviations from its mean `(BLOCK,)` and their mean square, both float32.

    A large mean has a rounding error, which is then the mean of the deviations. It is subtracted
    as well. If not CENTRED, the mean is taken to be zero.
    """
    if CENTRED:
        s = tl.where(mask, s - _mean(s, D), 0.0)
        s = tl.where(mask, s - _mean(s, D), 0.0)
    return s, tl.sum(s * s, 0) * (1.0 / D)


@triton.jit
def _forward_kernel(
    x_ptr,  # (N, D)
    residual_ptr,  # (N, D), read if HAS_RESIDUAL
    weight_ptr,  # (D,), read if HAS_WEIGHT
    bias_ptr,  # (D,), read if HAS_BIAS
    y_ptr,  # (N, D)
    sum_ptr,  # (N, D), written if HAS_RESIDUAL
    D,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # 64-bit, because 32-bit offsets overflow at 2^31 elements.
    row = tl.program_id(0).to(tl.int64) * D
    columns = tl.arange(0, BLOCK)
    mask = columns < D
    s = tl.load(x_ptr + row + columns, mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual_ptr + row + columns, mask, other=0.0).to(tl.float32)
        # Rounded to the stored dtype, so that mean and variance are those of the stored sum.
        stored = s.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row + columns, stored, mask)
        s = stored.to(tl.float32)
    d, var = _deviations(s, mask, D, CENTRED)
    # Cast, because the compiler would treat eps as float64 and compute the root in float64.
    y = d * tl.rsqrt(var + tl.cast(eps, tl.float32))
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + columns, mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row + columns, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _backward_kernel(
    dy_ptr,  # (N, D)
    dsum_ptr,  # (N, D), read if HAS_DSUM
    sum_ptr,  # (N, D)
    weight_ptr,  # (D,), read if HAS_WEIGHT
    dx_ptr,  # (N, D)
    dweight_ptr,  # (G, D) float32, one partial sum for each of G programs
    dbias_ptr,  # (G, D) float32, one partial sum for each of G programs
    N,
    eps,
    D: tl.constexpr,  # known to the compiler, which leaves out the columns beyond it
    HAS_DSUM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    # A thread loads 4 elements at once. With 8, the widest load of 16 bits, half of the threads
    # would have nothing to do in the last of two loads of 384 columns.
    columns = tl.max_contiguous(tl.arange(0, BLOCK), 4)
    mask = columns < D
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask, other=0.0).to(tl.float32)
    # Rows ahead are loaded while one is computed, whose sums wait for each other.
    for index in tl.range(program, N, tl.num_programs(0), num_stages=STAGES):
        row = index * D
        s = tl.load(sum_ptr + row + columns, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row + columns, mask, other=0.0).to(tl.float32)
        # Mean and variance are recomputed from the loaded row, which costs less than reading them.
        d, var = _deviations(s, mask, D, CENTRED)
        rstd = tl.rsqrt(var + tl.cast(eps, tl.float32))
        xhat = d * rstd
        dweight += dy * xhat
        dbias += dy
        if HAS_WEIGHT:
            dy *= weight
        share = rstd * (1.0 / D)
        if CENTRED:
            # Joined, so that the warps wait for each other once.
            along, total = tl.split(tl.sum(tl.join(dy * xhat, dy), 0))
            dx = dy * rstd - (xhat * (along * share) + total * share)
        else:
            dx = dy * rstd - xhat * (tl.sum(dy * xhat, 0) * share)
        if HAS_DSUM:
            dx += tl.load(dsum_ptr + row + columns, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row + columns, dx.to(dx_ptr.dtype.element_ty), mask)
    tl.store(dweight_ptr + program * D + columns, dweight, mask)
    tl.store(dbias_ptr + program * D + columns, dbias, mask)


@triton.jit
def _reduce_kernel(
    partial_ptr,  # (2, G, D) float32
    out_ptr,  # (2, D) float32
    G,
    D,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    sums = tl.program_id(1)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, G, ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < G)[:, None] & (columns < D)[None, :]
        offsets = (sums * G + rows)[:, None] * D + columns[None, :]
        total += tl.load(partial_ptr + offsets, mask, other=0.0)
    tl.store(out_ptr + sums * D + columns, tl.sum(total, 0), columns < D)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """Return `norm(x + residual)` and `x + residual`; without a residual, the latter is `x`.

    Args:
        x: `(..., D)`, D at most `MAX_FORWARD_D`.
        residual: `(..., D)`; None: zeros.
        weight: `(D,)`; None: ones.
        bias: `(D,)`; None: zeros.
        eps: Constant added to the variance.
        centred: True for layer norm, False for RMS norm.
    """
    D = x.shape[-1]
    x = x.contiguous()
    residual, weight, bias = (
        None if tensor is None else tensor.contiguous() for tensor in (residual, weight, bias)
    )
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rows = x.numel() // D if D else 0
    if rows:
        _forward_kernel[(rows,)](
            x,
            residual,
            weight,
            bias,
            y,
            total,
            D,
            eps,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            CENTRED=centred,
            BLOCK=triton.next_power_of_2(D),
            num_warps=warps(D),
        )
    return y, total


def backward(
    dy: Tensor,
    dsum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dweight and dbias: the gradients with respect to x, weight and bias.

    The gradient with respect to the residual equals dx.

    Args:
        dy: Gradient with respect to the normalised output, `(..., D)`, D at most `MAX_BACKWARD_D`.
        dsum: Gradient with respect to the sum, the second output, `(..., D)`; None: zeros.
        total: Sum `x + residual` from the forward pass, `(..., D)`.
        weight: `(D,)`; None: ones.
        eps: Constant added to the variance in the forward pass.
        centred: True for layer norm, False for RMS norm.

    Returns:
        dx `(..., D)` in the dtype of `total`; dweight and dbias `(D,)` in float32.
    """
    D = total.shape[-1]
    rows = total.numel() // D if D else 0
    dy, total = dy.contiguous(), total.contiguous()
    dsum, weight = (None if t is None else t.contiguous() for t in (dsum, weight))
    dx = torch.empty_like(total)
    if not rows:
        zeros = total.new_zeros(D, dtype=torch.float32)
        return dx, zeros, zeros.clone()
    block = triton.next_power_of_2(D)
    programs = min(rows, MAX_PARTIALS, _MAX_COLUMNS // block)
    partials = total.new_empty((2, programs, D), dtype=torch.float32)
    _backward_kernel[(programs,)](
        dy,
        dsum,
        total,
        weight,
        dx,
        partials[0],
        partials[1],
        rows,
        eps,
        D=D,
        HAS_DSUM=dsum is not None,
        HAS_WEIGHT=weight is not None,
        CENTRED=centred,
        BLOCK=block,
        STAGES=backward_stages(D, total.element_size(), 2 if dsum is None else 3),
        num_warps=backward_warps(D),
    )
    sums = total.new_empty((2, D), dtype=torch.float32)
    _reduce_kernel[(triton.cdiv(D, REDUCED_COLUMNS), 2)](
        partials,
        sums,
        programs,
        D,
        ROWS=REDUCED_ROWS,
        COLUMNS=REDUCED_COLUMNS,
        STAGES=REDUCING_STAGES,
        num_warps=REDUCING_WARPS,
    )
    return dx, sums[0], sums[1]


def warps(D: int) -> int:
    """Return the number of warps per row, forward: one for every 256 elements, from 1 to 16."""
    return min(16, max(1, triton.next_power_of_2(D) // 256))


def backward_warps(D: int) -> int:
    """Return the number of warps per row, backward: one for every 1,024 elements, from 1 to 8.

    That is at most 32 elements a thread: more do not fit its registers, and with fewer, the
    instructions that add up a row take a larger share.
    """
    return max(1, triton.next_power_of_2(D) // 1024)


def backward_stages(D: int, element_size: int, tensors: int) -> int:
    """Return the stages of the backward pass's loop: the row at work and those loaded ahead.

    Args:
        D: Width of a row.
        element_size: Bytes of an element.
        tensors: Number of tensors that are read row by row: 2, or 3 with a gradient of the sum.
    """
    block = triton.next_power_of_2(D)
    memory = min(_MAX_COLUMN_BYTES * block, _MAX_PROGRAM_BYTES)
    return 1 + min(_MAX_ROWS_AHEAD, memory // (block * element_size * tensors))
