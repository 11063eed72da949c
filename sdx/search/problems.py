"""Design problems as `parts` functions for the ascent and the exact search.

A problem is traced once per drafter family and dtype; batch, context and tensor parallel degree
are cells, so all workloads climb together.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from sdx.records import DrafterSpec, Number, Workload, record, static
from sdx.search.ascent import Parts
from sdx.search.space import Space, Variable
from sdx.theory.acceptance import Geometric
from sdx.theory.hardware import Hardware, memory_required_bytes
from sdx.theory.scaling import LossLaw, PerplexityLaw
from sdx.theory.throughput import draft_seconds, verify_seconds
from sdx.theory.transformers import Architecture, llama_like, parameters

# Width to layers of the Llama, Qwen, OPT and SmolLM models of hw_models/presets: 19 to 128. The
# loss law knows only N; outside this window a draft of N parameters is not what it was fitted on.
ASPECT_RATIO = (16.0, 160.0)


@record
class Common:
    """What the cells of one problem share. `objective` says what a second costs: 1
    (tokens_per_second, latency), watts, dollars."""

    target: Architecture
    hardware: Any
    law: Any  # PerplexityLaw, or a fixed acceptance law for a given draft
    loss_law: LossLaw
    draft_tokens: Number
    target_tokens: Number
    new_tokens: Number
    round_overhead_seconds: Number = 0.0
    draft: Any = None  # a given Architecture
    draft_hardware: Any = None
    latency_limit_seconds: Number = jnp.inf
    alpha_factor: Number = 1.0  # the handle of alpha's elasticity
    weight_dtype: str = static(default="bfloat16")
    objective: str = static(default="tokens_per_second")
    family: str = static(default="independent")


CELL = ("batch", "context", "tensor_parallel")


def workload_of(cell, common) -> Workload:
    return Workload(batch=cell[0], context=cell[1], new_tokens=common.new_tokens)


def price_per_second(common, tensor_parallel):
    """What a second costs under the objective, for all devices."""
    if common.objective in ("tokens_per_joule", "tokens_per_dollar"):
        h = common.hardware
        rate = h.watts if common.objective == "tokens_per_joule" else h.dollars_per_hour / 3600.0
        return rate * tensor_parallel
    return jnp.ones_like(tensor_parallel)


def memory_slack(cell, common, draft):
    """Share of the device's memory left; drafts are held whole on one device."""
    h = common.hardware
    if not isinstance(h, Hardware):
        return jnp.asarray(1.0)
    longest = cell[1] + common.new_tokens
    needed = memory_required_bytes(common.target, cell[0], longest, cell[2])
    if draft is not None:
        needed = needed + memory_required_bytes(draft, cell[0], longest, 1.0)
    return 1.0 - needed / h.memory_capacity_bytes


def chain_space(target: Architecture, width_step=256.0, max_layers=32, max_width=8192) -> Space:
    """Layers and width of a Llama-like draft. Wider or deeper: more tokens, more seconds."""
    layers = Variable(name="layers", low=1.0, high=float(max_layers), gain=1, seconds=1)
    width = Variable(
        name="width", low=width_step, high=float(max_width), step=width_step, gain=1, seconds=1
    )
    return (layers, width)


def chain_parts(x, profile, cell, common) -> Parts:
    """A chain of an independent draft: x = (layers, width), profile = (lookahead,).

    Layers and width -> N -> loss -> perplexity -> alpha (scaling law), and -> step time (roofline).
    """
    workload = workload_of(cell, common)
    draft = llama_like(x[0], x[1], common.target.vocabulary, weight_dtype=common.weight_dtype)
    N, M = parameters(draft), parameters(common.target)
    alpha = chain_alpha(N, M, common)
    aspect = jnp.log(x[1] / x[0])
    low, high = np.log(ASPECT_RATIO)
    # The loss law also wants the draft well below the target.
    slack = [aspect - low, high - aspect, jnp.log(0.5 * M / N), memory_slack(cell, common, draft)]
    spec = DrafterSpec(family="independent", weight_dtype=common.weight_dtype)
    return _chain(spec, draft, Geometric(alpha=alpha), profile[0], workload, cell, common, slack)


def chain_alpha(N, M, common):
    return common.alpha_factor * common.law.alpha(
        common.loss_law.perplexity(N, common.draft_tokens),
        common.loss_law.perplexity(M, common.target_tokens),
    )


def given_parts(x, profile, cell, common) -> Parts:
    """A chain of a given draft whose acceptance was measured: only the lookahead is free."""
    spec = DrafterSpec(family=common.family, weight_dtype=common.weight_dtype)
    slack = [memory_slack(cell, common, common.draft)]
    workload = workload_of(cell, common)
    return _chain(spec, common.draft, common.law, profile[0], workload, cell, common, slack)


def _chain(spec, draft, acceptance, gamma, workload, cell, common, slack) -> Parts:
    tp = cell[2]
    hardware = common.hardware if common.draft_hardware is None else common.draft_hardware
    drafted = draft_seconds(spec, draft, common.target, hardware, workload, gamma, tp)
    verified = verify_seconds(common.target, common.hardware, workload, gamma + 1.0, tp)
    tokens = acceptance.expected_tokens(gamma)
    seconds = drafted + verified + common.round_overhead_seconds
    slack.append(1.0 - seconds / tokens / common.latency_limit_seconds)
    return Parts(
        gain=tokens * (1.0 if common.objective == "latency" else workload.batch),
        seconds=seconds,
        price=price_per_second(common, tp),
        slack=jnp.stack([jnp.asarray(s, float) for s in slack]),
    )


def is_size_law(law) -> bool:
    return isinstance(law, PerplexityLaw)
