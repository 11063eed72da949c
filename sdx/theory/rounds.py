"""One round of every policy: tokens it yields, seconds it takes, the law of what is accepted.

    chain            gamma draft passes, one target pass over gamma + 1 positions
    threshold chain  drafts until the product of confidences is under the threshold, at most L; a
                     batch drafts until its last row stops, its pass is as wide as its widest row
    static tree      a draft pass per level over the nodes above it that have children
    dynamic tree     a draft pass over the root, depth - 1 over `branching` nodes; the best `budget`
                     of what was drafted is verified
    cascade          theory.cascades, a pass of each model costing what its held tokens take

What is accepted comes from a law that fits the policy (`rank_table`, `tree_outcome`, `_laws`); a
law that cannot say it is a ValueError. `round_of` mixes the integers next to a real number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sdx.records import (
    Autoregressive,
    Cascade,
    Chain,
    DrafterSpec,
    DynamicTree,
    Number,
    StaticTree,
    ThresholdChain,
    Workload,
    record,
)
from sdx.theory.acceptance import BetaMixture, Geometric, PerPosition, chain_survival
from sdx.theory.cascades import _threshold_cascade, cascade_of_passes, held_limits
from sdx.theory.costs import (
    AbstractCost,
    LeviathanCost,
    draft_pass_seconds,
    draft_seconds,
    verify_seconds,
)
from sdx.theory.thresholds import BetaConfidence, SampledConfidence, capped_threshold_chain
from sdx.theory.trees.aat import LogAAT, StretchedAAT
from sdx.theory.trees.base import acceptance_table, node_scores, structure
from sdx.theory.trees.exact import tree_profile
from sdx.theory.trees.geometric import GeometricRanks

MOST_NODES, MOST_LEVELS = 256, 16  # of a dynamic tree whose acceptance is a table
LONGEST_CALL = 16  # tokens that a level of a cascade of fixed lengths may ask for
_HELD, _RETURNED, _STEPS = 48, 12, 64  # bounds and grid of a cascade with thresholds


class Setting(NamedTuple):
    """All that a round depends on beside its policy. `draft`, `draft_hardware`: of a cascade a
    tuple, smallest model first."""

    spec: DrafterSpec
    tensor_parallel: Number
    workload: Workload
    target: Any
    hardware: Any
    acceptance: Any
    draft: Any
    draft_hardware: Any


@record
class Round:
    """Per round: tokens (A + 1), seconds of drafting and of the target's pass. survival [n + 1]:
    P(at least k drafts accepted), None where the law knows only the mean."""

    tokens: Number
    draft_seconds: Number
    verify_seconds: Number
    survival: Any = None


def _drafting(s: Setting, passes):
    where = (s.draft, s.target, s.draft_hardware, s.workload)
    return draft_seconds(s.spec, *where, passes, s.tensor_parallel)


def _verifying(s: Setting, new_tokens, ancestors=None):
    where = (s.target, s.hardware, s.workload)
    return verify_seconds(*where, new_tokens, s.tensor_parallel, ancestors)


def _refuse(policy: str, needs: str, law):
    raise ValueError(f"a {policy} needs {needs}, not {type(law).__name__}")


# ---------------------------------------------------------------------------- chains


def chain_round(gamma, s: Setting) -> Round:
    """A chain of `gamma` drafts under a law of chains (or an AAT law of verified tokens)."""
    if not hasattr(s.acceptance, "survival"):
        _refuse("chain", "a law of chains such as Geometric or PerPosition", s.acceptance)
    return Round(
        tokens=s.acceptance.expected_tokens(gamma),
        draft_seconds=_drafting(s, gamma),
        verify_seconds=_verifying(s, gamma + 1.0),
        survival=chain_survival(s.acceptance, gamma),
    )


def _of_the_slowest(at_least, batch):
    """P(the largest of `batch` independent counts >= k) from P(one >= k)."""
    certain = at_least >= 1.0
    missing = jnp.log1p(-jnp.where(certain, 0.0, at_least))
    return jnp.where(certain, 1.0, -jnp.expm1(batch * missing))


def _expected(at_least, seconds):
    """E[seconds[K]] from P(K >= k), k = 0..n: seconds [n + 1]."""
    return seconds[0] + jnp.sum(at_least[1:] * jnp.diff(seconds))


def threshold_round(policy: ThresholdChain, s: Setting) -> Round:
    """Exact in the numbers drafted and verified, for any step times."""
    if not isinstance(s.acceptance, BetaConfidence | SampledConfidence):
        _refuse("threshold", "a law of confidences (BetaConfidence)", s.acceptance)
    most = policy.max_lookahead
    law = capped_threshold_chain(s.acceptance, policy.threshold, most, policy.crossing)
    counts = jnp.arange(most + 1.0)
    drafting = jax.vmap(lambda n: _drafting(s, n))(counts)
    verifying = jax.vmap(lambda n: _verifying(s, n + 1.0))(counts)
    batch = s.workload.batch
    return Round(
        tokens=jnp.sum(law.survival),
        draft_seconds=_expected(_of_the_slowest(law.drafted, batch), drafting),
        verify_seconds=_expected(_of_the_slowest(law.verified, batch), verifying),
        survival=law.survival,
    )


# ---------------------------------------------------------------------------- trees


def rank_table(acceptance, depths: int, ranks: int):
    """q[d, r] of a tree from a table or GeometricRanks; from a law of chains if it is a chain."""
    if isinstance(acceptance, GeometricRanks):
        return acceptance_table(acceptance.masses(ranks), depths)
    if isinstance(acceptance, Geometric | BetaMixture | PerPosition):
        if ranks > 1:
            _refuse("tree", "acceptance by rank (an array q[depth, rank])", acceptance)
        survival = acceptance.survival(jnp.arange(depths + 1.0))
        return (survival[1:] / survival[:-1])[:, None]
    if not isinstance(acceptance, jax.Array) and not hasattr(acceptance, "__len__"):
        _refuse("tree", "acceptance by rank (an array q[depth, rank])", acceptance)
    return acceptance_table(acceptance, depths, ranks)


def _level_seconds(s: Setting, width):
    """One draft pass over `width` nodes of a level."""
    hardware = s.draft_hardware
    if isinstance(hardware, AbstractCost):  # Leviathan's passes are all alike, FLOPs are not
        return hardware.draft(1.0 if isinstance(hardware, LeviathanCost) else width)
    return draft_pass_seconds(s.draft, hardware, s.workload, width, s.tensor_parallel)


def _no_network(s: Setting) -> bool:
    return s.spec.family in ("medusa", "ngram") and not isinstance(s.draft_hardware, AbstractCost)


def static_tree_round(policy: StaticTree, s: Setting) -> Round:
    """The nodes' path products; levels and ancestors as they are."""
    parents = tuple(policy.parents)
    shape = structure(parents)
    depth = int(shape.depth.max(initial=0))
    scores = jnp.zeros(0)
    if parents:
        table = rank_table(s.acceptance, depth, int(shape.rank.max()) + 1)
        scores = node_scores(parents, table)
    widths = [1.0]
    for level in range(1, depth):
        widths.append(float(sum(shape.depth[p] == level for p in set(parents) - {-1})))
    if _no_network(s):
        drafted = _drafting(s, jnp.asarray(float(depth)))
    else:
        drafted = sum(_level_seconds(s, width) for width in widths) if parents else 0.0
    n = float(len(parents))
    reach = jnp.zeros(depth + 1).at[0].set(1.0)
    return Round(
        tokens=1.0 + jnp.sum(scores),
        draft_seconds=jnp.asarray(drafted),
        verify_seconds=_verifying(s, n + 1.0, float(shape.depth.sum()) / (n + 1.0)),
        survival=reach.at[shape.depth].add(scores),
    )


