"""`design`: the best speculative decoder for a target, a device and workloads, certified."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from sdx.records import Workload
from sdx.search.describe import DesignResult, describe
from sdx.search.members import Members, design_members
from sdx.search.posing import (
    check_drafters,
    check_request,
    laws_by_policy,
    parallel_degrees,
    pose,
)
from sdx.search.problems import Common, Kind, Knobs
from sdx.search.solving import certify, solve
from sdx.theory.numerics import float64
from sdx.theory.scaling import besiroglu, sdsl_plane


@float64
def design(
    target,
    hardware,
    workload: Workload | Sequence[Workload],
    *,
    family: str | Sequence[str] = "llama",
    policies: Sequence[str] = ("chain",),
    devices: int = 1,
    tensor_parallel: int | None = None,
    draft=None,
    acceptance=None,
    draft_hardware=None,
    head_law=None,
    head_layers: Sequence[int] = (1, 2, 3),
    specialist_positions: Sequence[int] = (0, 1, 2, 3),
    law=sdsl_plane,
    loss_law=besiroglu,
    draft_tokens=15e12,
    target_tokens=15e12,
    round_overhead_seconds=0.0,
    objective: str = "tokens_per_second",
    max_lookahead: int = 16,
    latency_limit_seconds=jnp.inf,
    training_flops_limit=None,
    weight_dtypes: Sequence[str] = ("bfloat16",),
    knobs: Knobs | None = None,
    members: Members | None = None,
    start_count: int = 6,
    certificate: bool = True,
):
    """The best speculative decoder for each workload (one `DesignResult`, or a list).

    target: Architecture. hardware: Hardware, or the target's StepTable. family "llama": layers and
    width of a Llama-like draft are designed, its acceptance by `law` of perplexities by `loss_law`
    of sizes and training tokens. Family "heads": `head_layers` K and `specialist_positions` n of a
    head on the target, accepted by `head_law` (a theory.heads.HeadLaw). Both may be compared. Or
    `draft` (Architecture) with its measured `acceptance` (a law, or a dict of laws by policy), and
    `draft_hardware` (its StepTable): only policy and split are designed. `policies` to compare:
    chain, tree, threshold (at most `max_lookahead` drafts), cascade (of some of `members`, in some
    order; continuous batches). `devices`: tensor parallel degrees 1, 2, 4 ... up to it are tried,
    or `tensor_parallel` alone; `weight_dtypes` of the draft (which change its time and memory, not
    its acceptance). `objective`: tokens_per_second, latency (tokens per second of one user),
    tokens_per_joule, tokens_per_dollar. `latency_limit_seconds` per token of one user.
    `training_flops_limit`, 6 N D: the draft's tokens are designed too, under it. `knobs`: compute,
    bandwidth and on-chip memory of the device are designed too, under its budget.

    Of a workload everything counts but its temperature, which only heads have a law for: other laws
    hold at the temperature they were fitted at. Raises ValueError for bad or infeasible input.
    """
    single = isinstance(workload, Workload)
    workloads = [workload] if single else list(workload)
    families = (family,) if isinstance(family, str) else tuple(family)
    check_request(workloads, devices, max_lookahead, objective, policies, hardware, knobs)
    check_drafters(workloads, families, policies, draft, acceptance, head_law, members)
    laws = laws_by_policy(acceptance, policies)
    common = Common(
        kind=Kind(
            objective=objective,
            batching=workloads[0].batching,
            max_lookahead=max_lookahead,
        ),
        target=target,
        hardware=hardware,
        law=law,
        loss_law=loss_law,
        draft_tokens=draft_tokens,
        target_tokens=target_tokens,
        round_overhead_seconds=round_overhead_seconds,
        draft=draft,
        draft_hardware=draft_hardware,
        head_law=head_law,
        training_flops_limit=jnp.inf if training_flops_limit is None else training_flops_limit,
        latency_limit_seconds=latency_limit_seconds,
        knobs=Knobs() if knobs is None else knobs,
    )
    degrees = [parallel_degrees(target, hardware, w, devices, tensor_parallel) for w in workloads]
    posed = pose(
        common,
        workloads,
        degrees,
        families,
        laws,
        heads=list(itertools.product(head_layers, specialist_positions)),
        weight_dtypes=weight_dtypes,
        tokens=training_flops_limit is not None,
        knobs=knobs,
    )
    solved = [(problem, solve(problem, start_count)) for problem in posed]
    results = []
    for k, w in enumerate(workloads):
        candidates = [(problem, solutions[k]) for problem, solutions in solved]
        best = _best_structure(k, w, candidates, certificate)
        if members is not None:
            best = _better(best, _cascade(w, members, degrees[k], common))
        if best is None:
            raise ValueError(
                f"no design is allowed at batch {float(w.batch):g}, context "
                f"{float(w.context):g}: loosen the memory or latency limit"
            )
        results.append(best)
    return results[0] if single else results


def _best_structure(owner, workload, candidates, certificate) -> DesignResult | None:
    """The best structure's solution, None where none is allowed; the certificate covers every
    structure that was tried."""
    if not candidates:
        return None
    problem, solution = max(candidates, key=lambda c: c[1][3])
    evaluations = sum(s[4] for _, s in candidates)
    found, gap, ascent_gap = solution[3], None, None
    if not np.isfinite(found):
        return None
    if certificate:
        gaps = []
        for tried, _ in candidates:
            g, missed, better = certify(tried, owner, found)
            gaps.append((g, missed))
            if better is not None and better[3] > solution[3]:
                problem, solution = tried, (*better, 0)
        raised = np.exp(solution[3] - found)
        gap = None
        if all(g is not None for g, _ in gaps):
            gap = max(max((1.0 + g) / raised - 1.0 if g else 0.0, 0.0) for g, _ in gaps)
        if all(m is not None for _, m in gaps):
            ascent_gap = max(m for _, m in gaps)
    return describe(workload, problem, solution, gap, ascent_gap, evaluations)


def _cascade(workload, members, degrees, common) -> DesignResult | None:
    return design_members(
        common.target,
        common.hardware,
        workload,
        members,
        degrees=degrees,
        objective_name=common.kind.objective,
        round_overhead_seconds=common.round_overhead_seconds,
        latency_limit_seconds=common.latency_limit_seconds,
    )


def _better(climbed: DesignResult | None, chosen: DesignResult | None) -> DesignResult | None:
    """The one of higher score; the other one's certificate is then the better one's, too, raised
    by the ratio of their scores."""
    if climbed is None or chosen is None:
        return chosen if climbed is None else climbed
    if climbed.score >= chosen.score:
        return climbed
    gap = climbed.certificate_gap
    if gap is not None:
        gap = max((1.0 + gap) * float(climbed.score) / float(chosen.score) - 1.0, 0.0)
    return dataclasses.replace(chosen, certificate_gap=gap)
