"""A head over whole sequences, several steps deep: what its training differentiates.

At step j, slot t stands for a draft that was made j steps after the target's last feature, f_{t-j}:
its hidden input is the output of step j - 1 at slot t - 1, and it attends to what it would find in
decoding, the keys of step 0 up to slot t - j and those of its own ancestors, step i at slot
t - j + i for i = 1 .. j (HASS, Zhang et al. 2024; EAGLE-3's training-time test). Slots are the same
at every step: slot t always predicts f_{t+1} and the law of x_{t+2}, so targets are shifted once.
Legend: base.py; S = T - 1 slots of T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from sdx.models.attention import NEGATIVE, causal_attention
from sdx.models.heads.base import Head
from sdx.models.llama import TargetParts


@struct.dataclass
class Step:
    """Step j at every slot: hidden_BxSxD, the predicted features (EAGLE, PosS: to be compared with
    `features[:, 1:]`), and logits_BxSxU over the draft vocabulary (to be compared with the target's
    laws at `[:, 1:]`). The first j slots have no past to stand on: leave them out of the loss."""

    hidden_BxSxD: jax.Array
    logits_BxSxU: jax.Array


def unroll(
    head: Head,
    parts: TargetParts,
    tokens_BxT: jax.Array,
    features_BxTxF: jax.Array,
    steps: int,
    detach: bool = True,
) -> list[Step]:
    """`steps` steps of a head along whole sequences, step 0 (the target's features) first.

    tokens_BxT: x_0 .. x_{T-1}; features_BxTxF: f_0 .. f_{T-1} (`features_of`). detach: no gradient
    flows from a step into the one before through the features (HASS, PosS); EAGLE-3 lets it flow.
    Returned are `steps` records over S = T - 1 slots. Raises ValueError for more steps than a
    parallel head has.
    """
    longest = head.config.longest
    if longest is not None and steps > longest:
        raise ValueError(f"{steps} steps of a head with {longest} positions: unroll at most those")
    B, T = tokens_BxT.shape
    positions_BxS = jnp.broadcast_to(jnp.arange(T - 1), (B, T - 1))
    history = History()
    fused_BxSxD = head.fuse(features_BxTxF[:, :-1])
    found: list[Step] = []
    for step in range(steps):
        if step == 0 or head.config.parallel:
            hidden_BxSxD = shift(fused_BxSxD, step)
        else:
            hidden_BxSxD = shift(found[-1].hidden_BxSxD, 1)
            hidden_BxSxD = jax.lax.stop_gradient(hidden_BxSxD) if detach else hidden_BxSxD
        hidden_BxSxD = head(
            parts, tokens_BxT[:, 1:], hidden_BxSxD, positions_BxS, history.attend, step
        ).hidden_BxTxD
        found.append(Step(hidden_BxSxD, head.logits(parts, hidden_BxSxD, step)))
    return found


def shift(x: jax.Array, slots: int) -> jax.Array:
    """x of slot t - slots at slot t (axis 1), zeros where there is none."""
    if slots == 0:
        return x
    padding = [(0, 0)] * x.ndim
    padding[1] = (slots, 0)
    return jnp.pad(x, padding)[:, : x.shape[1]]


class History:
    """Keys and values of every step so far, per layer; lives for one trace."""

    def __init__(self):
        self.seen: dict[int, list[tuple[jax.Array, jax.Array]]] = {}

    def attend(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """`Attend` at the present step, which this call's keys complete."""
        seen = self.seen.setdefault(layer, [])
        seen.append((k, v))
        return unrolled_attention(q, [k for k, _ in seen], [v for _, v in seen])


def unrolled_attention(
    q_BxSxHxE: jax.Array,
    keys: list[jax.Array],
    values: list[jax.Array],
    block: int = 64,
) -> jax.Array:
    """Attention of step j = len(keys) - 1 to the keys `[B, S, K, E]` of steps 0 .. j.

    Slot t sees step 0 up to slot t - j and step i at slot t - j + i. In blocks of queries, as
    `causal_attention`.
    """
    step = len(keys) - 1
    if step == 0:
        return causal_attention(q_BxSxHxE, keys[0], values[0])
    B, S, H, E = q_BxSxHxE.shape
    K = keys[0].shape[2]
    q = q_BxSxHxE.reshape(B, S, K, H // K, E) * E**-0.5
    own_k = [shift(k, step - i) for i, k in enumerate(keys) if i]
    own_v = [shift(v, step - i) for i, v in enumerate(values) if i]
    new = jnp.stack([jnp.einsum("bskge,bske->bkgs", q, k) for k in own_k], axis=-1)
    out = []
    for start in range(0, S, block):
        stop = min(start + block, S)
        width = max(stop - step, 0)
        old = jnp.einsum("bqkge,bske->bkgqs", q[:, start:stop], keys[0][:, :width])
        seen = jnp.arange(width) <= jnp.arange(start, stop)[:, None] - step
        scores = jnp.concatenate([jnp.where(seen, old, NEGATIVE), new[..., start:stop, :]], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)
        attended = jnp.einsum("bkgqs,bske->bqkge", weights[..., :width], values[0][:, :width])
        for i, v in enumerate(own_v):
            share = jnp.moveaxis(weights[..., width + i], 3, 1)  # B q K G
            attended = attended + share[..., None] * v[:, start:stop, :, None]
        out.append(attended)
    return jnp.concatenate(out, axis=1).reshape(B, S, H * E)