def dynamic_tree_round(policy: DynamicTree, depth, s: Setting) -> Round:
    """The best tree of `budget` nodes and `depth` levels in the mean acceptance: EAGLE-2 keeps the
    nodes of the best measured confidence, which is as good where confidences are calibrated."""
    branching = float(policy.branching)
    most = branching + (depth - 1.0) * branching**2
    budget = jnp.minimum(jnp.asarray(policy.budget, float), most)
    tokens, survival = tree_outcome(s.acceptance, budget, depth, policy.branching)
    drafted = _drafting(s, depth)
    if not _no_network(s):
        drafted = _level_seconds(s, 1.0) + (depth - 1.0) * _level_seconds(s, branching)
    verified = _verifying(s, budget + 1.0, (depth - 1.0) / 2.0)
    return Round(tokens=tokens, draft_seconds=drafted, verify_seconds=verified, survival=survival)


def tree_outcome(law, budget, depth, branching: int | None = None):
    """(tokens, survival or None) of the best tree of `budget` nodes and `depth` levels under a law
    of trees; `branching`: ranks of a table that are looked at (None: all)."""
    if isinstance(law, GeometricRanks):
        return law.expected_tokens(budget, depth), law.survival_of_tree(budget, depth)
    if isinstance(law, LogAAT | StretchedAAT):
        return law.expected_tokens(budget), None
    if isinstance(law, PerPosition):  # of a head: hazards of whole levels (theory.heads)
        return law.expected_tokens(depth), chain_survival(law, depth)
    if isinstance(law, Geometric | BetaMixture):
        _refuse("dynamic tree", "q[depth, rank], GeometricRanks or an AAT law", law)
    q = jnp.asarray(law, float)
    q = acceptance_table(q, MOST_LEVELS if q.ndim == 1 else q.shape[0])[:, :branching]
    levels = q.shape[0]
    q = jnp.where(jnp.arange(levels)[:, None] < depth, q, 0.0)

    def tokens(scale):
        profile = tree_profile(q * scale[:, None], MOST_NODES, levels)
        return jnp.interp(budget, jnp.arange(MOST_NODES + 1.0), profile)

    # A node of depth j scales with rows 1..j: the slope in row d sums the scores from depth d on.
    value, from_depth = jax.value_and_grad(tokens)(jnp.ones(levels))
    reach = from_depth - jnp.append(from_depth[1:], 0.0)
    return value, jnp.concatenate([jnp.ones(1), reach])


