"""Scaling laws: model size and data -> loss -> perplexity -> acceptance, with their uncertainty.

Sources: Hoffmann et al. 2022 and Besiroglu et al. 2024 (loss laws), SDSL (Bozorgkhoo & Molybog)
equations 2 and 5 and tables 3 and 4 (acceptance as a law of perplexities). Natural logarithms.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from scipy.special import stdtrit

from sdx.records import Interval, Number, record, static
from sdx.theory.numerics import _gap, expm1_ratio, float64, safe_log

# An acceptance law is a fit on a window of perplexities; outside it the clip keeps throughput
# defined. Inside (0, 1) nothing is changed.
_ALPHA_FLOOR, _ALPHA_CEILING = 1e-9, 1.0 - 1e-9


@record
class LossLaw:
    """L(N, D) = E + A / N^nu + B / D^delta in nats per token; N parameters, D training tokens."""

    E: Number
    A: Number
    nu: Number
    B: Number
    delta: Number

    def loss(self, N, D):
        return self.E + self.A * N**-self.nu + self.B * D**-self.delta

    def perplexity(self, N, D):
        # Below ~1e4 parameters the law's loss is absurd; the cap keeps exp finite.
        return jnp.exp(jnp.minimum(self.loss(N, D), 300.0))


hoffmann = LossLaw(E=1.69, A=406.4, nu=0.34, B=410.7, delta=0.28)
besiroglu = LossLaw(E=1.8172, A=482.01, nu=0.3478, B=2085.43, delta=0.3658)


@record
class PerplexityLaw:
    """alpha of the draft's perplexity x and the target's y; coefficients [a, b, c].

    "affine": a x + b y + c. "log": a ln x + b ln y + c. "power": exp(c) x^a y^b.
    `covariance` [3, 3] of the coefficients (zeros when unknown) and `freedom` = n - parameters of
    the fit feed the delta method. A law of x alone has b = 0 with zero (co)variance.
    """

    coefficients: Number
    covariance: Number
    freedom: Number = 1e9
    kind: Literal["affine", "log", "power"] = static(default="affine")

    def raw(self, x, y):
        """The law itself, unclipped."""
        a, b, c = self.coefficients[0], self.coefficients[1], self.coefficients[2]
        if self.kind == "affine":
            return a * x + b * y + c
        value = a * safe_log(x) + b * safe_log(y) + c
        return jnp.exp(value) if self.kind == "power" else value

    def alpha(self, x, y):
        return jnp.clip(self.raw(x, y), _ALPHA_FLOOR, _ALPHA_CEILING)


# SDSL table 3, coefficients as printed. The paper leaves the correlations of the errors out: the
# matrix is `fit_perplexity_law` on tables 1 and 2 (test_theory_scaling repeats the fit).
sdsl_plane = PerplexityLaw(
    coefficients=np.array([-0.0067, 0.012971, 0.642084]),
    covariance=np.array(
        [
            [3.68521e-07, 0.0, -6.72300e-06],
            [0.0, 2.385741e-06, -2.753786e-05],
            [-6.72300e-06, -2.753786e-05, 4.506214e-04],
        ]
    ),
    freedom=127.0,
)


@float64
def loss(law, N, D):
    """Loss in nats per token of N parameters trained on D tokens (any shape, broadcast)."""
    return law.loss(N, D)


@float64
def acceptance_of_perplexity(law, draft_perplexity, target_perplexity):
    """alpha in (0, 1) of two perplexities, clipped there outside the window of the fit."""
    return law.alpha(draft_perplexity, target_perplexity)


@float64
def acceptance_of_size(N, M, D, D_target, law=sdsl_plane, loss_law=besiroglu):
    """alpha of a draft of N parameters and D tokens against a target of M and D_target."""
    return law.alpha(loss_law.perplexity(N, D), loss_law.perplexity(M, D_target))


# ---------------------------------------------------------------------------- fits


@record
class LawFit:
    """A fitted law with margins (half-widths of 95 % Student-t intervals), mean squared error
    (sum of squares / n) and R^2."""

    law: PerplexityLaw
    margins: Number
    mean_squared_error: Number
    r_squared: Number


def student_t(freedom, level=0.95) -> float:
    """Two-sided quantile of Student's t."""
    return float(stdtrit(float(freedom), 0.5 + level / 2.0))


def _design_matrix(kind, x, y):
    columns = [x] if y is None else [x, y]
    if kind != "affine":
        columns = [jnp.log(column) for column in columns]
    return jnp.stack([*columns, jnp.ones_like(x)], axis=-1)


def _covariance(jacobian, residual):
    n, parameters = jacobian.shape
    # Columns differ by orders of magnitude (perplexity against 1): scale before inverting.
    scale = jnp.linalg.norm(jacobian, axis=0)
    inverse = jnp.linalg.inv((jacobian / scale).T @ (jacobian / scale)) / jnp.outer(scale, scale)
    return inverse * (residual @ residual) / (n - parameters)


def _power_residuals(theta, data):
    matrix, alpha = data
    return jnp.exp(matrix @ theta) - alpha


