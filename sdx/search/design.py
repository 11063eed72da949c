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
    Number,
    Prediction,
    Workload,
    record,
    static,
)
from sdx.search import problems
from sdx.search.ascent import ascend, evaluations_of_ascent, log_score
from sdx.search.exact import climb_lattice, exhaustive
from sdx.search.sensitivity import elasticities, scalars_to_float64
from sdx.search.space import from_lattice, round_to_lattice, starts
from sdx.theory.acceptance import Geometric
from sdx.theory.hardware import Hardware, require_fit, step_breakdown
from sdx.theory.numerics import float64
from sdx.theory.scaling import besiroglu, sdsl_plane
from sdx.theory.throughput import DO_NOT, predict
from sdx.theory.transformers import llama_like, parameters

OBJECTIVES = ("tokens_per_second", "latency", "tokens_per_joule", "tokens_per_dollar")


@record
class DesignResult:
    """The best design of one workload.

    `design` is the best *speculative* one, `prediction` what it yields, with the verdict;
    `recommended` is autoregression where that verdict is "do not speculate". `certificate_gap`:
    how much better, relatively, any design of the lattice can be (None: not certified);
    `ascent_gap`: what the ascent alone missed before the certificate. `bounds`: what bounds the
    draft's and the target's pass. `elasticities`: d ln score / d ln theta, largest first.
    """

    design: Design
    prediction: Prediction
    workload: Workload
    acceptance: Any
    draft_parameters: Number
    certificate_gap: float | None = static(default=None)
    ascent_gap: float | None = static(default=None)
    elasticities: Any = static(default=())
    bounds: Any = static(default=())
    evaluations: int = static(default=0)
    objective: str = static(default="tokens_per_second")

    @property
    def recommended(self) -> Design:
        if self.prediction.verdict == DO_NOT:
            return dataclasses.replace(self.design, policy=Autoregressive())
        return self.design


def _tensor_parallel_degrees(devices: int) -> list[int]:
    return [2**k for k in range(int(np.log2(devices)) + 1)]


def _feasible_degrees(target, hardware, workload, devices, fixed):
    """Degrees at which the target and its KV fit; ValueError where none does."""
    degrees = [fixed] if fixed else _tensor_parallel_degrees(devices)
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


def _check(workloads, devices, max_lookahead, objective):
    if devices < 1 or max_lookahead < 1:
        raise ValueError(
            f"devices = {devices} and max_lookahead = {max_lookahead} must be at least 1"
        )
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; known: {', '.join(OBJECTIVES)}")
    for w in workloads:
        if not float(w.batch) > 0 or float(w.context) < 0 or not float(w.new_tokens) > 0:
            raise ValueError(
                f"workload batch {float(w.batch):g}, context {float(w.context):g}, new_tokens "
                f"{float(w.new_tokens):g}: batch and new_tokens must be positive, context >= 0"
            )


