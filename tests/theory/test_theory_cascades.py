"""Cascades: the slides' figures, Monte Carlo, exact distributions against the renewal solver."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.search.cascades import optimal_lengths, optimal_thresholds
from sdx.theory.cascades import cascade, soft_cascade, threshold_cascade
from sdx.theory.thresholds import BetaConfidence, threshold_chain

ALPHAS, COSTS = (0.48, 0.749), (0.128, 0.28, 1.0)


@pytest.mark.parametrize("lengths, speedup", [((1, 3), 1.4762), ((1, 5), 1.3519), ((1, 2), 1.4905)])
def test_three_level_figures(lengths, speedup):
    np.testing.assert_allclose(cascade(ALPHAS, COSTS, lengths).speedup, speedup, atol=1e-4)


@pytest.mark.parametrize(
    "alpha, cost, best, gain",
    [(0.44, 0.128, 2, 1.30), (0.749, 0.28, 3, 1.48), (0.853, 0.566, 2, 1.21)],
)
def test_two_level_rows_of_the_slides(alpha, cost, best, gain):
    values = [float(cascade((alpha,), (cost, 1.0), (k,), 8).speedup) for k in range(9)]
    assert int(np.argmax(values)) == best
    np.testing.assert_allclose(values[best], gain, atol=0.005)


def test_two_levels_are_the_plain_chain():
    for gamma in (0, 1, 4):
        outcome = cascade((0.7,), (0.1, 1.0), (gamma,), 4)
        np.testing.assert_allclose(outcome.tokens, (1 - 0.7 ** (gamma + 1)) / 0.3, rtol=1e-13)
        np.testing.assert_allclose(outcome.cost, 1 + 0.1 * gamma, rtol=1e-13)


def test_real_lengths_mix_the_neighbouring_integers():
    low, middle, high = (cascade(ALPHAS, COSTS, (1, k), 3) for k in (2, 2.25, 3))
    for name in ("tokens", "cost"):
        mixed = 0.75 * float(getattr(low, name)) + 0.25 * float(getattr(high, name))
        np.testing.assert_allclose(getattr(middle, name), mixed, rtol=1e-13)


def simulate(rng, level, costs, drafting, accepts):
    """One call of `level` -> (tokens, cost). drafting(level, draw) -> confidences held."""
    if level == 0:
        return 1, costs[0]
    held, spent = drafting(rng, level)
    accepted = accepts(rng, level, held)
    return accepted + 1, spent + costs[level]


def monte_carlo(costs, drafting, accepts, rounds, seed):
    rng = np.random.default_rng(seed)
    draws = np.array(
        [simulate(rng, len(costs) - 1, costs, drafting, accepts) for _ in range(rounds)]
    )
    return draws.mean(axis=0), draws.std(axis=0) / math.sqrt(rounds)


@pytest.mark.parametrize(
    "alphas, costs, lengths",
    [
        ((0.6, 0.8), (0.05, 0.3, 1.0), (2, 3)),
        ((0.5, 0.6, 0.85), (0.02, 0.1, 0.3, 1.0), (1, 2, 3)),
    ],
)
def test_fixed_cascade_against_monte_carlo(alphas, costs, lengths):
    def drafting(rng, level):
        held, spent = 0, 0.0
        while held < lengths[level - 1]:
            tokens, cost = simulate(rng, level - 1, costs, drafting, accepts)
            held, spent = held + tokens, spent + cost
        return held, spent

    def accepts(rng, level, held):
        failed = rng.random(held) >= alphas[level - 1]
        return int(failed.argmax()) if failed.any() else held

    outcome = cascade(alphas, costs, lengths)
    mean, error = monte_carlo(costs, drafting, accepts, 6000, seed=len(alphas))
    assert (np.abs(mean - [float(outcome.tokens), float(outcome.cost)]) < 4 * error).all()


LAWS = (BetaConfidence(a=2.0, b=2.0), BetaConfidence(a=3.0, b=1.5), BetaConfidence(a=4.0, b=1.0))


@pytest.mark.parametrize("crossing, levels", [("keep", 3), ("drop", 3), ("keep", 4)])
def test_threshold_cascade_against_monte_carlo(crossing, levels):
    laws, costs = LAWS[: levels - 1], (0.05, 0.1, 0.3, 1.0)[-levels:]
    thresholds = (0.7, 0.5, 0.4)[: levels - 1]

    def drafting(rng, level):
        held, product, spent = [], 1.0, 0.0
        while product >= thresholds[level - 1]:
            tokens, cost = simulate(rng, level - 1, costs, drafting, accepts)
            law = laws[level - 1]
            new = rng.beta(law.a, law.b, tokens)
            product, spent = product * new.prod(), spent + cost
            if crossing == "keep" or product >= thresholds[level - 1]:
                held.extend(new)
        return held, spent

    def accepts(rng, level, held):
        failed = rng.random(len(held)) >= held
        return int(failed.argmax()) if failed.any() else len(held)

    outcome = threshold_cascade(laws, costs, thresholds, crossing, 40, 10, 64)
    assert float(outcome.missing) < 1e-5
    mean, error = monte_carlo(costs, drafting, accepts, 4000, seed=levels)
    assert (np.abs(mean - [float(outcome.tokens), float(outcome.cost)]) < 4 * error).all()


def test_two_level_thresholds_equal_the_renewal_solver_to_second_order():
    law = BetaConfidence(a=3.0, b=2.0)
    exact = threshold_chain(law, 0.3, "drop", 256)
    errors = []
    for steps in (16, 32):
        outcome = threshold_cascade((law,), (0.1, 1.0), (0.3,), "drop", steps=steps)
        errors.append(
            [float(outcome.tokens - exact.tokens), float(outcome.calls[0] - exact.drafts)]
        )
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    assert (np.abs(ratios - 4) < 0.5).all()
    np.testing.assert_allclose(errors[-1], 0, atol=6e-4)


@pytest.mark.parametrize("levels", [1, 2])
def test_gradient_finds_the_lengths_that_enumeration_finds(levels):
    rng = np.random.default_rng(levels)
    for _ in range(12 if levels == 1 else 8):
        alphas = rng.uniform(0.3, 0.95, levels)
        costs = np.append(np.sort(np.exp(rng.uniform(-4, 0, levels))), 1.0)
        found = optimal_lengths(alphas, costs, 6, starts=8)
        every = [cascade(alphas, costs, k, 6) for k in itertools.product(range(7), repeat=levels)]
        best = max(float(outcome.speedup) for outcome in every)
        np.testing.assert_allclose(found.outcome.speedup, best, rtol=1e-12)


def test_three_level_optimum_of_the_design():
    assert optimal_lengths(ALPHAS, COSTS, 6, starts=8).parameters == (1, 2)


BOUNDS = 24, 4, 24


def test_gradient_finds_the_best_threshold():
    law = BetaConfidence(a=3.0, b=1.0)
    found = optimal_thresholds((law,), (0.1, 1.0), starts=3, steps=50, bounds=BOUNDS)
    grid = np.linspace(0.02, 0.98, 49)
    best = max(
        float(threshold_cascade((law,), (0.1, 1.0), (p,), "keep", *BOUNDS).speedup) for p in grid
    )
    assert float(found.outcome.speedup) >= best * (1 - 1e-4)


def speedup(name, v):
    """Speedup as a function of one vector: everything that is differentiable in it."""
    if name == "cascade":
        return cascade(v[:2], v[2:5], v[5:7], 4).speedup
    if name == "soft_cascade":
        return soft_cascade(v[:2], v[2:5], v[5:7], v[7], 5).speedup
    lower, upper = BetaConfidence(a=v[0], b=v[1]), BetaConfidence(a=2.5, b=1.4, atom=v[2])
    if name == "keep":  # two models; drop, below, has three
        return threshold_cascade((lower,), v[4:6], v[7:], name, 16, 4, 16).speedup
    return threshold_cascade((lower, upper), v[3:6], v[6:8], name, 16, 4, 16).speedup


POINTS = {
    "cascade": [0.55, 0.8, 0.05, 0.3, 1.0, 1.4, 2.7],
    "soft_cascade": [0.55, 0.8, 0.05, 0.3, 1.0, 1.4, 2.7, 0.6],
    "keep": [2.2, 1.3, 0.1, 0.05, 0.3, 1.0, 0.6, 0.4],
    "drop": [2.2, 0.8, 0.1, 0.05, 0.3, 1.0, 0.6, 0.4],
}
LIMITS = {
    "cascade": [[a, a, 1e-5, 0.5, 1.0, k, k] for a in (0.0, 1e-9, 1.0) for k in (0.0, 1.0, 4.0)],
    "soft_cascade": [[a, a, 1e-5, 0.5, 1.0, 2, 2, t] for a in (0.0, 1.0) for t in (1e-6, 1e3)],
    "keep": [[50.0, 0.5, 0.0, 0.05, 0.3, 1.0, p, p] for p in (1e-6, 1 - 1e-9, 1.0)],
    "drop": [[50.0, 0.5, 0.0, 0.05, 0.3, 1.0, p, p] for p in (1e-6, 1 - 1e-9, 1.0)],
}


@pytest.mark.parametrize("name", POINTS)
def test_gradient_and_limits(name):
    with jax.enable_x64(True):
        both = jax.jit(jax.vmap(jax.value_and_grad(lambda v: speedup(name, v))))
        point, h = np.array(POINTS[name]), 1e-5
        shifts = h * np.concatenate([np.eye(len(point)), -np.eye(len(point))])
        batch = np.concatenate([[point], point + shifts, LIMITS[name]])
        value, slope = (np.asarray(part) for part in both(jnp.asarray(batch)))
    n = len(point)
    expected = (value[1 : n + 1] - value[n + 1 : 2 * n + 1]) / (2 * h)
    np.testing.assert_allclose(slope[0], expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert np.isfinite(value).all() and np.isfinite(slope).all()


def test_errors_name_value_and_remedy():
    with pytest.raises(ValueError, match="n - 1 lengths"):
        cascade((0.5,), (0.1, 1.0), (1, 2))
    with pytest.raises(ValueError, match="crossing is 'both'"):
        threshold_cascade((LAWS[0],), (0.1, 1.0), (0.5,), "both")
