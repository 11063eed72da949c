"""THE OBJECTIVE: design x workload x hardware x acceptance -> tokens per second.

    round = draft passes (draft_seconds) + one target pass (verify_seconds) + overhead_seconds
    tokens per second = batch * E[A + 1] / seconds per round

Costs come from the roofline, from a measured StepTable, or from one of the papers' abstract laws
(`theory.costs`), whose "second" is a FLOP or a target pass; tokens and passes from the policy
(`theory.rounds`). A real lookahead means mixing two integers: tokens and seconds interpolate
linearly, so no prediction ever shows a win that no integer has.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sdx.records import (
    Autoregressive,
    Cascade,
    Chain,
    Design,
    DynamicTree,
    Prediction,
    ThresholdChain,
    Workload,
)
from sdx.theory.acceptance import BetaMixture, Geometric, static_efficiency
from sdx.theory.costs import (
    AbstractCost,
    FlopsCost,
    LeviathanCost,
    SdslCost,
    draft_architecture,
    draft_pass_seconds,
    draft_seconds,
    medusa_seconds,
    verify_seconds,
)
from sdx.theory.hardware import (
    Hardware,
    StepTable,
    energy_joules,
    memory_required_bytes,
    price_dollars,
)
from sdx.theory.numerics import float64
from sdx.theory.rounds import LONGEST_CALL, MOST_LEVELS, MOST_NODES, Setting, round_of
from sdx.theory.transformers import Architecture, parameters

__all__ = [
    "DO_NOT",
    "SPECULATE",
    "AbstractCost",
    "FlopsCost",
    "LeviathanCost",
    "SdslCost",
    "draft_architecture",
    "draft_pass_seconds",
    "draft_seconds",
    "medusa_seconds",
    "objective",
    "predict",
    "verify_seconds",
]

SPECULATE, DO_NOT = "speculate", "do not speculate"


def _memory_fits(design, workload, target, hardware, draft):
    if not isinstance(hardware, Hardware) or target is None:
        return jnp.asarray(True)
    longest = workload.context + workload.new_tokens
    needed = memory_required_bytes(target, workload.batch, longest, design.tensor_parallel)
    for model in draft if isinstance(draft, tuple | list) else (draft,):
        if model is not None:
            needed = needed + memory_required_bytes(model, workload.batch, longest, 1.0)
    return needed <= hardware.memory_capacity_bytes


def objective(
    design, workload, target, hardware, acceptance, draft=None, draft_hardware=None, overhead=0.0
) -> Prediction:
    """The traced core of `predict`: no checks, no verdict; jit, vmap and differentiate it."""
    draft_hardware = hardware if draft_hardware is None else draft_hardware
    if draft is None and isinstance(target, Architecture):
        draft = draft_architecture(design.drafter, target)
    tp = design.tensor_parallel
    where = (workload, target, hardware, acceptance, draft, draft_hardware)
    round = round_of(design.policy, Setting(design.drafter, tp, *where))
    autoregressive = verify_seconds(target, hardware, workload, jnp.ones(()), tp)
    tokens, drafted, verified = round.tokens, round.draft_seconds, round.verify_seconds
    # A round that drafts nothing is a step of autoregression.
    overhead = jnp.where(tokens > 1.0, overhead, 0.0)
    efficiency = 1.0
    if workload.batching == "static" and not isinstance(design.policy, Autoregressive):
        if round.survival is None:
            raise ValueError(
                f"static batching needs the law of the tokens per round, of which "
                f"{type(acceptance).__name__} knows the mean: give q[depth, rank] or use continuous"
            )
        efficiency = static_efficiency(round.survival, workload.batch, workload.new_tokens)
    seconds = drafted + verified + overhead
    tokens_per_second = workload.batch * tokens / seconds * efficiency
    baseline = workload.batch / autoregressive
    joules, dollars = jnp.nan, jnp.nan
    if isinstance(hardware, Hardware):
        joules = energy_joules(hardware, 1.0 / tokens_per_second, tp)
        dollars = price_dollars(hardware, 1e6 / tokens_per_second, tp)
    return Prediction(
        tokens_per_second=tokens_per_second,
        speedup=tokens_per_second / baseline,
        tokens_per_round=tokens,
        draft_seconds=drafted,
        verify_seconds=verified,
        overhead_seconds=overhead,
        autoregressive_tokens_per_second=baseline,
        fits_in_memory=_memory_fits(design, workload, target, hardware, draft),
        joules_per_token=joules,
        dollars_per_million_tokens=dollars,
    )


_compiled_objective = jax.jit(objective)  # concrete calls: one dispatch instead of hundreds

# ---------------------------------------------------------------------------- the public door


def is_concrete(tree) -> bool:
    """No leaf is being traced."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _require(condition, message):
    if not condition:
        raise ValueError(message)


