"""Verification without materialised probabilities: laws of rows, and the streamed surplus.

    logits --law--> log-normaliser, threshold, argmax of rows      one pass (+ 4..16 if filtered)
    r = (w p - c q)+ --surplus--> S, and a Gumbel-argmax of ln r   one pass over one row

These two serve chains, trees with and without replacement, candidates chosen by value, block
verification and greedy decoding (`rules.py`).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from sdx.kernels.dispatch import dispatch
from sdx.kernels.verify import pallas_tpu, pallas_triton, reference
from sdx.kernels.verify.laws import BINS, Law, Request, Surplus

MODULES = {"reference": reference, "triton": pallas_triton, "tpu": pallas_tpu}
DTYPES = ("bfloat16", "float16", "float32")


def _table(name):
    return {key: getattr(module, name) for key, module in MODULES.items()}


STATISTICS, TAILS, SURPLUS = _table("statistics"), _table("tails"), _table("surplus")


def law(
    logits_RxV,
    temperature=1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    implementation: str | None = None,
    interpret: bool | None = None,
    config=None,
) -> Law:
    """The sampling law of every row: temperature, then top-k, then top-p on what is left.

    A filter is a threshold on the logit; equal logits stay together. Top-k keeps what is at least
    the k-th largest, top-p a token if the mass strictly above it is below `top_p`. The thresholds
    are exact and found by a 16-way search over the ordered bit patterns: 4 passes for bfloat16, 5
    for float16, 8 for float32, and as many again if both filters are on.

    Args:
      logits_RxV: bfloat16, float16 or float32, straight from the head; -inf is allowed, NaN not.
      temperature: positive, a number or one per row.
      top_k: 0 switches it off. top_p: 1 switches it off.
      implementation, interpret, config: as in `tree_attention`.

    Raises:
      ValueError: no dtype of these, or filters out of range.
    """
    r, v = logits_RxV.shape
    if logits_RxV.dtype.name not in DTYPES:
        raise ValueError(f"logits are {logits_RxV.dtype.name}: give one of {', '.join(DTYPES)}")
    if top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"top_k {top_k}, top_p {top_p}: need top_k >= 0 and 0 < top_p <= 1")
    options = dict(interpret=interpret, config=config)
    inverse = jnp.broadcast_to(1 / jnp.asarray(temperature, jnp.float32), (r,))
    found = dispatch("verify", STATISTICS, implementation, logits_RxV, inverse, **options)
    threshold, total = jnp.full((r,), -jnp.inf), found.total_R

    def search(goal_R, by_mass):
        # Searches above the threshold found so far: p follows k.
        def reach(cuts_RxJ):
            cuts_RxJ = jnp.maximum(cuts_RxJ, threshold[:, None])
            counts, masses = dispatch(
                "verify", TAILS, implementation, logits_RxV, found.top_R, inverse, cuts_RxJ,
                **options,
            )  # fmt: skip
            return masses if by_mass else counts, masses

        return largest_cut(reach, goal_R, DIGITS[logits_RxV.dtype.name])

    if 0 < top_k < v:
        threshold, total = search(jnp.full((r,), float(top_k)), by_mass=False)
    if top_p < 1:
        cut, total = search(top_p * total, by_mass=True)
        threshold = jnp.maximum(cut, threshold)
    log_normaliser = found.top_R * inverse + jnp.log(total)
    return Law(logits_RxV, inverse, log_normaliser, threshold, found.best_R)


def known_law(log_probabilities_RxV) -> Law:
    """The law of rows that are log-probabilities already (-inf allowed, any total mass)."""
    r = log_probabilities_RxV.shape[0]
    full = lambda value: jnp.full((r,), value, jnp.float32)  # noqa: E731
    return Law(log_probabilities_RxV, full(1), full(0), full(-jnp.inf), jnp.zeros((r,), jnp.int32))


def surplus(
    target: Law,
    draft: Law | None,
    request: Request,
    *,
    seeds_Nx2=None,
    noise_NxV=None,
    implementation: str | None = None,
    interpret: bool | None = None,
    config=None,
) -> Surplus:
    """Sums of r = (weight p - c q)+ and, with a source of noise, a draw from it; one pass a row.

    A Gumbel-argmax draws token x with probability r(x) / S. The noise is made in the kernel from
    `seeds_Nx2` (uint32; the same in every implementation) or given as `noise_NxV` float32; without
    either only the sums are computed. draft None: q = 0.
    """
    if seeds_Nx2 is not None and noise_NxV is not None:
        raise ValueError("both seeds and noise given: a draw has one source of randomness")
    return dispatch(
        "verify", SURPLUS, implementation, target, draft, request, seeds_Nx2, noise_NxV,
        interpret=interpret, config=config,
    )  # fmt: skip


# ---------------------------------------------------------------------------- thresholds

# 4-bit digits of the float32 bit pattern that can differ: bfloat16 fills the upper 16 bits,
# float16 (also its subnormals, which are normal in float32) the upper 19.
DIGITS = {"bfloat16": 4, "float16": 5, "float32": 8}
_SIGN = np.uint32(1 << 31)


def largest_cut(reach, goal_R, digits: int):
    """The largest float32 t with reach(t) >= goal, and the mass at or above it.

    `reach(cuts_RxJ)` gives two non-increasing functions of the cut: the one compared with the goal
    and the mass. Floats are ordered as unsigned integers, sixteen candidates a pass, most
    significant digit first. Where even the lowest cut falls short (rounding), everything stays.
    """
    low = jnp.zeros(goal_R.shape, jnp.uint32)
    mass = None
    for digit in range(digits):
        shift = np.uint32(28 - 4 * digit)
        candidates = low[:, None] + (jnp.arange(BINS, dtype=jnp.uint32) << shift)
        value, masses = reach(_float_of_order(candidates))
        enough = jnp.where(value >= goal_R[:, None], jnp.arange(BINS), 0)
        pick = enough.max(1)
        low = low + (pick.astype(jnp.uint32) << shift)
        mass = jnp.take_along_axis(masses, pick[:, None], 1)[:, 0]
    return _float_of_order(low), mass


def _float_of_order(order):
    """The float32 whose place in the order of all floats is `order`, clamped to [-inf, inf]."""
    order = jnp.clip(order, np.uint32(0x007FFFFF), np.uint32(0xFF800000))
    bits = jnp.where(order >= _SIGN, order ^ _SIGN, ~order)
    return lax.bitcast_convert_type(bits, jnp.float32)


__all__ = ["Law", "Request", "Surplus", "known_law", "largest_cut", "law", "surplus"]
