"""Draft heads on this machine: what their steps cost, and what tokens per second ask of training.

    head, target --time_heads--> StepCosts --survival_weights--> dT/dS(k) --> the throughput loss

The training knows no theory: it gets the weights as numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.calibration import measure
from sdx.decoding.heads import HeadModel
from sdx.records import Chain, Design, DrafterSpec, Workload
from sdx.theory.acceptance import PerPosition
from sdx.theory.hardware import StepTable, step_table
from sdx.theory.throughput import predict


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of a chain's steps at batch 1 and one context. target: of a pass over x tokens.
    first: of a draft's first pass (it reads what the last round accepted), step: of every later
    one, by the draft's name."""

    context: int
    target: dict[int, float]
    first: dict[str, float]
    step: dict[str, float]

    def round_seconds(self, name: str, lookahead: int) -> float:
        """Drafts and verification of a chain; passes that were not timed lie between their
        neighbours."""
        sizes = sorted(self.target)
        verify = np.interp(lookahead + 1, sizes, [self.target[x] for x in sizes])
        return float(self.first[name] + (lookahead - 1) * self.step[name] + verify)

    def speedup(self, name: str, hazards: Sequence[float], lookahead: int) -> float:
        """Tokens per second of a chain over those of autoregression."""
        tokens = 1.0 + np.cumsum(np.cumprod(np.asarray(hazards, float)))[lookahead - 1]
        return float(tokens / self.round_seconds(name, lookahead) * self.target[1])

    def best_lookahead(self, name: str, hazards: Sequence[float]) -> int:
        """The lookahead of the highest predicted throughput, 1 .. len(hazards)."""
        return max(range(1, len(hazards) + 1), key=lambda g: self.speedup(name, hazards, g))

    def tables(self, name: str) -> tuple[StepTable, StepTable]:
        """(target's, draft's) step times as theory reads them."""
        sizes = sorted(self.target)
        target = [[[self.target[x]] for x in sizes]]
        return (
            step_table([1], sizes, [self.context], target, name="target"),
            step_table([1], [1], [self.context], [[[self.step[name]]]], name=name),
        )


def time_heads(
    target: Any,
    drafts: Mapping[str, Any],
    new_tokens: Sequence[int] = (1, 2, 3, 4, 5, 7, 9),
    *,
    context: int = 80,
    capacity: int = 128,
    repeats: int = 7,
    rounds: int = 16,
    report: measure.Progress = measure.silent,
) -> StepCosts:
    """Medians of `repeats` turns over the target's passes and the drafts' steps.

    drafts: draft models, or heads bound to the target (`sdx.decoding.heads.bind`), by name.
    """
    sizes = dict(capacity=capacity, rounds=rounds, report=report)
    found = measure.target_timers(target, sorted({1, *new_tokens}), [context], **sizes)
    timers: dict[Any, measure.Timer] = {("target", key[1]): timer for key, timer in found.items()}
    for name, model in drafts.items():
        head = model.head.config if isinstance(model, HeadModel) else None
        most = min(4, (head and head.longest) or 4)  # Medusa has so many positions only
        chains = measure.draft_timers(model, sorted({1, most}), context, **sizes)
        timers |= {(name, lookahead): timer for lookahead, timer in chains.items()}
    samples = measure.interleaved(timers, repeats, report)
    # A tiny step can drown in the noise of the clock: never below a nanosecond.
    seconds = {key: max(float(np.median(v)), 1e-9) for key, v in samples.items()}
    step = {}
    for name in drafts:
        most = max(key[1] for key in seconds if key[0] == name)
        rise = (seconds[name, most] - seconds[name, 1]) / max(most - 1, 1)
        step[name] = max(rise, 1e-9) if most > 1 else seconds[name, 1]
    return StepCosts(
        context=context,
        target={key[1]: s for key, s in seconds.items() if key[0] == "target"},
        first={name: seconds[name, 1] for name in drafts},
        step=step,
    )


def survival_weights(
    hazards: Sequence[float], costs: StepCosts, name: str, lookahead: int | None = None
) -> np.ndarray:
    """dT/dS(k), k = 1 .. len(hazards): what a little more survival to each position is worth in
    tokens per second, by sdx's objective on measured steps.

    hazards: P(draft k accepted | those before were) of the head as it is. lookahead: None takes the
    best one. Positions beyond it are worth nothing.
    """
    lookahead = costs.best_lookahead(name, hazards) if lookahead is None else lookahead
    workload = Workload(batch=1, context=costs.context, new_tokens=1)
    design = Design(drafter=DrafterSpec(family="eagle"), policy=Chain(lookahead=lookahead))
    target, draft = costs.tables(name)

    def throughput(survival):
        rates = survival / jnp.concatenate([jnp.ones(1), survival[:-1]])
        law = PerPosition(rates=rates)
        return predict(
            design, workload, None, target, law, draft_hardware=draft,
            round_overhead_seconds=costs.first[name] - costs.step[name],
        ).tokens_per_second  # fmt: skip

    with jax.enable_x64(True):
        survival = jnp.cumprod(jnp.clip(jnp.asarray(hazards, float), 1e-6, 1.0))
        return np.asarray(jax.grad(throughput)(survival))
