"""Joint search by gradient against exhaustive enumeration, on random problems.

    python -m experiments.joint_search [--problems 208] [--seed 0]

A problem is a random target, device (half of them: a measured-looking StepTable of the target, with
jumps and jags that no roofline has), scaling law and workload; designed together are the draft's
layers, width and feed-forward ratio, the lookahead (chains) or budget and depth (trees), and the
tensor parallel degree: lattices of more than a million designs, each enumerated whole. A design at
one profile row counts as one evaluation, a gradient as three.

Expect: >= 99.9 % of the exhaustive optimum in >= 99 % of the problems, with >= 100 times fewer
evaluations; every branch-and-bound certificate >= the true gap. About 20 minutes on 2 cores. Writes
experiments/results/joint_search.json.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.provenance import provenance
from sdx.search.exact import exhaustive, lattice_points
from sdx.search.problems import (
    Common,
    Kind,
    chain_profiles,
    design_parts,
    draft_space,
    tree_profiles,
)
from sdx.search.sensitivity import scalars_to_float64
from sdx.search.solving import Problem, certify, solve
from sdx.theory.hardware import load_hardware, step_table
from sdx.theory.scaling import PerplexityLaw, besiroglu, sdsl_plane
from sdx.theory.transformers import llama_like

RESULT = Path(__file__).parent / "results" / "joint_search.json"
BUDGETS, DEPTHS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64), range(1, 9)
# (policy, costs) -> space, profiles, tensor parallel degrees; each above 1e6 points.
STRUCTURES = {
    ("chain", "roofline"): (draft_space(128.0, 28, 8192.0, 8), chain_profiles(20), (1, 2, 4, 8)),
    ("tree", "roofline"): (
        draft_space(192.0, 24, 9216.0, 4),
        tree_profiles(BUDGETS, DEPTHS),
        (1, 2, 4, 8),
    ),
    ("chain", "step table"): (draft_space(64.0, 32, 6144.0, 8), chain_profiles(48), (1,)),
    ("tree", "step table"): (
        draft_space(128.0, 24, 8192.0, 12),
        tree_profiles(BUDGETS, DEPTHS),
        (1,),
    ),
}


def log_uniform(rng, low, high):
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def random_hardware(rng):
    h = load_hardware("h100-sxm")
    scale = {
        f: log_uniform(rng, 0.2, 3.0) * float(getattr(h, f))
        for f in (
            "memory_bandwidth_bytes_per_second",
            "interconnect_bandwidth_bytes_per_second",
            "interconnect_latency_seconds",
            "layer_overhead_seconds",
            "step_overhead_seconds",
        )
    }
    peaks = {k: v * log_uniform(rng, 0.2, 3.0) for k, v in h.peak_flops_per_second.items()}
    # Capacity never binds the target, sometimes the draft beside it.
    return dataclasses.replace(
        h, peak_flops_per_second=peaks, memory_capacity_bytes=log_uniform(rng, 2e11, 2e12), **scale
    )


def random_step_table(rng):
    """Seconds of 1..80 tokens: a floor, a slope, jumps where kernels change, jags of 3 %."""
    tokens = np.arange(1.0, 81.0)
    seconds = log_uniform(rng, 3e-3, 5e-2) * (1.0 + tokens / log_uniform(rng, 10, 400))
    for at in (2, 9, 17, 33, 65):
        seconds = seconds * np.where(tokens >= at, 1.0 + rng.exponential(0.06), 1.0)
    seconds = seconds * np.exp(0.03 * rng.standard_normal(80))
    return step_table([1.0], tokens, [0.0], seconds[None, :, None])


def random_problem(rng, policy, costs) -> Problem:
    space, profiles, degrees = STRUCTURES[policy, costs]
    kind = Kind(variables=tuple(v.name for v in space), policy=policy)
    hardware = random_hardware(rng)
    table = random_step_table(rng) if costs == "step table" else None
    a, b, c = sdsl_plane.coefficients
    law = PerplexityLaw(
        coefficients=np.array([a * rng.uniform(0.6, 2.0), b, c + rng.uniform(-0.1, 0.15)]),
        covariance=np.zeros((3, 3)),
    )
    target = llama_like(
        float(rng.integers(24, 100)), 128.0 * rng.integers(28, 100), log_uniform(rng, 3e4, 2e5)
    )
    common = Common(
        kind=kind,
        target=target,
        hardware=hardware if table is None else table,
        draft_hardware=None if table is None else hardware,
        law=law,
        loss_law=besiroglu,
        draft_tokens=log_uniform(rng, 2e11, 2e13),
        target_tokens=log_uniform(rng, 1e12, 2e13),
        round_overhead_seconds=log_uniform(rng, 1e-6, 1e-3),
        rank_ratio=rng.uniform(0.1, 0.4),
    )
    batch, context = log_uniform(rng, 1, 64), log_uniform(rng, 128, 16384)
    cells = jnp.asarray([[batch, context, float(tp), 1.0, 0.0, 256.0, 0.0] for tp in degrees])
    return Problem(space, profiles, cells, np.zeros(len(degrees), int), scalars_to_float64(common))


def study(problem: Problem) -> dict:
    clock = time.perf_counter()
    (_, _, _, found, evaluations) = solve(problem, start_count=3, rounds=3, inner=6)[0]
    searched = time.perf_counter() - clock
    certificate, _, _ = certify(problem, 0, found)
    certified = time.perf_counter() - clock - searched
    profiles = jnp.asarray(problem.profiles)
    best = max(
        exhaustive(design_parts, problem.space, profiles, cell, problem.common)[2]
        for cell in problem.cells
    )
    points = lattice_points(problem.space, problem.profiles) * len(problem.cells)
    return {
        "points": points,
        "evaluations": evaluations,
        "share_of_optimum": float(np.exp(found - best)),
        "true_gap": float(np.expm1(max(best - found, 0.0))),
        "certificate": certificate,
        "search_seconds": searched,
        "certificate_seconds": certified,
        "exhaustive_seconds": time.perf_counter() - clock - searched - certified,
    }


def summary(rows) -> dict:
    share = np.array([r["share_of_optimum"] for r in rows])
    fewer = np.array([r["points"] / r["evaluations"] for r in rows])
    certified = [r for r in rows if r["certificate"] is not None]
    slack = np.array([r["certificate"] - r["true_gap"] for r in certified])
    return {
        "problems": len(rows),
        "smallest_lattice": min(r["points"] for r in rows),
        "reaching_99.9_percent": float(np.mean(share >= 0.999)),
        "exact_optimum": float(np.mean(share >= 1.0 - 1e-12)),
        "worst_share": float(share.min()),
        "fewer_evaluations_median": float(np.median(fewer)),
        "fewer_evaluations_worst": float(fewer.min()),
        "certified": len(certified),
        "certificates_below_true_gap": int(np.sum(slack < -1e-12)),
        "certificate_median": float(np.median([r["certificate"] for r in certified])),
        "certificate_largest": float(max(r["certificate"] for r in certified)),
        "certificate_minus_true_gap_median": float(np.median(slack)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=208)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    rows = []
    with jax.enable_x64(True):
        for k in range(arguments.problems):
            structure = list(STRUCTURES)[k % len(STRUCTURES)]
            row = study(random_problem(rng, *structure))
            rows.append({"policy": structure[0], "costs": structure[1], **row})
            print(k, structure, {k: v for k, v in row.items() if k != "points"}, flush=True)
    result = {"summary": summary(rows), "by_structure": {}, "problems": rows}
    for policy, costs in STRUCTURES:
        mine = [r for r in rows if (r["policy"], r["costs"]) == (policy, costs)]
        if mine:
            result["by_structure"][f"{policy}, {costs}"] = summary(mine)
    print(json.dumps(result["summary"], indent=1))
    result["provenance"] = provenance(arguments.seed)
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
