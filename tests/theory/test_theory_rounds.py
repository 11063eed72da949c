"""`predict` of every policy: tokens and seconds from the rooms they come from, step by step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdx.records import (
    Cascade,
    Chain,
    Design,
    DrafterSpec,
    DynamicTree,
    StaticTree,
    ThresholdChain,
    Workload,
)
from sdx.theory.acceptance import Geometric, PerPosition
from sdx.theory.cascades import cascade, cascade_of_passes, held_limits
from sdx.theory.costs import FlopsCost
from sdx.theory.hardware import Hardware, step_seconds, step_table
from sdx.theory.rounds import tree_outcome
from sdx.theory.thresholds import BetaConfidence, capped_threshold_chain, threshold_chain
from sdx.theory.throughput import objective, predict
from sdx.theory.transformers import llama_like, weight_bytes
from sdx.theory.trees import LogAAT, expected_tokens_of_tree, optimal_tree
from sdx.theory.trees.geometric import GeometricRanks

HARDWARE = Hardware(
    peak_flops_per_second={"bfloat16": 400e12},
    memory_bandwidth_bytes_per_second=2e12,
    memory_capacity_bytes=80e9,
    layer_overhead_seconds=4e-6,
    step_overhead_seconds=3e-5,
)
TARGET, DRAFT = llama_like(32.0, 4096.0, 32000.0), llama_like(4.0, 1024.0, 32000.0)
SMALL = llama_like(2.0, 512.0, 32000.0)
WORK = Workload(batch=4.0, context=2048.0)
Q = np.array([[0.6, 0.2, 0.05], [0.5, 0.15, 0.05], [0.45, 0.1, 0.05], [0.4, 0.1, 0.05]])
# Jagged measured steps: a mean number of tokens would be charged wrongly.
TABLE = step_table(
    [1.0],
    np.arange(1.0, 65.0),
    [0.0],
    (1e-3 * (1 + np.cumsum(np.random.default_rng(0).exponential(0.1, 64))))[None, :, None],
)
FAST = step_table([1.0], [1.0, 64.0], [0.0], [[[1e-4], [4e-4]]])


def outcome(policy, law, work=WORK, hardware=HARDWARE, draft=DRAFT, **other):
    design = Design(drafter=DrafterSpec(layers=4.0, width=1024.0), policy=policy)
    return predict(design, work, TARGET, hardware, law, draft, **other)


def seconds(model, tokens, ancestors=None):
    return float(step_seconds(model, HARDWARE, 4.0, tokens, 2048.0, ancestors=ancestors))


def test_static_tree_is_its_levels_and_its_nodes():
    parents = (-1, -1, 0, 0, 1, 2)  # nodes with children per level: root, two, one
    p = outcome(StaticTree(parents=parents), Q)
    assert float(p.tokens_per_round) == pytest.approx(float(expected_tokens_of_tree(parents, Q)))
    drafting = sum(seconds(DRAFT, width) for width in (1.0, 2.0, 1.0))
    assert float(p.draft_seconds) == pytest.approx(drafting, rel=1e-12)
    verifying = seconds(TARGET, 7.0, ancestors=(1 + 1 + 2 + 2 + 2 + 3) / 7)
    assert float(p.verify_seconds) == pytest.approx(verifying, rel=1e-12)


def test_a_chain_is_a_tree_without_branches():
    law = PerPosition(rates=np.array([0.8, 0.7, 0.6]))
    work = dataclasses.replace(WORK, batching="static")  # so the laws agree, not only the means
    tree, chain = (
        outcome(policy, law, work)
        for policy in (StaticTree(parents=(-1, 0, 1)), Chain(lookahead=3))
    )
    for name in ("tokens_per_second", "tokens_per_round", "draft_seconds"):
        assert float(getattr(tree, name)) == pytest.approx(float(getattr(chain, name)), rel=1e-12)


def test_dynamic_tree_is_the_optimal_tree():
    p = outcome(DynamicTree(budget=9, depth=3, branching=3), Q)
    best = optimal_tree(Q, 9, 3)
    assert float(p.tokens_per_round) == pytest.approx(best.expected_tokens, rel=1e-12)
    drafting = seconds(DRAFT, 1.0) + 2 * seconds(DRAFT, 3.0)
    assert float(p.draft_seconds) == pytest.approx(drafting, rel=1e-12)
    assert float(p.verify_seconds) == pytest.approx(seconds(TARGET, 10.0, ancestors=1.0), rel=1e-12)
    # Scores by depth: the law of what is accepted, which static batches need.
    with jax.enable_x64(True):
        tokens, survival = jax.jit(tree_outcome)(jnp.asarray(Q), 9.0, 3.0)
    levels = np.zeros(5)
    shape = best.depths
    for node in range(best.nodes):
        path, at = 1.0, node
        while at >= 0:
            path *= Q[shape[at] - 1, best.ranks[at]]
            at = best.parents[at]
        levels[shape[node]] += path
    np.testing.assert_allclose(np.asarray(survival)[1:], levels[1:], rtol=1e-12)
    assert np.asarray(survival).sum() == pytest.approx(float(tokens), rel=1e-12)


def test_dynamic_trees_of_other_laws():
    policy = DynamicTree(budget=12, depth=4)
    ranks = GeometricRanks(alpha=0.7)
    p = outcome(policy, ranks)
    assert float(p.tokens_per_round) == pytest.approx(float(ranks.expected_tokens(12.0, 4.0)))
    with jax.enable_x64(True):
        _, survival = tree_outcome(ranks, 12.0, 4.0)
    assert np.asarray(survival).sum() == pytest.approx(float(p.tokens_per_round), rel=1e-12)
    aat = LogAAT(A=1.0, B=0.8, C=0.0)
    assert float(outcome(policy, aat).tokens_per_round) == pytest.approx(float(aat.aat(13.0)))
    with pytest.raises(ValueError, match="LogAAT knows the mean"):
        outcome(policy, aat, dataclasses.replace(WORK, batching="static"))


@pytest.mark.parametrize("crossing", ["keep", "drop"])
def test_capped_threshold_chain(crossing):
    law = BetaConfidence(a=3.0, b=2.0)
    most, p, rounds = 4, 0.2, 60_000
    rng = np.random.default_rng(3)
    s = rng.beta(3.0, 2.0, (rounds, most))
    above = np.cumprod(s, axis=1) >= p
    made = np.concatenate([np.ones((rounds, 1), bool), above[:, :-1]], axis=1)
    seen = made if crossing == "keep" else above
    accepted = np.cumprod(seen & (rng.random(s.shape) < s), axis=1)
    ours = capped_threshold_chain(law, p, most, crossing)
    for name, draws in (("drafted", made), ("verified", seen), ("survival", accepted)):
        share = draws.mean(axis=0)
        error = 4 * np.sqrt(share * (1 - share) / rounds) + 1e-3
        assert (np.abs(np.asarray(getattr(ours, name))[1:] - share) < error).all(), name
    # Without a cap the renewal solver's expectations, second order in the step.
    exact = threshold_chain(law, 0.3, crossing)
    long = capped_threshold_chain(law, 0.3, 40, crossing)
    np.testing.assert_allclose(np.asarray(long.survival).sum(), exact.tokens, rtol=5e-4)
    np.testing.assert_allclose(np.asarray(long.verified).sum() - 1, exact.verified, rtol=5e-4)


def test_a_batch_of_threshold_chains_drafts_until_its_last_row_stops():
    law, policy = BetaConfidence(a=3.0, b=2.0), ThresholdChain(threshold=0.2, max_lookahead=4)
    rng, rounds, batch = np.random.default_rng(3), 20_000, 3
    above = np.cumprod(rng.beta(3.0, 2.0, (rounds, batch, 4)), axis=-1) >= 0.2
    drafts = 1 + above[..., :-1].sum(-1).max(axis=1)
    verify = np.asarray(TABLE.seconds)[0, drafts, 0]
    p = outcome(policy, law, Workload(batch=3.0, context=0.0), TABLE, draft_hardware=FAST)
    assert float(p.draft_seconds) == pytest.approx(1e-4 * drafts.mean(), rel=0.01)
    assert float(p.verify_seconds) == pytest.approx(verify.mean(), rel=0.01)


def test_cascade_pays_for_what_each_pass_holds():
    policy, laws = Cascade(lengths=(1, 3)), (Geometric(alpha=0.48), Geometric(alpha=0.749))
    models = (SMALL, DRAFT)
    p = outcome(policy, laws, draft=models)
    assert float(p.tokens_per_round) == pytest.approx(
        float(cascade((0.48, 0.749), (0.1, 0.3, 1.0), (1, 3)).tokens), rel=1e-12
    )
    # By simulation on measured steps: the number of tokens held varies, and so does the pass.
    tables = (FAST, FAST)
    alone = Workload(batch=1.0, context=0.0)
    p = outcome(policy, laws, alone, TABLE, draft=models, draft_hardware=tables)
    rng, drafting, verifying = np.random.default_rng(5), [], []
    middle = float(step_seconds(None, FAST, 1.0, 2.0, 0.0))
    for _ in range(6000):
        held, spent = 0, 0.0
        while held < 3:  # a call of the middle model: one draft, then its own token
            held += 1 + (rng.random() < 0.48)
            spent += 1e-4 + middle
        drafting.append(spent)
        verifying.append(TABLE.seconds[0, held, 0])
    for ours, draws in ((p.draft_seconds, drafting), (p.verify_seconds, verifying)):
        assert abs(float(ours) - np.mean(draws)) < 4 * np.std(draws) / np.sqrt(6000)


def test_constant_passes_are_the_plain_cascade():
    alphas, costs, lengths = (0.5, 0.6, 0.85), (0.02, 0.1, 0.3, 1.0), (1.5, 2.0, 3.0)
    tables = [np.full(n + 1, c) for n, c in zip(held_limits(3, 4), costs[1:], strict=True)]
    ours = cascade_of_passes(alphas, (costs[0], *tables), lengths, 4)
    plain = cascade(alphas, costs, lengths, 4)
    np.testing.assert_allclose(ours.speedup, plain.speedup, rtol=1e-12)


def test_cascade_with_thresholds_of_one_drafter_is_the_threshold_chain():
    law = BetaConfidence(a=3.0, b=2.0)
    work = dataclasses.replace(WORK, batch=1.0)
    one = outcome(Cascade(thresholds=(0.3,)), (law,), work, draft=(DRAFT,))
    chain = outcome(ThresholdChain(threshold=0.3, max_lookahead=40), law, work)
    for name in ("tokens_per_round", "draft_seconds", "verify_seconds"):
        ours, theirs = float(getattr(one, name)), float(getattr(chain, name))
        assert ours == pytest.approx(theirs, rel=2e-3), name


def test_a_draft_kept_on_chip_is_not_read():
    held = float(weight_bytes(DRAFT)) + 1e9
    with_memory = dataclasses.replace(HARDWARE, on_chip_memory_bytes=held)
    law, policy = Geometric(alpha=0.7), Chain(lookahead=4)
    near, far = (outcome(policy, law, hardware=h) for h in (with_memory, HARDWARE))
    compute = 4 * float(step_seconds(DRAFT, with_memory, 4.0, 1.0, 2048.0, resident_bytes=held))
    assert float(near.draft_seconds) == pytest.approx(compute, rel=1e-12)
    assert float(near.draft_seconds) < 0.6 * float(far.draft_seconds)
    assert float(near.verify_seconds) == float(far.verify_seconds)


def with_threshold(v):
    return ThresholdChain(threshold=v[0], max_lookahead=5), BetaConfidence(a=v[1], b=v[2]), DRAFT


def with_budget(v):
    return DynamicTree(budget=9.0 + v[0], depth=2.0 + v[1]), Q * v[2], DRAFT


def with_lengths(v):
    laws = (Geometric(alpha=0.5 * v[2]), Geometric(alpha=0.6 * v[2]))
    return Cascade(lengths=(1.0 + v[0], 2.0 + v[1])), laws, (SMALL, DRAFT)


@pytest.mark.parametrize("build", [with_threshold, with_budget, with_lengths])
def test_gradient_of_the_objective(build):
    point = np.array([0.35, 0.6, 0.9, 4.0, 2.0])

    def rate(v):
        policy, law, draft = build(v)
        hardware = dataclasses.replace(HARDWARE, memory_bandwidth_bytes_per_second=v[4] * 1e12)
        design = Design(drafter=DrafterSpec(), policy=policy)
        work = dataclasses.replace(WORK, batch=v[3], batching="static")
        return jnp.log(
            objective(design, work, TARGET, hardware, law, draft, None, 1e-4).tokens_per_second
        )

    with jax.enable_x64(True):
        h = 1e-6
        shifts = np.concatenate([np.zeros((1, 5)), h * np.eye(5), -h * np.eye(5)])
        both = jax.jit(jax.vmap(jax.value_and_grad(rate)))
        value, slope = (np.asarray(part) for part in both(jnp.asarray(point + shifts)))
    expected = (value[1:6] - value[6:11]) / (2 * h)
    np.testing.assert_allclose(slope[0], expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("policy", "law", "words"),
    [
        (StaticTree(parents=(-1, -1)), Geometric(alpha=0.5), "needs acceptance by rank"),
        (DynamicTree(), Geometric(alpha=0.5), "a dynamic tree needs"),
        (DynamicTree(budget=9, depth=7), Q, r"depth in \[1, 4\]"),
        (ThresholdChain(), Geometric(alpha=0.5), "a threshold needs a law of confidences"),
        (ThresholdChain(threshold=1.5), BetaConfidence(a=1.0, b=1.0), "threshold = 1.5"),
        (Cascade(lengths=(2,)), Geometric(alpha=0.5), "a tuple of Geometric laws"),
        (Cascade(lengths=(2,)), (Geometric(alpha=0.5),) * 2, "as many laws"),
        (Cascade(), (), "lengths or thresholds"),
        (Chain(), Q, "a chain needs a law of chains"),
    ],
)
def test_a_law_that_cannot_say_it_is_refused(policy, law, words):
    draft = (SMALL,) if isinstance(policy, Cascade) else DRAFT
    with pytest.raises(ValueError, match=words) as error:
        outcome(policy, law, draft=draft)
    assert "\n" not in str(error.value)


def test_trees_on_abstract_costs():
    cost = FlopsCost(N=1e8, M=1e10)
    p = outcome(StaticTree(parents=(-1, -1, 0, 1)), Q, hardware=cost)
    assert float(p.draft_seconds) == pytest.approx(2e8 * 3)  # root, then both its children
    assert float(p.verify_seconds) == pytest.approx(2e10 * 5)
