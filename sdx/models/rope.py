"""Rotary frequencies, plain and scaled (linear, dynamic NTK, Llama 3).

Legend: B batch, T fresh tokens, E head dim.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a context longer than the pre-trained one is reached.

    linear: positions divided by `factor` (Chen et al. 2023). dynamic: the base grows with the
    sequence once it exceeds `original_positions` (NTK-aware; the frequencies of a token then depend
    on the length at which it is computed, so cached keys keep those of their own pass). llama3:
    low frequencies divided by `factor`, high ones kept, a ramp in between (Llama 3.1).
    """

    kind: Literal["linear", "dynamic", "llama3"]
    factor: float
    original_positions: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    def __post_init__(self):
        if self.factor < 1.0:
            raise ValueError(f"RoPE scaling factor {self.factor}: must be at least 1")
        if self.kind != "linear" and self.original_positions < 1:
            raise ValueError(f"{self.kind} RoPE scaling needs the pre-trained context length")


def frequencies(
    theta: float, head_dim: int, scaling: RopeScaling | None, positions_BxT: jax.Array
) -> jax.Array:
    """Radians per position, `[E/2]` or, for dynamic scaling, `[B, 1, 1, E/2]`."""
    half = head_dim // 2
    exponents = jnp.arange(half, dtype=jnp.float32) / half
    if scaling is None:
        return theta**-exponents
    if scaling.kind == "linear":
        return theta**-exponents / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(theta**-exponents, scaling)
    length_B = jnp.maximum(positions_BxT.max(-1) + 1, scaling.original_positions)
    stretch_B = scaling.factor * length_B / scaling.original_positions - (scaling.factor - 1.0)
    base_B = theta * stretch_B ** (head_dim / (head_dim - 2))
    return base_B[:, None, None, None] ** -exponents


def _llama3(plain: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Wavelengths beyond original / low_factor are stretched, below original / high_factor kept."""
    turns = scaling.original_positions * plain / (2 * math.pi)  # within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (kept + (1.0 - kept) / scaling.factor)


def scaling_from_hf(fields: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from a `config.json`: `rope_theta` and `rope_scaling`, or the newer
    `rope_parameters`. Raises ValueError for another kind (yarn, longrope) or a missing number."""
    merged = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    theta = float(fields.get("rope_theta") or merged.get("rope_theta") or 10000.0)
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "dynamic", "llama3"):
        raise ValueError(f"rope_type = {kind!r}: sdx computes default, linear, dynamic and llama3")
    positions = fields.get("max_position_embeddings", 2048)
    try:
        if kind != "llama3":
            scaling = RopeScaling(
                kind=kind, factor=float(merged["factor"]), original_positions=positions
            )
        else:
            scaling = RopeScaling(
                kind=kind,
                factor=float(merged["factor"]),
                original_positions=int(merged["original_max_position_embeddings"]),
                low_frequency_factor=float(merged["low_freq_factor"]),
                high_frequency_factor=float(merged["high_freq_factor"]),
            )
    except KeyError as missing:
        raise ValueError(f"rope_type = {kind!r} needs {missing} in config.json") from None
    return theta, scaling


def scaling_to_hf(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The fields that `scaling_from_hf` reads."""
    if scaling is None:
        return {"rope_theta": theta}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        fields |= {
            "original_max_position_embeddings": scaling.original_positions,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        }
    return {"rope_theta": theta, "rope_scaling": fields}
