"""A draft head behind the interface of a draft model: it must be told the target's features.

A head drafts after pairs (token, feature of the token before; sdx/models/heads/base.py). The target
computes the features of the verified path in the pass that verifies it, so a head's life is

    prepare    the prompt's pairs into its cache, but the last
    open       reads the pairs that the last round made known (at most height + 1), writes them,
               and knows the law of the next token
    write      a draft after the other: its own features, slots past the known ones (chains), or
    __call__   a level of a tree after the other, keys outside the cache (trees)
    settle     takes the target's features of the accepted path; the drafts' are forgotten

so that between rounds the cache holds accepted tokens only, each with the target's feature. Medusa
has no cache: `open` picks the feature, every later level is one head more on it.
Legend: base.py; Q = height + 1 pairs that one round can make known, F feature width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sdx.decoding.base import Sequence, Verdict
from sdx.decoding.llama_target import LlamaTarget
from sdx.decoding.verify import after
from sdx.models.attention import cached_attention
from sdx.models.cache import Cache, Fresh, empty_cache
from sdx.models.heads import Head, features_of
from sdx.models.llama import Llama, TargetParts
from sdx.models.small_steps import PLAIN, prepare
from sdx.records import record, static


@record
class HeadCache:
    """What a head knows of the context.

    cache: keys and values, slot by slot. known_B: slots that the rounds before filled with the
    target's features; root_B: those and the pairs that `open` read; more are drafts.
    features_BxQxF: the target's features of the slots from `known_B` on. hidden_BxD: the head's
    own feature after the last token read (Medusa: the target's), where the next draft starts.
    """

    cache: Cache
    known_B: jax.Array
    root_B: jax.Array
    features_BxQxF: jax.Array
    hidden_BxD: jax.Array

    @property
    def lengths_B(self) -> jax.Array:
        return self.cache.lengths_B


@record
class HeadFresh:
    """Nodes read by passes over levels of a tree: keys and values, features, slots."""

    kept: Fresh
    hidden_BxTxD: jax.Array
    slots_BxT: jax.Array


@record
class HeadReading:
    logits_BxTxV: jax.Array
    fresh: HeadFresh


@record
class HeadModel:
    """A head and the parts of the target that it borrows (shared arrays, not copies)."""

    head: Head
    parts: TargetParts
    kernels: str = static(default="auto")

    @property
    def vocab_size(self) -> int:
        return self.head.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.head.config.max_positions

    def prepare(
        self, sequence: Sequence, prompt_slots: int, capacity: int, height: int, reading: Any
    ) -> HeadCache:
        """State after the prompts. reading: the target's output for the first `prompt_slots`
        tokens; height: the most drafts that a round can accept."""
        c, lengths_B = self.head.config, sequence.lengths_B
        features_BxSxF = features_of(c, reading)[:, :prompt_slots]
        B, S, F = features_BxSxF.shape
        known_B = jnp.maximum(lengths_B - 2, 0)
        cache = self._empty_cache(B, capacity)
        if c.cached_layers:
            # Read against a cache of one dead slot: the prompt attends to itself only.
            slots_BxS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
            tokens_BxS = sequence.tokens_BxL[:, 1 : S + 1]
            hidden_BxSxD = self.head.fuse(features_BxSxF)
            mask_SxS = jnp.tri(S, dtype=bool)
            read = self._read(
                tokens_BxS, hidden_BxSxD, slots_BxS, self._empty_cache(B, 1), mask_SxS
            )
            cache = cache.commit(read.fresh, slots_BxS, known_B)
        last_Bx1x1 = jnp.minimum(known_B, S - 1)[:, None, None]
        last_Bx1xF = jnp.take_along_axis(features_BxSxF, last_Bx1x1, axis=1)
        return HeadCache(
            cache=cache,
            known_B=known_B,
            root_B=jnp.zeros_like(known_B),
            features_BxQxF=jnp.pad(last_Bx1xF, ((0, 0), (0, height), (0, 0))),
            hidden_BxD=jnp.zeros((B, c.width), features_BxSxF.dtype),
        )

    def open(self, state: HeadCache, sequence: Sequence) -> tuple[jax.Array, HeadCache]:
        """Logits `[B, V]` after all known tokens, and the state that has read them."""
        c = self.head.config
        B, Q, _ = state.features_BxQxF.shape
        count_B = jnp.clip(sequence.lengths_B - 1 - state.known_B, 0, Q)  # 0: a finished row
        last_Bx1x1 = jnp.maximum(count_B - 1, 0)[:, None, None]
        cache = _with_lengths(state.cache, state.known_B)
        if c.parallel:
            feature_Bx1xF = jnp.take_along_axis(state.features_BxQxF, last_Bx1x1, axis=1)
            hidden_Bx1xD = self.head.fuse(feature_Bx1xF)
            logits_Bx1xV = self._parallel(hidden_Bx1xD, 0)
            cache = _with_lengths(cache, state.known_B + count_B)
        else:
            slots_BxQ = state.known_B[:, None] + jnp.arange(Q)
            at_BxQ = jnp.minimum(slots_BxQ + 1, sequence.tokens_BxL.shape[1] - 1)
            tokens_BxQ = jnp.take_along_axis(sequence.tokens_BxL, at_BxQ, axis=1)
            fused_BxQxD = self.head.fuse(state.features_BxQxF)
            mask_QxQ = jnp.tri(Q, dtype=bool)
            read = self._read(tokens_BxQ, fused_BxQxD, slots_BxQ, cache, mask_QxQ)
            hidden_Bx1xD = jnp.take_along_axis(read.hidden_BxTxD, last_Bx1x1, axis=1)
            logits_Bx1xV = self.head.expand(self.head.logits(self.parts, hidden_Bx1xD, 0))
            cache = _append(cache, read.fresh, count_B, logits_Bx1xV)
        opened = HeadCache(
            cache=cache,
            known_B=state.known_B,
            root_B=state.known_B + count_B,
            features_BxQxF=state.features_BxQxF,
            hidden_BxD=hidden_Bx1xD[:, 0],
        )
        return logits_Bx1xV[:, 0], opened

    def write(
        self, state: HeadCache, token_Bx1: jax.Array, step: int
    ) -> tuple[jax.Array, HeadCache]:
        """Logits `[B, V]` after one draft more, the state with it; `step` >= 1 drafts so far."""
        if self.head.config.parallel:
            return self._parallel(state.hidden_BxD[:, None], step)[:, 0], state
        slots_Bx1 = state.cache.lengths_B[:, None]
        mask_1x1 = jnp.ones((1, 1), bool)
        read = self._read(
            token_Bx1, state.hidden_BxD[:, None], slots_Bx1, state.cache, mask_1x1, step=step
        )
        logits = self.head.expand(self.head.logits(self.parts, read.hidden_BxTxD, step))
        cache = _append(state.cache, read.fresh, jnp.ones_like(state.known_B), logits)
        new = dataclasses.replace(state, cache=cache, hidden_BxD=read.hidden_BxTxD[:, 0])
        return logits[:, 0], new

    def __call__(
        self,
        tokens_BxT: jax.Array,
        state: HeadCache,
        mask: jax.Array,
        positions: jax.Array,
        pending: HeadFresh | None = None,
        step: int = 1,
    ) -> HeadReading:
        """A level of a tree: T drafts, none the parent of another.

        mask `[T, pending + T]` or with a leading B; positions of the tokens; pending: the levels
        above. The parent of a draft is the pending one that it sees in the slot before its own,
        or else the root. step: the level, 1 for children of the root.
        """
        B, T = tokens_BxT.shape
        slots_BxT = jnp.broadcast_to(positions - 1, (B, T))
        hidden_BxTxD = jnp.broadcast_to(
            state.hidden_BxD[:, None], (B, T, state.hidden_BxD.shape[-1])
        )
        if self.head.config.parallel:
            logits_Bx1xV = self._parallel(hidden_BxTxD[:, :1], step)
            logits_BxTxV = jnp.broadcast_to(logits_Bx1xV, (B, T, logits_Bx1xV.shape[-1]))
            fresh = HeadFresh(kept=_no_fresh(), hidden_BxTxD=hidden_BxTxD, slots_BxT=slots_BxT)
            return HeadReading(logits_BxTxV=logits_BxTxV, fresh=fresh)
        if pending is not None:
            U = pending.slots_BxT.shape[1]
            above_BxTxU = pending.slots_BxT[:, None, :] == slots_BxT[:, :, None] - 1
            above_BxTxU &= jnp.broadcast_to(mask, (B, T, U + T))[..., :U]
            parent_BxTx1 = jnp.argmax(above_BxTxU, axis=-1)[..., None]
            theirs_BxTxD = jnp.take_along_axis(pending.hidden_BxTxD, parent_BxTx1, axis=1)
            hidden_BxTxD = jnp.where(above_BxTxU.any(-1)[..., None], theirs_BxTxD, hidden_BxTxD)
        kept = None if pending is None else pending.kept
        read = self._read(tokens_BxT, hidden_BxTxD, slots_BxT, state.cache, mask, kept, step)
        logits = self.head.expand(self.head.logits(self.parts, read.hidden_BxTxD, step))
        fresh = HeadFresh(kept=read.fresh, hidden_BxTxD=read.hidden_BxTxD, slots_BxT=slots_BxT)
        return HeadReading(logits_BxTxV=logits, fresh=fresh)

    def join(self, parts: list[HeadFresh]) -> HeadFresh:
        kept = [part.kept for part in parts]
        return HeadFresh(
            kept=jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *kept),
            hidden_BxTxD=jnp.concatenate([part.hidden_BxTxD for part in parts], axis=1),
            slots_BxT=jnp.concatenate([part.slots_BxT for part in parts], axis=1),
        )

    def settle(self, state: HeadCache, verdict: Verdict, reading: Any) -> HeadCache:
        """The state for the next round. reading: the target's output for root and nodes."""
        features_BxTxF = features_of(self.head.config, reading)
        rows_BxQ = jnp.pad(verdict.path_BxP, ((0, 0), (1, 0)))
        return dataclasses.replace(
            state,
            known_B=state.root_B,
            features_BxQxF=jnp.take_along_axis(features_BxTxF, rows_BxQ[..., None], axis=1),
        )

    def _read(self, tokens_BxT, hidden_BxTxD, slots_BxT, cache, mask, kept=None, step=0):
        """One call of the head against a cache and, in a tree, the nodes `kept` so far."""
        B, T = tokens_BxT.shape
        waiting = 0 if kept is None else kept.keys[0].shape[2]
        mask_BxTxU = jnp.broadcast_to(mask, (B, T, waiting + T))

        def attend(layer, q, k, v):
            k, v = jnp.moveaxis(k, 2, 1), jnp.moveaxis(v, 2, 1)
            if waiting:
                k = jnp.concatenate([kept.keys[layer], k], axis=2)
                v = jnp.concatenate([kept.values[layer], v], axis=2)
            return cached_attention(
                q, k, v, cache.keys[layer], cache.values[layer], cache.lengths_B, mask_BxTxU,
                slots_BxT, slots_last=cache.slots_last, kernels=cache.kernels,
            )  # fmt: skip

        return self.head(self.parts, tokens_BxT, hidden_BxTxD, slots_BxT, attend, step)

    def _parallel(self, feature_Bx1xD: jax.Array, step: int) -> jax.Array:
        """Logits `[B, 1, V]` of a parallel head's position `step`."""
        hidden = self.head(self.parts, None, feature_Bx1xD, None, None, step).hidden_BxTxD
        return self.head.expand(self.head.logits(self.parts, hidden, step))

    def _empty_cache(self, batch: int, capacity: int) -> Cache:
        c = self.head.config
        if c.cached_layers:
            return empty_cache(c.block(), batch, capacity, kernels=self.kernels)
        return Cache(keys=(), values=(), lengths_B=jnp.zeros((batch,), jnp.int32))


def bind(head: Head, target: Any) -> HeadModel:
    """The head as a draft model for this target, its matrices laid out for small steps (a copy:
    bind once when decoding many times).

    Raises ValueError where they do not fit.
    """
    if not isinstance(target, LlamaTarget) or not isinstance(target.model, Llama):
        raise ValueError(
            f"a draft head needs the features of a Llama target, not of {type(target).__name__}"
        )
    c, shape = head.config, target.model.config
    for name in ("width", "vocab_size"):
        if getattr(c, name) != getattr(shape, name):
            raise ValueError(
                f"the head was made for a target of {name} {getattr(c, name)}, this one has "
                f"{getattr(shape, name)}"
            )
    if max(c.feature_layers, default=1) > shape.layers or min(c.feature_layers, default=1) < 1:
        raise ValueError(f"features of layers {c.feature_layers}: the target has {shape.layers}")
    head = prepare(head) if head.forms == PLAIN else head
    return HeadModel(head=head, parts=target.model.parts(), kernels=target.kernels)


def _with_lengths(cache: Cache, lengths_B: jax.Array) -> Cache:
    return cache.replace(lengths_B=lengths_B.astype(jnp.int32))


def _append(cache: Cache, fresh: Fresh, counts_B: jax.Array, logits_Bx1xV: jax.Array) -> Cache:
    """The cache with the first `counts_B` of the fresh pairs, written after all of them were
    computed (verify.after): keys of later specialists do not depend on the logits."""
    computed = [logits_Bx1xV[:, 0, 0], *(key[:, 0, 0, 0] for key in fresh.keys)]
    known_B = jnp.stack([~jnp.isnan(x) for x in computed]).all(0)
    B, T = fresh.keys[0].shape[0], fresh.keys[0].shape[2]
    path_BxT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    return cache.commit(fresh, path_BxT, after(known_B, counts_B))


def _no_fresh() -> Fresh:
    return Fresh(keys=(), values=())