@jax.jit
def _fit_power(matrix, alpha):
    start = jnp.linalg.lstsq(matrix, jnp.log(alpha))[0]
    solver = optimistix.LevenbergMarquardt(rtol=1e-13, atol=1e-13)
    data = (matrix, alpha)
    theta = optimistix.least_squares(
        _power_residuals, solver, start, args=data, max_steps=200, throw=False
    ).value
    return theta, jax.jacfwd(_power_residuals)(theta, data), _power_residuals(theta, data)


@float64
def fit_perplexity_law(draft_perplexity, alpha, target_perplexity=None, kind="affine") -> LawFit:
    """Least squares of alpha on perplexities, all of shape [n]; n > parameters.

    Affine and log laws are linear; the power law is fitted to alpha itself (not its logarithm) by
    Levenberg-Marquardt, its covariance from the Jacobian. For the power law of x alone the margins
    are those of ln(prefactor) and exponent; SDSL table 4 prints the prefactor: multiply by it.
    """
    x = jnp.asarray(draft_perplexity, float)
    y = None if target_perplexity is None else jnp.asarray(target_perplexity, float)
    alpha = jnp.asarray(alpha, float)
    matrix = _design_matrix(kind, x, y)
    if alpha.shape[0] <= matrix.shape[1]:
        raise ValueError(
            f"a {kind} law has {matrix.shape[1]} coefficients, {alpha.shape[0]} points cannot "
            "give it an error: measure more pairs"
        )
    if kind == "power":
        theta, jacobian, residual = _fit_power(matrix, alpha)
    else:
        theta = jnp.linalg.lstsq(matrix, alpha)[0]
        jacobian, residual = matrix, matrix @ theta - alpha
    covariance = _covariance(jacobian, residual)
    freedom = alpha.shape[0] - matrix.shape[1]
    margins = student_t(freedom) * jnp.sqrt(jnp.diag(covariance))
    if y is None:  # no coefficient of y
        keep = jnp.array([0, 2])
        theta = jnp.zeros(3).at[keep].set(theta)
        covariance = jnp.zeros((3, 3)).at[jnp.ix_(keep, keep)].set(covariance)
        margins = jnp.zeros(3).at[keep].set(margins)
    total = jnp.sum((alpha - alpha.mean()) ** 2)
    law = PerplexityLaw(coefficients=theta, covariance=covariance, freedom=freedom, kind=kind)
    return LawFit(
        law=law,
        margins=margins,
        mean_squared_error=jnp.mean(residual**2),
        r_squared=1.0 - residual @ residual / total,
    )


# ---------------------------------------------------------------------------- uncertainty


@float64
def delta_method(function, coefficients, covariance, freedom=1e9) -> Interval:
    """Value of `function(coefficients)` with its 95 % interval, first order in the errors.

    `coefficients` [p], `covariance` [p, p]; the function may return any shape. Student's t with
    `freedom` degrees.
    """
    value = function(coefficients)
    jacobian = jax.jacrev(function)(coefficients)
    variance = jnp.einsum("...i,ij,...j->...", jacobian, covariance, jacobian)
    margin = student_t(freedom) * jnp.sqrt(jnp.maximum(variance, 0.0))
    return Interval(value=value, low=value - margin, high=value + margin)


# ---------------------------------------------------------------------------- SDSL in closed form


def _minus_log(alpha):
    # alpha = 1 would want an infinite lookahead; the floor keeps it finite (about 1e9).
    return jnp.maximum(-safe_log(alpha), 1e-18)


def _lookahead(alpha, cost_ratio):
    rate = _minus_log(alpha)
    u = jnp.maximum(1.0 / cost_ratio - 1.0, 0.0) * rate
    positive = u > 0  # where u = 0 the gap's derivative is infinite and the answer is 0 anyway
    gap = _gap(jnp.where(positive, u, 1.0))
    return jnp.where(positive, jnp.maximum(jnp.log1p(gap) / rate - 1.0, 0.0), 0.0)


@float64
def optimal_lookahead(alpha, cost_ratio):
    """gamma* >= 0 that maximises (1 - alpha^(gamma+1)) / ((1 - alpha)(1 + gamma c)), c = N/M.

    SDSL equation 13 in the form ln(v)/(-ln alpha) - 1, v = 1 + lambertw_gap((1/c - 1)(-ln alpha)),
    which does not cancel. Clamped at 0 where speculation does not pay,
    alpha (-ln alpha)/(1 - alpha) <= c: unclamped, the closed form claims wins that no integer
    lookahead has. Any shape.
    """
    return _lookahead(alpha, cost_ratio)


def _log_throughput(log_n, M, D, D_target, law, loss_law):
    """ln T of SDSL equation 9 (unclamped) as a function of ln N."""
    N = jnp.exp(log_n)
    alpha = law.alpha(loss_law.perplexity(N, D), loss_law.perplexity(M, D_target))
    log_alpha = jnp.minimum(safe_log(alpha), -1e-18)
    v = 1.0 + _gap(jnp.maximum(M / N - 1.0, 0.0) * -log_alpha)
    # -ln(alpha) / (1 - alpha) = 1 / expm1_ratio(ln alpha)
    return -jnp.log(2.0 * N * v * expm1_ratio(log_alpha))


