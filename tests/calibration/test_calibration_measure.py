"""Timing and counting through the runtime itself, on decoders small enough to compile quickly."""

import jax
import numpy as np
import pytest

from sdx.calibration import measure
from sdx.calibration.chains import design_effect, fit_chains
from sdx.calibration.machine import time_here
from sdx.decoding.heads import bind
from sdx.decoding.llama_target import as_target
from sdx.models.config import ModelConfig
from sdx.models.heads import HeadConfig, create_head
from sdx.models.llama import Llama
from sdx.records import Autoregressive, Chain, Measurement
from sdx.theory.hardware import step_seconds

SHAPE = dict(vocab_size=48, heads=2, kv_heads=1, head_dim=8, max_positions=128)
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


@pytest.fixture(scope="module")
def target():
    return as_target(
        Llama(ModelConfig(**SHAPE, width=16, layers=2, ffn_width=32), jax.random.key(0))
    )


@pytest.fixture(scope="module")
def draft():
    return as_target(
        Llama(ModelConfig(**SHAPE, width=8, layers=1, ffn_width=16), jax.random.key(1))
    )


@pytest.fixture(scope="module")
def runs(target, draft):
    """The target drafting for itself, and the small draft."""
    policies = {
        "autoregressive": (Autoregressive(), None),
        "self": (Chain(lookahead=2), target),
        "draft": (Chain(lookahead=2), draft),
    }
    return measure.decode(target, None, PROMPTS, policies, max_new_tokens=13, repeats=2)


def test_step_table_is_filled_from_timers(target):
    notes = []
    timers = measure.target_timers(target, [1, 3], [8], rounds=4, report=notes.append)
    samples = measure.interleaved(timers, 3)
    table = measure.table_of_medians(samples, "tiny")
    assert np.asarray(table.seconds).shape == (1, 2, 1)
    assert step_seconds(None, table, 1, 3, 8) == pytest.approx(np.median(samples[1, 3, 8]))
    assert len(notes) == 2 and all((values > 0).all() for values in samples.values())


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_draft_timer_runs_the_drafts_and_no_target(kind, draft, target):
    if kind != "model":
        config = HeadConfig.for_target(target.model.config, kind=kind)
        draft = bind(create_head(config, jax.random.key(2)), target)
    timers = measure.draft_timers(draft, (1, 3), 8, capacity=64, rounds=4)
    samples = measure.interleaved(timers, 2)
    assert sorted(samples) == [1, 3] and all((values > 0).all() for values in samples.values())


def test_draft_times_are_slope_and_intercept():
    samples = {k: np.array([1e-3 * k + 2e-3] * 3) for k in (1, 4, 8)}
    times = measure.draft_times(samples, "d", 8)
    assert np.asarray(times.table.seconds).ravel()[0] == pytest.approx(1e-3)
    assert times.extra_seconds == pytest.approx(2e-3) and times.residual < 1e-9
    with pytest.raises(ValueError, match="two lookaheads"):
        measure.draft_times({1: np.ones(3)}, "d", 8)


def test_no_room_for_a_round_is_named(target):
    with pytest.raises(ValueError, match="leave no room"):
        measure.round_timer(target, measure.FixedDrafter(lookahead=3), context=30, capacity=32)


def test_a_model_accepts_its_own_drafts(runs):
    """12 tokens after the first: four rounds of three; counts and tokens agree."""
    for prompt in runs["self"]:
        m = prompt[0].measurement()
        assert (m.rounds, m.tokens) == (4, 12)
        assert m.accepted_per_position == (4, 4) and m.drafted_per_position == (4, 4)
    for mine, base in zip(runs["draft"], runs["autoregressive"], strict=True):
        assert mine[0].tokens == base[0].tokens
        assert base[0].measurement().rounds == 12
        assert len(mine) == 2


def test_pooled_sums_and_refuses_mixtures(runs):
    own = [prompt[0].measurement() for prompt in runs["self"]]
    total = measure.pooled(own)
    assert (total.rounds, total.tokens) == (12, 36)
    assert total.accepted_per_position == (12, 12)
    with pytest.raises(ValueError, match="must share policy"):
        measure.pooled([own[0], runs["autoregressive"][0][0].measurement()])


def synthetic(gamma, alphas, rounds, rng):
    """One Measurement per prompt, prompt i with constant acceptance alphas[i]."""
    found = []
    for alpha in alphas:
        run = np.minimum(rng.geometric(1 - alpha, rounds) - 1, gamma)
        found.append(
            Measurement(
                rounds=rounds,
                tokens=rounds + int(run.sum()),
                seconds=1e-3 * rounds,
                drafted_per_position=(rounds,) * gamma,
                accepted_per_position=tuple(int((run > k).sum()) for k in range(gamma)),
                policy=Chain(lookahead=gamma),
            )
        )
    return found


def test_chains_of_one_pair():
    rng = np.random.default_rng(0)
    measured = {g: synthetic(g, [0.7] * 8, 400, rng) for g in (1, 2, 4, 8)}
    found = fit_chains(measured)
    assert found.alpha.alpha.value == pytest.approx(0.7, abs=0.01)
    assert found.hazards.hazards[0].low <= 0.7 <= found.hazards.hazards[0].high
    assert found.seconds_per_round[4] == pytest.approx(1e-3)
    assert found.design_effect < 3
    assert len(found.lines()) == 1 + 8 + 1 + 4 + 1
    single = fit_chains({1: measured[1]})
    assert single.alpha is None and single.mixture is None
    assert single.law.expected_tokens(1) == pytest.approx(found.tokens_per_round[1], rel=1e-6)


def test_design_effect_sees_unlike_prompts():
    rng = np.random.default_rng(1)
    alike = design_effect(synthetic(2, [0.7] * 40, 200, rng))
    unlike = design_effect(synthetic(2, rng.uniform(0.4, 0.95, 40), 200, rng))
    assert alike < 2 and unlike > 5
    measured = {2: synthetic(2, [0.0001] * 2, 5, rng)}
    assert fit_chains(measured).hazards.hazards[0].high > 0


def test_nothing_drafted_is_named():
    with pytest.raises(ValueError, match="nothing was drafted"):
        fit_chains({})


def test_this_machine(monkeypatch):
    from sdx.calibration import machine

    config = ModelConfig(**SHAPE, width=16, layers=1, ffn_width=32)
    monkeypatch.setattr(machine, "DEFAULT_SHAPES", {"tiny": config})
    found = time_here([], [1, 2, 4, 6], [8, 24], repeats=1)
    assert len(found.fit.labels) == 8 and len(found.tables) == 1
    assert found.fit.hardware.peak_flops_per_second["float32"] > 0
    assert "milliseconds per step" in found.lines()[0]
    assert set(found.data()) >= {"step_tables", "residuals", "hardware"}
    with pytest.raises(ValueError, match="repeats"):
        time_here([], [1], [8], repeats=0)
