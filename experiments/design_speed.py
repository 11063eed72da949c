"""How fast the objective and the joint search are.

    python -m experiments.design_speed

Chain designs (layers, width, lookahead of an independent draft: parameters, scaling law, roofline
of draft and target, tokens per second) evaluated by one vmapped call, warm; and full joint designs
(chains and trees over four tensor parallel degrees, certificate included) of one workload, warm.

Expect on 2 cores: >= 1e6 designs per second; a joint design in < 5 s. Writes
experiments/results/design_speed.json.
"""

import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.provenance import provenance
from sdx.records import Workload
from sdx.search.ascent import log_score
from sdx.search.design import design
from sdx.search.problems import Common, Kind, design_parts
from sdx.search.sensitivity import scalars_to_float64
from sdx.theory.hardware import load_hardware
from sdx.theory.scaling import besiroglu, sdsl_plane
from sdx.theory.transformers import load_architecture

RESULT = Path(__file__).parent / "results" / "design_speed.json"
COUNT = 1_000_000


def median_seconds(run, repeats):
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def chain_designs_per_second(target, hardware) -> float:
    common = Common(
        kind=Kind(),
        target=target,
        hardware=hardware,
        law=sdsl_plane,
        loss_law=besiroglu,
        draft_tokens=15e12,
        target_tokens=15e12,
    )
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        common = scalars_to_float64(common)
        designs = jnp.stack(
            [
                jnp.asarray(rng.uniform(1, 32, COUNT)),
                jnp.asarray(rng.uniform(256, 8192, COUNT)),
                jnp.asarray(rng.uniform(1, 16, COUNT)),
            ],
            axis=1,
        )
        cell = jnp.asarray([8.0, 1024.0, 8.0, 1.0, 0.0, 256.0, 0.0])
        one = lambda d, common: log_score(design_parts(d[:2], d[2:], cell, common))  # noqa: E731
        evaluate = jax.jit(jax.vmap(one, in_axes=(0, None)))
        seconds = median_seconds(lambda: evaluate(designs, common).block_until_ready(), 5)
    return COUNT / seconds


def main():
    target, hardware = load_architecture("llama-3.1-70b"), load_hardware("h100-sxm")
    workload = Workload(batch=8.0, context=1024.0)

    def joint():
        return design(target, hardware, workload, devices=8, policies=("chain", "tree"))

    result = {
        "chain_designs_per_second": chain_designs_per_second(target, hardware),
        "joint_design_seconds": median_seconds(joint, 3),
        "joint_design_certificate": joint().certificate_gap,
        "provenance": provenance(0),
    }
    print(json.dumps(result, indent=1))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
