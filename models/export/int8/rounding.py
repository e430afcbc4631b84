"""Quantisation of one matrix product: smoothed activations, and rounded weights. numpy only.

Activations are quantised at run time, each token in groups of `INT8_GROUP` channels with their own
scale. For the product y = x W' with weights W `(O, K)`, the graph computes

    y = q((x - shift) / smoothing) (W * smoothing)' + (bias + shift W')

Shifts and smoothing factors move the range of outlier channels to the weights (SmoothQuant,
arXiv:2211.10438; shifts: Outlier Suppression+, arXiv:2304.09145). Weights have one scale per
output and are rounded one channel at a time; the later channels compensate each rounding error on
the calibration's activations (GPTQ, arXiv:2210.17323).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.engines.with_openvino import INT8_GROUP

Matrix = NDArray[np.float32]
Double = NDArray[np.float64]

# Exponents of the smoothing factors, of which each input takes the best.
_EXPONENTS = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0)
# Number of tokens with which exponents are compared.
_SAMPLE = 1500
_MAX = 127
# Share of the mean diagonal that is added to the second moments of the activations.
_DAMPING = 0.01
# Number of channels after which all later channels are updated at once.
_BLOCK = 128


@dataclass(frozen=True)
class Rounded:
    """A quantised product.

    Attributes:
        shift: Subtracted from the activations, `(K,)`.
        smoothing: Divisor of the shifted activations, `(K,)`.
        weights: int8 weights `(O, K)`.
        scales: Scale of the weights of each output, `(O,)`.
        bias: Addition to the bias, `(O,)`: the shift's product with the weights, and the mean
            error of the quantised product.
        cost: Mean square error of each output relative to its variance, averaged over outputs.
    """

    shift: Matrix
    smoothing: Matrix
    weights: NDArray[np.int8]
    scales: Matrix
    bias: Matrix
    cost: float


def round_product(x: Matrix, weights: Matrix) -> Rounded:
    """Return the quantised product of activations and weights.

    Args:
        x: Activations of calibration tokens, `(N, K)`.
        weights: Weights of all products with this input, `(O, K)`.
    """
    shift = x.mean(0)
    centred = x - shift
    y = centred @ weights.T
    variance = y.var(0) + np.finfo(np.float32).tiny
    sample = np.random.default_rng(0).permutation(len(x))[:_SAMPLE]

    def cost(smoothing: Matrix, rounded: Matrix) -> float:
        error = quantize_activations(centred[sample] / smoothing) @ rounded.T - y[sample]
        return float(((error - error.mean(0)) ** 2 / variance).mean())

    candidates = [smoothing_factors(centred, weights, exponent) for exponent in _EXPONENTS]
    smoothing = min(candidates, key=lambda own: cost(own, _nearest(weights * own)))
    smoothed = centred / smoothing
    codes, scales = round_weights(weights * smoothing, smoothed)
    rounded = codes * scales[:, None]
    error = (y - quantize_activations(smoothed) @ rounded.T).mean(0)
    return Rounded(
        shift=shift,
        smoothing=smoothing,
        weights=codes,
        scales=scales,
        bias=weights @ shift + error,
        cost=cost(smoothing, rounded),
    )


def smoothing_factors(centred: Matrix, weights: Matrix, exponent: float) -> Matrix:
    """Return factors `(K,)` with a geometric mean of 1; exponent 0: no smoothing."""
    if exponent == 0:
        return np.ones(centred.shape[1], np.float32)
    tiny = np.float32(1e-6)
    activation = np.maximum(np.abs(centred).max(0), tiny)
    weight = np.maximum(np.abs(weights).max(0), tiny)
    factors: Matrix = activation**exponent / weight ** (1 - exponent)
    return (factors / np.exp(np.log(factors).mean())).astype(np.float32)


def quantize_activations(x: Matrix) -> Matrix:
    """Return activations `(N, K)` as OpenVINO quantises them, in groups of up to `INT8_GROUP`."""
    parts = np.split(x, range(INT8_GROUP, x.shape[1], INT8_GROUP), axis=1)
    rounded: list[Matrix] = []
    for part in parts:
        scale = np.abs(part).max(1, keepdims=True) / np.float32(_MAX)
        scale[scale == 0] = 1
        rounded.append(np.round(part / scale) * scale)
    return np.concatenate(rounded, axis=1)


def _scales(weights: NDArray[np.floating]) -> NDArray[np.floating]:
    scales = np.abs(weights).max(1) / _MAX
    return np.where(scales == 0, 1, scales)


def _nearest(weights: Matrix) -> Matrix:
    scales = _scales(weights)[:, None]
    nearest: Matrix = (np.round(weights / scales) * scales).astype(np.float32)
    return nearest


def round_weights(weights: Matrix, x: Matrix) -> tuple[NDArray[np.int8], Matrix]:
    """Return int8 weights `(O, K)` and their scales `(O,)` with a small error of `x @ weights.T`.

    Args:
        weights: Weights `(O, K)`.
        x: Activations `(N, K)`.
    """
    K = weights.shape[1]
    moments = (x.T @ x).astype(np.float64) / len(x)
    moments[np.diag_indices(K)] += _DAMPING * np.mean(np.diag(moments)) + 1e-12
    # Row j has the change of the channels after j that compensates an error of channel j.
    factor = np.linalg.cholesky(np.linalg.inv(moments)).T
    left: Double = weights.astype(np.float64)
    scales = _scales(left)
    codes = np.zeros(weights.shape, np.int8)
    for start in range(0, K, _BLOCK):
        end = min(start + _BLOCK, K)
        errors = np.zeros((len(weights), end - start))
        for j in range(start, end):
            codes[:, j] = np.clip(np.round(left[:, j] / scales), -_MAX, _MAX)
            errors[:, j - start] = (left[:, j] - codes[:, j] * scales) / factor[j, j]
            left[:, j + 1 : end] -= np.outer(errors[:, j - start], factor[j, j + 1 : end])
        left[:, end:] -= errors @ factor[start:end, end:]
    return codes, scales.astype(np.float32)
