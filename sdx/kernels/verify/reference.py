"""The three streams of verify in plain JAX: the truth the kernels are held against."""

import functools

import jax
import jax.numpy as jnp

from sdx.kernels.verify.laws import Statistics, Surplus, log_or_least, probability
from sdx.kernels.verify.noise import gumbel


@functools.partial(jax.jit, static_argnames=("interpret", "config"))
def statistics(logits_RxV, inverse_temperature_R, *, interpret=None, config=None):
    x = logits_RxV.astype(jnp.float32)
    top = x.max(-1)
    total = jnp.exp((x - top[:, None]) * inverse_temperature_R[:, None]).sum(-1)
    return Statistics(top, x.argmax(-1).astype(jnp.int32), total)


@functools.partial(jax.jit, static_argnames=("interpret", "config"))
def tails(logits_RxV, top_R, inverse_temperature_R, cuts_RxJ, *, interpret=None, config=None):
    """How many logits are >= each cut, and the mass exp((logit - top) * it) of those: `[R, J]`."""
    x = logits_RxV.astype(jnp.float32)
    mass = jnp.exp((x - top_R[:, None]) * inverse_temperature_R[:, None])
    over = [x >= cuts_RxJ[:, j : j + 1] for j in range(cuts_RxJ.shape[1])]
    counts = jnp.stack([o.sum(-1) for o in over], -1).astype(jnp.float32)
    return counts, jnp.stack([jnp.where(o, mass, 0.0).sum(-1) for o in over], -1)


@functools.partial(jax.jit, static_argnames=("interpret", "config"))
def surplus(target, draft, request, seeds_Nx2, noise_NxV, *, interpret=None, config=None):
    """See `api.surplus`."""
    v = target.logits_RxV.shape[1]

    def dense(law, rows):
        columns = (law.inverse_temperature_R, law.log_normaliser_R, law.threshold_R)
        return probability(
            law.logits_RxV[rows].astype(jnp.float32), *(c[rows][:, None] for c in columns)
        )

    token_V = jnp.arange(v, dtype=jnp.int32)
    excluded = (request.excluded_NxK[:, :, None] == token_V).any(1)
    p = jnp.where(excluded, 0.0, dense(target, request.target_rows_N))
    q = jnp.zeros_like(p)
    if draft is not None:
        q = jnp.where(excluded, 0.0, dense(draft, request.draft_rows_N))
    r = jnp.maximum(request.weight_N[:, None] * p - request.c_N[:, None] * q, 0.0)
    if seeds_Nx2 is not None:
        noise = gumbel(seeds_Nx2[:, :1], seeds_Nx2[:, 1:], jnp.broadcast_to(token_V, p.shape))
    else:
        noise = 0.0 if noise_NxV is None else noise_NxV
    scores, left_scores = log_or_least(r) + noise, log_or_least(p) + noise
    return Surplus(
        mass_N=r.sum(-1),
        left_N=p.sum(-1),
        undrawn_N=q.sum(-1),
        token_N=scores.argmax(-1).astype(jnp.int32),
        score_N=scores.max(-1),
        left_token_N=left_scores.argmax(-1).astype(jnp.int32),
        left_score_N=left_scores.max(-1),
    )
