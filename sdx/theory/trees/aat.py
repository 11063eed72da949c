"""Tokens per round as a law of the verification length alone (AAT(x)).

x counts the root: x = budget + 1, x = 1 is autoregression. The FPGA paper (eq. 3) uses a logarithm;
a tree of bounded depth saturates, which the stretched exponential does.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optimistix

from sdx.records import Number, record
from sdx.theory.numerics import float64


def _bounded(x, value):
    """1 <= AAT(x) <= x: one token always comes, and never more than are verified."""
    return jnp.clip(value, 1.0, jnp.maximum(x, 1.0))


class _Marginal:
    """What every AAT law shares: the interface of the chain's acceptance laws."""

    @float64
    def expected_tokens(self, budget):
        """Tokens per round of a tree of `budget` nodes (real, the root not counted)."""
        return self.aat(jnp.asarray(budget) + 1.0)

    @float64
    def survival(self, k):
        """Tokens that the k-th node adds; sum_{k=0}^{n} is AAT(n + 1), survival(0) = 1."""
        k = jnp.asarray(k)
        return self.aat(k + 1.0) - jnp.where(k > 0, self.aat(jnp.maximum(k, 1.0)), 0.0)


@record
class LogAAT(_Marginal):
    """AAT(x) = A + B ln(x - C), kept within [1, x] (FPGA paper, eq. 3 and 4)."""

    A: Number
    B: Number
    C: Number

    @float64
    def aat(self, x):
        x = jnp.asarray(x)
        inside = x - self.C > 1e-12
        log = jnp.log(jnp.where(inside, x - self.C, 1.0))
        return _bounded(x, jnp.where(inside, self.A + self.B * log, 1.0))


@record
class StretchedAAT(_Marginal):
    """AAT(x) = 1 + gain (1 - exp(-((x - 1) / scale)^exponent)): saturates at 1 + gain; ours."""

    gain: Number
    scale: Number
    exponent: Number

    @float64
    def aat(self, x):
        x = jnp.asarray(x)
        beyond = x > 1.0
        z = jnp.where(beyond, (x - 1.0) / self.scale, 1.0)
        grown = -jnp.expm1(-jnp.exp(self.exponent * jnp.log(z)))
        return _bounded(x, 1.0 + self.gain * jnp.where(beyond, grown, 0.0))


def _best(errors, *columns):
    """The grid point of least error, one value per column."""
    at = jnp.argmin(errors)
    return jnp.stack([column[at] for column in columns])


def _log_start(x, aat):
    """Best C of a grid below the smallest x, with A and B by linear least squares."""
    back = jnp.geomspace(0.05, 50.0, 40)
    log = jnp.log(x[None, :] - x.min() + back[:, None])
    centred = log - log.mean(axis=1, keepdims=True)
    b = centred @ aat / jnp.sum(centred**2, axis=1)
    a = aat.mean() - b * log.mean(axis=1)
    errors = jnp.sum((a[:, None] + b[:, None] * log - aat) ** 2, axis=1)
    return _best(errors, a, b, jnp.log(back))


def _stretched_start(x, aat):
    """Best scale and exponent of a grid, with the gain by linear least squares."""
    scale, exponent = (
        grid.ravel()
        for grid in jnp.meshgrid(jnp.geomspace(0.5, 4.0 * x.max(), 20), jnp.linspace(0.2, 1.2, 11))
    )
    basis = -jnp.expm1(-(((x[None, :] - 1.0) / scale[:, None]) ** exponent[:, None]))
    gain = jnp.maximum(basis @ (aat - 1.0) / jnp.sum(basis**2, axis=1), 1e-6)
    errors = jnp.sum((1.0 + gain[:, None] * basis - aat) ** 2, axis=1)
    return _best(errors, *(jnp.log(v) for v in (gain, scale, exponent)))


def _log_law(free, x):
    return LogAAT(A=free[0], B=free[1], C=jnp.min(x) - jnp.exp(free[2]))


def _log_residual(free, data):
    # Unclipped, unlike the law: a clipped residual has no gradient to come back by.
    x, aat = data
    return free[0] + free[1] * jnp.log(x - jnp.min(x) + jnp.exp(free[2])) - aat


def _stretched_law(free, x):
    gain, scale, exponent = jnp.exp(free)
    return StretchedAAT(gain=gain, scale=scale, exponent=exponent)


def _stretched_residual(free, data):
    x, aat = data
    gain, scale, exponent = jnp.exp(free)
    return 1.0 - gain * jnp.expm1(-jnp.exp(exponent * jnp.log((x - 1.0) / scale))) - aat


_FORMS = {
    "log": (_log_start, _log_residual, _log_law),
    "stretched": (_stretched_start, _stretched_residual, _stretched_law),
}


@functools.partial(jax.jit, static_argnames="form")
def _fit(x, aat, form):
    start, residual, law = _FORMS[form]
    data = (x, aat)
    fixed = jax.lax.stop_gradient(data)
    solution = optimistix.least_squares(
        residual,
        optimistix.LevenbergMarquardt(rtol=1e-10, atol=1e-10),
        start(*fixed),
        args=fixed,
        max_steps=500,
        throw=False,
    )
    free = jax.lax.stop_gradient(solution.value)

    def loss(free, data):
        return 0.5 * jnp.sum(residual(free, data) ** 2)

    for _ in range(2):
        # Newton from the optimum stays there; its derivative is the implicit function theorem's.
        free = free - jnp.linalg.solve(jax.hessian(loss)(free, data), jax.grad(loss)(free, data))
    return law(free, x)


@float64
def fit_aat(x, aat, form: Literal["log", "stretched"] = "log"):
    """Least-squares law through measured tokens per round: `LogAAT` or `StretchedAAT`.

    x [n]: verification lengths, root included, at least 3 of them and > 1; aat [n]. A grid start
    with the linear coefficients solved, then Levenberg-Marquardt. Differentiable in `aat` by the
    implicit function theorem. ValueError for unusable data.
    """
    if form not in _FORMS:
        raise ValueError(f"form is {form!r}: choose one of {sorted(_FORMS)}")
    x = jnp.asarray(x, jnp.float64)
    aat = jnp.asarray(aat, jnp.float64)
    x_known = np.asarray(x)
    if x_known.ndim != 1 or len(np.unique(x_known)) < 3 or x_known.min() <= 1.0:
        raise ValueError(
            f"x is {x_known.tolist()}: three parameters need at least 3 different verification "
            f"lengths > 1 (the root counts, x = 1 is autoregression)"
        )
    return _fit(x, aat, form)


@float64
def r_squared(law, x, aat):
    """Coefficient of determination of an AAT law on measured points (FPGA paper, Fig. 5)."""
    aat = jnp.asarray(aat, jnp.float64)
    residual = jnp.sum((law.aat(jnp.asarray(x, jnp.float64)) - aat) ** 2)
    return 1.0 - residual / jnp.sum((aat - jnp.mean(aat)) ** 2)
