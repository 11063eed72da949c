"""The floor `theory` stands on: float64, Lambert W in log form, smooth maxima, safe gradients.

Imports nothing of sdx. Every function here is differentiable twice and free of NaN on the closed
domain that its docstring names.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


def _to_float64(leaf):
    """Floating leaves become float64 arrays; ints, booleans, strings, records' statics stay."""
    if isinstance(leaf, float):
        return jnp.asarray(leaf, jnp.float64)
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(leaf, jnp.float64)
    return leaf


def float64(function):
    """Runs `function` under `jax.enable_x64(True)` with floating inputs cast to float64.

    The one door between the caller's float32 world and the analysis wing. Arrays inside pytrees
    (records, lists) are cast too. The context manager is thread-local and part of the jit key; the
    global flag is untouched. A caller who takes `jax.grad` or `jax.jit` *around* a decorated
    function does so under his own precision: wrap that in `with jax.enable_x64(True):`.
    """

    @functools.wraps(function)
    def in_float64(*args, **kwargs):
        with jax.enable_x64(True):
            args, kwargs = jax.tree.map(_to_float64, (args, kwargs))
            return function(*args, **kwargs)

    return in_float64


# ---------------------------------------------------------------------------- Lambert W


def _gap_residual(x):
    """x - log1p(x) without cancellation.

    With r = x / (2 + x), log1p(x) = 2 artanh(r), so the difference is
    2 r^2 / (1 - r) - 2 r^3 (1/3 + r^2/5 + ...). Plain log1p loses everything below x ~ 1e-8.
    """
    small = x < 0.5
    r = jnp.where(small, x, 0.25) / (2.0 + jnp.where(small, x, 0.25))
    r2 = r * r
    tail = jnp.zeros_like(r)
    for k in range(12, -1, -1):  # r <= 0.2: the term left out is below 1e-19
        tail = tail * r2 + 1.0 / (2 * k + 3)
    series = 2.0 * r2 / (1.0 - r) - 2.0 * r2 * r * tail
    return jnp.where(small, series, x - jnp.log1p(x))


@jax.custom_jvp
def _gap(u):
    u = jnp.asarray(u)
    positive = u > 0
    safe = jnp.where(positive, u, 1.0)
    s = jnp.sqrt(2.0 * safe)
    near = s + s * s * (1.0 / 3.0 + s * (1.0 / 36.0 - s / 270.0))
    far = safe + jnp.log(1.0 + safe + jnp.log1p(safe))
    x = jnp.where(s < 1.0, near, far)
    for _ in range(4):  # Newton on a convex increasing residual; 3 steps reach rounding error
        x = x - (_gap_residual(x) - safe) * (1.0 + 1.0 / x)
    return jnp.where(positive, x, jnp.where(u == 0, 0.0, jnp.nan))


@_gap.defjvp
def _gap_jvp(primals, tangents):
    (u,), (du,) = primals, tangents
    x = _gap(u)
    # 1 + 1/x and not (1 + x)/x: its own derivative -1/x^2 has no cancellation either.
    return x, (1.0 + 1.0 / x) * du


@float64
def lambertw_gap(u):
    """x = v - 1 >= 0 with v - ln v = 1 + u, to full relative precision (u >= 0; NaN below).

    -W_{-1}(-exp(-1 - u)) - 1, which cannot be recovered from v when u is small. dx/du = 1 + 1/x:
    +inf at u = 0. Any shape. (SDSL appendix C needs u = (M/N - 1)(-ln alpha).)
    """
    return _gap(u)


@float64
def lambertw_m1_log(u):
    """W_{-1}(-exp(-1 - u)) = -v for u >= 0 of any shape, never forming the argument."""
    return -1.0 - _gap(u)


# ---------------------------------------------------------------------------- safe pieces


def expm1_ratio(z):
    """(exp(z) - 1) / z, 1 at z = 0, differentiable through it."""
    small = jnp.abs(z) < 0.05
    series = jnp.ones_like(z)
    near = jnp.where(small, z, 0.0)
    for k in range(9, 1, -1):
        series = 1.0 + series * near / k
    away = jnp.where(small, 1.0, z)
    return jnp.where(small, series, jnp.expm1(away) / away)


