"""THE OBJECTIVE: design x workload x hardware x acceptance -> tokens per second.

    round = draft passes (draft_seconds) + one target pass (verify_seconds) + overhead_seconds
    tokens per second = batch * E[A + 1] / seconds per round

Costs come from the roofline, from a measured StepTable, or from one of the papers' abstract laws
(SdslCost, FlopsCost, LeviathanCost), whose "second" is a FLOP or a target pass. A real lookahead
means mixing two integers: tokens and seconds interpolate linearly, so no prediction ever shows a
win that no integer has.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sdx.records import (
    Autoregressive,
    Chain,
    Design,
    Number,
    Prediction,
    Workload,
    record,
)
from sdx.theory.acceptance import BetaMixture, Geometric, static_batch_efficiency
from sdx.theory.hardware import (
    Hardware,
    StepTable,
    energy_joules,
    linear_seconds,
    memory_required_bytes,
    price_dollars,
    step_seconds,
)
from sdx.theory.numerics import float64
from sdx.theory.transformers import BYTES_PER_NUMBER, Architecture, llama_like, parameters

SPECULATE, DO_NOT = "speculate", "do not speculate"

# ---------------------------------------------------------------------------- abstract costs


@record
class SdslCost:
    """SDSL's proxy for time, 2 (M + gamma N) FLOPs: one token charged for verification."""

    N: Number
    M: Number

    def draft(self, passes):
        return 2.0 * self.N * passes

    def verify(self, new_tokens):
        return 2.0 * self.M * jnp.ones_like(new_tokens)


@record
class FlopsCost:
    """True FLOPs, 2 (M (gamma + 1) + gamma N): per-FLOP and per-joule objectives."""

    N: Number
    M: Number

    def draft(self, passes):
        return 2.0 * self.N * passes

    def verify(self, new_tokens):
        return 2.0 * self.M * new_tokens


@record
class LeviathanCost:
    """gamma c + 1 in units of a target pass (Leviathan et al. 2023); c = `cost_ratio`."""

    cost_ratio: Number

    def draft(self, passes):
        return self.cost_ratio * passes

    def verify(self, new_tokens):
        return jnp.ones_like(new_tokens)


AbstractCost = SdslCost | FlopsCost | LeviathanCost

# ---------------------------------------------------------------------------- drafters

_PARALLEL = ("medusa",)  # one pass drafts every position
_HEADS = ("eagle", "eagle3", "poss")


def draft_architecture(spec, target: Architecture) -> Architecture | None:
    """The network a `DrafterSpec` stands for beside `target`; None where there is none to run.

    independent: a Llama-like decoder with the target's vocabulary. eagle, eagle3, poss: `layers`
    of the target's width and shape in front of the target's own LM head. medusa and ngram run no
    decoder of their own (see `draft_seconds`).
    """
    if spec.family == "independent":
        return llama_like(
            spec.layers, spec.width, target.vocabulary, weight_dtype=spec.weight_dtype
        )
    if spec.family in _HEADS:
        dense = dict(ffn="dense", experts=0.0, active_experts=0.0, dense_layers=0.0)
        return dataclasses.replace(
            target, **dense, layers=spec.layers, window_layers=0.0, name=spec.family
        )
    return None


def medusa_seconds(hardware: Hardware, target: Architecture, batch, heads, layers, dtype):
    """One pass of `heads` Medusa heads: `layers` residual blocks of width^2 and an LM head each."""
    weights = heads * (layers * target.width**2 + target.vocabulary * target.width)
    bytes_ = weights * BYTES_PER_NUMBER[dtype]
    return linear_seconds(hardware, 2.0 * batch * weights, bytes_, dtype).seconds


def draft_seconds(spec, draft, target, hardware, workload, passes, tensor_parallel=1.0):
    """Seconds of drafting `passes` positions in a row.

    A sequential drafter takes `passes` one-token steps, on one device or split like the target,
    whichever is faster (engines offer both). Medusa takes one pass for all positions, an n-gram
    table none.
    """
    if isinstance(hardware, AbstractCost):
        return hardware.draft(passes)
    if spec.family == "ngram":
        return jnp.zeros_like(passes)
    if spec.family in _PARALLEL and draft is None:
        seconds = medusa_seconds(
            hardware, target, workload.batch, passes, spec.layers, spec.weight_dtype
        )
        return jnp.where(passes > 0, seconds, 0.0)
    return passes * draft_pass_seconds(draft, hardware, workload, 1.0, tensor_parallel)