# ---------------------------------------------------------------------------- cascades


def _laws(policy: Cascade, s: Setting):
    """One law per model but the target, checked against the policy and the models."""
    wanted = Geometric if policy.lengths else BetaConfidence | SampledConfidence
    numbers = policy.lengths or policy.thresholds
    laws, models = s.acceptance, s.draft
    if not isinstance(laws, tuple | list) or not all(isinstance(law, wanted) for law in laws):
        kind = "Geometric laws" if policy.lengths else "laws of confidences"
        _refuse("cascade", f"a tuple of {kind}, one per model towards the next", laws)
    if not isinstance(models, tuple | list) or not len(models) == len(laws) == len(numbers):
        raise ValueError(
            f"a cascade of {len(numbers)} lengths or thresholds needs as many laws ({len(laws)}) "
            "and as many drafts, a tuple with the smallest first"
        )
    return tuple(laws), tuple(models)


def cascade_costs(s: Setting, models, most):
    """The smallest model's pass; then of every other the passes over 0..most[n] held tokens."""
    where = s.draft_hardware
    where = where if isinstance(where, tuple | list) else (where,) * len(models)

    def own(n, x):
        return draft_pass_seconds(models[n], where[n], s.workload, x, s.tensor_parallel)

    costs = [own(0, 1.0)]
    for n, held in enumerate(most):
        tokens = jnp.arange(held + 1.0) + 1.0
        last = n + 1 == len(models)
        costs.append(
            jax.vmap(lambda x, n=n, last=last: _verifying(s, x) if last else own(n + 1, x))(tokens)
        )
    return tuple(costs)


def cascade_round(policy: Cascade, s: Setting) -> Round:
    """theory.cascades with passes that cost what they verify. A batch takes the rows' mean number
    of calls: a lower bound of its seconds (its slowest row decides)."""
    laws, models = _laws(policy, s)
    if isinstance(s.hardware, AbstractCost):
        raise ValueError("a cascade needs step times (Hardware or StepTable), not abstract costs")
    if policy.lengths:
        costs = cascade_costs(s, models, held_limits(len(laws), LONGEST_CALL))
        alphas, lengths = (
            jnp.stack([jnp.asarray(v, float) for v in values])
            for values in ([law.alpha for law in laws], policy.lengths)
        )
        outcome = cascade_of_passes(alphas, costs, lengths, LONGEST_CALL)
    else:
        costs = cascade_costs(s, models, [_HELD - 1] * len(laws))
        thresholds = jnp.stack([jnp.asarray(p, float) for p in policy.thresholds])
        bounds = (_HELD, _RETURNED, _STEPS)
        outcome = _threshold_cascade(laws, costs, thresholds, "keep", *bounds)
    return Round(
        tokens=outcome.tokens,
        draft_seconds=outcome.cost - outcome.verify,
        verify_seconds=outcome.verify,
        survival=outcome.survival,
    )


# ---------------------------------------------------------------------------- any policy


def _mix(function, count):
    """`function` of integers, linear in between: lookaheads (depths) mixed between rounds."""
    low = jnp.floor(count)
    share = count - low
    pair = function(low), function(low + 1.0)
    return jax.tree.map(lambda a, b: (1.0 - share) * a + share * b, *pair)


def round_of(policy, s: Setting) -> Round:
    """The round of any policy; a real lookahead or depth mixes its neighbours."""
    if isinstance(policy, Autoregressive):
        one = jnp.ones(())
        return Round(
            tokens=one,
            draft_seconds=0.0 * one,
            verify_seconds=_verifying(s, one),
            survival=jnp.ones(1),
        )
    if isinstance(policy, Chain):
        return _mix(lambda g: chain_round(g, s), jnp.asarray(policy.lookahead, float))
    if isinstance(policy, DynamicTree):
        depth = jnp.asarray(policy.depth, float)
        return _mix(lambda d: dynamic_tree_round(policy, d, s), depth)
    rounds = {
        ThresholdChain: threshold_round,
        StaticTree: static_tree_round,
        Cascade: cascade_round,
    }
    if type(policy) not in rounds:
        raise ValueError(f"predict knows no {type(policy).__name__} round")
    return rounds[type(policy)](policy, s)
