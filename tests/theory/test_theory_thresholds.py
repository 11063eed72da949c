"""Thresholds: the design's figures, closed forms, Monte Carlo for trees, calibration."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.theory.numerics import renewal
from sdx.theory.thresholds import (
    BetaConfidence,
    Calibration,
    SampledConfidence,
    fit_calibration,
    reliability,
    threshold_chain,
    threshold_tree,
)

BETA = BetaConfidence(a=3.0, b=2.0)


def test_design_figures():
    keep, drop = (threshold_chain(BETA, 0.3, c, 256) for c in ("keep", "drop"))
    np.testing.assert_allclose(keep.accepted, 1.1914, atol=1e-4)
    np.testing.assert_allclose(drop.accepted, 0.9857, atol=1e-4)
    np.testing.assert_allclose(keep.drafts, 2.8191, atol=1e-4)
    np.testing.assert_allclose(keep.verified - drop.verified, 1.0)


def test_second_order_convergence():
    found = []
    for n in (32, 64, 128):
        outcome = threshold_chain(BETA, 0.3, "drop", n)
        found.append([float(outcome.accepted), float(outcome.drafts)])
    steps = np.diff(found, axis=0)
    np.testing.assert_allclose(steps[:-1] / steps[1:], 4.0, atol=0.15)


@pytest.mark.parametrize("p", [0.9, 0.3, 0.02])
def test_uniform_confidence_in_closed_form(p):
    law = BetaConfidence(a=1.0, b=1.0)
    keep, drop = (threshold_chain(law, p, c, 256) for c in ("keep", "drop"))
    np.testing.assert_allclose(keep.accepted, 1 - p / 2, atol=2e-5)
    np.testing.assert_allclose(drop.accepted, 1 - p, atol=2e-5)
    np.testing.assert_allclose(keep.drafts, 1 - math.log(p), atol=2e-5)


def test_renewal_with_an_atom_in_closed_form():
    # V = 1 + a V + int k e^{-y} V(x - y) dy has V = (1 + k' ...)/...: rate k/(1 - a) over e^{-y}.
    atom, k, n, x = 0.4, 0.3, 400, 2.0
    edges = np.linspace(0, x, n + 1)
    value = renewal(np.ones(n + 1), k * -np.diff(np.exp(-edges)), None, atom)
    r = k / (1 - atom)  # V' = r e^{...}: V = (1 - r e^{-(1 - r) x}) / ((1 - r)(1 - a))
    exact = (1 - r * np.exp(-(1 - r) * edges)) / ((1 - r) * (1 - atom))
    np.testing.assert_allclose(value, exact, rtol=1e-5)


@pytest.mark.parametrize("atom, b", [(0.3, 2.0), (0.0, 0.4)])
@pytest.mark.parametrize("crossing", ["keep", "drop"])
def test_chain_against_monte_carlo(atom, b, crossing):
    law, p = BetaConfidence(a=3.0, b=b, atom=atom), 0.25
    rng = np.random.default_rng(int(10 * b))
    rounds, longest = 20_000, 400
    s = rng.beta(3.0, b, (rounds, longest))
    s[rng.random(s.shape) < atom] = 1.0
    product = np.cumprod(s, axis=1)
    drafts = (product >= p).sum(axis=1) + 1
    assert drafts.max() < longest
    held = drafts if crossing == "keep" else drafts - 1
    run = np.cumprod(rng.random(s.shape) < s, axis=1).sum(axis=1)
    accepted = np.minimum(run, held)
    outcome = threshold_chain(law, p, crossing, 256)
    for value, draws in (
        (outcome.accepted, accepted),
        (outcome.drafts, drafts),
        (outcome.verified, held),
    ):
        assert abs(float(value) - draws.mean()) < 4 * draws.std() / math.sqrt(rounds)


def test_many_thresholds_at_once():
    """Batched solves used to wait for each other for ever on two cores, once in some ten calls."""
    thresholds = np.geomspace(0.01, 0.9, 40)
    with jax.enable_x64(True):
        law = BetaConfidence(a=3.0, b=2.0)
        batched = jax.jit(jax.vmap(lambda p: threshold_chain(law, p, steps=128).tokens))
        found = [np.asarray(batched(thresholds)) for _ in range(60)][-1]
    alone = float(threshold_chain(law, thresholds[20], steps=128).tokens)
    assert found[20] == pytest.approx(alone, rel=1e-12) and (np.diff(found) < 0).all()


def test_samples_of_a_law_stand_in_for_it():
    s = np.random.default_rng(0).beta(3.0, 2.0, 200_000)
    exact, found = (
        threshold_chain(law, 0.3, "keep", 256) for law in (BETA, SampledConfidence(samples=s))
    )
    np.testing.assert_allclose(found.accepted, exact.accepted, rtol=5e-3)
    np.testing.assert_allclose(found.drafts, exact.drafts, rtol=5e-3)


# ---------------------------------------------------------------------------- trees


def complementary(rng, n):
    s = rng.random(n)
    return np.stack([s, 1 - s], axis=1)


def uniforms(rng, n):
    return rng.random((n, 2))


def broken_stick(rng, n):
    return rng.dirichlet([1.2, 0.8, 0.5, 0.5], n)


GRID = (np.arange(40) + 0.5) / 40
LINE = (np.arange(1024) + 0.5) / 1024
LAWS = {
    "s and 1 - s": (complementary, np.stack([LINE, 1 - LINE], axis=1)),
    "two uniforms": (
        uniforms,
        np.stack([a.ravel() for a in np.meshgrid(GRID, GRID)], axis=1),
    ),
    "broken stick": (broken_stick, broken_stick(np.random.default_rng(99), 20_000)),
}


def grow(draw, p, rounds, seed):
    """Trees of all nodes with path product >= p: accepted tokens (as mean path products), nodes and
    depth of each."""
    rng = np.random.default_rng(seed)
    owner, product, depth = np.arange(rounds), np.ones(rounds), 0
    total = np.zeros((3, rounds))
    while owner.size:
        children = product[:, None] * draw(rng, owner.size)
        kept = children >= p
        owner = np.broadcast_to(owner[:, None], kept.shape)[kept]
        product, depth = children[kept], depth + 1
        np.add.at(total[0], owner, product)
        np.add.at(total[1], owner, 1.0)
        total[2, owner] = depth
    return total


@pytest.mark.parametrize("name", LAWS)
def test_threshold_tree_against_monte_carlo(name):
    draw, siblings = LAWS[name]
    p, rounds = 0.1, 8000
    outcome = threshold_tree(siblings, p, max_depth=30, steps=96)
    total = grow(draw, p, rounds, seed=4)
    # The broken stick is known by samples only: their own error is that of as many root nodes.
    scale = math.sqrt(1 / rounds + (1 / 2000 if name == "broken stick" else 0))
    for value, draws in zip((outcome.accepted, outcome.nodes, outcome.depth), total, strict=True):
        assert abs(float(value) - draws.mean()) < 4 * draws.std() * scale + 1e-3
    law = np.array([(total[2] <= d).mean() for d in range(31)])
    error = np.sqrt(law * (1 - law)) * scale
    assert (np.abs(np.asarray(outcome.depth_law) - law) < 4 * error + 2e-3).all()


def test_same_intensity_same_tokens_other_depth():
    a, b = (threshold_tree(LAWS[n][1], 0.1) for n in ("s and 1 - s", "two uniforms"))
    for outcome in (a, b):  # mu = 2 on [0, 1]: closed forms
        np.testing.assert_allclose(outcome.accepted, -2 * math.log(0.1), rtol=1e-3)
        np.testing.assert_allclose(outcome.nodes, 2 * (1 / 0.1 - 1), rtol=1e-3)
    np.testing.assert_allclose(a.depth, 7.7, atol=0.05)
    np.testing.assert_allclose(b.depth, 5.9, atol=0.05)


# ---------------------------------------------------------------------------- calibration


def test_calibration_recovers_the_law():
    rng = np.random.default_rng(2)
    truth = Calibration(offset=-0.4, up=0.7, down=0.5)
    s = rng.beta(2.0, 1.0, 60_000)
    hits = rng.random(s.size) < np.asarray(truth.probability(s))
    found = fit_calibration(s, hits.astype(float))
    grid = np.linspace(0.05, 0.95, 19)
    np.testing.assert_allclose(found.probability(grid), truth.probability(grid), atol=0.015)
    np.testing.assert_allclose(Calibration().probability(grid), grid, rtol=1e-5)
    _, before = reliability(s, hits.astype(float))
    _, after = reliability(np.asarray(found.probability(s)), hits.astype(float))
    assert float(before) > 0.05 > 0.015 > float(after)


def test_reliability_by_hand():
    table, error = reliability([0.15, 0.17, 0.95], [0.0, 1.0, 1.0], 10)
    np.testing.assert_allclose(table[1], [0.16, 0.5, 2.0], rtol=1e-12)
    assert np.isnan(table[0, 0]) and float(table[0, 2]) == 0
    np.testing.assert_allclose(error, (2 * 0.34 + 0.05) / 3, rtol=1e-12)


# ---------------------------------------------------------------------------- derivatives

SMALL = np.random.default_rng(7).dirichlet([1.0, 0.7, 0.5], 40)
CONFIDENCE = np.random.default_rng(8).random(50)


def chain_sum(crossing):
    def total(v):
        outcome = threshold_chain(BetaConfidence(a=v[0], b=v[1], atom=v[2]), v[3], crossing, 64)
        return outcome.tokens + 0.3 * outcome.drafts + 0.1 * outcome.verified

    return total


def tree_sum(v):
    outcome = threshold_tree(v[1:].reshape(-1, 3), v[0], 12, 32)
    return outcome.tokens + 0.1 * outcome.nodes + 0.3 * outcome.depth


GRADIENTS = {
    "chain keep": (chain_sum("keep"), np.array([2.7, 1.8, 0.1, 0.27])),
    "chain drop": (chain_sum("drop"), np.array([2.7, 0.8, 0.1, 0.27])),
    "sampled chain": (
        lambda v: threshold_chain(SampledConfidence(samples=v[1:]), v[0], "drop", 48).accepted,
        np.append(0.3, CONFIDENCE[:12]),
    ),
    "threshold_tree": (tree_sum, np.append(0.137, SMALL[:6].ravel())),
    "renewal": (
        lambda v: renewal(v[:5], v[5:9], v[9:13], v[13])[-1],
        np.concatenate([np.linspace(1, 1.5, 5), [0.2, 0.15, 0.1, 0.05], [0.4] * 4, [0.2]]),
    ),
    "Calibration": (
        lambda v: Calibration(offset=v[0], up=v[1], down=v[2]).probability(v[3]),
        np.array([0.3, 0.8, 1.3, 0.6]),
    ),
    "fit_calibration": (
        lambda v: fit_calibration(CONFIDENCE, v).probability(0.4),
        np.clip(CONFIDENCE * 0.8 + 0.1, 0, 1),
    ),
    "reliability": (lambda v: reliability(v, CONFIDENCE[:10])[1], CONFIDENCE[10:20]),
}


LIMITS = {
    "chain keep": [
        [a, b, 0.0, p] for a, b in ((1e-3, 5.0), (500.0, 0.5), (1.0, 1.0)) for p in (1e-4, 1.0)
    ],
    "threshold_tree": [np.append(p, SMALL[:6].ravel()) for p in (1e-4, 1 - 1e-12, 1.0)],
    "Calibration": [[0.0, 1.0, 1.0, s] for s in (0.0, 1.0)],
}
LIMITS["chain drop"] = LIMITS["chain keep"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_and_limits(name):
    function, point = GRADIENTS[name]
    h, n = 1e-6, len(point)
    with jax.enable_x64(True):
        both = jax.jit(jax.vmap(jax.value_and_grad(function)))
        shifts = h * np.concatenate([np.eye(n), -np.eye(n)])
        batch = np.concatenate(
            [[point], point + shifts, *([LIMITS[name]] if name in LIMITS else [])]
        )
        value, slope = (np.asarray(part) for part in both(jnp.asarray(batch)))
    expected = (value[1 : n + 1] - value[n + 1 : 2 * n + 1]) / (2 * h)
    scale = max(np.abs(expected).max(), 1e-3)
    np.testing.assert_allclose(slope[0], expected, rtol=1e-6, atol=1e-6 * scale)
    assert np.isfinite(value).all() and np.isfinite(slope).all()
