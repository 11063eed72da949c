"""Plain frozen data that the two wings exchange.

`theory` predicts with these records and the runtime executes them; neither knows the other.
Numbers that are designed, differentiated or swept are pytree leaves (real on the theory side,
integers once `search.space` has rounded them); names and modes are static.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeVar, dataclass_transform

import jax

T = TypeVar("T")
Number = Any  # float, int or a scalar array


def static(**kwargs):
    """A field that is part of the tree's structure: a name, a mode, a shape."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static,))
def record(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass and a pytree."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(cls)
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


# ---------------------------------------------------------------------------- workload


@record
class Workload:
    """What is decoded: `batch` sequences, `context` committed tokens each.

    `batching`: "continuous" replaces finished rows at once, throughput b * E[A + 1] / T;
    "static" waits for the slowest row of the batch until `new_tokens` are out.
    """

    batch: Number = 1.0
    context: Number = 1024.0
    new_tokens: Number = 256.0
    temperature: Number = 0.0
    batching: Literal["continuous", "static"] = static(default="continuous")


# ---------------------------------------------------------------------------- policies


@record
class Sampling:
    """Target sampling. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch the filters off.

    Both filters are applied to target and draft; top-k before top-p. Static: they are part of the
    compiled loop.
    """

    temperature: float = static(default=0.0)
    top_k: int = static(default=0)
    top_p: float = static(default=1.0)


@record
class Autoregressive:
    """One target token per pass; the baseline."""


@record
class Chain:
    """`lookahead` (gamma) drafts in a row, verified over gamma + 1 positions.

    `verification`: "token" is the standard rule, "block" is Sun et al. 2024.
    """

    lookahead: Number = 4
    verification: Literal["token", "block"] = static(default="token")


@record
class ThresholdChain:
    """Draft until the product of calibrated confidences falls under `threshold`, at most
    `max_lookahead`. `crossing`: keep or drop the token that crosses."""

    threshold: Number = 0.3
    max_lookahead: int = static(default=8)
    crossing: Literal["keep", "drop"] = static(default="keep")


@record
class StaticTree:
    """A fixed token tree. `parents[i]` is the index of node i's parent, -1 for a child of the
    root; the root is not a node (a budget counts draft nodes only). Nodes are in topological
    order, siblings in rank order.

    `children`: how siblings come to be: "replacement" (i.i.d. from q), "without_replacement"
    (successive draws from q), "top" (the k likeliest: chosen by value).
    """

    parents: tuple[int, ...] = static(default=())
    children: Literal["replacement", "without_replacement", "top"] = static(
        default="without_replacement"
    )


@record
class DynamicTree:
    """EAGLE-2: expand the `branching` best nodes per depth by cumulative confidence, `depth`
    times, keep the best `budget` nodes."""

    budget: Number = 16
    depth: Number = 4
    branching: int = static(default=4)


@record
class Cascade:
    """Level n calls level n - 1 until it holds `lengths[n]` tokens (fixed) or until the product of
    confidences falls under `thresholds[n]`; ordered from the level just above the smallest drafter
    to the target. One of the two is empty."""

    lengths: tuple[Number, ...] = ()
    thresholds: tuple[Number, ...] = ()


Policy = Autoregressive | Chain | ThresholdChain | StaticTree | DynamicTree | Cascade


# ---------------------------------------------------------------------------- design, outcome


@record
class DrafterSpec:
    """The draft as a set of design variables.

    family: "independent" (own embedding and layers), "eagle", "eagle3", "medusa", "poss" (heads on
    the target), "ngram" (no network). `layers` is K for heads; `specialist_positions` is PosS's n
    (0: none); `tokens` are training tokens D (scaling law).
    """

    layers: Number = 1.0
    width: Number = 1024.0
    specialist_positions: Number = 0.0
    training_tokens: Number = 1e12
    family: str = static(default="independent")
    weight_dtype: str = static(default="bfloat16")
    name: str = static(default="")


@record
class Design:
    """A drafter, how it is used, and over how many devices the target is split."""

    drafter: DrafterSpec
    policy: Policy
    tensor_parallel: Number = 1


@record
class Prediction:
    """What the objective says of a design. Times in seconds per round.

    speedup is over autoregression of the same target, hardware, workload. `verdict` is static
    text, filled in by concrete (non-traced) evaluation: "speculate" or "do not speculate".
    """

    tokens_per_second: Number
    speedup: Number
    tokens_per_round: Number
    draft_seconds: Number
    verify_seconds: Number
    overhead_seconds: Number
    autoregressive_tokens_per_second: Number
    fits_in_memory: Number
    joules_per_token: Number
    dollars_per_million_tokens: Number
    verdict: str = static(default="")


@record
class Interval:
    """An estimate with its 95 % interval."""

    value: Number
    low: Number
    high: Number


@record
class Measurement:
    """What the runtime measured of one policy on one pair: counts, not conclusions.

    drafted_per_position[k], accepted_per_position[k]: how often position k (0-based) was drafted,
    and was accepted. `rounds` target calls, `tokens` emitted, `seconds` of decoding.
    """

    rounds: Number
    tokens: Number
    seconds: Number
    drafted_per_position: tuple[Number, ...]
    accepted_per_position: tuple[Number, ...]
    policy: Policy
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    batch: int = static(default=1)
    note: str = static(default="")
