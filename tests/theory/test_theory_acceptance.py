"""Acceptance laws: expected tokens are the sum of survival, limits are finite, gradients right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from central_differences import assert_gradient

from sdx.theory.acceptance import (
    BetaMixture,
    Geometric,
    PerPosition,
    expected_tokens,
    expected_tokens_over_requests,
    hazards,
    static_batch_efficiency,
    survival,
)

LAWS = {
    "geometric": Geometric(alpha=0.7),
    "certain": Geometric(alpha=1.0),
    "never": Geometric(alpha=0.0),
    "beta": BetaMixture(a=2.0, b=0.6),
    "beta at its removable pole": BetaMixture(a=2.0, b=1.0),
    "beta near it": BetaMixture(a=2.0, b=1.0499),
    "beta past it": BetaMixture(a=0.3, b=1.06),
    "decaying": PerPosition(rates=np.array([0.8, 0.7, 0.65])),
    "rising": PerPosition(rates=np.array([0.6, 0.7, 0.8])),
    "one position": PerPosition(rates=np.array([0.5])),
}


@pytest.mark.parametrize("name", LAWS)
def test_expected_tokens_sum_survival(name):
    law = LAWS[name]
    s = np.asarray(survival(law, np.arange(301.0)))
    gammas = np.array([0.0, 1.0, 5.0, 300.0])
    sums = [s[: int(g) + 1].sum() for g in gammas]
    np.testing.assert_allclose(np.asarray(expected_tokens(law, gammas)), sums, rtol=1e-11)
    assert s[0] == 1.0 and np.all(np.diff(s) <= 0) and np.all(s >= 0)


def test_budgets_to_ten_thousand():
    for law in LAWS.values():
        for gamma in (1.0, 1e4):
            tokens = float(expected_tokens(law, gamma))
            assert 1.0 - 1e-12 <= tokens <= gamma + 1.0
    assert float(expected_tokens(LAWS["certain"], 1e4)) == 10001.0
    assert float(expected_tokens(LAWS["rising"], 1e4)) == pytest.approx(
        1 + 0.6 + 0.42 + 0.42 * 0.8 / (1 - 0.8), rel=1e-12
    )


def test_beta_mixture_is_the_mixture():
    alpha = np.random.default_rng(0).beta(3.0, 2.0, 400_000)
    ours = float(expected_tokens(BetaMixture(a=3.0, b=2.0), 6.0))
    samples = (1 - alpha**7) / (1 - alpha)
    assert abs(ours - samples.mean()) < 4 * samples.std() / np.sqrt(alpha.size)


def test_hazards_of_a_mixture_rise_and_data_that_decay_never_level_off():
    rising = np.asarray(hazards(LAWS["beta"], 8))
    np.testing.assert_allclose(rising, (2 + np.arange(8.0)) / (2.6 + np.arange(8.0)))
    decaying = np.asarray(hazards(LAWS["decaying"], 8))
    np.testing.assert_allclose(decaying[:3], [0.8, 0.7, 0.65])
    assert np.all(np.diff(decaying) < 0)
    np.testing.assert_allclose(np.asarray(hazards(LAWS["rising"], 6))[3:], 0.8)


GRADIENTS = {
    "geometric": (lambda x: Geometric(alpha=x[0]), [[0.7]]),
    # The second point sits on the pole of the closed form.
    "beta": (lambda x: BetaMixture(a=x[0], b=x[1]), [[1.7, 2.3], [1.7, 1.0]]),
    "positions": (lambda x: PerPosition(rates=x), [[0.8, 0.75, 0.6, 0.55]]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    build, points = GRADIENTS[name]

    def both(x):  # both functions in one program; the last number is gamma or k
        return expected_tokens(build(x[:-1]), x[-1]) + 0.3 * survival(build(x[:-1]), x[-1])

    # A step below 1e-2 keeps gamma between its integers.
    gammas = (0.4, 3.3, 9.7, 40.7)
    assert_gradient(both, *([*point, g] for point in points for g in gammas), step=2e-4)


def test_gradients_in_the_limits_are_finite():
    with jax.enable_x64(True):
        slope = jax.jit(jax.grad(lambda a, g: expected_tokens(Geometric(alpha=a), g), (0, 1)))
        for alpha in (0.0, 1e-12, 1 - 1e-12, 1.0):
            for gamma in (0.0, 1.0, 1e4):
                assert np.all(np.isfinite(np.asarray(slope(jnp.asarray(alpha), gamma))))
        at_one = slope(jnp.asarray(1.0), 9.0)[0]
    assert float(at_one) == pytest.approx(45.0, rel=1e-12)  # sum of k, k = 0..9


def test_requests_average_harmonically():
    laws, weights = [Geometric(alpha=0.9), Geometric(alpha=0.3)], [0.5, 0.5]
    taus = [float(expected_tokens(law, 4.0)) for law in laws]
    ours = float(expected_tokens_over_requests(laws, weights, 4.0))
    assert ours == pytest.approx(2 / (1 / taus[0] + 1 / taus[1]), rel=1e-12)
    assert ours < np.mean(taus)
    assert_gradient(
        lambda x: expected_tokens_over_requests(
            [Geometric(alpha=x[0]), Geometric(alpha=x[1])], [0.4, 0.6], x[2]
        ),
        [0.9, 0.3, 4.2],
    )


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_static_batch_waits_for_its_slowest_row(batch):
    """Against simulation: rounds of the slowest of `batch` rows to reach 128 tokens."""
    rng, alpha, gamma, tokens = np.random.default_rng(1), 0.7, 4, 128
    u = rng.random((1500 // batch + 40, batch, 110, gamma)) < alpha
    emitted = np.cumsum(np.cumprod(u, axis=-1).sum(-1) + 1, axis=-1)
    rounds = (emitted < tokens).sum(-1).max(axis=1) + 1
    ideal = tokens / float(expected_tokens(Geometric(alpha=alpha), gamma))
    simulated = ideal / rounds.mean()
    ours = float(static_batch_efficiency(Geometric(alpha=alpha), gamma, batch, tokens))
    assert ours == pytest.approx(simulated, abs=0.012)
    assert 0.8 < ours < 1.0


def test_static_batch_gradient():
    assert_gradient(
        lambda x: static_batch_efficiency(Geometric(alpha=x[0]), x[1], x[2], x[3]),
        [0.7, 4.3, 8.0, 128.0],
    )