@float64
def design(
    target,
    hardware,
    workload: Workload | Sequence[Workload],
    *,
    family: str = "llama",
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
    weight_dtype: str = "bfloat16",
    start_count: int = 6,
):
    """The best chain of drafts for each workload (one `DesignResult`, or a list for a sequence).

    target: Architecture. hardware: Hardware, or the target's StepTable. family "llama": layers and
    width of a Llama-like draft are designed, its acceptance by `law` of perplexities by `loss_law`
    of sizes and training tokens. Or `draft` (Architecture) with its measured `acceptance` law, and
    `draft_hardware` (its StepTable): only lookahead and split are designed. `devices`: tensor
    parallel degrees 1, 2, 4 ... up to it are tried, or `tensor_parallel` alone. `objective`:
    tokens_per_second, latency (tokens per second of one user), tokens_per_joule, tokens_per_dollar.
    `latency_limit_seconds` per token of one user. Raises ValueError for bad or infeasible input.
    """
    single = isinstance(workload, Workload)
    workloads = [workload] if single else list(workload)
    _check(workloads, devices, max_lookahead, objective)
    if (draft is None) != (acceptance is None):
        raise ValueError("a given draft and its measured acceptance law come together")
    if family != "llama" and draft is None:
        raise ValueError(f"unknown draft family {family!r}; known: llama, or give a draft")
    owners, cells = [], []
    for k, w in enumerate(workloads):
        for degree in _feasible_degrees(target, hardware, w, devices, tensor_parallel):
            owners.append(k)
            cells.append([float(w.batch), float(w.context), float(degree)])
    common = problems.Common(
        target=target,
        hardware=hardware,
        law=law if draft is None else acceptance,
        loss_law=loss_law,
        draft_tokens=draft_tokens,
        target_tokens=target_tokens,
        new_tokens=workloads[0].new_tokens,
        round_overhead_seconds=round_overhead_seconds,
        draft=draft,
        draft_hardware=draft_hardware,
        latency_limit_seconds=latency_limit_seconds,
        weight_dtype=weight_dtype,
        objective=objective,
    )
    common = scalars_to_float64(common)
    parts = problems.chain_parts if draft is None else problems.given_parts
    space = _space(target) if draft is None else ()
    profiles = jnp.arange(1.0, max_lookahead + 1.0)[:, None]
    owners, cells = np.array(owners), jnp.asarray(cells)
    found = _search(parts, space, profiles, cells, common, start_count)
    results = []
    for k, w in enumerate(workloads):
        mine = np.flatnonzero(owners == k)
        results.append(_result(w, mine, found, parts, space, profiles, cells, common))
    return results[0] if single else results


