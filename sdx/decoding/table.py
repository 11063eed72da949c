"""A language model that is a table: for proofs by enumeration and for tests without networks.

The next token depends on the last two, so a wrong cache, mask, position or roll-back changes the
law. It satisfies `Target` and, inside a drafter, serves as a draft model.
Legend: base.py; U = pending + T tokens outside the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sdx.records import record, static


@record
class TableFresh:
    """Tokens of one pass and where they stand."""

    tokens_BxT: jax.Array
    positions_BxT: jax.Array


@record
class TableCache:
    """The committed tokens themselves."""

    tokens_BxS: jax.Array
    lengths_B: jax.Array

    def commit(self, fresh: TableFresh, path_BxP: jax.Array, counts_B: jax.Array) -> TableCache:
        B, P = path_BxP.shape
        step_P = jnp.arange(P)
        slot_BxP = jnp.where(
            step_P < counts_B[:, None], self.lengths_B[:, None] + step_P, self.tokens_BxS.shape[1]
        )
        new_BxP = jnp.take_along_axis(fresh.tokens_BxT, path_BxP, axis=1)
        tokens_BxS = self.tokens_BxS.at[jnp.arange(B)[:, None], slot_BxP].set(new_BxP, mode="drop")
        return TableCache(tokens_BxS=tokens_BxS, lengths_B=self.lengths_B + counts_B)

    def rollback(self, lengths_B: jax.Array) -> TableCache:
        return TableCache(tokens_BxS=self.tokens_BxS, lengths_B=lengths_B)


@record
class TableOutput:
    logits_BxTxV: jax.Array
    fresh: TableFresh


@record
class TableModel:
    """`logits_VxVxV[previous, last]` are the logits of the next token."""

    logits_VxVxV: jax.Array
    kernels: str = static(default="auto")  # which implementation judges

    @property
    def vocab_size(self) -> int:
        return self.logits_VxVxV.shape[-1]

    def empty_cache(self, batch: int, capacity: int) -> TableCache:
        tokens_BxS = jnp.zeros((batch, capacity), jnp.int32)
        return TableCache(tokens_BxS=tokens_BxS, lengths_B=jnp.zeros((batch,), jnp.int32))

    def join(self, parts: list[TableFresh]) -> TableFresh:
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)

    def pad(self, fresh: TableFresh, tokens: int) -> TableFresh:
        T = fresh.tokens_BxT.shape[1]
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, tokens - T))), fresh)

    def __call__(
        self, tokens_BxT, cache, mask=None, positions=None, pending=None, last=None
    ) -> TableOutput:
        B, T = tokens_BxT.shape
        mask = jnp.tri(T, dtype=bool) if mask is None else mask
        if positions is None:
            positions = cache.lengths_B[:, None] + jnp.arange(T)
        fresh = TableFresh(tokens_BxT=tokens_BxT, positions_BxT=jnp.broadcast_to(positions, (B, T)))
        tokens_BxU, positions_BxU = fresh.tokens_BxT, fresh.positions_BxT
        if pending is not None:
            tokens_BxU = jnp.concatenate([pending.tokens_BxT, tokens_BxU], axis=1)
            positions_BxU = jnp.concatenate([pending.positions_BxT, positions_BxU], axis=1)
        before_BxT = fresh.positions_BxT - 1
        parent_BxTxU = mask & (positions_BxU[:, None, :] == before_BxT[:, :, None])
        outside_BxT = jnp.where(parent_BxTxU, tokens_BxU[:, None, :], 0).sum(-1)
        slot_BxT = jnp.clip(before_BxT, 0, cache.tokens_BxS.shape[1] - 1)
        cached_BxT = jnp.take_along_axis(cache.tokens_BxS, slot_BxT, axis=1)
        previous_BxT = jnp.where(parent_BxTxU.any(-1), outside_BxT, cached_BxT)
        previous_BxT = jnp.where(before_BxT >= 0, previous_BxT, 0)
        logits_BxTxV = self.logits_VxVxV[previous_BxT, tokens_BxT]
        return TableOutput(logits_BxTxV=logits_BxTxV[:, -(last or T) :], fresh=fresh)
