"""When speculation pays on a mixture of experts.

    python -m experiments.moe_speculation

Best chain of a given draft (alpha = 0.75, integers to 12) over batch x context, on rooflines: of a
mixture, verification of gamma + 1 tokens touches more experts than one token does, so one user
gains little; once the batch touches all experts anyway, verification is free until compute binds.
A dense target gains the same from one user on until compute binds.

Expect: the speedup of every mixture peaks between batch 16 and 128 (x1.9 to x2.2 against x1.0 to
x1.25 for one user); the dense target's is flat to batch 64 (x1.45) and falls from there. Writes
experiments/results/moe_speculation.json.
"""

import json
from pathlib import Path

from experiments.provenance import provenance
from sdx.search import break_even
from sdx.theory.acceptance import Geometric
from sdx.theory.hardware import load_hardware
from sdx.theory.transformers import load_architecture

RESULT = Path(__file__).parent / "results" / "moe_speculation.json"
ALPHA = 0.75
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
CONTEXTS = [512, 4096]
TARGETS = {  # target: draft, devices
    "qwen3-30b-a3b": ("qwen2.5-0.5b", 1),
    "mixtral-8x7b": ("smollm-135m", 2),
    "deepseek-v3": ("qwen2.5-0.5b", 16),
    "llama-3.1-8b": ("smollm-135m", 1),
}


def main():
    hardware, result = load_hardware("h100-sxm"), {}
    for name, (draft, devices) in TARGETS.items():
        surface = break_even(
            load_architecture(name),
            hardware,
            load_architecture(draft),
            Geometric(alpha=ALPHA),
            BATCHES,
            CONTEXTS,
            tensor_parallel=devices,
            max_lookahead=12,
        )
        best = surface.speedup[:, 0].argmax()
        result[name] = {
            "draft": draft,
            "devices": devices,
            "batches": BATCHES,
            "contexts": CONTEXTS,
            "speedup": surface.speedup.tolist(),
            "lookahead": surface.lookahead.tolist(),
            "crossings": [list(c) for c in surface.crossings],
            "best_batch_at_short_context": BATCHES[best],
        }
        print(name, "best batch", BATCHES[best], surface.speedup[:, 0].round(2).tolist())
    result["provenance"] = provenance(0)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
