"""Design problems as one `parts` function for the ascent and the exact search.

A problem's structure (`Kind`: which variables, which policy, which dtype) is static and compiled
once; its numbers are a cell (batch, context, devices, head layers and specialists) and what all
cells share (`Common`). All workloads and all numeric categories climb together.

    x        layers, width, ffn_ratio, log10_draft_tokens, threshold,
             compute, bandwidth                                real, designed by gradient
    profile  (lookahead,)  or  (budget, depth)                 integers, looked at exactly
    cell     batch, context, tensor_parallel, and for heads
             head_layers (K), specialist_positions (n)         enumerated
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from sdx.records import DrafterSpec, Number, Workload, record, static
from sdx.search.ascent import Parts
from sdx.search.space import Space, Variable
from sdx.theory.acceptance import Geometric, PerPosition
from sdx.theory.hardware import Hardware, memory_required_bytes, step_seconds
from sdx.theory.scaling import LossLaw
from sdx.theory.thresholds import BetaConfidence, threshold_chain
from sdx.theory.throughput import (
    draft_architecture,
    draft_pass_seconds,
    draft_seconds,
    verify_seconds,
)
from sdx.theory.transformers import Architecture, llama_like, parameters
from sdx.theory.trees.geometric import GeometricRanks

# Width to layers of the Llama, Qwen, OPT and SmolLM models of hw_models/presets: 19 to 128. The
# loss law knows only N; outside this window a draft of N parameters is not what it was fitted on.
ASPECT_RATIO = (16.0, 160.0)
CELL = ("batch", "context", "tensor_parallel", "head_layers", "specialist_positions")
OBJECTIVES = ("tokens_per_second", "latency", "tokens_per_joule", "tokens_per_dollar")


@record
class Kind:
    """The static structure of a problem. `variables` in the order of x. `family`: "independent"
    drafts by scaling law, or "heads" on the target by a `HeadLaw`."""

    variables: tuple[str, ...] = static(default=("layers", "width"))
    policy: Literal["chain", "tree", "threshold"] = static(default="chain")
    family: Literal["independent", "heads"] = static(default="independent")
    objective: str = static(default="tokens_per_second")
    weight_dtype: str = static(default="bfloat16")


@record
class Knobs:
    """A device to be designed: its peak rate and bandwidth are multiples (variables `compute`,
    `bandwidth`) of the given one's; compute_share * compute + bandwidth_share * bandwidth +
    fixed_share <= budget, in shares of the given device's area, power or price."""

    compute_share: Number = 0.55
    bandwidth_share: Number = 0.25
    fixed_share: Number = 0.2
    budget: Number = 1.0


@record
class Common:
    """What the cells of one problem share.

    `draft` given: its architecture and `acceptance` law, only the policy is designed. Else layers
    and width -> N -> `loss_law` -> `law` of perplexities -> alpha.
    """

    kind: Kind
    target: Architecture
    hardware: Any  # Hardware, or the target's StepTable
    law: Any
    loss_law: LossLaw
    draft_tokens: Number
    target_tokens: Number
    new_tokens: Number
    round_overhead_seconds: Number = 0.0
    draft: Any = None
    acceptance: Any = None
    draft_hardware: Any = None
    head_law: Any = None
    training_flops_limit: Number = jnp.inf
    latency_limit_seconds: Number = jnp.inf
    rank_ratio: Number = 0.3
    confidence_concentration: Number = 3.0
    knobs: Knobs = dataclasses.field(default_factory=Knobs)
    alpha_factor: Number = 1.0  # the handle of alpha's elasticity


def workload_of(cell, common) -> Workload:
    return Workload(batch=cell[0], context=cell[1], new_tokens=common.new_tokens)


def values_of(x, common) -> dict:
    return {name: x[k] for k, name in enumerate(common.kind.variables)}


# ---------------------------------------------------------------------------- spaces


