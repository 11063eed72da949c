"""`design`: the best speculative decoder for a target, a device and workloads, certified."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import (
    Autoregressive,
    Chain,
    Design,
    DrafterSpec,
    DynamicTree,
    Number,
    Prediction,
    ThresholdChain,
    Workload,
    record,
    static,
)
from sdx.search import problems
from sdx.search.ascent import ascend, evaluations_of_ascent, log_score
from sdx.search.exact import (
    branch_and_bound,
    climb_lattice,
    exhaustive,
    lattice_points,
)
from sdx.search.problems import CELL, OBJECTIVES, Common, Kind, Knobs, design_parts
from sdx.search.sensitivity import elasticities, scalars_to_float64
from sdx.search.space import from_lattice, round_to_lattice, starts
from sdx.theory.acceptance import Geometric
from sdx.theory.hardware import Hardware, StepTable, require_fit, step_breakdown
from sdx.theory.numerics import float64
from sdx.theory.scaling import besiroglu, sdsl_plane
from sdx.theory.throughput import DO_NOT, SPECULATE, objective
from sdx.theory.transformers import parameters

POLICIES = ("chain", "tree", "threshold")
_ENUMERATE = 50_000  # lattice points per cell up to which the certificate is enumeration
TREE_BUDGETS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TREE_DEPTHS = tuple(range(1, 9))


@record
class DesignResult:
    """The best design of one workload.

    `design` is the best *speculative* one, `prediction` what it yields, with the verdict;
    `recommended` is autoregression where that verdict is "do not speculate". `certificate_gap`:
    how much better, relatively, any design of the lattice can be (None: not certified);
    `ascent_gap`: what the ascent alone missed before enumeration (None: not enumerated).
    `bounds`: what bounds the draft's and the target's pass. `elasticities`: d ln score / d ln
    theta, largest first. `device`: multiples of compute and bandwidth where they were designed.
    """

    design: Design
    prediction: Prediction
    workload: Workload
    acceptance: Any
    draft: Any
    draft_parameters: Number
    score: Number
    certificate_gap: float | None = static(default=None)
    ascent_gap: float | None = static(default=None)
    elasticities: Any = static(default=())
    bounds: Any = static(default=())
    device: Any = static(default=())
    evaluations: int = static(default=0)
    objective: str = static(default="tokens_per_second")

    @property
    def recommended(self) -> Design:
        if self.prediction.verdict == DO_NOT:
            return dataclasses.replace(self.design, policy=Autoregressive())
        return self.design


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
    for w in workloads:
        if not float(w.batch) > 0 or float(w.context) < 0 or not float(w.new_tokens) > 0:
            raise ValueError(
                f"workload batch {float(w.batch):g}, context {float(w.context):g}, new_tokens "
                f"{float(w.new_tokens):g}: batch and new_tokens must be positive, context >= 0"
            )


def _space(target, given, policy, knobs):
    if given:
        space = problems.draft_space(threshold=policy == "threshold", knobs=knobs)[2:]
        return tuple(space)
    # A draft of half the target's layers or of its full width is no draft.
    layers = int(max(1, min(32, float(target.layers) // 2)))
    width = float(target.width)
    step = 256.0 if width >= 2048 else 64.0
    return problems.draft_space(
        step,
        layers,
        max(step, min(8192.0, width)),
        threshold=policy == "threshold",
        knobs=knobs,
    )


def _profiles(policy, max_lookahead):
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
    z0 = jnp.asarray(starts(space, start_count if space else 1))
    arguments = (jnp.asarray(profiles), cells, problem.common, z0)
    x, _, score = ascend(design_parts, space, *arguments, rounds=rounds, inner=inner)
    x, score = np.asarray(x), np.nan_to_num(np.asarray(score), nan=-np.inf)
    per_start = evaluations_of_ascent(len(profiles), rounds, inner) if space else len(profiles)
    solutions = []
    for owner in np.unique(problem.owners):
        mine = np.flatnonzero(problem.owners == owner)
        order = mine[np.argsort(-score[mine].max(axis=1), kind="stable")][:top]
        index = round_to_lattice(space, x[order, score[order].argmax(axis=1)])
        climbed = climb_lattice(
            design_parts, space, profiles, [cells[c] for c in order], problem.common, index
        )
        index, rows, scores, exact = climbed
        k = int(scores.argmax())
        evaluations = exact + len(mine) * len(z0) * per_start
        solutions.append(
            (order[k], from_lattice(space, index[k]), int(rows[k]), float(scores[k]), evaluations)
        )
    return solutions


def certify(problem: Problem, owner: int, found: float):
    """(certificate gap, ascent gap, better (cell, x, row, score) or None) of one workload."""
    mine = np.flatnonzero(problem.owners == owner)
    space, profiles, common = problem.space, jnp.asarray(problem.profiles), problem.common
    if lattice_points(space, profiles) <= _ENUMERATE:
        tops = [
            (c, *exhaustive(design_parts, space, profiles, problem.cells[c], common)[:3])
            for c in mine
        ]
        best = max(tops, key=lambda t: t[3])
        gap = float(np.expm1(max(best[3] - found, 0.0)))
        return 0.0, gap, best if best[3] > found else None
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
    family: str = "llama",
    policies: Sequence[str] = ("chain",),
    devices: int = 1,
    tensor_parallel: int | None = None,
    draft=None,
    acceptance=None,
    draft_hardware=None,
    law=sdsl_plane,
    loss_law=besiroglu,
    draft_tokens=15e12,
    target_tokens=15e12,
    round_overhead_seconds=0.0,
    objective: str = "tokens_per_second",
    max_lookahead: int = 16,
    latency_limit_seconds=jnp.inf,
    weight_dtypes: Sequence[str] = ("bfloat16",),
    knobs: Knobs | None = None,
    start_count: int = 6,
    certificate: bool = True,
):
    """The best speculative decoder for each workload (one `DesignResult`, or a list).

    target: Architecture. hardware: Hardware, or the target's StepTable. family "llama": layers and
    width of a Llama-like draft are designed, its acceptance by `law` of perplexities by `loss_law`
    of sizes and training tokens. Or `draft` (Architecture) with its measured `acceptance` law, and
    `draft_hardware` (its StepTable): only policy and split are designed. `policies` to compare:
    chain, tree, threshold. `devices`: tensor parallel degrees 1, 2, 4 ... up to it are tried, or
    `tensor_parallel` alone; `weight_dtypes` of the draft. `objective`: tokens_per_second, latency
    (tokens per second of one user), tokens_per_joule, tokens_per_dollar.
    `latency_limit_seconds` per token of one user. `knobs`: compute and bandwidth of the device are
    designed too, under its budget. Raises ValueError for bad or infeasible input.
    """
    single = isinstance(workload, Workload)
    workloads = [workload] if single else list(workload)
    _check(workloads, devices, max_lookahead, objective, policies, hardware, knobs)
    if (draft is None) != (acceptance is None):
        raise ValueError("a given draft and its measured acceptance law come together")
    if family != "llama" and draft is None:
        raise ValueError(f"unknown draft family {family!r}; known: llama, or give a draft")
    owners, cells = [], []
    for k, w in enumerate(workloads):
        for degree in _degrees(target, hardware, w, devices, tensor_parallel):
            owners.append(k)
            cells.append([float(w.batch), float(w.context), float(degree)])
    owners, cells = np.array(owners), jnp.asarray(cells)
    best: dict = {}
    for policy in policies:
        space = _space(target, draft is not None, policy, knobs is not None)
        for dtype in weight_dtypes if draft is None else (draft.weight_dtype,):
            kind = Kind(
                variables=tuple(v.name for v in space),
                policy=policy,
                objective=objective,
                weight_dtype=dtype,
            )
            common = Common(
                kind=kind,
                target=target,
                hardware=hardware,
                law=law,
                loss_law=loss_law,
                draft_tokens=draft_tokens,
                target_tokens=target_tokens,
                new_tokens=workloads[0].new_tokens,
                round_overhead_seconds=round_overhead_seconds,
                draft=draft,
                acceptance=acceptance,
                draft_hardware=draft_hardware,
                latency_limit_seconds=latency_limit_seconds,
                knobs=Knobs() if knobs is None else knobs,
            )
            profiles = _profiles(policy, max_lookahead)
            problem = Problem(space, profiles, cells, owners, scalars_to_float64(common))
            for k, solution in enumerate(solve(problem, start_count)):
                best.setdefault(k, []).append((problem, solution))
    results = [_result(k, w, best[k], certificate) for k, w in enumerate(workloads)]
    return results[0] if single else results


def _result(owner, workload, candidates, certificate) -> DesignResult:
    """The best structure's solution; the certificate covers every structure that was tried."""
    problem, solution = max(candidates, key=lambda c: c[1][3])
    evaluations = sum(s[4] for _, s in candidates)
    found, gap, ascent_gap = solution[3], None, None
    if not np.isfinite(found):
        raise ValueError(
            f"no design is allowed at batch {float(workload.batch):g}, context "
            f"{float(workload.context):g}: loosen the memory or latency limit"
        )
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
    return _describe(workload, problem, solution, gap, ascent_gap, evaluations)