def geometric_sum(log_ratio, terms):
    """sum_{k=0}^{terms-1} exp(k log_ratio) for real `terms` >= 0, including log_ratio = 0."""
    return terms * expm1_ratio(terms * log_ratio) / expm1_ratio(log_ratio)


def safe_log(x, floor=1e-300):
    """ln max(x, floor): finite, with zero gradient where x was clipped."""
    return jnp.log(jnp.maximum(x, floor))


def safe_divide(numerator, denominator, otherwise=0.0):
    """numerator / denominator, `otherwise` where the denominator is 0; no NaN in gradients."""
    zero = denominator == 0
    return jnp.where(zero, otherwise, numerator / jnp.where(zero, 1.0, denominator))


# ---------------------------------------------------------------------------- smooth maxima


def p_norm_maximum(a, b, p):
    """(a^p + b^p)^(1/p) for a, b >= 0, p >= 1: the p-norm roofline; max(a, b) as p -> inf.

    Scaled by the larger one, so nothing under- or overflows, and free of NaN at a = b = 0.
    """
    large = jnp.maximum(a, b)
    small = jnp.minimum(a, b)
    ratio = small / jnp.where(large > 0, large, 1.0)
    positive = ratio > 0
    power = jnp.where(positive, jnp.exp(p * jnp.log(jnp.where(positive, ratio, 1.0))), 0.0)
    return large * jnp.exp(jnp.log1p(power) / p)


def soft_maximum(x, temperature, axis=None):
    """temperature * logsumexp(x / temperature): an upper bound of max(x), exact as it cools."""
    return temperature * jax.nn.logsumexp(x / temperature, axis=axis)


# ---------------------------------------------------------------------------- renewal equations


@jax.jit
def _renewal(forcing, near, far, atom):
    # V_i meets V_{i-lag} as the near end of cell `lag` (while lag < i) and the far end of the one
    # before; V_0 is never a near end, there being no cell beyond the origin.
    start = forcing[0] / (1.0 - atom)
    column = -near - jnp.append(0.0, far[:-1])
    column = column.at[0].add(1.0 - atom)
    return jnp.append(start, _solve_toeplitz(column, forcing[1:] + far * start))


def _solve_toeplitz(column, right):
    """Forward substitution, column by column, in a lower triangular Toeplitz system.

    jax.scipy.linalg.solve_triangular is slower here, and two batched ones at a time wait for each
    other for ever where XLA has two threads (LAPACK's kernel blocks the pool it needs; jaxlib
    0.10).
    """

    def step(left, _):
        value = left[0] / column[0]
        return jnp.append(left[1:] - column[1:] * value, 0.0), value

    return jax.lax.scan(step, right, None, length=column.shape[0])[1]


@float64
def renewal(forcing, masses, offsets=None, atom=0.0):
    """Solves V(x) = g(x) + atom V(x) + int_0^x V(x - y) dK(y) on x_i = i h, i = 0..n.

    forcing [n + 1]: g(x_i). masses [n]: K of each cell [y_j, y_{j+1}]; offsets [n]: mean position
    of that mass in its cell, as a fraction of h (default: one half). atom < 1: mass at y = 0.
    Returns V [n + 1], differentiable in everything. V is taken as linear within cells and the
    kernel's mass and first moment are met exactly, so the error is O(h^2) and densities may be
    singular; the lower triangular Toeplitz system is solved by forward substitution, O(n^2).
    """
    forcing, masses, atom = (jnp.asarray(v, jnp.float64) for v in (forcing, masses, atom))
    if forcing.shape[0] != masses.shape[0] + 1:
        raise ValueError(
            f"forcing has {forcing.shape[0]} points and masses {masses.shape[0]} cells: n cells "
            f"have n + 1 edges"
        )
    far = 0.5 * masses if offsets is None else masses * offsets
    return _renewal(forcing, masses - far, far, atom)
