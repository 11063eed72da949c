"""Enumerates the law of a round for every policy through every implementation of the kernels.

    python -m experiments.kernel_losslessness       # about 6 minutes on 2 cores

A substituted source of randomness walks through all answers, driving the runtime's own drafters and
the ops themselves (Pallas bodies interpreted). Expected: the largest difference from the target's
law stays below 1e-6 in every case; a residual with half its constant is far above. Writes
results/kernel_losslessness.json.
"""

import json
import sys
from pathlib import Path

from experiments.provenance import provenance

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent / "tests" / "decoding"))

from test_decoding_kernels import DRAFTERS, SAMPLING, error_of  # noqa: E402

from sdx.decoding import streamed  # noqa: E402
from sdx.kernels import surplus  # noqa: E402


def broken(target, draft, request, **options):
    return surplus(target, draft, request._replace(c_N=0.5 * request.c_N), **options)


def main() -> int:
    errors = {}
    for kernels in ("reference", "triton", "tpu"):
        for policy in DRAFTERS:
            errors[f"{kernels} {policy}"] = error_of(policy, kernels)
            print(f"{kernels:10s} {policy:26s} {errors[f'{kernels} {policy}']:.1e}", flush=True)
    streamed.surplus = broken
    caught = {policy: error_of(policy, "reference") for policy in ("chain", "block")}
    result = {
        "provenance": provenance(),
        "temperature": SAMPLING.temperature,
        "top_p": SAMPLING.top_p,
        "largest_difference": errors,
        "with_a_wrong_constant": caught,
    }
    out = ROOT / "results" / "kernel_losslessness.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    worst = max(errors.values())
    print(f"{len(errors)} cases, worst {worst:.1e}; wrong constant: {min(caught.values()):.1e}")
    return int(worst > 1e-6 or min(caught.values()) < 1e-3)


if __name__ == "__main__":
    sys.exit(main())
