"""Which of several drafters take part in a cascade, in what order, with what lengths: all tried.

Membership is a category: every ordered choice of up to `max_levels` drafters is looked at, and for
each every vector of lengths, so the result is the optimum of the lattice. `rates[i][j]` is the
acceptance rate of drafter i's tokens by drafter j, and by the target in the last column.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import Cascade, Design, DrafterSpec, Workload, record, static
from sdx.search.describe import DesignResult
from sdx.search.sensitivity import elasticities, scalars_to_float64
from sdx.theory.acceptance import Geometric
from sdx.theory.cascades import cascade_of_passes, held_limits
from sdx.theory.hardware import Hardware, memory_required_bytes
from sdx.theory.rounds import LONGEST_CALL, Setting, cascade_costs
from sdx.theory.throughput import objective, predict
from sdx.theory.transformers import parameters


@record
class Members:
    """Drafters to choose from: architectures, acceptance `rates` [n, n + 1] (see the module), and
    where they are measured their StepTables. `max_levels`: the most that take part."""

    drafts: tuple
    rates: Any
    draft_hardware: Any = None
    max_levels: int = static(default=2)
    max_length: int = static(default=8)


def _checked(members: Members) -> Members:
    n, rates = len(members.drafts), np.asarray(members.rates, float)
    if rates.shape != (n, n + 1) or not ((rates >= 0) & (rates < 1)).all():
        raise ValueError(
            f"rates have shape {rates.shape} for {n} drafts: give [{n}, {n + 1}] acceptance rates "
            "in [0, 1), of row i's tokens by column j, the target last"
        )
    if not 1 <= members.max_length <= LONGEST_CALL or members.max_levels < 1:
        raise ValueError(
            f"max_length = {members.max_length} must lie in [1, {LONGEST_CALL}], max_levels = "
            f"{members.max_levels} above 0"
        )
    return members


def memberships(members: Members) -> list[tuple[int, ...]]:
    """Every ordered choice of drafters, the first one called by the second and so on."""
    numbers = range(len(members.drafts))
    most = min(members.max_levels, len(members.drafts))
    return [o for k in range(1, most + 1) for o in itertools.permutations(numbers, k)]


def _chosen(members: Members, order):
    """(drafts, acceptance laws, hardware or None) of a membership."""
    rates = np.asarray(members.rates, float)
    verifiers = (*order[1:], len(members.drafts))
    laws = tuple(Geometric(alpha=float(rates[i, j])) for i, j in zip(order, verifiers, strict=True))
    tables = members.draft_hardware
    tables = None if tables is None else tuple(tables[i] for i in order)
    drafts = tuple(dataclasses.replace(members.drafts[i], name="") for i in order)
    return drafts, laws, tables


@functools.partial(jax.jit, static_argnames="max_length")
def _rates(setting: Setting, lengths, overhead, max_length):
    """Tokens per second of one row for lengths [m, levels]."""
    costs = cascade_costs(setting, setting.draft, held_limits(lengths.shape[1], max_length))
    alphas = jnp.stack([jnp.asarray(law.alpha, float) for law in setting.acceptance])

    def one(k):
        outcome = cascade_of_passes(alphas, costs, k, max_length)
        return outcome.tokens / (outcome.cost + overhead)

    return jax.vmap(one)(lengths)


def _fits(models, target, hardware, workload, degree) -> bool:
    if not isinstance(hardware, Hardware):
        return True
    longest = workload.context + workload.new_tokens
    needed = memory_required_bytes(target, workload.batch, longest, degree)
    needed = needed + sum(memory_required_bytes(m, workload.batch, longest) for m in models)
    return float(needed) <= float(hardware.memory_capacity_bytes)


def _price(name, hardware, degree) -> float:
    if name == "tokens_per_joule":
        return float(hardware.watts) * degree
    if name == "tokens_per_dollar":
        return float(hardware.dollars_per_hour) / 3600.0 * degree
    return 1.0


def design_members(
    target,
    hardware,
    workload: Workload,
    members: Members,
    *,
    degrees=(1,),
    objective_name: str = "tokens_per_second",
    round_overhead_seconds=0.0,
    latency_limit_seconds=np.inf,
) -> DesignResult | None:
    """The best cascade of some of `members`; None where none is allowed (memory, latency).

    The certificate is 0: all memberships, lengths and degrees were evaluated. Called by `design`,
    under float64. Throughput is that of continuous batches; of a batch the mean row (rounds).
    """
    members, best, evaluations = _checked(members), None, 0
    for order, degree in itertools.product(memberships(members), degrees):
        drafts, laws, tables = _chosen(members, order)
        if not _fits(drafts, target, hardware, workload, degree):
            continue
        where = (workload, target, hardware, laws, drafts, hardware if tables is None else tables)
        lattice = list(itertools.product(range(1, members.max_length + 1), repeat=len(order)))
        # No spec: it is not looked at here. No names: each would be compiled anew.
        setting = scalars_to_float64(Setting(None, float(degree), *where))
        rates = np.asarray(
            _rates(setting, jnp.asarray(lattice, float), round_overhead_seconds, members.max_length)
        )
        rates = np.where(1.0 / rates <= latency_limit_seconds, rates, -np.inf)
        evaluations += len(lattice)
        batch = 1.0 if objective_name == "latency" else float(workload.batch)
        score = batch * rates.max() / _price(objective_name, hardware, degree)
        if np.isfinite(score) and (best is None or score > best[0]):
            best = (score, order, degree, lattice[int(rates.argmax())])
    if best is None:
        return None
    return _described(
        target, hardware, workload, members, best, evaluations, objective_name,
        round_overhead_seconds,
    )  # fmt: skip


def _described(
    target, hardware, workload, members, best, evaluations, objective_name, overhead
) -> DesignResult:
    score, order, degree, lengths = best
    drafts, laws, tables = _chosen(members, order)
    names = " > ".join(members.drafts[i].name or f"draft {i}" for i in order)
    design = Design(
        drafter=DrafterSpec(name=names), policy=Cascade(lengths=lengths), tensor_parallel=degree
    )
    arguments = (workload, target, hardware, laws, drafts)
    prediction = predict(design, *arguments, draft_hardware=tables, round_overhead_seconds=overhead)

    def log_rate(at):
        chosen = Design(
            drafter=design.drafter,
            policy=Cascade(lengths=at["lengths"]),
            tensor_parallel=at["tensor_parallel"],
        )
        where = (at["workload"], target, at["hardware"], at["acceptance"], drafts, tables)
        return jnp.log(objective(chosen, *where, overhead).tokens_per_second)

    varied = {
        "lengths": lengths,
        "tensor_parallel": degree,
        "workload": workload,
        "hardware": hardware,
        "acceptance": laws,
    }
    return DesignResult(
        design=design,
        prediction=prediction,
        workload=workload,
        acceptance=laws,
        draft=drafts,
        draft_parameters=sum(float(parameters(d)) for d in drafts),
        score=score,
        certificate_gap=0.0,
        elasticities=elasticities(jax.jit(jax.grad(log_rate)), scalars_to_float64(varied)),
        bounds={"draft": "cascade", "verify": "cascade"},
        evaluations=evaluations,
        objective=objective_name,
    )
