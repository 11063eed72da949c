"""`design`: the best speculative decoder for a target, a device and workloads, certified."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import Workload
from sdx.search import problems
from sdx.search.ascent import ascend, evaluations_of_ascent, polish
from sdx.search.describe import DesignResult, describe
from sdx.search.exact import (
    branch_and_bound,
    climb_lattice,
    exhaustive,
    lattice_points,
    score_chunks,
)
from sdx.search.members import Members, design_members
from sdx.search.problems import OBJECTIVES, Common, Kind, Knobs, design_parts
from sdx.search.sensitivity import scalars_to_float64
from sdx.search.space import from_lattice, round_to_lattice, starts
from sdx.theory.acceptance import BetaMixture, Geometric, PerPosition
from sdx.theory.hardware import Hardware, StepTable, require_fit
from sdx.theory.numerics import float64
from sdx.theory.scaling import besiroglu, sdsl_plane

POLICIES = ("chain", "tree", "threshold", "cascade")
# Lattice points per cell up to which the certificate is enumeration. A threshold design costs as
# much as fifty chains (convolutions): there branch and bound is the cheaper one much earlier.
_ENUMERATE = {"chain": 50_000, "tree": 50_000, "threshold": 2_000}
TREE_BUDGETS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TREE_DEPTHS = tuple(range(1, 9))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One compiled structure with its numbers: what ascent and exact search work on."""

    space: tuple
    profiles: np.ndarray
    cells: jax.Array
    owners: np.ndarray  # which workload a cell belongs to
    common: Common


# ---------------------------------------------------------------------------- posing


def _degrees(target, hardware, workload, devices, fixed):
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


def _check(workloads, devices, max_lookahead, objective, policies, hardware, knobs):
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