def draft_pass_seconds(draft, hardware, workload, new_tokens, tensor_parallel):
    """A draft pass on one device or split like the target, whichever is faster."""
    one = step_seconds(draft, hardware, workload.batch, new_tokens, workload.context)
    if not isinstance(hardware, Hardware):
        return one
    split = step_seconds(
        draft, hardware, workload.batch, new_tokens, workload.context, tensor_parallel
    )
    return jnp.minimum(one, split)


def verify_seconds(target, hardware, workload, new_tokens, tensor_parallel=1.0, ancestors=None):
    """Seconds of the target's pass over `new_tokens` positions of each sequence."""
    if isinstance(hardware, AbstractCost):
        return hardware.verify(new_tokens)
    return step_seconds(
        target, hardware, workload.batch, new_tokens, workload.context, tensor_parallel, ancestors
    )


# ---------------------------------------------------------------------------- rounds


def _mix(function, gamma):
    """`function` of integers, linear in between: lookaheads mixed between rounds."""
    low = jnp.floor(gamma)
    share = gamma - low
    pair = function(low), function(low + 1.0)
    return jax.tree.map(lambda a, b: (1.0 - share) * a + share * b, *pair)


def _chain_round(design, workload, target, hardware, acceptance, draft, draft_hardware):
    """(tokens per round, draft seconds, verify seconds) of a chain."""
    tp = design.tensor_parallel

    def at(gamma):
        drafted = draft_seconds(design.drafter, draft, target, draft_hardware, workload, gamma, tp)
        verified = verify_seconds(target, hardware, workload, gamma + 1.0, tp)
        return acceptance.expected_tokens(gamma), drafted, verified

    return _mix(at, jnp.asarray(design.policy.lookahead, float))


def _memory_fits(design, workload, target, hardware, draft):
    if not isinstance(hardware, Hardware) or target is None:
        return jnp.asarray(True)
    longest = workload.context + workload.new_tokens
    needed = memory_required_bytes(target, workload.batch, longest, design.tensor_parallel)
    if draft is not None:
        needed = needed + memory_required_bytes(draft, workload.batch, longest, 1.0)
    return needed <= hardware.memory_capacity_bytes


def objective(
    design, workload, target, hardware, acceptance, draft=None, draft_hardware=None, overhead=0.0
) -> Prediction:
    """The traced core of `predict`: no checks, no verdict; jit, vmap and differentiate it."""
    draft_hardware = hardware if draft_hardware is None else draft_hardware
    if draft is None and isinstance(target, Architecture):
        draft = draft_architecture(design.drafter, target)
    arguments = (design, workload, target, hardware, acceptance, draft, draft_hardware)
    tp = design.tensor_parallel
    autoregressive = verify_seconds(target, hardware, workload, jnp.ones(()), tp)
    if isinstance(design.policy, Autoregressive):
        tokens, drafted, verified, overhead = 1.0, 0.0, autoregressive, 0.0
    else:
        tokens, drafted, verified = _ROUNDS[type(design.policy)](*arguments)
        # A round that drafts nothing is a step of autoregression.
        overhead = jnp.where(tokens > 1.0, overhead, 0.0)
    efficiency = 1.0
    if workload.batching == "static" and isinstance(design.policy, Chain):
        efficiency = static_batch_efficiency(
            acceptance, design.policy.lookahead, workload.batch, workload.new_tokens
        )
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


_ROUNDS = {Chain: _chain_round}
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
    if isinstance(design.policy, Chain):
        gamma = float(design.policy.lookahead)
        _require(gamma >= 0, f"lookahead = {gamma:g} must be >= 0")
    if isinstance(hardware, SdslCost | FlopsCost):
        N, M = float(hardware.N), float(hardware.M)
        _require(0 < N < M, f"draft size N = {N:g} must lie below the target's M = {M:g}")
    if isinstance(hardware, Hardware):
        _require(target is not None, "a roofline needs the target's architecture")
        if draft is not None:
            N, M = float(parameters(draft)), float(parameters(target))
            _require(N < M, f"draft size N = {N:g} must lie below the target's M = {M:g}")
    _require(
        type(design.policy) in _ROUNDS or isinstance(design.policy, Autoregressive),
        f"predict knows no {type(design.policy).__name__} round; known: "
        + ", ".join(sorted(p.__name__ for p in _ROUNDS)),
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
    Hardware (roofline), the target's measured StepTable, or an abstract cost. `draft`: the draft's
    Architecture, built from `design.drafter` where None. `draft_hardware`: where the draft is
    measured by a table of its own. `round_overhead_seconds`: accept, roll back, host time per
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
