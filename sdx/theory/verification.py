"""How long to verify: AAT(x) over a roofline, per context length (effective performance).

    P_eff(x) = AAT(x) / (T_v(x) + T_d(x))        FPGA paper, eq. 7; x counts the root

T_v, T_d: seconds of the target's pass over x tokens and of drafting them. The length is an integer,
so the optimum is found by looking at all of them; the ridge x_R is where verification leaves the
memory roof. Three regimes (paper, section III.B):

    compute  x_R <= 1: T_v(x) = x T_v(1), no speedup can exceed AAT(x)/x < 1: do not speculate
    memory   x_R beyond every length: longer is better as long as drafting stays cheap
    mixed    in between: the optimum sits near the ridge
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from sdx.records import Number, record, static
from sdx.theory.hardware import step_seconds
from sdx.theory.numerics import float64

Regime = Literal["compute", "memory", "mixed"]


@record
class TwoLineRoofline:
    """An accelerator that the FPGA paper describes by its processing elements and its bandwidth.

    verify = max(memory, x (kappa_token + kappa_context context) / elements), memory = (weight_bytes
    + context_bytes context) / bandwidth; draft = draft_ratio (weight_bytes + draft_context_bytes
    context) / bandwidth * x^(draft_exponent - 1). Seconds; context in tokens; kappa in
    element-seconds. Weights count what the bandwidth actually delivers (efficiency included).
    """

    weight_bytes: Number
    context_bytes: Number
    kappa_token: Number
    kappa_context: Number
    draft_ratio: Number
    draft_exponent: Number
    draft_context_bytes: Number

    def memory_seconds(self, context, bandwidth):
        return (self.weight_bytes + self.context_bytes * context) / bandwidth

    def compute_seconds(self, x, context, elements):
        return x * (self.kappa_token + self.kappa_context * context) / elements

    @float64
    def verify_seconds(self, x, context, elements, bandwidth):
        """Seconds of the target's pass over x tokens; arrays broadcast."""
        memory = self.memory_seconds(context, bandwidth)
        return jnp.maximum(memory, self.compute_seconds(x, context, elements))

    @float64
    def draft_seconds(self, x, context, bandwidth):
        """Seconds of drafting x - 1 tokens, 0 for x = 1."""
        one = self.draft_ratio * (self.weight_bytes + self.draft_context_bytes * context)
        return jnp.where(x > 1, one / bandwidth * x ** (self.draft_exponent - 1.0), 0.0)


@record
class VerificationChoice:
    """The best verification length at one workload. `length` counts the root (1: do not speculate);
    `ridge`: x_R, where T_v starts to grow; `regime`, `verdict` are text."""

    length: int = static()
    tokens_per_second: Number
    speedup: Number
    ridge: Number
    regime: Regime = static()
    verdict: str = static()


@float64
def effective_performance(law, x, verify_seconds, draft_seconds):
    """Tokens per second AAT(x) / (T_v + T_d) of verification length x (FPGA paper, eq. 7).

    law: an AAT law (theory.trees). x, verify_seconds, draft_seconds broadcast. Differentiable.
    """
    x = jnp.asarray(x, jnp.float64)
    return law.aat(x) / (jnp.asarray(verify_seconds) + jnp.asarray(draft_seconds))


def optimal_verification_length(law, verify_seconds, draft_seconds) -> VerificationChoice:
    """The best of the lengths 1..X by exhaustion, with regime and verdict.

    verify_seconds, draft_seconds [X]: entry i belongs to length i + 1 (concrete numbers);
    draft_seconds[0] belongs to autoregression and is not charged.
    """
    verify, draft = (np.asarray(v, np.float64) for v in (verify_seconds, draft_seconds))
    if verify.ndim != 1 or verify.shape != draft.shape or not len(verify):
        raise ValueError(
            f"verify_seconds has shape {verify.shape}, draft_seconds {draft.shape}: both need one "
            f"entry per length 1..X"
        )
    draft = np.concatenate([[0.0], draft[1:]])
    x = np.arange(1.0, len(verify) + 1.0)
    speed = np.asarray(effective_performance(law, x, verify, draft))
    best = int(speed.argmax())
    # Exact rooflines leave the memory roof at x_R; a smooth or measured one passes 1 % there.
    above = verify > 1.01 * verify[0]
    slope = verify[-1] / x[-1]
    ridge = float(verify[0] / slope) if above.any() else float("inf")
    regime: Regime = "memory" if not above.any() else "compute" if ridge <= 1.01 else "mixed"
    return VerificationChoice(
        length=best + 1,
        tokens_per_second=float(speed[best]),
        speedup=float(speed[best] / speed[0]),
        ridge=ridge,
        regime=regime,
        verdict="speculate" if best > 0 else "do not speculate",
    )


def verification_schedule(
    law, target, hardware, contexts, max_length: int = 64, draft_seconds=None, batch=1.0
) -> dict[int, VerificationChoice]:
    """Best verification length per context length: the paper's dynamic solution.

    target: Architecture (theory.transformers); hardware: Hardware or StepTable. draft_seconds:
    function (x [X], context) -> seconds [X]; None charges no drafting. Returns context -> choice.
    """
    lengths = jnp.arange(1.0, max_length + 1.0)
    choices = {}
    for context in contexts:
        with jax.enable_x64(True):
            verify = jax.vmap(
                lambda x, context=context: step_seconds(
                    target, hardware, batch, x, float(context), ancestors=None
                )
            )(lengths.astype(jnp.float64))
        draft = np.zeros(max_length) if draft_seconds is None else draft_seconds(lengths, context)
        choices[context] = optimal_verification_length(law, verify, draft)
    return choices
