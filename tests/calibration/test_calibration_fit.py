"""Fits on synthetic data with known truth: the estimate, and that 95 % intervals cover 95 %."""

import numpy as np
import pytest
from scipy import special, stats

from sdx.calibration import fit
from sdx.records import Autoregressive, Chain, Measurement
from sdx.theory.acceptance import survival as law_survival

GAMMAS = np.arange(1, 10)


def tokens_per_round(alpha, gamma):
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def mixture_counts(a, b, lookahead, rounds, rng):
    """A chain's counts when each round has its own alpha ~ Beta(a, b)."""
    alpha = rng.beta(a, b, rounds)
    run = np.minimum(rng.geometric(np.clip(1 - alpha, 1e-12, 1)) - 1, lookahead)
    reached = [(run >= k).sum() for k in range(lookahead)]
    accepted = [(run >= k + 1).sum() for k in range(lookahead)]
    return np.array(reached), np.array(accepted)


@pytest.mark.parametrize("alpha", [0.05, 0.6, 0.9, 0.995])
def test_alpha_from_exact_rates(alpha):
    rates = tokens_per_round(alpha, GAMMAS)
    for bonus in (True, False):
        result = fit.fit_alpha(GAMMAS, rates - (0 if bonus else 1), bonus_included=bonus)
        assert result.converged
        assert result.alpha.value == pytest.approx(alpha, rel=1e-9)
        assert np.abs(result.residuals).max() < 1e-8
    assert fit.expected_tokens(result.law, 4) == pytest.approx(tokens_per_round(alpha, 4))


def test_alpha_interval_covers():
    rng = np.random.default_rng(0)
    rates = tokens_per_round(0.7, GAMMAS)
    hits = 0
    for _ in range(300):
        alpha = fit.fit_alpha(GAMMAS, rates + 0.02 * rng.normal(size=9)).alpha
        hits += alpha.low <= 0.7 <= alpha.high
    assert 0.91 <= hits / 300 <= 0.985  # 95 % +- 3 standard errors; a normal quantile gives 91 %


def test_alpha_uses_student_not_normal():
    result = fit.fit_alpha([1, 2, 3], tokens_per_round(0.7, np.array([1, 2, 3])) + [0.01, 0, -0.01])
    half = result.alpha.high - result.alpha.value
    assert half / result.standard_error == pytest.approx(stats.t.ppf(0.975, 2))


def test_binomial_interval_never_covers_less():
    for n, p in [(20, 0.3), (50, 0.8), (400, 0.97)]:
        counts = np.arange(n + 1)
        inside = [(i := fit.binomial_interval(k, n)).low <= p <= i.high for k in counts]
        assert stats.binom.pmf(counts, n, p)[inside].sum() >= 0.95


def test_hazards_rise_by_survivor_selection():
    reached, accepted = mixture_counts(2.0, 1.0, 4, 20_000, np.random.default_rng(1))
    result = fit.fit_hazards(reached, accepted)
    for k, hazard in enumerate(result.hazards):
        assert hazard.low <= (2 + k) / (3 + k) <= hazard.high
    values = [h.value for h in result.hazards]
    assert values == sorted(values)
    survival = [s.value for s in result.survival]
    np.testing.assert_allclose(survival, np.cumprod(values), rtol=1e-12)
    assert law_survival(result.law, 2) == pytest.approx(survival[1], rel=1e-12)


def test_beta_mixture_recovers_and_covers():
    rng = np.random.default_rng(2)
    hits = np.zeros(2)
    for _ in range(150):
        reached, accepted = mixture_counts(2.0, 1.0, 5, 3000, rng)
        result = fit.fit_beta_mixture(reached, accepted)
        assert result.converged
        hits += [
            result.mean.low <= 2 / 3 <= result.mean.high,
            result.concentration.low <= 3.0 <= result.concentration.high,
        ]
    assert (hits / 150 > 0.89).all(), hits  # 95 % - 3 standard errors
    reached, accepted = mixture_counts(2.0, 1.0, 5, 400_000, rng)
    result = fit.fit_beta_mixture(reached, accepted)
    assert result.law.a == pytest.approx(2, rel=0.05) and result.law.b == pytest.approx(1, rel=0.05)


def test_beta_mixture_finds_the_geometric_limit():
    reached = 10_000 * 0.8 ** np.arange(6)  # hazards exactly constant
    result = fit.fit_beta_mixture(reached, 0.8 * reached)
    assert result.mean.value == pytest.approx(0.8, abs=2e-3)
    assert result.concentration.value > 300


def test_counts_of_a_measurement():
    measurement = Measurement(
        rounds=100,
        tokens=250,
        seconds=1.0,
        drafted_per_position=(100, 98, 95),
        accepted_per_position=(80, 60, 50),
        policy=Chain(lookahead=3),
    )
    reached, accepted = fit.reached_and_accepted(measurement)
    assert reached.tolist() == [100, 80, 60] and accepted.tolist() == [80, 60, 50]
    with pytest.raises(ValueError, match="need a chain"):
        fit.reached_and_accepted(
            Measurement(
                rounds=1,
                tokens=1,
                seconds=1,
                drafted_per_position=(),
                accepted_per_position=(),
                policy=Autoregressive(),
            )
        )


@pytest.mark.parametrize("method", ["isotonic", "platt"])
def test_confidence_is_calibrated(method):
    rng = np.random.default_rng(3)
    stated = rng.beta(2, 1, 20_000)
    truth = special.expit(0.5 * special.logit(stated) - 0.3)  # an over-confident draft
    result = fit.fit_confidence(stated, rng.random(20_000) < truth, method=method)
    assert result.error_before > 0.1 and result.error_after < 0.02
    inner = np.linspace(0.2, 0.95, 20)
    expected = special.expit(0.5 * special.logit(inner) - 0.3)
    np.testing.assert_allclose(result(inner), expected, atol=0.05)
    assert (np.diff(result.values) >= 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit.fit_alpha([3], [2.0]), "two lookaheads"),
        (lambda: fit.fit_alpha([1, 2], [0.6, 0.9]), "leave the bonus out"),
        (lambda: fit.fit_alpha([1, 2], [1.5, 3.2]), "impossible"),
        (lambda: fit.fit_hazards([10, 9], [11, 8]), "do not fit"),
        (lambda: fit.fit_hazards([], []), "one pair per"),
        (lambda: fit.fit_beta_mixture([10], [8]), "two positions"),
        (lambda: fit.fit_confidence([0.5] * 30, [1] * 29), ">= 20 pairs"),
        (lambda: fit.fit_confidence([1.5] * 30, [1] * 30), "not logits"),
        (lambda: fit.fit_confidence([0.5] * 30, [1] * 30, method="spline"), "choose"),
        (lambda: fit.binomial_interval(3, 2), "0 <= k <= n"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
