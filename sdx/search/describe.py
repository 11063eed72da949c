"""What a found design means: its prediction, what bounds it, what would improve it."""

from __future__ import annotations

import dataclasses
import functools
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
from sdx.search.ascent import log_score
from sdx.search.problems import CELL, KNOBS, design_parts
from sdx.search.sensitivity import elasticities, scalars_to_float64
from sdx.theory.hardware import Hardware, step_breakdown
from sdx.theory.throughput import DO_NOT, predict
from sdx.theory.transformers import parameters

WORKLOAD = ("batch", "context", "new_tokens", "temperature")


@record
class DesignResult:
    """The best design of one workload.

    `design` is the best *speculative* one, `prediction` what it yields, with the verdict;
    `recommended` is autoregression where that verdict is "do not speculate". `certificate_gap`:
    how much better, relatively, any design of the lattice can be (None: not certified);
    `ascent_gap`: what the ascent alone missed before enumeration (None: not enumerated).
    `bounds`: what bounds the draft's and the target's pass. `elasticities`: d ln score / d ln
    theta, largest first. `device`: the designed multiples of compute and bandwidth, and on-chip
    megabytes.
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
    source: Any = static(default=None)  # (problem, cell, x, profile row): what `intervals` needs

    @property
    def recommended(self) -> Design:
        if self.prediction.verdict == DO_NOT:
            return dataclasses.replace(self.design, policy=Autoregressive())
        return self.design


def _policy(kind, values, profile):
    if kind.policy == "chain":
        return Chain(lookahead=int(profile[0]))
    if kind.policy == "tree":
        budget, depth = int(profile[0]), int(profile[1])
        return DynamicTree(budget=budget, depth=depth, branching=-(-budget // depth))
    return ThresholdChain(threshold=float(values["threshold"]), max_lookahead=kind.max_lookahead)


@jax.jit
def _drafted(x, profile, cell, common):
    """Draft, acceptance law, device and N of a design."""
    values = problems.values_of(x, common)
    s = problems.setting_of(profile, values, cell, common)
    return s.draft, s.acceptance, s.hardware, parameters(s.draft)


def describe(workload, problem, solution, gap, ascent_gap, evaluations) -> DesignResult:
    """A design's prediction, bounds and elasticities."""
    cell_index, x, row, score, _ = solution
    common, cell = problem.common, problem.cells[cell_index]
    profile = jnp.asarray(problem.profiles[row])
    values = {v.name: float(x[k]) for k, v in enumerate(problem.space)}
    draft, acceptance, device, N = _drafted(jnp.asarray(x), profile, cell, common)
    chosen = Design(
        drafter=_spec(values, cell, draft, common),
        policy=_policy(common.kind, values, problem.profiles[row]),
        tensor_parallel=int(cell[2]),
    )
    prediction = predict(
        chosen,
        workload,
        common.target,
        device,
        acceptance,
        draft,
        draft_hardware=common.draft_hardware,
        round_overhead_seconds=common.round_overhead_seconds,
    )
    return DesignResult(
        design=chosen,
        prediction=prediction,
        workload=workload,
        acceptance=acceptance,
        draft=draft,
        draft_parameters=N,
        score=np.exp(score),
        certificate_gap=gap,
        ascent_gap=ascent_gap,
        elasticities=_elasticities(x, profile, cell, common, problem.space),
        bounds=_bounds(draft, cell, problem.profiles[row], common),
        device={k: values[k] for k in KNOBS if k in values},
        evaluations=evaluations,
        objective=common.kind.objective,
        source=(problem, int(cell_index), np.asarray(x), int(row)),
    )


def _spec(values, cell, draft, common) -> DrafterSpec:
    """The drafter in integers."""
    layers, width, n, family = float(draft.layers), float(draft.width), 0, "independent"
    if common.kind.family == "heads":
        layers, n = int(cell[3]), int(cell[4])
        family = "poss" if n else "eagle"
    elif common.draft is None:
        layers, width = int(values["layers"]), int(values["width"])
    return DrafterSpec(
        layers=layers,
        width=width,
        specialist_positions=n,
        training_tokens=float(problems.draft_tokens_of(values, common)),
        family=family,
        weight_dtype=common.kind.weight_dtype,
        name=draft.name if common.draft is not None else "",
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
    chosen = {v.name: x[k] for k, v in enumerate(space)}
    chosen |= {name: profile[k] for k, name in enumerate(names)}
    chosen |= {name: cell[k] for k, name in enumerate(CELL) if name not in WORKLOAD}
    arguments = {
        "design": chosen,
        "workload": {name: cell[k] for k, name in enumerate(CELL) if name in WORKLOAD},
        "hardware": common.hardware,
        "acceptance": {"alpha": common.alpha_factor, "draft_tokens": common.draft_tokens},
    }
    if common.acceptance is not None:  # a measured law stands for alpha and data
        arguments["acceptance"] = common.acceptance
    if common.kind.family == "independent":  # no K and n to move
        del chosen["head_layers"], chosen["specialist_positions"]
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
        by_name = {"head_layers": 1.0, "specialist_positions": 0.0} | w | d
        cell = jnp.stack([jnp.asarray(by_name[n], float) for n in CELL])
        common = dataclasses.replace(common, **changed)
        return log_score(design_parts(x, profile, cell, common))

    return jax.jit(jax.grad(score))