def draft_space(
    width_step=256.0,
    max_layers=32,
    max_width=8192.0,
    ffn_steps=0,
    tokens=False,
    threshold=False,
    knobs=False,
) -> Space:
    """Variables of an independent draft and, where asked for, of threshold and device.

    Deeper, wider: more tokens, more seconds. A higher threshold: fewer of both. A faster device:
    fewer seconds, a higher price.
    """
    grow = dict(gain=1, seconds=1)
    space = [
        Variable(name="layers", low=1.0, high=float(max_layers), **grow),
        Variable(name="width", low=width_step, high=float(max_width), step=width_step, **grow),
    ]
    if ffn_steps:
        space.append(
            Variable(name="ffn_ratio", low=2.0, high=2.0 + 0.5 * (ffn_steps - 1), step=0.5, **grow)
        )
    if tokens:  # data costs training, not decoding
        space.append(
            Variable(
                name="log10_draft_tokens",
                low=10.0,
                high=14.0,
                step=0.1,
                scale="linear",
                gain=1,
                seconds=0,
            )
        )
    if threshold:
        space.append(
            Variable(
                name="threshold",
                low=0.02,
                high=0.96,
                step=0.02,
                scale="linear",
                gain=-1,
                seconds=-1,
            )
        )
    if knobs:
        faster = dict(low=0.25, high=2.5, step=0.05, scale="linear", gain=0, seconds=-1, price=1)
        space += [Variable(name="compute", **faster), Variable(name="bandwidth", **faster)]
    return tuple(space)


def chain_profiles(max_lookahead: int) -> np.ndarray:
    return np.arange(1.0, max_lookahead + 1.0)[:, None]


def tree_profiles(budgets, depths) -> np.ndarray:
    """Every (budget, depth) with at least a node per level."""
    return np.array([(b, d) for b in budgets for d in depths if b >= d], float)


# ---------------------------------------------------------------------------- objective


def price_per_second(hardware, common, tensor_parallel, values):
    """What a second costs under the objective, for all devices."""
    if common.kind.objective == "tokens_per_joule":
        price = hardware.watts * tensor_parallel
    elif common.kind.objective == "tokens_per_dollar":
        price = hardware.dollars_per_hour / 3600.0 * tensor_parallel
    else:
        return jnp.ones_like(tensor_parallel)
    if "compute" in values:  # power and price follow the shares of the device's parts
        price = price * _budget_used(common.knobs, values)
    return price


def _budget_used(knobs, values):
    parts = knobs.compute_share * values["compute"] + knobs.bandwidth_share * values["bandwidth"]
    return parts + knobs.fixed_share


def _device(common, values):
    h = common.hardware
    if "compute" not in values:
        return h
    return dataclasses.replace(
        h,
        peak_flops_per_second={
            k: v * values["compute"] for k, v in h.peak_flops_per_second.items()
        },
        memory_bandwidth_bytes_per_second=h.memory_bandwidth_bytes_per_second * values["bandwidth"],
    )


def _memory_slack(cell, common, draft):
    """Share of the device's memory left; drafts are held whole on one device (a head with the
    target's embedding, which is an upper bound)."""
    h = common.hardware
    if not isinstance(h, Hardware):
        return jnp.asarray(1.0)
    longest = cell[1] + common.new_tokens
    needed = memory_required_bytes(common.target, cell[0], longest, cell[2])
    needed = needed + memory_required_bytes(draft, cell[0], longest, 1.0)
    return 1.0 - needed / h.memory_capacity_bytes


def draft_of(values, cell, common) -> Architecture:
    """The network that the variables describe, or the given one."""
    if common.draft is not None:
        return common.draft
    if common.kind.family == "heads":
        spec = DrafterSpec(family="eagle", layers=cell[3])
        return draft_architecture(spec, common.target)
    return llama_like(
        values["layers"],
        values["width"],
        common.target.vocabulary,
        ffn_ratio=values.get("ffn_ratio", 3.5),
        weight_dtype=common.kind.weight_dtype,
    )


def draft_tokens_of(values, common):
    if "log10_draft_tokens" in values:
        return 10.0 ** values["log10_draft_tokens"]
    return common.draft_tokens


def alpha_of(draft, values, common):
    """alpha by the scaling law."""
    loss, M = common.loss_law, parameters(common.target)
    return common.alpha_factor * common.law.alpha(
        loss.perplexity(parameters(draft), draft_tokens_of(values, common)),
        loss.perplexity(M, common.target_tokens),
    )