# ---------------------------------------------------------------------------- describing


def _policy(kind, values, profile):
    if kind.policy == "chain":
        return Chain(lookahead=int(profile[0]))
    if kind.policy == "tree":
        return DynamicTree(budget=int(profile[0]), depth=int(profile[1]))
    return ThresholdChain(threshold=float(values["threshold"]))


@jax.jit
def _predict(x, profile, cell, common):
    """Prediction, alpha and N of a design, for any policy."""
    values = problems.values_of(x, common)
    draft = problems.draft_of(values, common)
    workload = problems.workload_of(cell, common)
    alpha = jnp.nan if common.acceptance is not None else problems.alpha_of(draft, common)
    spec = DrafterSpec(weight_dtype=common.kind.weight_dtype)
    alone = Design(drafter=spec, policy=Autoregressive(), tensor_parallel=cell[2])
    baseline = objective(
        alone,
        workload,
        common.target,
        problems._device(common, values),
        None,
        draft,
        common.draft_hardware,
    )
    drafted, verified, tokens = problems.round_seconds(x, profile, cell, common)
    seconds = drafted + verified + common.round_overhead_seconds
    rate = workload.batch * tokens / seconds
    speedup = rate / baseline.tokens_per_second
    prediction = dataclasses.replace(
        baseline,
        tokens_per_second=rate,
        speedup=speedup,
        tokens_per_round=tokens,
        draft_seconds=drafted,
        verify_seconds=verified,
        overhead_seconds=common.round_overhead_seconds,
        joules_per_token=baseline.joules_per_token / speedup,
        dollars_per_million_tokens=baseline.dollars_per_million_tokens / speedup,
    )
    return prediction, draft, alpha, parameters(draft)


