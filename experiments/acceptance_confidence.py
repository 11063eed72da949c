"""How acceptance varies between contexts, and how well the draft's confidence foretells it.

    python -m experiments.acceptance_confidence [--pair experiments/small_pair]

Teacher-forced on held-out text: at every position the acceptance rate of a sampled draft,
sum_x min(p(x), q(x)) at temperature 1, the draft's confidence max q, and whether its likeliest
token is the target's too (greedy acceptance). The multi-level slides show both for Llama 1B -> 3B.
Expected: a U-shaped or right-heavy distribution of rates, far from one constant alpha, and greedy
acceptance rising with confidence. Writes experiments/results/acceptance_confidence.json. A minute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tokenizers import Tokenizer

from experiments.provenance import provenance
from sdx.models.checkpoint import load_model
from sdx.training.corpus import held_out_prompts, texts, tokenise

RESULT = Path(__file__).parent / "results" / "acceptance_confidence.json"
WINDOWS, LENGTH, SKIP, BINS, BATCH = 64, 160, 32, 20, 8


def measure(target, draft, windows) -> dict[str, np.ndarray]:
    """Rate, confidence and greedy agreement at every position after the first `SKIP`."""

    @jax.jit
    def both(tokens_BxT):
        p = jax.nn.softmax(target.logits(target.features(tokens_BxT)), axis=-1)
        q = jax.nn.softmax(draft.logits(draft.features(tokens_BxT)), axis=-1)
        agree = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
        return jnp.minimum(p, q).sum(axis=-1), q.max(axis=-1), agree

    parts = [both(jnp.asarray(windows[i : i + BATCH])) for i in range(0, len(windows), BATCH)]
    rate, confidence, agree = (
        np.concatenate([np.asarray(p[k])[:, SKIP:].ravel() for p in parts]) for k in range(3)
    )
    return {"rate": rate, "confidence": confidence, "agree": agree}


def summary(found: dict[str, np.ndarray]) -> dict:
    """Histogram of the rate; mean rate and greedy agreement per bin of confidence."""
    edges = np.linspace(0, 1, BINS + 1)
    place = np.clip(np.digitize(found["confidence"], edges) - 1, 0, BINS - 1)
    counts = np.bincount(place, minlength=BINS)

    def means(values):
        sums = np.bincount(place, weights=values, minlength=BINS)
        return [round(float(s / n), 4) if n else None for s, n in zip(sums, counts, strict=True)]

    rate = np.clip(found["rate"], 0.0, 1.0)
    return {
        "positions": int(rate.size),
        "mean_rate": round(float(rate.mean()), 4),
        "rate_standard_deviation": round(float(rate.std()), 4),
        "greedy_agreement": round(float(found["agree"].mean()), 4),
        "rate_histogram": np.histogram(rate, edges)[0].tolist(),
        "confidence_counts": counts.tolist(),
        "rate_by_confidence": means(rate),
        "agreement_by_confidence": means(found["agree"].astype(float)),
    }


def main(pair: Path = Path(__file__).parent / "small_pair") -> int:
    tokenizer = Tokenizer.from_file(str(pair / "tokenizer.json"))
    windows = held_out_prompts(tokenise(tokenizer, texts("held_out")), WINDOWS, LENGTH)
    target, _ = load_model(pair / "target")
    out = {"provenance": provenance(), "bins": BINS, "drafts": {}}
    for name in ("draft_small", "draft_medium"):
        draft, _ = load_model(pair / name)
        out["drafts"][name] = s = summary(measure(target, draft, windows))
        print(
            f"{name}: rate {s['mean_rate']:.3f} +- {s['rate_standard_deviation']:.3f} between "
            f"contexts, greedy agreement {s['greedy_agreement']:.3f}, {s['positions']} positions"
        )
    RESULT.write_text(json.dumps(out) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
