"""A draft model of another vocabulary, by token-level intersection (Timor et al. 2025).

Tokens whose text is the same in both vocabularies are shared. The draft law is restricted to them
and renormalised; the target's law is untouched, so the output is lossless. Legend: base.py; U the
draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdx.decoding.base import Target
from sdx.records import record


@record
class Output:
    """Logits over the target's vocabulary, fresh of the draft model."""

    logits_BxTxV: jax.Array
    fresh: Any


@record
class CrossVocabulary:
    """Wraps a draft model: takes and gives the target's token ids.

    to_draft_V: the draft id of each target id. shared_V: false where the draft has no such token;
    it is never proposed, and read as whatever `to_draft` says (the draft's unknown token).
    """

    model: Target
    to_draft_V: jax.Array
    shared_V: jax.Array

    @property
    def vocab_size(self) -> int:
        return self.to_draft_V.shape[0]

    @property
    def max_positions(self) -> int:
        return getattr(self.model, "max_positions", 2**31 - 1)

    def empty_cache(self, batch: int, capacity: int) -> Any:
        return self.model.empty_cache(batch, capacity)

    def join(self, parts: list[Any]) -> Any:
        return self.model.join(parts)

    def pad(self, fresh: Any, tokens: int) -> Any:
        return self.model.pad(fresh, tokens)

    def __call__(self, tokens_BxT, cache, **arguments) -> Output:
        output = self.model(self.to_draft_V[tokens_BxT], cache, **arguments)
        logits_BxTxV = output.logits_BxTxV[..., self.to_draft_V]
        # -inf before any softmax: restriction and renormalisation in one.
        logits_BxTxV = jnp.where(self.shared_V, logits_BxTxV, -jnp.inf)
        return Output(logits_BxTxV=logits_BxTxV, fresh=output.fresh)


def cross_vocabulary(
    model: Any,
    target_ids: Mapping[str, int],
    draft_ids: Mapping[str, int],
    target_size: int,
    unknown_id: int = 0,
) -> CrossVocabulary:
    """From two vocabularies (token -> id, as `tokenizers` gives them).

    unknown_id: the draft id that stands for target tokens which the draft does not have.
    Raises ValueError if nothing is shared, or an id lies outside its vocabulary.
    """
    to_draft, shared = np.full((target_size,), unknown_id, np.int32), np.zeros((target_size,), bool)
    if not 0 <= unknown_id < model.vocab_size:
        raise ValueError(f"unknown_id = {unknown_id}: the draft has {model.vocab_size} tokens")
    for token, target_id in target_ids.items():
        draft_id = draft_ids.get(token)
        if draft_id is None:
            continue
        if not (0 <= target_id < target_size and 0 <= draft_id < model.vocab_size):
            raise ValueError(f"token {token!r}: id {target_id} or {draft_id} is out of range")
        to_draft[target_id], shared[target_id] = draft_id, True
    if not shared.any():
        raise ValueError("the two vocabularies share no token: this draft cannot propose anything")
    return CrossVocabulary(
        model=model, to_draft_V=jnp.asarray(to_draft), shared_V=jnp.asarray(shared)
    )