def _describe(workload, problem, solution, gap, ascent_gap, evaluations) -> DesignResult:
    """A design's prediction, bounds and elasticities."""
    cell_index, x, row, score, _ = solution
    common, cell = problem.common, problem.cells[cell_index]
    profile = jnp.asarray(problem.profiles[row])
    values = {v.name: float(x[k]) for k, v in enumerate(problem.space)}
    prediction, draft, alpha, N = _predict(jnp.asarray(x), profile, cell, common)
    wins = float(prediction.speedup) > 1.0 + 1e-12
    prediction = dataclasses.replace(prediction, verdict=SPECULATE if wins else DO_NOT)
    given = common.draft is not None
    spec = DrafterSpec(
        layers=float(draft.layers) if given else int(values["layers"]),
        width=float(draft.width) if given else int(values["width"]),
        training_tokens=float(common.draft_tokens),
        weight_dtype=common.kind.weight_dtype,
        name=common.draft.name if given else "",
    )
    chosen = Design(
        drafter=spec,
        policy=_policy(common.kind, values, problem.profiles[row]),
        tensor_parallel=int(cell[2]),
    )
    return DesignResult(
        design=chosen,
        prediction=prediction,
        workload=workload,
        acceptance=common.acceptance if given else Geometric(alpha=alpha),
        draft=draft,
        draft_parameters=N,
        score=np.exp(score),
        certificate_gap=gap,
        ascent_gap=ascent_gap,
        elasticities=_elasticities(x, profile, cell, common, problem.space),
        bounds=_bounds(draft, cell, problem.profiles[row], common),
        device={k: values[k] for k in ("compute", "bandwidth") if k in values},
        evaluations=evaluations,
        objective=common.kind.objective,
    )


@jax.jit
def _breakdowns(draft, target, hardware, cell, new_tokens):
    verify = step_breakdown(target, hardware, cell[0], new_tokens, cell[1], cell[2])
    return step_breakdown(draft, hardware, cell[0], 1.0, cell[1]), verify


def _bounds(draft, cell, profile, common) -> dict[str, str]:
    """Which resource each phase waits for."""
    if not isinstance(common.hardware, Hardware):
        return {"draft": "measured", "verify": "measured"}
    drafted, verified = _breakdowns(
        scalars_to_float64(draft), common.target, common.hardware, cell, profile[0] + 1.0
    )
    measured = common.draft_hardware is not None
    return {"draft": "measured" if measured else drafted.bound, "verify": verified.bound}


def _elasticities(x, profile, cell, common, space) -> dict[str, float]:
    """Of what can be changed: the device, the workload, the design, the drafts' alpha and data.
    (The target and the fitted laws are given; their errors become intervals instead.)"""
    rows = {"chain": ("lookahead",), "tree": ("budget", "depth"), "threshold": ()}
    names = rows[common.kind.policy]
    chosen = {v.name: x[k] for k, v in enumerate(space)} | {"tensor_parallel": cell[2]}
    chosen |= {name: profile[k] for k, name in enumerate(names)}
    arguments = {
        "design": chosen,
        "workload": {"batch": cell[0], "context": cell[1]},
        "hardware": common.hardware,
        "acceptance": {"alpha": common.alpha_factor, "draft_tokens": common.draft_tokens},
    }
    if common.acceptance is not None:  # a measured law stands for alpha and data
        arguments["acceptance"] = common.acceptance
    arguments = scalars_to_float64(arguments)
    return elasticities(_score_gradient(names), arguments, common, profile)


@functools.cache
def _score_gradient(names):
    """One compiled gradient per policy, so that every cell reuses it."""

    def score(arguments, common, profile):
        d, w, law = arguments["design"], arguments["workload"], arguments["acceptance"]
        changed = dict(hardware=arguments["hardware"])
        if common.acceptance is None:
            changed |= dict(alpha_factor=law["alpha"], draft_tokens=law["draft_tokens"])
        else:
            changed |= dict(acceptance=law)
        variables = common.kind.variables
        x = jnp.stack([d[n] for n in variables]) if variables else jnp.zeros(0)
        profile = jnp.stack([d[n] for n in names]) if names else profile
        by_name = w | d
        cell = jnp.stack([by_name[n] for n in CELL])
        common = dataclasses.replace(common, **changed)
        return log_score(design_parts(x, profile, cell, common))

    return jax.jit(jax.grad(score))
