"""Example inputs of the guides: engine metrics and a sweep of step times, simulated.

    python -m experiments.make_guide_examples        # writes docs/examples/

Expected: metrics-before.txt, metrics-after.txt, requests.jsonl (a server whose drafts are accepted
with hazards 0.67, 0.74, 0.80, 0.84; requests differ), steps.csv (Llama-3.1-8B on the model of an
L40S, 2 % noise). They stand for files that a running engine would give; no engine was measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sdx.theory.hardware import load_hardware, step_seconds
from sdx.theory.transformers import load_architecture

FOLDER = Path(__file__).parent.parent / "docs" / "examples"
HAZARDS = np.array([0.67, 0.74, 0.80, 0.84])
LOOKAHEAD = len(HAZARDS)
PAGE = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="target"}} {drafts}.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="target"}} {tokens}.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="target"}} {accepted}.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
"""
POSITION = (
    "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    '{{engine="0",model_name="target",position="{position}"}} {count}.0\n'
)


def serve(rng: np.random.Generator, requests: int) -> list[np.ndarray]:
    """Per request the accepted drafts of its rounds; requests differ by a shift of the logit."""
    logit = np.log(HAZARDS / (1 - HAZARDS))
    served = []
    for shift in rng.normal(0, 0.4, requests):
        hazards = 1 / (1 + np.exp(-(logit + shift)))
        accepted = rng.random((rng.integers(30, 90), LOOKAHEAD)) < hazards
        served.append(np.where(accepted.all(1), LOOKAHEAD, accepted.argmin(1)))
    return served


def page(lengths: np.ndarray) -> str:
    head = PAGE.format(
        drafts=lengths.size, tokens=lengths.size * LOOKAHEAD, accepted=int(lengths.sum())
    )
    counts = ((lengths > i).sum() for i in range(LOOKAHEAD))
    return head + "".join(POSITION.format(position=i, count=c) for i, c in enumerate(counts))


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    warm, served = serve(rng, 10), serve(rng, 120)
    (FOLDER / "metrics-before.txt").write_text(page(np.concatenate(warm)))
    (FOLDER / "metrics-after.txt").write_text(page(np.concatenate(warm + served)))
    entries = [
        {"acceptance_histogram": np.bincount(r, minlength=LOOKAHEAD + 1).tolist(),
         "num_spec_steps": int(r.size), "num_spec_tokens": LOOKAHEAD}
        for r in served
    ]  # fmt: skip
    lines = [json.dumps({"metrics": {"speculative_decoding": e}}) for e in entries]
    (FOLDER / "requests.jsonl").write_text("\n".join(lines) + "\n")
    target, hardware = load_architecture("llama-3.1-8b"), load_hardware("l40s")
    rows = ["batch,tokens,context,seconds"]
    for batch in (1, 8, 32):
        for tokens in (1, 2, 4, 8):
            for context in (512, 4096):
                seconds = float(step_seconds(target, hardware, batch, tokens, context))
                rows.append(f"{batch},{tokens},{context},{seconds * rng.normal(1, 0.02):.6f}")
    (FOLDER / "steps.csv").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
