"""What a machine's step times say about a head: the best lookahead, and what survival is worth."""

import jax
import numpy as np
import pytest

from sdx.calibration.draft_heads import StepCosts, survival_weights, time_heads
from sdx.decoding.heads import bind
from sdx.decoding.llama_target import LlamaTarget
from sdx.models.config import ModelConfig
from sdx.models.heads import HeadConfig, create_head
from sdx.models.llama import Llama

COSTS = StepCosts(
    context=64,
    target={1: 1.0, 2: 1.1, 3: 1.2, 5: 1.6},
    first={"head": 0.2},
    step={"head": 0.1},
)
HAZARDS = [0.7, 0.6, 0.5, 0.4]


def test_rounds_and_the_best_lookahead():
    assert COSTS.round_seconds("head", 1) == pytest.approx(0.2 + 1.1)
    assert COSTS.round_seconds("head", 3) == pytest.approx(0.2 + 2 * 0.1 + 1.4)  # pass between
    survival = np.cumprod(HAZARDS)
    speedups = [(1 + survival[:g].sum()) / COSTS.round_seconds("head", g) for g in range(1, 5)]
    found = [COSTS.speedup("head", HAZARDS, g) for g in range(1, 5)]
    np.testing.assert_allclose(found, speedups)
    assert COSTS.best_lookahead("head", HAZARDS) == 1 + int(np.argmax(speedups)) == 2


@pytest.mark.parametrize("lookahead", [None, 3])
def test_survival_is_worth_a_rounds_share_up_to_the_lookahead(lookahead):
    """T = (1 + sum S(k)) / seconds, so dT/dS(k) is one over the round's seconds for k <= gamma."""
    gamma = lookahead or 2
    found = survival_weights(HAZARDS, COSTS, "head", lookahead)
    seconds = COSTS.first["head"] + (gamma - 1) * COSTS.step["head"]
    # Theory interpolates the table in logarithms: at a measured pass it is the measurement.
    verify = COSTS.target[gamma + 1] if gamma + 1 in COSTS.target else (1.2 * 1.6) ** 0.5
    np.testing.assert_allclose(found[:gamma], 1 / (seconds + verify), rtol=0.02)
    np.testing.assert_allclose(found[gamma:], 0, atol=1e-12)


def test_heads_are_timed_beside_their_target():
    shape = ModelConfig(
        vocab_size=7, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn_width=8
    )
    target = LlamaTarget(model=Llama(shape, jax.random.key(0)))
    config = HeadConfig.for_target(shape, "medusa", steps=2)
    head = bind(create_head(config, jax.random.key(1)), target)
    costs = time_heads(target, {"head": head}, (1, 2), context=8, capacity=32, repeats=3, rounds=4)
    assert set(costs.target) == {1, 2} and min(costs.target.values()) > 0
    assert costs.first["head"] > 0 and costs.step["head"] > 0
