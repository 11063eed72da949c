"""Laws of the number of accepted tokens in a chain of drafts.

A law says how far a chain survives: `survival(k)` = S(k) = P(the first k drafts are accepted),
S(0) = 1, for real k >= 0. A round of lookahead gamma emits A + 1 tokens, so

    expected_tokens(law, gamma) = sum_{k=0}^{gamma} S(k).

For real gamma this is the law's analytic extension where it has one (Geometric, BetaMixture), and
linear between integers otherwise (PerPosition: mixing two lookaheads).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma, gammaln
from jax.scipy.stats import norm

from sdx.records import Number, record
from sdx.theory.numerics import float64, geometric_sum, safe_log

_TAIL = 256  # extrapolated positions that PerPosition sums one by one
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


@record
class Geometric:
    """Every draft is accepted with probability `alpha`, independently (Leviathan et al. 2023)."""

    alpha: Number

    def survival(self, k):
        return jnp.where(k > 0, jnp.exp(k * safe_log(self.alpha)), 1.0)

    def expected_tokens(self, gamma):
        return geometric_sum(safe_log(self.alpha), gamma + 1.0)


@record
class BetaMixture:
    """alpha differs between contexts as Beta(a, b): S(k) = B(a + k, b) / B(a, b).

    Hazards (a + k)/(a + b + k) rise with the position, as serving engines report.
    """

    a: Number
    b: Number

    def survival(self, k):
        a, b = self.a, self.b
        log_ratio = gammaln(a + k) - gammaln(a + b + k) + gammaln(a + b) - gammaln(a)
        return jnp.where(k > 0, jnp.exp(log_ratio), 1.0)  # S(0) = 1 to the last digit

    def expected_tokens(self, gamma):
        """E[(1 - alpha^n)/(1 - alpha)], n = gamma + 1, in closed form.

        F(x)/x with x = b - 1, F(x) = a + x - exp(g(x)),
        g(x) = ln Gamma(a + n) - ln Gamma(a + n + x) + ln Gamma(a + 1 + x) - ln Gamma(a). F(0) = 0:
        near b = 1 the quotient is the integral of F' over [0, x] divided by x.
        """
        a, x, n = self.a, self.b - 1.0, gamma + 1.0

        def exponential(x):
            return jnp.exp(gammaln(a + n) - gammaln(a + n + x) + gammaln(a + 1.0 + x) - gammaln(a))

        near = jnp.abs(x) < 0.05
        small = jnp.where(near, x, 0.0)
        quotient = 0.0
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            t = 0.5 * (node + 1.0) * small
            slope = digamma(a + 1.0 + t) - digamma(a + n + t)
            quotient = quotient + 0.5 * weight * (1.0 - exponential(t) * slope)
        away = jnp.where(near, 1.0, x)
        return jnp.where(near, quotient, (a + away - exponential(away)) / away)


@record
class PerPosition:
    """Measured hazards: `rates[k]` = P(draft k + 1 accepted | the k before it were), k = 0, 1, ...

    Beyond the last one the hazards follow their last trend, h_{n+j} = h_n rho^j, rho <= 1 being the
    ratio per position over the last three. A constant would overstate long chains whenever the
    data decay; data that rise are continued by a constant.
    """

    rates: Number  # shape [positions]

    def _trend(self):
        log_rates = safe_log(jnp.asarray(self.rates), 1e-30)
        back = min(2, log_rates.shape[0] - 1)
        slope = (log_rates[-1] - log_rates[-1 - back]) / max(back, 1)
        return log_rates, jnp.minimum(slope, 0.0)

    def survival(self, k):
        log_rates, slope = self._trend()
        n = log_rates.shape[0]
        logs = jnp.concatenate([jnp.zeros_like(log_rates[:1]), jnp.cumsum(log_rates)])
        inside = jnp.interp(jnp.minimum(k, n), jnp.arange(n + 1.0), logs)
        beyond = jnp.maximum(k - n, 0.0)
        return jnp.exp(inside + beyond * log_rates[-1] + 0.5 * beyond * (beyond + 1.0) * slope)

    def expected_tokens(self, gamma):
        log_rates, slope = self._trend()
        gamma = jnp.asarray(gamma)[..., None]
        k = jnp.arange(1.0, log_rates.shape[0] + _TAIL + 1.0)
        partial = jnp.clip(gamma - k + 1.0, 0.0, 1.0)  # linear between integers
        last = k[-1]
        # Beyond the table only data without any decay still survive: a constant hazard.
        rest = jnp.maximum(gamma[..., 0] - last, 0.0)
        hazard = log_rates[-1] + _TAIL * slope
        tail = self.survival(last) * (geometric_sum(hazard, rest + 1.0) - 1.0)
        return 1.0 + jnp.sum(partial * self.survival(k), axis=-1) + tail


AcceptanceLaw = Geometric | BetaMixture | PerPosition


@float64
def expected_tokens(law, gamma):
    """Tokens per round, sum_{k=0}^{gamma} S(k) >= 1, for a chain of `gamma` >= 0 drafts.

    `gamma` real, any shape. `law` is any record with `expected_tokens(gamma)`.
    """
    return law.expected_tokens(jnp.asarray(gamma, float))


@float64
def survival(law, k):
    """S(k), k >= 0 real, any shape."""
    return law.survival(jnp.asarray(k, float))


@float64
def hazards(law, positions: int):
    """P(draft k accepted | the k - 1 before it were), k = 1..positions: shape [positions]."""
    s = law.survival(jnp.arange(positions + 1.0))
    return s[1:] / jnp.where(s[:-1] > 0, s[:-1], 1.0)


@float64
def expected_tokens_over_requests(laws, weights, gamma):
    """Tokens per round when alpha differs between *requests*: 1 / E[1 / tau].

    A slow request takes more rounds, so rounds are not weighted by requests; the mean over rounds
    within a request stays arithmetic (that is what a law's own mixture means). `weights` sum to 1,
    one per law.
    """
    rounds = sum(w / law.expected_tokens(gamma) for law, w in zip(laws, weights, strict=True))
    return 1.0 / rounds


def chain_survival(law, gamma, positions: int = 128):
    """P(at least k drafts of a chain of `gamma` are accepted), k = 0..positions; a real gamma
    mixes its neighbours."""
    k = jnp.arange(positions + 1.0)
    return jnp.clip(gamma - k + 1.0, 0.0, 1.0) * law.survival(k)


@float64
def static_efficiency(survival, batch, new_tokens):
    """Share of the continuous throughput that a static batch keeps; in (0, 1].

    survival [n + 1]: P(at least k drafts are accepted in a round). A static batch runs until its
    slowest row holds `new_tokens`. Rounds of a row are a first passage of i.i.d. steps X = A + 1:
    mean (n + overshoot)/tau with overshoot (E X^2/E X - 1)/2, variance n var/tau^3 (renewal central
    limit), and the slowest of `batch` rows lies Blom's normal score above the mean.
    """
    k = jnp.arange(survival.shape[0], dtype=survival.dtype)
    mean = jnp.sum(survival)
    square = jnp.sum((2.0 * k + 1.0) * survival)
    overshoot = 0.5 * (square / mean - 1.0)
    # The floor keeps sqrt differentiable when every round emits the same number of tokens.
    spread = jnp.sqrt(jnp.maximum(new_tokens * (square - mean**2) / mean**3, 1e-12))
    score = norm.ppf((batch - 0.375) / (batch + 0.25))
    ideal = new_tokens / mean
    return ideal / (ideal + overshoot / mean + score * spread)


@float64
def static_batch_efficiency(law, gamma, batch, new_tokens):
    """`static_efficiency` of a chain of `gamma` drafts."""
    return static_efficiency(chain_survival(law, gamma), batch, new_tokens)