def _check(design, workload, target, hardware, acceptance, draft):
    """Bad input in one clear line; concrete values only."""
    for name in ("batch", "new_tokens"):
        value = float(getattr(workload, name))
        _require(value > 0, f"{name} = {value:g} must be positive")
    _require(workload.context >= 0, f"context = {float(workload.context):g} must be >= 0")
    if isinstance(acceptance, Geometric):
        alpha = float(acceptance.alpha)
        _require(0 < alpha < 1, f"alpha = {alpha:g} must lie inside (0, 1)")
    if isinstance(acceptance, BetaMixture):
        a, b = float(acceptance.a), float(acceptance.b)
        _require(a > 0 and b > 0, f"BetaMixture(a={a:g}, b={b:g}) needs a, b > 0")
    _check_policy(design.policy, acceptance)
    if isinstance(hardware, SdslCost | FlopsCost):
        N, M = float(hardware.N), float(hardware.M)
        _require(0 < N < M, f"draft size N = {N:g} must lie below the target's M = {M:g}")
    if isinstance(hardware, Hardware):
        _require(target is not None, "a roofline needs the target's architecture")
        for model in draft if isinstance(draft, tuple | list) else (draft,):
            if model is None:
                continue
            N, M = float(parameters(model)), float(parameters(target))
            _require(N < M, f"draft size N = {N:g} must lie below the target's M = {M:g}")


def _check_policy(policy, acceptance):
    """The policy's numbers in their ranges."""
    if isinstance(policy, Chain):
        gamma = float(policy.lookahead)
        _require(gamma >= 0, f"lookahead = {gamma:g} must be >= 0")
    if isinstance(policy, ThresholdChain):
        p = float(policy.threshold)
        _require(0 < p <= 1, f"threshold = {p:g} must lie in (0, 1]")
        _require(policy.max_lookahead >= 1, "max_lookahead must be at least 1")
    if isinstance(policy, DynamicTree):
        budget, depth = float(policy.budget), float(policy.depth)
        levels = getattr(acceptance, "shape", (0, 0))
        most = levels[0] if len(levels) == 2 and levels[0] else MOST_LEVELS
        _require(
            1 <= budget <= MOST_NODES and 1 <= depth <= most,
            f"a dynamic tree of {budget:g} nodes and depth {depth:g}: budget must lie in "
            f"[1, {MOST_NODES}], depth in [1, {most}] (what the acceptance covers)",
        )
    if isinstance(policy, Cascade):
        numbers = [float(v) for v in (*policy.lengths, *policy.thresholds)]
        _require(
            bool(policy.lengths) != bool(policy.thresholds),
            "a cascade has lengths or thresholds, one of the two",
        )
        low, high = (0, LONGEST_CALL) if policy.lengths else (1e-9, 1)
        _require(
            all(low <= v <= high for v in numbers),
            f"a cascade's numbers {numbers} must lie in [{low:g}, {high:g}]",
        )


@float64
def predict(
    design: Design,
    workload: Workload,
    target: Architecture | None,
    hardware: Hardware | StepTable | AbstractCost,
    acceptance,
    draft: Architecture | None = None,
    *,
    draft_hardware: Hardware | StepTable | None = None,
    round_overhead_seconds=0.0,
) -> Prediction:
    """What a design yields on a workload.

    `target`: its Architecture (may be None with a StepTable or an abstract cost). `hardware`: a
    Hardware (roofline), the target's measured StepTable, or an abstract cost. `acceptance`, by
    policy: Chain a law of chains (Geometric, BetaMixture, PerPosition); ThresholdChain a law of
    confidences (theory.thresholds); StaticTree and DynamicTree an array q[rank] or q[depth, rank]
    or GeometricRanks, DynamicTree also an AAT law or a head's PerPosition; Cascade a tuple with a
    law per model towards the next (Geometric for lengths, of confidences for thresholds).
    `draft`: the draft's Architecture, built from `design.drafter` where None; of a cascade a tuple,
    smallest first. `draft_hardware`: where the draft is measured by a table of its own (or a
    tuple). `round_overhead_seconds`: accept, roll back, host time per
    speculative round. Seconds, joules, dollars per round or token as their names say; energy and
    price are NaN unless `hardware` is a Hardware.

    Differentiable and vmappable in every number (inside `jax.enable_x64(True)`); concrete input is
    checked (ValueError) and gets the verdict, "do not speculate" where the speedup is not above 1.
    """
    arguments = (design, workload, target, hardware, acceptance, draft)
    concrete = is_concrete((arguments, draft_hardware, round_overhead_seconds))
    if concrete:
        _check(*arguments)
    if not concrete:
        return objective(*arguments, draft_hardware, round_overhead_seconds)
    prediction = _compiled_objective(*arguments, draft_hardware, round_overhead_seconds)
    wins = float(prediction.speedup) > 1.0 + 1e-12
    return dataclasses.replace(prediction, verdict=SPECULATE if wins else DO_NOT)