def design_parts(x, profile, cell, common) -> Parts:
    """Gain, seconds, price and slacks of one design in one cell."""
    values, workload = values_of(x, common), workload_of(cell, common)
    draft, device = draft_of(values, cell, common), _device(common, values)
    slack = [_memory_slack(cell, common, draft)]
    if common.draft is None and common.kind.family == "independent":
        aspect = jnp.log(values["width"] / values["layers"])
        low, high = np.log(ASPECT_RATIO)
        # The loss law also wants the draft well below the target.
        size = jnp.log(0.5 * parameters(common.target) / parameters(draft))
        slack += [aspect - low, high - aspect, size]
        flops = 6.0 * parameters(draft) * draft_tokens_of(values, common)
        slack.append(1.0 - flops / common.training_flops_limit)
    if "compute" in values:
        slack.append(1.0 - _budget_used(common.knobs, values) / common.knobs.budget)
    drafted, verified, tokens = _ROUNDS[common.kind.policy](
        profile, draft, device, workload, cell, common, values
    )
    seconds = drafted + verified + common.round_overhead_seconds
    return Parts(
        gain=tokens * (1.0 if common.kind.objective == "latency" else workload.batch),
        seconds=seconds,
        price=price_per_second(device, common, cell[2], values),
        slack=jnp.stack([jnp.asarray(s, float) for s in slack]),
        free_slack=1.0 - seconds / tokens / common.latency_limit_seconds,
    )


def round_seconds(x, profile, cell, common):
    """(draft seconds, verify seconds, tokens) per round."""
    values = values_of(x, common)
    return _ROUNDS[common.kind.policy](
        profile,
        draft_of(values, cell, common),
        _device(common, values),
        workload_of(cell, common),
        cell,
        common,
        values,
    )


def _drafter(common, device):
    """(hardware that times the draft, spec)."""
    spec = DrafterSpec(family="independent", weight_dtype=common.kind.weight_dtype)
    return (device if common.draft_hardware is None else common.draft_hardware), spec


def _chain_round(profile, draft, device, workload, cell, common, values):
    gamma, tp = profile[0], cell[2]
    hardware, spec = _drafter(common, device)
    drafted = draft_seconds(spec, draft, common.target, hardware, workload, gamma, tp)
    verified = verify_seconds(common.target, device, workload, gamma + 1.0, tp)
    law = common.acceptance
    if common.kind.family == "heads":
        law = _head_acceptance(gamma, cell, common)
    elif law is None:
        law = Geometric(alpha=alpha_of(draft, values, common))
    return drafted, verified, law.expected_tokens(gamma)


_POSITIONS = 16


def _head_acceptance(nodes, cell, common) -> PerPosition:
    """Chain: the hazards of a head of K layers with n positions per specialist."""
    rates = common.head_law.hazards(
        _POSITIONS, layers=cell[3], specialist_positions=cell[4], nodes=nodes
    )
    return PerPosition(rates=common.alpha_factor * rates)


def _tree_round(profile, draft, device, workload, cell, common, values):
    """`depth` draft passes of budget / depth nodes each; a node sees (depth - 1) / 2 ancestors."""
    budget, depth, tp = profile[0], profile[1], cell[2]
    hardware, _ = _drafter(common, device)
    drafted = depth * draft_pass_seconds(draft, hardware, workload, budget / depth, tp)
    verified = verify_seconds(
        common.target, device, workload, budget + 1.0, tp, ancestors=(depth - 1.0) / 2.0
    )
    if common.kind.family == "heads":  # the law's hazards are those of whole levels of a tree
        law = _head_acceptance(budget, cell, common)
        return drafted, verified, law.expected_tokens(depth)
    law = common.acceptance
    if law is None:
        law = GeometricRanks(alpha=alpha_of(draft, values, common), rank_ratio=common.rank_ratio)
    return drafted, verified, law.expected_tokens(budget, depth)


def _threshold_round(profile, draft, device, workload, cell, common, values):
    """Confidence ~ Beta with mean alpha; the token that crosses the threshold is kept."""
    tp, kappa = cell[2], common.confidence_concentration
    law = common.acceptance
    if law is None:
        alpha = alpha_of(draft, values, common)
        law = BetaConfidence(a=kappa * alpha, b=kappa * (1.0 - alpha))
    outcome = threshold_chain(law, values["threshold"], steps=64)
    hardware, spec = _drafter(common, device)
    drafted = draft_seconds(spec, draft, common.target, hardware, workload, outcome.drafts, tp)
    verified = step_seconds(common.target, device, cell[0], outcome.verified + 1.0, cell[1], tp)
    return drafted, verified, outcome.tokens


_ROUNDS = {"chain": _chain_round, "tree": _tree_round, "threshold": _threshold_round}