def _space(target, without_draft, policy, tokens, knobs):
    threshold = policy == "threshold"
    if without_draft:  # a given draft, or heads
        return problems.draft_space(threshold=threshold, knobs=knobs)[2:]
    # A draft of half the target's layers or of its full width is no draft.
    layers = int(max(1, min(32, float(target.layers) // 2)))
    width = float(target.width)
    step = 256.0 if width >= 2048 else 64.0
    return problems.draft_space(
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
        return problems.tree_profiles(TREE_BUDGETS, TREE_DEPTHS)
    return problems.chain_profiles(max_lookahead if policy == "chain" else 1)


# ---------------------------------------------------------------------------- solving


def solve(problem: Problem, start_count: int = 6, rounds: int = 4, inner: int = 6, top: int = 2):
    """Ascent from every start in every cell, rounding, exact neighbourhood of the best cells.

    Returns (cell, x, profile row, ln score, evaluations) per workload; only the `top` best cells of
    a workload by the ascent's own score are rounded and climbed.
    """
    space, profiles, cells = problem.space, problem.profiles, problem.cells
    if not space:
        return _looked_at(problem)
    z0 = jnp.asarray(starts(space, start_count))
    arguments = (jnp.asarray(profiles), cells, problem.common, z0)
    x, _, score = ascend(design_parts, space, *arguments, rounds=rounds, inner=inner)
    x, score = np.asarray(x), np.nan_to_num(np.asarray(score), nan=-np.inf)
    per_start = evaluations_of_ascent(len(profiles), rounds, inner)
    solutions = []
    for owner in np.unique(problem.owners):
        mine = np.flatnonzero(problem.owners == owner)
        order = mine[np.argsort(-score[mine].max(axis=1), kind="stable")][:top]
        begin = x[order, score[order].argmax(axis=1)]
        index, extra = _best_rounding(problem, order, begin, top)
        index, rows, scores, exact = climb_lattice(
            design_parts, space, profiles, [cells[c] for c in order], problem.common, index
        )
        k = int(scores.argmax())
        evaluations = exact + extra + len(mine) * len(z0) * per_start
        solutions.append(
            (order[k], from_lattice(space, index[k]), int(rows[k]), float(scores[k]), evaluations)
        )
    return solutions


def _looked_at(problem: Problem):
    """As `solve` where only integers are designed: the profile table is the problem."""
    arguments = (design_parts, problem.space, problem.profiles)
    tops = [
        (c, *exhaustive(*arguments, cell, problem.common)) for c, cell in enumerate(problem.cells)
    ]
    solutions = []
    for owner in np.unique(problem.owners):
        mine = [top for top in tops if problem.owners[top[0]] == owner]
        best = max(mine, key=lambda top: top[3])
        solutions.append((*best[:4], sum(top[4] for top in mine)))
    return solutions


def _best_rounding(problem: Problem, order, x, top, rows=10, steps=12):
    """Lattice indices [p, n] for cells `order` and their ascents' points x [p, n]: polished once
    per likely profile row, rounded, the best by exact score. Also the evaluations spent."""
    space, common = problem.space, problem.common
    profiles, cells = jnp.asarray(problem.profiles), problem.cells[order]
    tables = np.concatenate(
        [
            score_chunks(design_parts, x[k][None], profiles, cell, common)
            for k, cell in enumerate(cells)
        ]
    )
    likely = np.argsort(-tables, axis=1, kind="stable")[:, :rows]
    # Workloads differ in how many cells they have: filled up to `top`, polish compiles once.
    filled = np.resize(np.arange(len(order)), top)
    polished, _ = polish(
        design_parts,
        space,
        profiles,
        cells[filled],
        common,
        x[filled],
        jnp.asarray(likely[filled]),
        steps=steps,
    )
    index = round_to_lattice(space, np.asarray(polished))
    best = []
    for k, cell in enumerate(cells):
        candidates = np.concatenate([index[k], round_to_lattice(space, x[k])[None]])
        values = from_lattice(space, candidates)
        table = score_chunks(design_parts, values, profiles, cell, common)[:, likely[k]]
        best.append(candidates[table.max(axis=1).argmax()])
    spent = tables.size + likely.size * (3 * steps + 1) + len(cells) * table.size
    return np.stack(best), spent


def certify(problem: Problem, owner: int, found: float):
    """(certificate gap, ascent gap, better (cell, x, row, score) or None) of one workload."""
    mine = np.flatnonzero(problem.owners == owner)
    space, profiles, common = problem.space, jnp.asarray(problem.profiles), problem.common
    if lattice_points(space, profiles) <= _ENUMERATE[common.kind.policy]:
        tops = [
            (c, *exhaustive(design_parts, space, profiles, problem.cells[c], common)[:3])
            for c in mine
        ]
        best = max(tops, key=lambda t: t[3])
        gap = float(np.expm1(max(best[3] - found, 0.0)))
        return 0.0, gap, best if best[3] > found else None
    if problem.common.kind.batching == "static":
        return None, None, None  # what a static batch loses has no known sign: no box bounds
    gaps = [
        branch_and_bound(design_parts, space, profiles, problem.cells[c], common, found)[0]
        for c in mine
    ]
    return (None if None in gaps else max(gaps)), None, None


@float64
def design(
    target,
    hardware,
    workload: Workload | Sequence[Workload],
    *,
    family: str | Sequence[str] = "llama",
    policies: Sequence[str] = ("chain",),
    devices: int = 1,
    tensor_parallel: int | None = None,
    draft=None,
    acceptance=None,
    draft_hardware=None,
    head_law=None,
    head_layers: Sequence[int] = (1, 2, 3),
    specialist_positions: Sequence[int] = (0, 1, 2, 3),
    law=sdsl_plane,
    loss_law=besiroglu,
    draft_tokens=15e12,
    target_tokens=15e12,
    round_overhead_seconds=0.0,
    objective: str = "tokens_per_second",
    max_lookahead: int = 16,
    latency_limit_seconds=jnp.inf,
    training_flops_limit=None,
    weight_dtypes: Sequence[str] = ("bfloat16",),
    knobs: Knobs | None = None,
    members: Members | None = None,
    start_count: int = 6,
    certificate: bool = True,
):
    """The best speculative decoder for each workload (one `DesignResult`, or a list).

    target: Architecture. hardware: Hardware, or the target's StepTable. family "llama": layers and
    width of a Llama-like draft are designed, its acceptance by `law` of perplexities by `loss_law`
    of sizes and training tokens. Family "heads": `head_layers` K and `specialist_positions` n of a
    head on the target, accepted by `head_law` (a theory.heads.HeadLaw). Both may be compared. Or
    `draft` (Architecture) with its measured `acceptance` (a law, or a dict of laws by policy), and
    `draft_hardware` (its StepTable): only policy and split are designed. `policies` to compare:
    chain, tree, threshold (at most `max_lookahead` drafts), cascade (of some of `members`, in some
    order; continuous batches). `devices`: tensor parallel degrees 1, 2, 4 ... up to it are tried,
    or `tensor_parallel` alone; `weight_dtypes` of the draft (which change its time and memory, not
    its acceptance). `objective`: tokens_per_second, latency (tokens per second of one user),
    tokens_per_joule, tokens_per_dollar. `latency_limit_seconds` per token of one user.
    `training_flops_limit`, 6 N D: the draft's tokens are designed too, under it. `knobs`: compute,
    bandwidth and on-chip memory of the device are designed too, under its budget.

    Of a workload everything counts but its temperature, which only heads have a law for: other laws
    hold at the temperature they were fitted at. Raises ValueError for bad or infeasible input.
    """
    single = isinstance(workload, Workload)
    workloads = [workload] if single else list(workload)
    _check(workloads, devices, max_lookahead, objective, policies, hardware, knobs)
    if (draft is None) != (acceptance is None):
        raise ValueError("a given draft and its measured acceptance law come together")
    if ("cascade" in policies) != (members is not None):
        raise ValueError("the policy cascade needs `members` (search.Members) to choose from")
    if members is not None and workloads[0].batching == "static":
        raise ValueError("cascades are chosen for continuous batches: predict a static one")
    climbed = [policy for policy in policies if policy != "cascade"]
    laws = _laws(acceptance, climbed)
    families = (family,) if isinstance(family, str) else tuple(family)
    _check_families(families, draft, head_law, policies)
    common = Common(
        kind=Kind(objective=objective),
        target=target,
        hardware=hardware,
        law=law,
        loss_law=loss_law,
        draft_tokens=draft_tokens,
        target_tokens=target_tokens,
        round_overhead_seconds=round_overhead_seconds,
        draft=draft,
        draft_hardware=draft_hardware,
        head_law=head_law,
        training_flops_limit=jnp.inf if training_flops_limit is None else training_flops_limit,
        latency_limit_seconds=latency_limit_seconds,
        knobs=Knobs() if knobs is None else knobs,
    )
    degrees = [_degrees(target, hardware, w, devices, tensor_parallel) for w in workloads]
    heads = list(itertools.product(head_layers, specialist_positions))
    best: dict = {}
    for name, policy in itertools.product(families, climbed):
        plain = draft is not None or name == "llama"
        owners, cells = _cells(workloads, degrees, [(1, 0)] if plain else heads)
        tokens = training_flops_limit is not None
        space = _space(target, draft is not None or not plain, policy, tokens, knobs)
        for dtype in weight_dtypes if draft is None else (draft.weight_dtype,):
            kind = dataclasses.replace(
                common.kind,
                variables=tuple(v.name for v in space),
                policy=policy,
                family="independent" if plain else "heads",
                weight_dtype=dtype,
                batching=workloads[0].batching,
                max_lookahead=max_lookahead,
            )
            problem = Problem(
                space,
                _profiles(policy, max_lookahead),
                cells,
                owners,
                scalars_to_float64(dataclasses.replace(common, kind=kind, acceptance=laws[policy])),
            )
            for k, solution in enumerate(solve(problem, start_count)):
                best.setdefault(k, []).append((problem, solution))
    results = [_result(k, w, best.get(k, []), certificate) for k, w in enumerate(workloads)]
    if members is not None:
        limits = dict(
            objective_name=objective,
            round_overhead_seconds=round_overhead_seconds,
            latency_limit_seconds=latency_limit_seconds,
        )
        for k, w in enumerate(workloads):
            chosen = design_members(target, hardware, w, members, degrees=degrees[k], **limits)
            results[k] = _better(results[k], chosen)
    for w, result in zip(workloads, results, strict=True):
        if result is None:
            raise ValueError(
                f"no design is allowed at batch {float(w.batch):g}, context "
                f"{float(w.context):g}: loosen the memory or latency limit"
            )
    return results[0] if single else results


def _better(climbed: DesignResult | None, chosen: DesignResult | None) -> DesignResult | None:
    """The one of higher score; the other one's certificate is then the better one's, too, raised
    by the ratio of their scores."""
    if climbed is None or chosen is None:
        return chosen if climbed is None else climbed
    if climbed.score >= chosen.score:
        return climbed
    gap = climbed.certificate_gap
    if gap is not None:
        gap = max((1.0 + gap) * float(climbed.score) / float(chosen.score) - 1.0, 0.0)
    return dataclasses.replace(chosen, certificate_gap=gap)


def _check_families(families, draft, head_law, policies):
    if draft is None and set(families) - {"llama", "heads"}:
        raise ValueError(
            f"unknown draft family {', '.join(families)!r}; known: llama, heads, or give a draft"
        )
    if "heads" in families and head_law is None:
        raise ValueError("family heads needs head_law, a theory.heads.HeadLaw of measured heads")
    if "heads" in families and "threshold" in policies:
        raise ValueError("a head's confidences have no law here: leave the threshold policy out")


def _laws(acceptance, policies) -> dict:
    """The given draft's acceptance by policy; a tree's is by rank."""
    if not isinstance(acceptance, dict):
        acceptance = dict.fromkeys(policies, acceptance)
    missing = set(policies) - set(acceptance)
    if missing:
        raise ValueError(f"no acceptance law for {', '.join(sorted(missing))}: add it to the dict")
    if isinstance(acceptance.get("tree"), Geometric | BetaMixture | PerPosition):
        raise ValueError("a tree needs acceptance by rank: q[depth, rank], GeometricRanks or AAT")
    return acceptance


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


def _result(owner, workload, candidates, certificate) -> DesignResult | None:
    """The best structure's solution, None where none is allowed; the certificate covers every
    structure that was tried."""
    if not candidates:
        return None
    problem, solution = max(candidates, key=lambda c: c[1][3])
    evaluations = sum(s[4] for _, s in candidates)
    found, gap, ascent_gap = solution[3], None, None
    if not np.isfinite(found):
        return None
    if certificate:
        gaps = []
        for tried, _ in candidates:
            g, missed, better = certify(tried, owner, found)
            gaps.append((g, missed))
            if better is not None and better[3] > solution[3]:
                problem, solution = tried, (*better, 0)
        raised = np.exp(solution[3] - found)
        gap = None
        if all(g is not None for g, _ in gaps):
            gap = max(max((1.0 + g) / raised - 1.0 if g else 0.0, 0.0) for g, _ in gaps)
        if all(m is not None for _, m in gaps):
            ascent_gap = max(m for _, m in gaps)
    return describe(workload, problem, solution, gap, ascent_gap, evaluations)