def _space(target):
    # A draft of half the target's layers and width is no draft.
    layers = int(max(1, min(32, float(target.layers) // 2)))
    width = float(target.width)
    step = 256.0 if width >= 2048 else 64.0
    return problems.chain_space(target, step, layers, max(step, min(8192.0, width)))


def _search(parts, space, profiles, cells, common, start_count):
    """Ascent from every start in every cell, rounding, exact neighbourhood of each cell's best."""
    z0 = jnp.asarray(starts(space, start_count if space else 1))
    x, row, score = ascend(parts, space, profiles, cells, common, z0)
    x, score = np.asarray(x), np.nan_to_num(np.asarray(score), nan=-np.inf)
    best = score.argmax(axis=1)
    index = round_to_lattice(space, x[np.arange(len(cells)), best])
    index, row, score, exact = climb_lattice(parts, space, profiles, cells, common, index)
    per_start = evaluations_of_ascent(len(profiles), 4, 6) if space else len(profiles)
    evaluations = exact + len(cells) * len(z0) * per_start
    return from_lattice(space, index), row, score, evaluations


def _result(workload, mine, found, parts, space, profiles, cells, common) -> DesignResult:
    xs, rows, scores, evaluations = found
    best = mine[scores[mine].argmax()]
    if not np.isfinite(scores[best]):
        raise ValueError(
            f"no design is allowed at batch {float(workload.batch):g}, context "
            f"{float(workload.context):g}: loosen the memory or latency limit"
        )
    x, row, score = xs[best], rows[best], scores[best]
    # The lattice of one workload is small enough to be looked at whole.
    tops = [exhaustive(parts, space, profiles, cells[c], common) for c in mine]
    top = int(np.argmax([t[2] for t in tops]))
    gap = float(np.expm1(max(tops[top][2] - score, 0.0)))
    if tops[top][2] > score:
        best = mine[top]
        x, row = tops[top][0], tops[top][1]
    return describe(
        workload, x, profiles[row], cells[best], common, parts, space, 0.0, gap, evaluations
    )


def describe(
    workload, x, profile, cell, common, parts, space, gap, ascent_gap, evaluations
) -> DesignResult:
    """A chain design's prediction, bounds and elasticities."""
    gamma, tp = int(profile[0]), int(cell[2])
    acceptance, network = common.law, common.draft
    spec = DrafterSpec(training_tokens=float(common.draft_tokens), weight_dtype=common.weight_dtype)
    if network is None:
        layers, width = int(x[0]), int(x[1])
        network = llama_like(
            layers, width, common.target.vocabulary, weight_dtype=common.weight_dtype
        )
        M = parameters(common.target)
        alpha = problems.chain_alpha(parameters(network), M, common)
        acceptance = Geometric(alpha=alpha)
        spec = dataclasses.replace(spec, layers=layers, width=width)
    else:
        spec = dataclasses.replace(
            spec, layers=network.layers, width=network.width, name=network.name
        )
    chosen = Design(drafter=spec, policy=Chain(lookahead=gamma), tensor_parallel=tp)
    prediction = predict(
        chosen,
        workload,
        common.target,
        common.hardware,
        acceptance,
        network,
        draft_hardware=common.draft_hardware,
        round_overhead_seconds=common.round_overhead_seconds,
    )
    return DesignResult(
        design=chosen,
        prediction=prediction,
        workload=workload,
        acceptance=acceptance,
        draft_parameters=parameters(network),
        certificate_gap=gap,
        ascent_gap=ascent_gap,
        elasticities=_elasticities(x, profile, cell, common, parts, space),
        bounds=_bounds(network, workload, gamma, tp, common),
        evaluations=evaluations,
        objective=common.objective,
    )


@jax.jit
def _breakdowns(draft, target, hardware, batch, gamma, context, tp):
    verify = step_breakdown(target, hardware, batch, gamma + 1.0, context, tp)
    return step_breakdown(draft, hardware, batch, 1.0, context), verify


def _bounds(draft, workload, gamma, tp, common) -> dict[str, str]:
    """Which resource each phase waits for."""
    if not isinstance(common.hardware, Hardware):
        return {"draft": "measured", "verify": "measured"}
    numbers = (workload.batch, float(gamma), workload.context, float(tp))
    if common.draft_hardware is None:
        drafted, verified = _breakdowns(
            scalars_to_float64(draft), common.target, common.hardware, *numbers
        )
        return {"draft": drafted.bound, "verify": verified.bound}
    verified = step_breakdown(common.target, common.hardware, *numbers)
    return {"draft": "measured", "verify": verified.bound}


def _elasticities(x, profile, cell, common, parts, space) -> dict[str, float]:
    """Of what can be changed: the device, the workload, the design, the drafts' alpha and data.
    (The target and the fitted laws are given; their errors become intervals instead.)"""
    chosen = {v.name: x[k] for k, v in enumerate(space)} | {"lookahead": profile[0]}
    chosen["tensor_parallel"] = cell[2]
    arguments = {
        "design": chosen,
        "workload": {"batch": cell[0], "context": cell[1]},
        "hardware": common.hardware,
        "acceptance": {"alpha": common.alpha_factor, "draft_tokens": common.draft_tokens},
    }
    if not space:  # a measured law stands for alpha and data
        arguments["acceptance"] = common.law
    arguments = scalars_to_float64(arguments)
    return elasticities(_score_of(parts, tuple(v.name for v in space)), arguments, common)


@functools.cache
def _score_of(parts, names):
    """One compiled gradient per problem, so that every cell reuses it."""

    def score(arguments, common):
        d, w = arguments["design"], arguments["workload"]
        acceptance = arguments["acceptance"]
        changed = dict(hardware=arguments["hardware"])
        if names:
            changed |= dict(
                alpha_factor=acceptance["alpha"], draft_tokens=acceptance["draft_tokens"]
            )
        else:
            changed |= dict(law=acceptance)
        x = jnp.stack([d[n] for n in names]) if names else jnp.zeros(0)
        cell = jnp.stack([w["batch"], w["context"], d["tensor_parallel"]])
        common = dataclasses.replace(common, **changed)
        return log_score(parts(x, d["lookahead"][None], cell, common))

    return jax.jit(jax.grad(score))
