"""`design` end to end: optimum, constraints, verdicts, explanation, bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.records import Autoregressive, Chain, DynamicTree, Workload
from sdx.search import Knobs, break_even, design, intervals, pareto, schedule
from sdx.search.exact import exhaustive
from sdx.search.problems import design_parts
from sdx.theory.acceptance import Geometric
from sdx.theory.hardware import load_hardware, step_seconds
from sdx.theory.heads import HeadLaw
from sdx.theory.scaling import sdsl_plane
from sdx.theory.throughput import predict
from sdx.theory.transformers import llama_like, load_architecture

TARGET = llama_like(24.0, 2048.0, 32000.0, tie_embedding=False, name="target")
HARDWARE = load_hardware("h100-sxm")
WORK = [Workload(batch=1.0, context=1024.0), Workload(batch=4000.0, context=16.0)]


@pytest.fixture(scope="module")
def chains():
    return design(TARGET, HARDWARE, WORK, devices=2, max_lookahead=8)


def test_chain_is_the_exhaustive_optimum(chains):
    for result in chains:
        problem, cell, _, _ = result.source
        owner = problem.owners[cell]
        with jax.enable_x64(True):
            best = max(
                exhaustive(
                    design_parts, problem.space, problem.profiles, problem.cells[c], problem.common
                )[2]
                for c in np.flatnonzero(problem.owners == owner)
            )
        assert float(result.score) == pytest.approx(np.exp(best), rel=1e-12)
        assert result.certificate_gap == 0.0 and result.ascent_gap < 1e-3


def test_prediction_of_a_design_is_predicts(chains):
    r = chains[0]
    p = predict(r.design, r.workload, TARGET, HARDWARE, r.acceptance, r.draft)
    for field in ("tokens_per_second", "speedup", "draft_seconds", "verify_seconds"):
        ours, theirs = float(getattr(r.prediction, field)), float(getattr(p, field))
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert r.prediction.verdict == p.verdict == "speculate"
    assert r.recommended is r.design


def test_where_it_loses_the_verdict_says_so(chains):
    r = chains[1]
    assert float(r.prediction.speedup) < 1 and r.prediction.verdict == "do not speculate"
    assert isinstance(r.recommended.policy, Autoregressive)
    assert isinstance(r.design.policy, Chain)


def test_elasticities_are_those_of_the_prediction(chains):
    r = chains[0]
    names = list(r.elasticities)
    assert len(names) >= 5
    assert sorted(map(abs, r.elasticities.values()), reverse=True) == [
        abs(v) for v in r.elasticities.values()
    ]

    def rate(bandwidth):
        h = dataclasses.replace(HARDWARE, memory_bandwidth_bytes_per_second=bandwidth)
        return float(predict(r.design, WORK[0], TARGET, h, r.acceptance, r.draft).tokens_per_second)

    base = float(HARDWARE.memory_bandwidth_bytes_per_second)
    slope = np.log(rate(base * 1.001) / rate(base / 1.001)) / np.log(1.001**2)
    ours = r.elasticities["hardware.memory_bandwidth_bytes_per_second"]
    assert ours == pytest.approx(slope, rel=1e-4)
    assert set(r.bounds) == {"draft", "verify"}


def test_intervals_cover_the_laws_errors(chains):
    r = chains[0]
    i = intervals(r)
    assert float(i.score.low) < float(r.score) < float(i.score.high)
    assert float(i.draft_parameters.low) < float(r.draft_parameters)
    # One deviation more of the constant: the score moves by its share of the interval.
    moved = sdsl_plane.coefficients + np.array([0.0, 0.0, 1e-4])
    law = dataclasses.replace(sdsl_plane, coefficients=moved)
    problem, cell, x, row = r.source
    with jax.enable_x64(True):
        common = dataclasses.replace(problem.common, law=law)
        up = design_parts(
            jnp.asarray(x), jnp.asarray(problem.profiles[row]), problem.cells[cell], common
        )
    assert float(up.gain / up.seconds / up.price) > float(r.score)


def test_memory_and_latency_are_constraints(chains):
    assert all(bool(r.prediction.fits_in_memory) for r in chains)
    fastest = float(WORK[0].batch) / float(chains[0].prediction.tokens_per_second)
    with pytest.raises(ValueError, match="no design is allowed"):
        design(
            TARGET,
            HARDWARE,
            WORK,
            devices=2,
            max_lookahead=8,
            latency_limit_seconds=fastest / 2,
            certificate=False,
        )
    with pytest.raises(ValueError, match="need .* GB per device"):
        design(load_architecture("llama-3.1-70b"), HARDWARE, Workload())


def test_a_given_draft_gets_its_lookahead():
    draft, law = llama_like(2.0, 512.0, 32000.0), Geometric(alpha=0.8)
    r = design(TARGET, HARDWARE, WORK[0], draft=draft, acceptance=law, max_lookahead=8)
    rates = []
    for gamma in range(1, 9):
        seconds = gamma * float(step_seconds(draft, HARDWARE, 1.0, 1.0, 1024.0))
        seconds += float(step_seconds(TARGET, HARDWARE, 1.0, gamma + 1.0, 1024.0))
        rates.append(float(law.expected_tokens(float(gamma))) / seconds)
    assert r.design.policy.lookahead == int(np.argmax(rates)) + 1
    assert float(r.prediction.tokens_per_second) == pytest.approx(max(rates), rel=1e-6)


def test_heads_are_enumerated():
    law = HeadLaw(base=1.3, layers=0.15, boost=0.2, drift=0.2, spread=0.3)
    r = design(
        TARGET,
        HARDWARE,
        WORK[0],
        family="heads",
        policies=("tree",),
        head_law=law,
        certificate=False,
    )
    assert isinstance(r.design.policy, DynamicTree) and r.design.drafter.family in ("eagle", "poss")
    assert r.design.drafter.layers in (1, 2, 3)
    assert float(r.prediction.speedup) > 1


def test_a_device_is_designed_within_its_budget():
    knobs = Knobs()
    r = design(
        TARGET, HARDWARE, WORK[0], max_lookahead=8, knobs=knobs, certificate=False, start_count=4
    )
    used = (
        knobs.compute_share * r.device["compute"]
        + knobs.bandwidth_share * r.device["bandwidth"]
        + knobs.fixed_share
    )
    assert used <= knobs.budget + 1e-9
    # One user waits for memory: bandwidth grows at compute's expense.
    assert r.device["bandwidth"] > 1.0 > r.device["compute"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(objective="joy"), "unknown objective 'joy'"),
        (dict(policies=("forest",)), "unknown policy"),
        (dict(family="gpt"), "unknown draft family"),
        (dict(family="heads"), "needs head_law"),
        (dict(devices=0), "devices = 0"),
        (dict(workload=Workload(batch=-2.0)), "batch -2"),
        (dict(draft=llama_like(1.0, 64.0, 100.0)), "come together"),
    ],
)
def test_bad_input_is_one_clear_line(change, words):
    arguments = dict(target=TARGET, hardware=HARDWARE, workload=WORK[0]) | change
    with pytest.raises(ValueError, match=words) as error:
        design(**arguments)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------- where it pays


def test_schedule_falls_with_the_batch_and_break_even_bisects_it():
    draft, law = llama_like(2.0, 512.0, 32000.0), Geometric(alpha=0.75)
    batches = [1.0, 16.0, 256.0, 4096.0]
    s = schedule(TARGET, HARDWARE, draft, law, batches, context=16.0, max_lookahead=8)
    assert np.all(np.diff(s.lookahead) <= 0) and s.lookahead[0] > 0 and s.lookahead[-1] == 0
    assert np.all(s.speedup >= 1) and s.speedup[-1] == 1.0
    b = break_even(TARGET, HARDWARE, draft, law, batches, [16.0, 64.0], max_lookahead=8)
    assert len(b.crossings) == 2 and len(b.crossings[0]) == 1
    at = schedule(
        TARGET,
        HARDWARE,
        draft,
        law,
        np.array(b.crossings[0]) * 0.999,
        context=16.0,
        max_lookahead=8,
    )
    beyond = schedule(
        TARGET,
        HARDWARE,
        draft,
        law,
        np.array(b.crossings[0]) * 1.001,
        context=16.0,
        max_lookahead=8,
    )
    assert at.speedup[0] > 1.0 and beyond.speedup[0] == 1.0


def test_mixtures_pay_at_middle_batches():
    """At batch 1 verification touches more experts than decoding; later all are touched anyway."""
    moe = load_architecture("qwen3-30b-a3b")
    draft = load_architecture("qwen2.5-0.5b")
    s = schedule(moe, HARDWARE, draft, Geometric(alpha=0.7), [1.0, 64.0], max_lookahead=8)
    assert s.speedup[1] > 1.3 * s.speedup[0]


def test_pareto():
    front = pareto([[1, 2], [2, 1], [1, 1], [2, 1], [1.5, 1.5]])
    assert front.tolist() == [0, 4, 1]
    with pytest.raises(ValueError, match="give \\[designs, objectives\\]"):
        pareto([1.0, 2.0])
