"""`design` end to end: optimum, constraints, verdicts, explanation, bad input."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.records import (
    Autoregressive,
    Cascade,
    Chain,
    Design,
    DrafterSpec,
    DynamicTree,
    ThresholdChain,
    Workload,
)
from sdx.search import (
    Knobs,
    Members,
    break_even,
    design,
    intervals,
    pareto,
    schedule,
    tree_elasticities,
)
from sdx.search.exact import branch_and_bound, exhaustive, score_chunks
from sdx.search.problems import design_parts
from sdx.search.space import lattice
from sdx.theory.acceptance import Geometric
from sdx.theory.hardware import load_hardware, step_seconds
from sdx.theory.heads import HeadLaw
from sdx.theory.scaling import sdsl_plane
from sdx.theory.thresholds import BetaConfidence
from sdx.theory.throughput import predict
from sdx.theory.transformers import llama_like, load_architecture
from sdx.theory.trees import optimal_tree

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
    draft = llama_like(2.0, 512.0, 32000.0)  # 61 MB of weights read per draft pass
    knobs = Knobs(max_on_chip_megabytes=128.0)
    r = design(
        TARGET,
        HARDWARE,
        WORK[0],
        draft=draft,
        acceptance=Geometric(alpha=0.8),
        max_lookahead=8,
        knobs=knobs,
        start_count=4,
    )
    used = (
        knobs.compute_share * r.device["compute"]
        + knobs.bandwidth_share * r.device["bandwidth"]
        + knobs.megabyte_share * r.device["on_chip_megabytes"]
        + knobs.fixed_share
    )
    assert used <= knobs.budget + 1e-9
    # One user waits for memory: bandwidth grows at compute's expense.
    assert r.device["bandwidth"] > 1.0 > r.device["compute"]
    assert r.certificate_gap is not None
    # Memory on the chip at a hundredth of the price is bought until the draft fits.
    cheap = dataclasses.replace(knobs, megabyte_share=4e-6)
    held = design(
        TARGET,
        HARDWARE,
        WORK[0],
        draft=draft,
        acceptance=Geometric(alpha=0.8),
        max_lookahead=8,
        knobs=cheap,
        start_count=4,
        certificate=False,
    )
    assert held.device["on_chip_megabytes"] >= r.device["on_chip_megabytes"]
    assert held.device["on_chip_megabytes"] > 50.0 and held.score > r.score


DRAFT, LAW = llama_like(2.0, 512.0, 32000.0), Geometric(alpha=0.8)
GIVEN = dict(draft=DRAFT, acceptance=LAW, max_lookahead=8, certificate=False)


def test_threshold_design_with_its_certificate():
    """Its certificate used to be an enumeration of 50 000 renewal equations per cell."""
    law = BetaConfidence(a=4.0, b=1.0)
    r = design(
        TARGET,
        HARDWARE,
        WORK[0],
        policies=("threshold",),
        draft=DRAFT,
        acceptance=law,
        max_lookahead=6,
        start_count=2,
    )
    assert isinstance(r.design.policy, ThresholdChain) and r.design.policy.max_lookahead == 6
    p = predict(r.design, r.workload, TARGET, HARDWARE, law, DRAFT)
    assert float(p.tokens_per_second) == pytest.approx(float(r.score), rel=1e-12)
    assert r.certificate_gap == 0.0
    # Branch and bound, which drafts by scaling law need, certifies a poorer point soundly.
    problem, cell, _, _ = r.source
    where = (jnp.asarray(problem.profiles), problem.cells[cell], problem.common)
    with jax.enable_x64(True):
        scores = np.sort(score_chunks(design_parts, lattice(problem.space), *where)[:, 0])
        gap, _ = branch_and_bound(design_parts, problem.space, *where, scores[-5])
    assert np.log(float(r.score)) == pytest.approx(scores[-1], rel=1e-12)
    assert np.expm1(scores[-1] - scores[-5]) - 1e-12 <= gap < 0.02


def test_training_budget_binds_and_dtypes_are_the_drafts():
    r = design(
        TARGET,
        HARDWARE,
        WORK[0],
        training_flops_limit=1e20,
        weight_dtypes=("int8",),
        max_lookahead=4,
        certificate=False,
        start_count=3,
    )
    spec = r.design.drafter
    flops = 6.0 * float(r.draft_parameters) * spec.training_tokens
    assert 0.3e20 < flops <= 1e20 * (1 + 1e-9)
    assert 1e10 <= spec.training_tokens <= 1e14
    assert spec.weight_dtype == r.draft.weight_dtype == "int8"
    wide = dataclasses.replace(r.draft, weight_dtype="bfloat16")
    slow = predict(r.design, WORK[0], TARGET, HARDWARE, r.acceptance, wide)
    assert float(slow.draft_seconds) > float(r.prediction.draft_seconds)


def test_static_batches_and_every_workloads_own_length():
    work = [
        Workload(batch=64.0, context=1024.0, new_tokens=n, batching="static") for n in (16.0, 512.0)
    ]
    short, long = design(TARGET, HARDWARE, work, **GIVEN)
    for r in (short, long):
        p = predict(r.design, r.workload, TARGET, HARDWARE, LAW, DRAFT)
        assert float(r.score) == pytest.approx(float(p.tokens_per_second), rel=1e-12)
    assert short.score < long.score  # few tokens: the slowest row overshoots by more
    # A length whose KV does not fit is refused, whatever the other workload needs.
    many = Workload(batch=200.0, context=1024.0, new_tokens=1e6)
    with pytest.raises(ValueError, match="GB per device"):
        design(TARGET, HARDWARE, [WORK[0], many], **GIVEN)
    with pytest.raises(ValueError, match="all continuous or all static"):
        design(TARGET, HARDWARE, [WORK[0], work[0]], **GIVEN)


Q = np.array([0.6, 0.2, 0.05])


def test_a_given_drafts_trees_by_rank():
    r = design(
        TARGET,
        HARDWARE,
        WORK[0],
        draft=DRAFT,
        acceptance={"chain": Geometric(alpha=0.6), "tree": Q},
        policies=("chain", "tree"),
        max_lookahead=4,
    )
    assert isinstance(r.design.policy, DynamicTree) and r.certificate_gap == 0.0
    best = optimal_tree(Q, r.design.policy.budget, r.design.policy.depth)
    assert float(r.prediction.tokens_per_round) == pytest.approx(best.expected_tokens, rel=1e-12)
    with pytest.raises(ValueError, match="a tree needs acceptance by rank"):
        design(TARGET, HARDWARE, WORK[0], policies=("tree",), **GIVEN)


def test_tree_elasticities_are_the_soft_trees():
    budget, depth = 12.5, 8.0
    found = tree_elasticities(Q, budget, depth, 1e-3)
    more, less = (optimal_tree(Q, n, 8).expected_tokens for n in (13, 12))
    # Cold: the next node's score, relative.
    share = budget * (more - less) / (0.5 * (more + less))
    assert float(found.budget) == pytest.approx(share, rel=1e-2)
    assert float(tree_elasticities(Q, 12.0, 2.0).depth) > 0.05 > float(found.depth) >= 0
    shares = np.asarray(found.acceptance)
    assert shares.shape == (9, 3) and shares.argmax() == 0 and shares.sum() > 0.5


CHAIN_OF_DRAFTS = (
    llama_like(1.0, 256.0, 32000.0),
    llama_like(2.0, 512.0, 32000.0),
    llama_like(6.0, 1024.0, 32000.0),
)
RATES = np.array([[0.9, 0.6, 0.45, 0.3], [0.9, 0.9, 0.8, 0.6], [0.9, 0.9, 0.9, 0.85]])


def test_which_drafters_take_part_and_in_what_order():
    named = tuple(
        dataclasses.replace(d, name=n) for d, n in zip(CHAIN_OF_DRAFTS, "abc", strict=True)
    )
    members = Members(drafts=named, rates=RATES, max_length=3)
    r = design(TARGET, HARDWARE, WORK[0], policies=("cascade",), members=members)
    scores = {}
    for order in [(i,) for i in range(3)] + list(itertools.permutations(range(3), 2)):
        laws = tuple(
            Geometric(alpha=RATES[i, j]) for i, j in zip(order, (*order[1:], 3), strict=True)
        )
        drafts = tuple(CHAIN_OF_DRAFTS[i] for i in order)
        for lengths in itertools.product((1.0, 2.0, 3.0), repeat=len(order)):
            chosen = Design(drafter=DrafterSpec(), policy=Cascade(lengths=lengths))
            p = predict(chosen, WORK[0], TARGET, HARDWARE, laws, drafts)
            scores[order, lengths] = float(p.tokens_per_second)
    order, lengths = max(scores, key=scores.get)
    assert r.design.policy.lengths == lengths
    assert r.design.drafter.name == " > ".join("abc"[i] for i in order)
    assert float(r.score) == pytest.approx(max(scores.values()), rel=1e-12)
    assert r.certificate_gap == 0.0 and "acceptance.0.alpha" in r.elasticities
    with pytest.raises(ValueError, match="rates have shape"):
        bad = dataclasses.replace(members, rates=RATES[:2])
        design(TARGET, HARDWARE, WORK[0], policies=("cascade",), members=bad)
    with pytest.raises(ValueError, match="needs `members`"):
        design(TARGET, HARDWARE, WORK[0], policies=("cascade",))


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
