"""Losses of a language model and of a draft that imitates one. All in nats per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sdx.models.llama import Llama


def cross_entropy(logits_NxV: jax.Array, targets_N: jax.Array) -> jax.Array:
    """Mean of -ln q(target)."""
    chosen_N = jnp.take_along_axis(logits_NxV, targets_N[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits_NxV, axis=1) - chosen_N)


def forward_kl(teacher_NxV: jax.Array, student_NxV: jax.Array) -> jax.Array:
    """Mean of KL(p || q), p the teacher's law, q the student's, from their logits."""
    log_p, log_q = jax.nn.log_softmax(teacher_NxV), jax.nn.log_softmax(student_NxV)
    return jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=1))


def language_model_loss(model: Llama, window_BxT: jax.Array) -> jax.Array:
    """Cross-entropy of a window's tokens, each given those before it. window: `[B, T + 1]`."""
    hidden = model.features(window_BxT[:, :-1])
    return cross_entropy(
        model.logits(hidden.reshape(-1, hidden.shape[-1])), window_BxT[:, 1:].reshape(-1)
    )


def distillation_loss(
    student: Llama, window_BxT: jax.Array, teacher: Llama, share: float = 0.8
) -> jax.Array:
    """share * KL(teacher || student) + (1 - share) * cross-entropy of the text."""
    flat = [m.features(window_BxT[:, :-1]) for m in (teacher, student)]
    p, q = (
        m.logits(h.reshape(-1, h.shape[-1])) for m, h in zip((teacher, student), flat, strict=True)
    )
    text = cross_entropy(q, window_BxT[:, 1:].reshape(-1))
    return share * forward_kl(jax.lax.stop_gradient(p), q) + (1 - share) * text
