"""The source of randomness: a value that is passed in and handed back.

Every random decision of the runtime is one of two questions, "does this event of probability a
happen?" and "which token of these log-weights?", and goes through a `RandomSource`. The runtime
uses `Keys`; a proof substitutes a source that walks through all answers and is told their
probabilities, so that the law of what the runtime emits is enumerated, not sampled.
"""

from __future__ import annotations

from typing import Protocol, Self

import jax
import jax.numpy as jnp

from sdx.records import record


class RandomSource(Protocol):
    """A pytree; each draw returns the source to use next."""

    def accept(self, probability_BxK: jax.Array) -> tuple[jax.Array, Self]:
        """K independent events per row: bool `[B, K]`, true with the given probability."""
        ...

    def draw(self, log_weights_BxV: jax.Array) -> tuple[jax.Array, Self]:
        """One token per law, int32 `[B]`, by unnormalised log-weights (-inf is never drawn
        unless the whole law is). `[B, G, V]` draws G independent tokens per row, `[B, G]`."""
        ...


@record
class Keys:
    """The runtime's source: row b's n-th draw uses `fold_in(keys_B[b], n)`, once.

    A row's draws depend on its own key and on the number of draws before, not on its neighbours.
    """

    keys_B: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, key: jax.Array, batch: int) -> Keys:
        """A source for `batch` rows from one key (typed, or a raw uint32 pair)."""
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)
        rows = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))
        return cls(keys_B=rows, count=jnp.int32(0))

    def _next(self) -> tuple[jax.Array, Keys]:
        keys_B = jax.vmap(jax.random.fold_in, (0, None))(self.keys_B, self.count)
        return keys_B, Keys(keys_B=self.keys_B, count=self.count + 1)

    def seeds(self) -> tuple[jax.Array, Keys]:
        """uint32 `[B, 2]` for a draw whose noise is made inside a kernel; counts as one draw."""
        keys_B, source = self._next()
        return jax.random.key_data(keys_B)[:, :2], source

    def accept(self, probability_BxK: jax.Array) -> tuple[jax.Array, Keys]:
        keys_B, source = self._next()
        shape = probability_BxK.shape[1:]
        uniform = jax.vmap(lambda key: jax.random.uniform(key, shape))(keys_B)
        return uniform < probability_BxK, source

    def draw(self, log_weights_BxV: jax.Array) -> tuple[jax.Array, Keys]:
        # Gumbel-argmax: no normalisation, no cumulative sum.
        keys_B, source = self._next()
        shape = log_weights_BxV.shape[1:]
        gumbel = jax.vmap(lambda key: jax.random.gumbel(key, shape))(keys_B)
        return jnp.argmax(log_weights_BxV + gumbel, axis=-1).astype(jnp.int32), source