@float64
def sdsl_throughput(N, M, D, D_target, law=sdsl_plane, loss_law=besiroglu):
    """Tokens per FLOP at the optimal real lookahead, SDSL equation 9 as printed: gamma* unclamped.

    N, M parameters of draft and target (N <= M), D, D_target their training tokens; any shape.
    Near N = M the form has a spurious maximum (negative lookahead): `predict` uses the clamped one.
    """
    return jnp.exp(_log_throughput(jnp.log(N), M, D, D_target, law, loss_law))


@record
class DraftOptimum:
    """The throughput-optimal draft: parameters N, tokens per FLOP, alpha, lookahead (real)."""

    N: Number
    throughput: Number
    alpha: Number
    lookahead: Number


_LADDER = np.linspace(np.log(1e-4), np.log(0.3), 14)  # N/M of the rungs that bracket the optimum


def _optimal_draft_size(M, D, D_target, law, loss_law):
    """Scalar core of `optimal_draft_size`."""
    arguments = (M, D, D_target, law, loss_law)
    fixed = jax.lax.stop_gradient(arguments)
    value = jax.vmap(lambda z: _log_throughput(z, *fixed))
    slope = jax.grad(_log_throughput)
    curvature = jax.grad(slope)
    rungs = jnp.log(fixed[0]) + jnp.asarray(_LADDER)
    best = jnp.clip(jnp.argmax(value(rungs)), 1, len(_LADDER) - 2)
    low, high = rungs[best - 1], rungs[best + 1]

    def newton(_, state):
        z, low, high = state
        f = slope(z, *fixed)
        low, high = jnp.where(f > 0, z, low), jnp.where(f > 0, high, z)
        step = z - f / curvature(z, *fixed)
        # Otherwise bisect: never leaves the bracket. A converged z is an end of it: closed.
        inside = (step >= low) & (step <= high)
        return jnp.where(inside, step, 0.5 * (low + high)), low, high

    z, _, _ = jax.lax.fori_loop(0, 8, newton, (rungs[best], low, high))
    # Differentiable Newton steps at the root: the implicit function theorem, so that gradients of
    # N* in M, D, D_target and in the laws' coefficients are exact; a second step, so that theirs
    # are too (an interval's end is made of first derivatives).
    for _ in range(2):
        z = z - slope(z, *arguments) / jax.lax.stop_gradient(curvature(z, *arguments))
    N = jnp.exp(z)
    alpha = law.alpha(loss_law.perplexity(N, D), loss_law.perplexity(M, D_target))
    throughput = jnp.exp(_log_throughput(z, *arguments))
    return DraftOptimum(N=N, throughput=throughput, alpha=alpha, lookahead=_lookahead(alpha, N / M))


@jax.jit
def _optimal_draft_sizes(M, D, D_target, law, loss_law):
    core = lambda m, d, t: _optimal_draft_size(m, d, t, law, loss_law)  # noqa: E731
    flat = jax.vmap(core)(M.ravel(), D.ravel(), D_target.ravel())
    return jax.tree.map(lambda leaf: leaf.reshape(M.shape), flat)


@float64
def optimal_draft_size(M, D, D_target, law=sdsl_plane, loss_law=besiroglu) -> DraftOptimum:
    """N* that maximises SDSL equation 9, by safeguarded Newton on ln N with the exact gradient.

    M target parameters, D and D_target training tokens of draft and target; broadcast, any shape.
    Looks for N in [1e-4, 0.3] M: the maximum near N = M is spurious (see `sdsl_throughput`).
    Differentiable in every argument, the laws included.
    """
    M, D, D_target = jnp.broadcast_arrays(*(jnp.asarray(x, float) for x in (M, D, D_target)))
    return _optimal_draft_sizes(M, D, D_target, law, loss_law)


@jax.jit
def _optimum_of(coefficients, M, D, D_target, law, loss_law):
    """Fields of the optimum [4] under `law` with other coefficients."""
    law = PerplexityLaw(coefficients=coefficients, covariance=law.covariance, kind=law.kind)
    o = _optimal_draft_size(M, D, D_target, law, loss_law)
    return jnp.stack([o.N, o.throughput, o.alpha, o.lookahead])


@float64
def optimal_draft_interval(M, D, D_target, law=sdsl_plane, loss_law=besiroglu) -> DraftOptimum:
    """`optimal_draft_size` with a 95 % `Interval` in every field (scalars): the covariance of the
    acceptance law's coefficients carried to N* and T* by the delta method."""
    M, D, D_target = (jnp.asarray(x, float) for x in (M, D, D_target))
    coefficients = jnp.asarray(law.coefficients, float)
    optimum = lambda c: _optimum_of(c, M, D, D_target, law, loss_law)  # noqa: E731
    i = delta_method(optimum, coefficients, law.covariance, law.freedom)
    fields = [Interval(value=i.value[k], low=i.low[k], high=i.high[k]) for k in range(4)]
    return DraftOptimum(N=fields[0], throughput=fields[1], alpha=fields[2], lookahead=fields[3])
