"""Measurement -> acceptance laws with 95 % intervals.

Everything here takes counts or arrays, from sdx's own runtime, from a serving engine's metrics or
from a file: no model is needed. (`fit_hardware` in `roofline.py` does the same for step times.)

Two ways of counting meet here and are kept apart by name: *tokens per round* (Eq. 12 of SDSL, the
engines' "mean acceptance length") counts the bonus token, *accepted* does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from scipy import optimize, special

from sdx.records import Chain, Interval, Measurement, Number, record, static
from sdx.theory.acceptance import BetaMixture, Geometric, PerPosition, expected_tokens
from sdx.theory.numerics import float64

CONFIDENCE = 0.95
# The mixture's a + b above which its law differs from the geometric one by less than counts show.
LARGEST_CONCENTRATION = 1e4


def student_t_interval(value, standard_error, degrees_of_freedom) -> Interval:
    """95 % interval of an estimate whose variance was itself estimated from the residuals."""
    half = special.stdtrit(degrees_of_freedom, 0.5 + CONFIDENCE / 2) * standard_error
    return Interval(value=float(value), low=float(value - half), high=float(value + half))


def normal_interval(value, standard_error, transform=lambda x: x) -> Interval:
    """95 % interval of a maximum-likelihood estimate, mapped monotonically by `transform`."""
    half = special.ndtri(0.5 + CONFIDENCE / 2) * standard_error
    low, mid, high = (float(transform(value + sign * half)) for sign in (-1, 0, 1))
    return Interval(value=mid, low=min(low, high), high=max(low, high))


def binomial_interval(successes, trials) -> Interval:
    """Exact (Clopper-Pearson) 95 % interval of a proportion; trials = 0 gives (0, 1)."""
    successes, trials = float(successes), float(trials)
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes:g} successes of {trials:g} trials: need 0 <= k <= n")
    tail = (1 - CONFIDENCE) / 2
    failures = trials - successes
    low = special.betaincinv(successes, failures + 1, tail) if successes > 0 else 0.0
    high = special.betaincinv(successes + 1, failures, 1 - tail) if failures > 0 else 1.0
    return Interval(value=successes / trials if trials else 0.5, low=float(low), high=float(high))


# ---------------------------------------------------------------------------- alpha from TAR


@record
class AlphaFit:
    """alpha of one pair, and how well a constant alpha explains the measured TAR(gamma).

    residuals: E(alpha, gamma_i) - b_i in tokens per round, one per lookahead.
    """

    alpha: Interval
    standard_error: Number
    residuals: tuple[Number, ...]
    lookaheads: tuple[Number, ...]
    converged: bool = static(default=True)

    @property
    def law(self) -> Geometric:
        return Geometric(alpha=self.alpha.value)


def _tar_residuals(logit_alpha, data):
    """E(alpha, gamma_i) - b_i; alpha = sigmoid(logit) keeps every iterate inside (0, 1)."""
    lookaheads, tokens_per_round = data
    law = Geometric(alpha=jax.nn.sigmoid(logit_alpha))
    return jax.vmap(lambda gamma: expected_tokens(law, gamma))(lookaheads) - tokens_per_round


@float64
@jax.jit
def _fit_alpha(lookaheads, tokens_per_round):
    solution = optimistix.least_squares(
        _tar_residuals,
        optimistix.LevenbergMarquardt(rtol=1e-12, atol=1e-12),
        jnp.zeros(()),
        args=(lookaheads, tokens_per_round),
        max_steps=200,
        throw=False,
    )
    alpha = jax.nn.sigmoid(solution.value)

    def residuals(a):
        return _tar_residuals(jnp.log(a) - jnp.log1p(-a), (lookaheads, tokens_per_round))

    converged = solution.result == optimistix.RESULTS.successful
    return alpha, residuals(alpha), jax.jacfwd(residuals)(alpha), converged


def fit_alpha(lookaheads, tokens_per_round, *, bonus_included: bool = True) -> AlphaFit:
    """alpha from TAR(gamma) by nonlinear least squares (SDSL, appendix B).

    lookaheads [n], n >= 2; tokens_per_round [n]: mean tokens per target call, the bonus token
    included as in Eq. 12 (`bonus_included=False`: mean number of accepted drafts, the appendix's
    wording). Covariance s^2 (J'J)^-1 with n - 1 degrees of freedom and a Student-t quantile.
    """
    gamma, tokens = np.asarray(lookaheads, float), np.asarray(tokens_per_round, float)
    if gamma.shape != tokens.shape or gamma.ndim != 1 or gamma.size < 2:
        raise ValueError(
            f"alpha needs TAR at two lookaheads or more: got {gamma.size} lookaheads and "
            f"{tokens.size} values"
        )
    tokens = tokens + (0.0 if bonus_included else 1.0)
    impossible = (tokens < 1) | (tokens > gamma + 1) | ~np.isfinite(tokens)
    if impossible.any():
        i = int(np.argmax(impossible))
        raise ValueError(
            f"{tokens[i]:g} tokens per round at lookahead {gamma[i]:g} is impossible: the bonus "
            f"counted, it lies in 1..{gamma[i] + 1:g}; does your count leave the bonus out?"
        )
    alpha, residuals, jacobian, converged = (np.asarray(x) for x in _fit_alpha(gamma, tokens))
    variance = np.sum(residuals**2) / (gamma.size - 1)
    error = float(np.sqrt(variance / np.sum(jacobian**2)))
    return AlphaFit(
        alpha=student_t_interval(alpha, error, gamma.size - 1),
        standard_error=error,
        residuals=tuple(residuals.tolist()),
        lookaheads=tuple(gamma.tolist()),
        converged=bool(converged),
    )


# ---------------------------------------------------------------------------- per position


@record
class HazardFit:
    """hazards[k]: P(draft k+1 accepted | the k before it were); survival[k] = S(k + 1)."""

    hazards: tuple[Interval, ...]
    survival: tuple[Interval, ...]

    @property
    def law(self) -> PerPosition:
        return PerPosition(rates=np.asarray([h.value for h in self.hazards]))


def _chain_counts(reached, accepted) -> tuple[np.ndarray, np.ndarray]:
    reached, accepted = np.asarray(reached, float), np.asarray(accepted, float)
    if reached.shape != accepted.shape or reached.ndim != 1 or reached.size == 0:
        raise ValueError(
            f"counts per position: got {reached.size} trials and {accepted.size} accepted; "
            "give one pair per drafted position"
        )
    if (accepted > reached).any() or (accepted < 0).any() or reached[0] <= 0:
        raise ValueError(
            f"accepted counts {accepted.tolist()} do not fit into the trials {reached.tolist()}: "
            "a draft counts as tried only if all before it were accepted"
        )
    return reached, accepted


def reached_and_accepted(measurement: Measurement) -> tuple[np.ndarray, np.ndarray]:
    """Trials and successes per position of a measured chain.

    Position k is tried where it was drafted and every draft before it was accepted. The runtime
    counts rounds in which k was drafted; of these, rounds that ended early for lack of room are
    the only ones in which k - 1 was accepted and k was not drafted.
    """
    if not isinstance(measurement.policy, Chain):
        kind = type(measurement.policy).__name__
        raise ValueError(f"per-position rates need a chain, this measurement is of a {kind}")
    drafted = np.asarray(measurement.drafted_per_position, float)
    accepted = np.asarray(measurement.accepted_per_position, float)
    before = np.concatenate([drafted[:1], accepted[:-1]])
    return np.minimum(drafted, before), accepted


def fit_hazards(reached, accepted) -> HazardFit:
    """Acceptance per position with exact binomial intervals.

    reached[k]: rounds in which the k drafts before position k were accepted and k was drafted;
    accepted[k]: of these, accepted. Survival's interval takes the first position's trials as the
    number of rounds.
    """
    reached, accepted = _chain_counts(reached, accepted)
    return HazardFit(
        hazards=tuple(binomial_interval(k, n) for k, n in zip(accepted, reached, strict=True)),
        survival=tuple(binomial_interval(k, reached[0]) for k in accepted),
    )


# ---------------------------------------------------------------------------- beta mixture


@record
class BetaMixtureFit:
    """Maximum likelihood a, b. `mean` = a / (a + b) = S(1); `concentration` = a + b.

    `geometric_limit`: the counts show no rise of the hazards, so a + b ran into its bound and the
    law equals a geometric one; the interval of the concentration then says nothing.
    """

    law: BetaMixture
    mean: Interval
    concentration: Interval
    log_likelihood: Number
    geometric_limit: bool = static(default=False)
    converged: bool = static(default=True)


def _mixture(free):
    """(logit mean, free concentration) -> (a, b), a + b below LARGEST_CONCENTRATION."""
    mean = jax.nn.sigmoid(free[0])
    concentration = LARGEST_CONCENTRATION * jax.nn.sigmoid(free[1])
    return mean * concentration, (1 - mean) * concentration


def _mixture_loss(free, counts):
    """-log likelihood per round: hazards of the mixture are (a + k) / (a + b + k)."""
    reached, accepted = counts
    a, b = _mixture(free)
    k = jnp.arange(reached.shape[0])
    accept = jnp.log(a + k) - jnp.log(a + b + k)
    reject = jnp.log(b) - jnp.log(a + b + k)
    return -jnp.sum(accepted * accept + (reached - accepted) * reject) / reached[0]


@float64
@jax.jit
def _fit_mixture(reached, accepted):
    rate = jnp.clip(jnp.sum(accepted) / jnp.sum(reached), 1e-3, 1 - 1e-3)
    start = jnp.stack([jnp.log(rate / (1 - rate)), -jnp.log(LARGEST_CONCENTRATION / 5.0)])
    solution = optimistix.minimise(
        _mixture_loss,
        optimistix.BFGS(rtol=1e-10, atol=1e-12),
        start,
        args=(reached, accepted),
        max_steps=500,
        throw=False,
    )
    hessian = jax.hessian(_mixture_loss)(solution.value, (reached, accepted)) * reached[0]
    loss = _mixture_loss(solution.value, (reached, accepted)) * reached[0]
    converged = solution.result == optimistix.RESULTS.successful
    return solution.value, hessian, loss, converged


def fit_beta_mixture(reached, accepted) -> BetaMixtureFit:
    """`BetaMixture(a, b)` by maximum likelihood from a chain's counts (as in `fit_hazards`).

    Rounds cut off at the lookahead are censored, which the product of hazards handles exactly.
    Intervals from the observed information in (logit mean, log concentration).
    """
    reached, accepted = _chain_counts(reached, accepted)
    if reached.size < 2:
        raise ValueError("a beta mixture needs counts at two positions or more, got 1")
    free, hessian, loss, converged = (np.asarray(x) for x in _fit_mixture(reached, accepted))
    a, b = (float(x) for x in _mixture(jnp.asarray(free)))
    covariance = np.linalg.pinv(hessian, hermitian=True)
    error = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return BetaMixtureFit(
        law=BetaMixture(a=a, b=b),
        mean=normal_interval(free[0], error[0], special.expit),
        concentration=normal_interval(
            free[1], error[1], lambda x: LARGEST_CONCENTRATION * special.expit(x)
        ),
        log_likelihood=-float(loss),
        geometric_limit=a + b > 0.3 * LARGEST_CONCENTRATION,
        converged=bool(converged),
    )


# ---------------------------------------------------------------------------- confidence


@record
class ConfidenceFit:
    """A non-decreasing map from a draft's confidence to the measured chance of acceptance.

    Linear between `knots` (confidences, ascending) with `values`; constant outside. The expected
    calibration error (mean |stated - observed| over ten equally filled bins) before and after.
    """

    knots: tuple[Number, ...]
    values: tuple[Number, ...]
    error_before: Number
    error_after: Number
    method: str = static(default="isotonic")

    def __call__(self, confidence):
        return jnp.interp(confidence, jnp.asarray(self.knots), jnp.asarray(self.values))


def calibration_error(confidence, accepted, bins: int = 10) -> float:
    """Mean |confidence - acceptance| over `bins` equally filled bins, weighted by their counts."""
    order = np.argsort(confidence, kind="stable")
    gaps = [
        abs(np.mean(np.asarray(confidence)[part]) - np.mean(np.asarray(accepted)[part])) * part.size
        for part in np.array_split(order, bins)
        if part.size
    ]
    return float(np.sum(gaps) / order.size)


def _platt(confidence, accepted):
    """sigmoid(slope * logit(confidence) + shift), slope > 0, by maximum likelihood."""
    edge = 1e-6
    logit = special.logit(np.clip(confidence, edge, 1 - edge))

    def loss(free, data):
        x, y = data
        z = jnp.exp(free[0]) * x + free[1]
        return jnp.mean(jax.nn.softplus(z) - y * z)

    # Tighter, and the line search can stall on the rounding of the mean; here the gradient is 1e-9.
    solver = optimistix.BFGS(rtol=1e-5, atol=1e-7)
    data = (jnp.asarray(logit), jnp.asarray(accepted, logit.dtype))
    free = optimistix.minimise(loss, solver, jnp.zeros(2), args=data, max_steps=500).value
    knots = special.expit(np.linspace(logit.min(), logit.max(), 65))
    return knots, special.expit(np.exp(float(free[0])) * special.logit(knots) + float(free[1]))


def fit_confidence(confidence, accepted, *, method: str = "isotonic") -> ConfidenceFit:
    """Calibrates a draft's confidence against what was accepted.

    confidence [n] in [0, 1]; accepted [n] 0 or 1. method: "isotonic" (non-parametric, monotone) or
    "platt" (temperature and shift of the logit; two parameters, for few data).
    """
    confidence, accepted = np.asarray(confidence, float), np.asarray(accepted, float)
    if confidence.shape != accepted.shape or confidence.ndim != 1 or confidence.size < 20:
        raise ValueError(
            f"calibration needs >= 20 pairs, got {confidence.size} confidences and "
            f"{accepted.size} outcomes"
        )
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise ValueError("confidences must lie in [0, 1]: give probabilities, not logits")
    if method == "platt":
        with jax.enable_x64(True):
            knots, values = _platt(confidence, accepted)
    elif method == "isotonic":
        order = np.argsort(confidence, kind="stable")
        steps = optimize.isotonic_regression(accepted[order])
        # One knot per block, at its mean confidence: a continuous map through the step function.
        edges = steps.blocks
        sums = np.add.reduceat(confidence[order], edges[:-1])
        knots, values = sums / np.diff(edges), steps.x[edges[:-1]]
        knots, first = np.unique(knots, return_index=True)
        values = values[first]
    else:
        raise ValueError(f"method {method!r}: choose 'isotonic' or 'platt'")
    return ConfidenceFit(
        knots=tuple(knots.tolist()),
        values=tuple(values.tolist()),
        error_before=calibration_error(confidence, accepted),
        error_after=calibration_error(np.interp(confidence, knots, values), accepted),
        method=method,
    )
