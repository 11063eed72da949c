"""From what is asked of `design` to the problems that are solved: checks, laws, spaces, cells."""

from __future__ import annotations

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np

from sdx.search.problems import (
    OBJECTIVES,
    Common,
    Knobs,
    chain_profiles,
    draft_space,
    tree_profiles,
)
from sdx.search.sensitivity import scalars_to_float64
from sdx.search.solving import Problem
from sdx.theory.acceptance import BetaMixture, Geometric, PerPosition
from sdx.theory.hardware import Hardware, StepTable, require_fit

POLICIES = ("chain", "tree", "threshold", "cascade")
TREE_BUDGETS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TREE_DEPTHS = tuple(range(1, 9))


def check_request(workloads, devices, max_lookahead, objective, policies, hardware, knobs):
    """ValueError where a number, a name or the device does not serve."""
    if devices < 1 or max_lookahead < 1:
        raise ValueError(
            f"devices = {devices} and max_lookahead = {max_lookahead} must be at least 1"
        )
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; known: {', '.join(OBJECTIVES)}")
    unknown = set(policies) - set(POLICIES)
    if unknown:
        raise ValueError(f"unknown policy {sorted(unknown)}; known: {', '.join(POLICIES)}")
    if isinstance(hardware, StepTable) and (objective[-5:] in ("joule", "ollar") or knobs):
        raise ValueError("a step table has no watts, price or knobs: give a Hardware")
    if len({w.batching for w in workloads}) > 1:
        raise ValueError("workloads of one call are all continuous or all static: call twice")
    for w in workloads:
        if not float(w.batch) > 0 or float(w.context) < 0 or not float(w.new_tokens) > 0:
            raise ValueError(
                f"workload batch {float(w.batch):g}, context {float(w.context):g}, new_tokens "
                f"{float(w.new_tokens):g}: batch and new_tokens must be positive, context >= 0"
            )


def check_drafters(workloads, families, policies, draft, acceptance, head_law, members):
    """ValueError where the drafters to choose from and their laws do not belong together."""
    if (draft is None) != (acceptance is None):
        raise ValueError("a given draft and its measured acceptance law come together")
    if ("cascade" in policies) != (members is not None):
        raise ValueError("the policy cascade needs `members` (search.Members) to choose from")
    if members is not None and workloads[0].batching == "static":
        raise ValueError("cascades are chosen for continuous batches: predict a static one")
    if draft is None and set(families) - {"llama", "heads"}:
        raise ValueError(
            f"unknown draft family {', '.join(families)!r}; known: llama, heads, or give a draft"
        )
    if "heads" in families and head_law is None:
        raise ValueError("family heads needs head_law, a theory.heads.HeadLaw of measured heads")
    if "heads" in families and "threshold" in policies:
        raise ValueError("a head's confidences have no law here: leave the threshold policy out")


def laws_by_policy(acceptance, policies) -> dict:
    """The given draft's acceptance (None without one) by policy, but for cascades, whose members
    have their own; a tree's is by rank."""
    policies = [policy for policy in policies if policy != "cascade"]
    if not isinstance(acceptance, dict):
        acceptance = dict.fromkeys(policies, acceptance)
    missing = set(policies) - set(acceptance)
    if missing:
        raise ValueError(f"no acceptance law for {', '.join(sorted(missing))}: add it to the dict")
    if isinstance(acceptance.get("tree"), Geometric | BetaMixture | PerPosition):
        raise ValueError("a tree needs acceptance by rank: q[depth, rank], GeometricRanks or AAT")
    return {policy: acceptance[policy] for policy in policies}


def parallel_degrees(target, hardware, workload, devices, fixed):
    """Tensor parallel degrees at which the target and its KV fit; ValueError where none does."""
    degrees = [fixed] if fixed else [2**k for k in range(int(np.log2(devices)) + 1)]
    if not isinstance(hardware, Hardware):
        return degrees[:1]
    longest = workload.context + workload.new_tokens
    fitting = []
    for degree in degrees:
        try:
            require_fit([target], hardware, workload.batch, longest, degree)
            fitting.append(degree)
        except ValueError:
            if degree == degrees[-1] and not fitting:
                raise
    return fitting


def _space(target, without_draft, policy, tokens, knobs):
    """The variables of a policy: of the draft, if one is designed by size, and of the device."""
    threshold = policy == "threshold"
    if without_draft:  # a given draft, or heads
        return draft_space(threshold=threshold, knobs=knobs)[2:]
    # A draft of half the target's layers or of its full width is no draft.
    layers = int(max(1, min(32, float(target.layers) // 2)))
    width = float(target.width)
    step = 256.0 if width >= 2048 else 64.0
    return draft_space(
        step,
        layers,
        max(step, min(8192.0, width)),
        tokens=tokens,
        threshold=threshold,
        knobs=knobs,
    )


def _profiles(policy, max_lookahead):
    """Threshold policies have no integer to look at: one row."""
    if policy == "tree":
        return tree_profiles(TREE_BUDGETS, TREE_DEPTHS)
    return chain_profiles(max_lookahead if policy == "chain" else 1)


def _cells(workloads, degrees, heads):
    """(owner of each cell, cells [p, 7]): workload x tensor parallel degree x (K, n)."""
    rows = [
        (k, *map(float, (w.batch, w.context, degree, layers, n, w.new_tokens, w.temperature)))
        for k, w in enumerate(workloads)
        for degree in degrees[k]
        for layers, n in heads
    ]
    table = np.array(rows)
    return table[:, 0].astype(int), jnp.asarray(table[:, 1:])


def pose(
    common: Common,
    workloads,
    degrees,
    families,
    laws: dict,
    *,
    heads,
    weight_dtypes,
    tokens: bool,
    knobs: Knobs | None,
) -> list[Problem]:
    """One problem per draft family, policy (the keys of `laws`) and weight dtype of the draft, each
    with the cells of all workloads at their tensor parallel `degrees`. heads: the (K, n) to try.
    tokens, knobs: whether the draft's training tokens and the device are designed, too."""
    given = common.draft is not None
    dtypes = (common.draft.weight_dtype,) if given else weight_dtypes
    posed = []
    for family, policy, dtype in itertools.product(families, laws, dtypes):
        head = family == "heads" and not given
        space = _space(common.target, given or head, policy, tokens, knobs)
        owners, cells = _cells(workloads, degrees, heads if head else [(1, 0)])
        kind = dataclasses.replace(
            common.kind,
            variables=tuple(v.name for v in space),
            policy=policy,
            family="heads" if head else "independent",
            weight_dtype=dtype,
        )
        numbers = dataclasses.replace(common, kind=kind, acceptance=laws[policy])
        profiles = _profiles(policy, common.kind.max_lookahead)
        posed.append(Problem(space, profiles, cells, owners, scalars_to_float64(numbers)))
    return posed
