"""What one pass over text says of a pair: perplexities, acceptance by rank, confidence.

    prompts                     --> perplexity of target and draft (SDSL's y and x)
    the target's continuations  --> target mass on the draft's r-th choice, confidence against it

No speculation is run: both models read the same tokens. Legend: T tokens, K ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.calibration.fit import ConfidenceFit, fit_confidence, normal_interval
from sdx.decoding.llama_target import as_target
from sdx.records import Interval, Number, record, static


@record
class PairText:
    """Perplexities over the prompts' tokens; over the continuations `rank_acceptance[r]`, the
    target's probability mass on the draft's (r + 1)-th likeliest token (at temperature 0: how often
    it is the target's choice), and the draft's top probability calibrated against acceptance (None
    with too few tokens). `shared`: share of tokens that the draft has a token for (perplexities
    are over these). Intervals take texts as clusters.
    """

    target_perplexity: Interval
    draft_perplexity: Interval
    rank_acceptance: tuple[Interval, ...]
    confidence: ConfidenceFit | None
    shared: Number
    texts: int = static(default=0)
    tokens: int = static(default=0)

    def lines(self) -> list[str]:
        """For a person."""
        y, x = self.target_perplexity, self.draft_perplexity
        ranks = ", ".join(f"{r.value:.3f}" for r in self.rank_acceptance)
        lines = [
            f"perplexity: target {y.value:.3f} [{y.low:.3f}, {y.high:.3f}], draft {x.value:.3f} "
            f"[{x.low:.3f}, {x.high:.3f}] over {self.texts} texts",
            f"target's mass on the draft's choices by rank: {ranks}",
        ]
        if self.confidence is not None:
            c = self.confidence
            lines.append(
                f"draft's confidence: calibration error {c.error_before:.3f}, {c.error_after:.3f} "
                "after the fitted map"
            )
        return lines


@partial(jax.jit, static_argnames=("ranks", "temperature"))
def _read(target, draft, tokens_T, ranks, temperature):
    """Per next token: -ln p of both models, target mass on the draft's ranks [T - 1, K], the
    draft's top probability."""

    def log_probabilities(model):
        reading = model(tokens_T[None], model.empty_cache(1, len(tokens_T)))
        return reading.logits_BxTxV[0, :-1].astype(jnp.float32)

    p, q = log_probabilities(target), log_probabilities(draft)
    following = tokens_T[1:, None]

    def surprise(logits):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), following, axis=-1)[:, 0]

    if temperature > 0:
        mass_TxV, draft_TxV = (jax.nn.softmax(x / temperature) for x in (p, q))
    else:
        mass_TxV = jax.nn.one_hot(p.argmax(-1), p.shape[-1])
        draft_TxV = jax.nn.softmax(q)
    top_TxK, choice_TxK = jax.lax.top_k(draft_TxV, ranks)
    mass_TxK = jnp.take_along_axis(mass_TxV, choice_TxK, axis=-1)
    return surprise(p), surprise(q), mass_TxK, top_TxK[:, 0]


def read_pair(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    *,
    ranks: int = 4,
    temperature: float = 0.0,
) -> PairText:
    """Reads every prompt with its continuation (the target's own output) by both models.

    Raises ValueError for prompts without a second token, or too long for either model.
    """
    target, draft = as_target(target), as_target(draft)
    texts = [[*p, *c] for p, c in zip(prompts, continuations, strict=True)]
    if not texts or min(map(len, prompts)) < 2:
        raise ValueError("perplexity needs prompts of two tokens or more")
    length = max(map(len, texts))
    room = min(target.max_positions, draft.max_positions)
    if length > room:
        raise ValueError(f"a text of {length} tokens: the models have {room}; shorten the prompts")
    surprises, masses, tops = [], [], []
    for prompt, text in zip(prompts, texts, strict=True):
        padded = jnp.asarray([*text, *[0] * (length - len(text))], jnp.int32)
        y, x, mass, top = map(np.asarray, _read(target, draft, padded, ranks, float(temperature)))
        known, new = slice(0, len(prompt) - 1), slice(len(prompt) - 1, len(text) - 1)
        surprises.append(np.stack([y[known], x[known]]))
        masses.append(mass[new])
        tops.append(top[new])
    shared = np.concatenate([np.isfinite(s[1]) for s in surprises])
    surprises = [s[:, np.isfinite(s[1])] for s in surprises]
    top, accepted = np.concatenate(tops), np.concatenate(masses)[:, 0]
    return PairText(
        target_perplexity=_clustered([s[0] for s in surprises], np.exp),
        draft_perplexity=_clustered([s[1] for s in surprises], np.exp),
        rank_acceptance=tuple(_clustered([m[:, r] for m in masses]) for r in range(ranks)),
        confidence=fit_confidence(top, accepted) if top.size >= 20 else None,
        shared=float(shared.mean()),
        texts=len(texts),
        tokens=int(shared.size),
    )


def _clustered(values: Sequence[np.ndarray], transform=lambda x: x) -> Interval:
    """Mean over all tokens with a 95 % interval; tokens of one text are not independent."""
    sizes = np.asarray([len(v) for v in values], float)
    sums = np.asarray([v.sum() for v in values], float)
    mean = sums.sum() / sizes.sum()
    clusters = len(values)
    if clusters > 1:
        spread = clusters / (clusters - 1) * np.sum((sums - mean * sizes) ** 2)
        error = np.sqrt(spread) / sizes.sum()
    else:
        error = np.std(values[0], ddof=1) / np.sqrt(sizes.sum()) if sizes[0] > 1 else np.inf
    return normal_interval(mean, error, transform)
