"""Where speculation pays: lookahead by batch, break-even surfaces, Pareto fronts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import Workload, record
from sdx.theory.costs import draft_pass_seconds, verify_seconds
from sdx.theory.numerics import float64


@record
class Schedule:
    """Per batch size: the best integer lookahead (0: do not speculate), tokens per second, speedup
    over autoregression. Arrays of one shape."""

    batch: Any
    lookahead: Any
    tokens_per_second: Any
    speedup: Any


@record
class BreakEven:
    """speedup[b, c] and lookahead[b, c] (0: do not speculate) over batches x contexts;
    `crossings[c]`: the batches, ascending, at which the best speculative speedup passes 1."""

    batch: Any
    context: Any
    speedup: Any
    lookahead: Any
    crossings: Any


@partial(jax.jit, static_argnames=("max_lookahead",))
def _speedups(target, hardware, draft, draft_hardware, acceptance, overhead, points, max_lookahead):
    """Speedup at lookahead 1..max_lookahead and the baseline's tokens per second: points [n, 3] of
    batch, context, tensor parallel degree."""
    gammas = jnp.arange(1.0, max_lookahead + 1.0)

    def at(point):
        workload = Workload(batch=point[0], context=point[1])
        step = draft_pass_seconds(draft, draft_hardware, workload, 1.0, point[2])
        alone = verify_seconds(target, hardware, workload, jnp.ones(()), point[2])
        seconds = jax.vmap(
            lambda g: g * step + verify_seconds(target, hardware, workload, g + 1.0, point[2])
        )(gammas)
        tokens = jax.vmap(acceptance.expected_tokens)(gammas)
        return tokens * alone / (seconds + overhead), point[0] / alone

    return jax.vmap(at)(points)


def _table(target, hardware, draft, acceptance, points, draft_hardware, overhead, max_lookahead):
    draft_hardware = hardware if draft_hardware is None else draft_hardware
    speedups, baseline = _speedups(
        target,
        hardware,
        draft,
        draft_hardware,
        acceptance,
        jnp.asarray(overhead, float),
        jnp.asarray(points),
        max_lookahead,
    )
    return np.asarray(speedups), np.asarray(baseline)


@float64
def schedule(
    target,
    hardware,
    draft,
    acceptance,
    batches,
    *,
    context=1024.0,
    tensor_parallel=1,
    max_lookahead: int = 16,
    draft_hardware=None,
    round_overhead_seconds=0.0,
) -> Schedule:
    """The lookahead to use at each batch size: what an engine's dynamic speculation needs.

    target, draft: Architecture; hardware: Hardware or StepTable (draft_hardware: the draft's own);
    acceptance: a law. batches [n]. Every integer up to `max_lookahead` is looked at.
    """
    batches = np.asarray(batches, float)
    points = np.stack(
        [batches, np.full_like(batches, float(context)), np.full_like(batches, tensor_parallel)], 1
    )
    speedups, baseline = _table(
        target,
        hardware,
        draft,
        acceptance,
        points,
        draft_hardware,
        round_overhead_seconds,
        max_lookahead,
    )
    best = np.maximum(speedups.max(axis=1), 1.0)
    lookahead = np.where(speedups.max(axis=1) > 1.0, speedups.argmax(axis=1) + 1, 0)
    return Schedule(
        batch=batches, lookahead=lookahead, tokens_per_second=best * baseline, speedup=best
    )


@float64
def break_even(
    target,
    hardware,
    draft,
    acceptance,
    batches,
    contexts,
    *,
    tensor_parallel=1,
    max_lookahead: int = 16,
    draft_hardware=None,
    round_overhead_seconds=0.0,
) -> BreakEven:
    """Where in batch x context speculation stops (or starts) to pay; arguments as `schedule`.

    `batches` ascending; between two of them that differ in verdict the crossing is bisected on real
    batches. Of a mixture of experts the speedup need not fall with the batch.
    """
    batches, contexts = np.asarray(batches, float), np.asarray(contexts, float)

    def best(points):
        points = np.concatenate([points, np.full((len(points), 1), float(tensor_parallel))], 1)
        return _table(
            target,
            hardware,
            draft,
            acceptance,
            points,
            draft_hardware,
            round_overhead_seconds,
            max_lookahead,
        )[0]

    grid = np.stack(np.meshgrid(batches, contexts, indexing="ij"), -1).reshape(-1, 2)
    table = best(grid).reshape(len(batches), len(contexts), max_lookahead)
    speedup = table.max(axis=-1)
    lookahead = np.where(speedup > 1.0, table.argmax(axis=-1) + 1, 0)
    wins = speedup > 1.0
    turn, column = np.nonzero(wins[1:] != wins[:-1])
    low, high = batches[turn], batches[turn + 1]
    for _ in range(30 if len(turn) else 0):  # in ln batch
        middle = np.sqrt(low * high)
        won = best(np.stack([middle, contexts[column]], 1)).max(axis=1) > 1.0
        same = won == wins[turn, column]
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    crossings = tuple(
        tuple(float(b) for b in np.sort(low[column == c])) for c in range(len(contexts))
    )
    return BreakEven(
        batch=batches,
        context=contexts,
        speedup=speedup,
        lookahead=lookahead,
        crossings=crossings,
    )


def pareto(points) -> np.ndarray:
    """Indices, sorted by the first objective, of the points [n, k] that no other point dominates
    (all objectives maximised; of equal points the first stays)."""
    points = np.asarray(points, float)
    if points.ndim != 2:
        raise ValueError(f"points have shape {points.shape}: give [designs, objectives]")
    keep = []
    for i, p in enumerate(points):
        better = np.all(points >= p, axis=1) & np.any(points > p, axis=1)
        twin = np.all(points[:i] == p, axis=1).any()
        if not better.any() and not twin:
            keep.append(i)
    return np.array(sorted(keep, key=lambda i: points[i, 0]), int)
