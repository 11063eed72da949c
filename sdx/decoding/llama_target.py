"""A Llama behind the runtime's `Target` protocol."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sdx.models.cache import Cache, Fresh, empty_cache
from sdx.models.llama import Llama
from sdx.models.opt import Opt
from sdx.models.small_steps import PLAIN, prepare
from sdx.records import record


@record
class Reading:
    """Logits of the tokens asked for, and the keys and values of all tokens read."""

    logits_BxTxV: jax.Array
    fresh: Fresh


@record
class LlamaTarget:
    """Target, or draft model: the decoder with its cache."""

    model: Llama | Opt

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions

    @property
    def stop_ids(self) -> tuple[int, ...]:
        eos = self.model.config.eos_id
        return () if eos is None else (eos,)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        return empty_cache(self.model.config, batch, capacity)

    def join(self, parts: list[Fresh]) -> Fresh:
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *parts)

    def pad(self, fresh: Fresh, tokens: int) -> Fresh:
        T = fresh.keys[0].shape[2]
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, tokens - T), (0, 0))), fresh)

    def __call__(
        self, tokens_BxT, cache, mask=None, positions=None, pending=None, last=None
    ) -> Reading:
        extra = {} if pending is None else {"pending": pending}
        output = self.model(tokens_BxT, cache, mask=mask, positions=positions, **extra)
        logits = output.logits_BxTxV
        if last is not None and last < tokens_BxT.shape[1]:
            # The other rows' logits are then dead code: the head is half of a small draft.
            logits = self.model.logits(output.hidden_BxTxD[:, -last:])
        return Reading(logits_BxTxV=logits, fresh=output.fresh)


def as_target(model: Any) -> Any:
    """A Llama (or OPT) becomes a `Target`, its matrices laid out for small steps on this device
    (`sdx.models.small_steps`); what already is a target passes through. Laying out copies the
    weights: wrap once when decoding many times."""
    if isinstance(model, Opt):
        return LlamaTarget(model=model)
    if not isinstance(model, Llama):
        return model
    return LlamaTarget(model=prepare(model) if model.forms == PLAIN else model)
