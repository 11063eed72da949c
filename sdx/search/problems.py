"""Design problems as one `parts` function for the ascent and the exact search.

A problem's structure (`Kind`: which variables, which policy, which dtype) is static and compiled
once; its numbers are a cell (batch, context, devices, head layers and specialists) and what all
cells share (`Common`). All workloads and all numeric categories climb together.

    x        layers, width, ffn_ratio, log10_draft_tokens, threshold,
             compute, bandwidth, on_chip_megabytes             real, designed by gradient
    profile  (lookahead,)  or  (budget, depth)                 integers, looked at exactly
    cell     batch, context, tensor_parallel, and for heads
             head_layers (K), specialist_positions (n);
             new_tokens, temperature                           enumerated
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from sdx.records import DrafterSpec, Number, ThresholdChain, Workload, record, static
from sdx.search.ascent import Parts
from sdx.search.space import Space, Variable
from sdx.theory.acceptance import Geometric, PerPosition, static_efficiency
from sdx.theory.costs import draft_architecture, draft_pass_seconds, verify_seconds
from sdx.theory.hardware import Hardware, memory_required_bytes
from sdx.theory.rounds import Round, Setting, chain_round, threshold_round, tree_outcome
from sdx.theory.scaling import LossLaw
from sdx.theory.thresholds import BetaConfidence
from sdx.theory.transformers import Architecture, llama_like, parameters
from sdx.theory.trees.geometric import GeometricRanks

# Width to layers of the Llama, Qwen, OPT and SmolLM models of hw_models/presets: 19 to 128. The
# loss law knows only N; outside this window a draft of N parameters is not what it was fitted on.
ASPECT_RATIO = (16.0, 160.0)
CELL = (
    "batch",
    "context",
    "tensor_parallel",
    "head_layers",
    "specialist_positions",
    "new_tokens",
    "temperature",
)
KNOBS = ("compute", "bandwidth", "on_chip_megabytes")
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
    batching: Literal["continuous", "static"] = static(default="continuous")
    max_lookahead: int = static(default=8)  # of the threshold policy


@record
class Knobs:
    """A device to be designed: its peak rate and bandwidth are multiples (variables `compute`,
    `bandwidth`) of the given one's, and `on_chip_megabytes` of memory are added, up to
    `max_on_chip_megabytes` (0: none), in which a draft stays. compute_share * compute +
    bandwidth_share * bandwidth + megabyte_share * on_chip_megabytes + fixed_share <= budget, in
    shares of the given device's area, power or price. Shares are assumptions to be replaced;
    megabyte_share: some 0.3 mm2 of SRAM on a die of 800 mm2."""

    compute_share: Number = 0.55
    bandwidth_share: Number = 0.25
    fixed_share: Number = 0.2
    megabyte_share: Number = 4e-4
    budget: Number = 1.0
    max_on_chip_megabytes: float = static(default=0.0)


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
    return Workload(
        batch=cell[0],
        context=cell[1],
        new_tokens=cell[5],
        temperature=cell[6],
        batching=common.kind.batching,
    )


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
    knobs: Knobs | None = None,
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
    if knobs is not None:
        better = dict(scale="linear", gain=0, seconds=-1, price=1)
        faster = dict(low=0.25, high=2.5, step=0.05, **better)
        space += [Variable(name="compute", **faster), Variable(name="bandwidth", **faster)]
        most = knobs.max_on_chip_megabytes
        if most:
            name = "on_chip_megabytes"
            space.append(Variable(name=name, low=0.0, high=most, step=most / 64.0, **better))
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
    memory = knobs.megabyte_share * values.get("on_chip_megabytes", 0.0)
    return parts + memory + knobs.fixed_share


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
        on_chip_memory_bytes=h.on_chip_memory_bytes + 1e6 * values.get("on_chip_megabytes", 0.0),
    )


def _memory_slack(cell, common, draft):
    """Share of the device's memory left; drafts are held whole on one device (a head with the
    target's embedding, which is an upper bound)."""
    h = common.hardware
    if not isinstance(h, Hardware):
        return jnp.asarray(1.0)
    longest = cell[1] + cell[5]
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
    values = values_of(x, common)
    setting = setting_of(profile, values, cell, common)
    draft, device = setting.draft, setting.hardware
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
    round = _ROUNDS[common.kind.policy](profile, setting, values, common)
    tokens = round.tokens
    if common.kind.batching == "static":
        tokens = tokens * static_efficiency(round.survival, cell[0], cell[5])
    seconds = round.draft_seconds + round.verify_seconds + common.round_overhead_seconds
    return Parts(
        gain=tokens * (1.0 if common.kind.objective == "latency" else cell[0]),
        seconds=seconds,
        price=price_per_second(device, common, cell[2], values),
        slack=jnp.stack([jnp.asarray(s, float) for s in slack]),
        free_slack=1.0 - seconds / tokens / common.latency_limit_seconds,
    )


def setting_of(profile, values, cell, common) -> Setting:
    """All that `theory.rounds` needs to know of a design beside its policy."""
    device, draft = _device(common, values), draft_of(values, cell, common)
    return Setting(
        spec=DrafterSpec(family="independent", weight_dtype=common.kind.weight_dtype),
        tensor_parallel=cell[2],
        workload=workload_of(cell, common),
        target=common.target,
        hardware=device,
        acceptance=law_of(profile, draft, values, cell, common),
        draft=draft,
        draft_hardware=device if common.draft_hardware is None else common.draft_hardware,
    )


def law_of(profile, draft, values, cell, common):
    """The acceptance law of a design: measured, of a head, or by the scaling law of alpha."""
    kind = common.kind
    if kind.family == "heads":
        # A chain verifies its drafts, a tree its nodes; the hazards are those of whole levels.
        rates = common.head_law.hazards(
            _POSITIONS,
            layers=cell[3],
            specialist_positions=cell[4],
            temperature=cell[6],
            nodes=profile[0],
        )
        return PerPosition(rates=common.alpha_factor * rates)
    if common.acceptance is not None:
        return common.acceptance
    alpha = alpha_of(draft, values, common)
    if kind.policy == "tree":
        return GeometricRanks(alpha=alpha, rank_ratio=common.rank_ratio)
    if kind.policy == "threshold":  # confidences around their mean, which is alpha
        kappa = common.confidence_concentration
        return BetaConfidence(a=kappa * alpha, b=kappa * (1.0 - alpha))
    return Geometric(alpha=alpha)


_POSITIONS = 16


def _chain_round(profile, s, values, common):
    return chain_round(profile[0], s)


def _tree_round(profile, s, values, common):
    """`depth` draft passes of budget / depth nodes each; a node sees (depth - 1) / 2 ancestors."""
    budget, depth = profile[0], profile[1]
    where = (s.draft, s.draft_hardware, s.workload)
    drafted = depth * draft_pass_seconds(*where, budget / depth, s.tensor_parallel)
    ancestors = (depth - 1.0) / 2.0
    verified = verify_seconds(
        s.target, s.hardware, s.workload, budget + 1.0, s.tensor_parallel, ancestors=ancestors
    )
    tokens, survival = tree_outcome(s.acceptance, budget, depth)
    return Round(tokens=tokens, draft_seconds=drafted, verify_seconds=verified, survival=survival)


def _threshold_round(profile, s, values, common):
    policy = ThresholdChain(threshold=values["threshold"], max_lookahead=common.kind.max_lookahead)
    return threshold_round(policy, s)


_ROUNDS = {"chain": _chain_round, "tree": _tree_round, "threshold": _threshold_round}
