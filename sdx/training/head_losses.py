"""Losses of draft heads: imitation, acceptance itself, throughput, an adversary.

All compare what a head predicts at slot t and step j (models.heads.unroll) with the target's law p
of the same token. The first j slots of step j have no past and are left out. The target's features
and laws are data: nothing here trains it.

    ce          -sum p ln q                                   (EAGLE, EAGLE-3, KOALA's distillation)
    tv          1 - sum min(p, q): one minus the acceptance rate of speculative sampling
    throughput  -sum_k w_k S(k), w_k = dT/dS(k): tokens per second to first order in the survival
                S(k) = mean over starts of prod_{j < k} sum min(p, q), step j at slot start + j

Legend: B batch, S slots, U draft vocabulary, V vocabulary, D width, F features, T = S + 1 tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from sdx.models.heads import Head, Step, unroll
from sdx.models.llama import TargetParts, rms_norm

Objective = Literal["ce", "tv", "throughput"]


@struct.dataclass
class Teacher:
    """What a head learns from: arrays of its target, never trained.

    parts: embedding and LM head. norm_D, eps: the norm before the LM head.
    """

    parts: TargetParts
    norm_D: jax.Array
    eps: float = struct.field(pytree_node=False, default=1e-5)

    def top(self, last_BxTxD: jax.Array) -> jax.Array:
        """The input of the LM head, from the last layer's output."""
        return rms_norm(last_BxTxD, self.norm_D, self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """How a head is trained; `sdx.training.heads.RECIPES` holds the papers' settings.

    steps: how many are unrolled. decay: weight of step j is decay**j. feature: weight of SmoothL1
    between predicted and true features (heads whose output is a feature). law: weight of the
    objective. top: weight of -sum p ln q over the target's `top_k` likeliest tokens (HASS). noise:
    half-width of the uniform noise on the features that the head reads (EAGLE). detach: no
    gradient through features from step to step. survival_weights: w_1 .. w_steps of `throughput`.
    """

    objective: Objective = "ce"
    steps: int = 1
    decay: float = 1.0
    feature: float = 0.0
    law: float = 1.0
    top: float = 0.0
    top_k: int = 10
    noise: float = 0.0
    detach: bool = True
    survival_weights: tuple[float, ...] = ()

    def __post_init__(self):
        if self.objective not in ("ce", "tv", "throughput"):
            raise ValueError(f"objective {self.objective!r}: must be ce, tv or throughput")
        if self.steps < 1:
            raise ValueError(f"steps = {self.steps}: unroll at least 1")
        if self.objective == "throughput" and len(self.survival_weights) != self.steps:
            raise ValueError(
                f"{len(self.survival_weights)} survival weights for {self.steps} steps: the "
                "throughput loss needs dT/dS(k) for k = 1 .. steps"
            )


# ---------------------------------------------------------------------------- laws


def kept_law(head: Head, teacher_BxSxV: jax.Array) -> jax.Array:
    """The target's probabilities of the tokens that the head can draft, `[B, S, U]`; not
    renormalised: what is not kept is mass that no draft can win."""
    p = jax.nn.softmax(jax.lax.stop_gradient(teacher_BxSxV))
    kept = head.config.kept
    return p[..., np.asarray(kept)] if kept else p


def soft_cross_entropy(p: jax.Array, logits: jax.Array) -> jax.Array:
    """-sum p ln q over the last axis."""
    return -jnp.sum(p * jax.nn.log_softmax(logits), axis=-1)


def acceptance(p: jax.Array, logits: jax.Array) -> jax.Array:
    """sum min(p, q) over the last axis: how often a draft from q is accepted."""
    return jnp.sum(jnp.minimum(p, jax.nn.softmax(logits)), axis=-1)


def top_k_cross_entropy(p: jax.Array, logits: jax.Array, k: int) -> jax.Array:
    """-sum of p ln q over the k likeliest tokens of p, not renormalised (HASS)."""
    best, which = jax.lax.top_k(p, min(k, p.shape[-1]))
    return -jnp.sum(best * jnp.take_along_axis(jax.nn.log_softmax(logits), which, -1), axis=-1)


def smooth_l1(x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean over the last axis of d^2 / 2 where |d| < 1, |d| - 1/2 beyond (Girshick 2015)."""
    d = jnp.abs(x - y)
    return jnp.mean(jnp.where(d < 1, 0.5 * d * d, d - 0.5), axis=-1)


def after_start(values_BxS: jax.Array, step: int) -> jax.Array:
    """Mean over the slots that have `step` drafts behind them."""
    return jnp.mean(values_BxS[:, step:])


def survivals(rates: list[jax.Array]) -> list[jax.Array]:
    """S(k) for k = 1 .. len(rates) from acceptance rates `[B, S]` of steps 0, 1, ...: the mean over
    starts s of prod_{j < k} rates[j][:, s + j], over starts whose longest chain lies inside."""
    starts = rates[0].shape[1] - len(rates) + 1
    alive, found = 1.0, []
    for step, rate_BxS in enumerate(rates):
        alive = alive * rate_BxS[:, step : step + starts]
        found.append(jnp.mean(alive))
    return found


# ---------------------------------------------------------------------------- the losses


def distillation(
    head: Head, loss: HeadLoss, steps: list[Step], teacher_BxSxV: jax.Array, top_BxSxD: jax.Array
) -> jax.Array:
    """The supervised loss of unrolled steps; teacher and top (features) at the same slots."""
    p = kept_law(head, teacher_BxSxV)
    imitates = head.config.kind in ("eagle", "poss")
    total = jnp.zeros(())
    for j, step in enumerate(steps):
        weight = loss.decay**j
        if loss.objective == "ce":
            total += loss.law * weight * after_start(soft_cross_entropy(p, step.logits_BxSxU), j)
        if loss.objective == "tv":
            total += loss.law * weight * after_start(1 - acceptance(p, step.logits_BxSxU), j)
        if loss.top:
            term = top_k_cross_entropy(p, step.logits_BxSxU, loss.top_k)
            total += loss.top * weight * after_start(term, j)
        if loss.feature and imitates:
            term = smooth_l1(step.hidden_BxSxD, top_BxSxD)
            total += loss.feature * weight * after_start(term, j)
    if loss.objective == "throughput":
        rates = [acceptance(p, step.logits_BxSxU) for step in steps]
        scale = sum(loss.survival_weights)
        for w, s in zip(loss.survival_weights, survivals(rates), strict=True):
            total -= loss.law * w / scale * s
    return total


def unrolled(head: Head, loss: HeadLoss, batch: dict[str, jax.Array], teacher: Teacher):
    """(steps, the target's logits, its features) at the slots of a batch of `tokens` `[B, T]`,
    `last` `[B, T, D]` (the last layer's output), `fused` `[B, T, F]` (EAGLE-3) and `seed`."""
    top_BxTxD = teacher.top(batch["last"].astype(jnp.float32))
    fused = head.config.feature_layers
    features = batch["fused"].astype(jnp.float32) if fused else top_BxTxD
    if loss.noise:
        key = jax.random.key(batch["seed"])
        features += jax.random.uniform(key, features.shape, minval=-1.0) * loss.noise
    steps = unroll(head, teacher.parts, batch["tokens"], features, loss.steps, loss.detach)
    return steps, teacher.parts.logits(top_BxTxD[:, 1:]), top_BxTxD


def head_loss(head: Head, batch: dict[str, jax.Array], teacher: Teacher, loss: HeadLoss):
    """The supervised loss of a batch (see `unrolled`)."""
    steps, teacher_BxSxV, top_BxTxD = unrolled(head, loss, batch, teacher)
    return distillation(head, loss, steps, teacher_BxSxV, top_BxTxD[:, 1:])


# ---------------------------------------------------------------------------- KOALA's adversary


def scores(
    pair: dict[str, Any], loss: HeadLoss, batch: dict[str, jax.Array], teacher: Teacher
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """(the discriminator's scores of the drafts of every step, of the target, the supervised
    loss). It is conditioned on the feature that slot t starts from, f_t: with f_{t+1} it could
    compute the target's logits itself."""
    head, discriminator = pair["head"], pair["discriminator"]
    steps, teacher_BxSxV, top_BxTxD = unrolled(head, loss, batch, teacher)
    given = top_BxTxD[:, :-1]
    kept = head.config.kept
    real = teacher_BxSxV[..., np.asarray(kept)] if kept else teacher_BxSxV
    drafts = [discriminator(given, step.logits_BxSxU) for step in steps]
    supervised = distillation(head, loss, steps, teacher_BxSxV, top_BxTxD[:, 1:])
    return drafts, discriminator(given, real), supervised


def generator_loss(pair, batch, teacher: Teacher, loss: HeadLoss, adversarial: float):
    """L_G = -lambda E ln D(draft) + distillation (KOALA, Eq. 5)."""
    drafts, _, supervised = scores(pair, loss, batch, teacher)
    fooled = [after_start(jax.nn.log_sigmoid(draft), j) for j, draft in enumerate(drafts)]
    return supervised - adversarial * sum(fooled) / len(fooled)


def discriminator_loss(pair, batch, teacher: Teacher, loss: HeadLoss):
    """L_D = -E ln(1 - D(draft)) - E ln D(target) (KOALA, Eq. 6)."""
    drafts, real, _ = scores(pair, loss, batch, teacher)
    caught = [after_start(jax.nn.log_sigmoid(-draft), j) for j, draft in enumerate(drafts)]
    return -sum(caught) / len(caught) - jnp.mean(jax.nn.log_sigmoid(real))
