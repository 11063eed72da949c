"""Design variables: bounded reals for the ascent, a lattice for the answer.

The ascent works on the unit cube (z = 0 is `low`, z = 1 is `high`, linear or logarithmic between).
Only this file rounds, and every rounded point is re-evaluated exactly by its caller.
"""

from __future__ import annotations

import itertools
from typing import Literal

import jax.numpy as jnp
import numpy as np

from sdx.records import record, static


@record
class Variable:
    """One design variable in [low, high] on the lattice low + step * k.

    `gain`, `seconds`, `price`: the sign of the dependence of tokens, of time and of running cost
    on it (+1, -1, 0 for none), used by box bounds; None: not monotone, no bound.
    """

    name: str = static()
    low: float = static()
    high: float = static()
    step: float = static(default=1.0)
    scale: Literal["linear", "log"] = static(default="log")
    gain: int | None = static(default=None)
    seconds: int | None = static(default=None)
    price: int | None = static(default=0)

    def __post_init__(self):
        if not self.low <= self.high or self.step <= 0 or (self.scale == "log" and self.low <= 0):
            raise ValueError(
                f"variable {self.name!r}: [{self.low:g}, {self.high:g}] step {self.step:g} is no "
                f"{self.scale} range; need low <= high, step > 0, low > 0 on a log scale"
            )

    @property
    def count(self) -> int:
        """Lattice points."""
        return int(np.floor((self.high - self.low) / self.step + 1e-9)) + 1

    def grid(self) -> np.ndarray:
        return self.low + self.step * np.arange(self.count)


Space = tuple[Variable, ...]


def to_values(space: Space, z):
    """Unit cube -> values; z [..., n]."""
    values = []
    for k, v in enumerate(space):
        if v.scale == "log":
            values.append(v.low * jnp.exp(z[..., k] * np.log(v.high / v.low)))
        else:
            values.append(v.low + z[..., k] * (v.high - v.low))
    return jnp.stack(values, axis=-1) if values else jnp.zeros((*z.shape[:-1], 0))


def to_unit(space: Space, values):
    """Values [..., n] -> unit cube; the inverse of `to_values`."""
    z = []
    for k, v in enumerate(space):
        if v.high == v.low:
            z.append(jnp.zeros_like(values[..., k]))
        elif v.scale == "log":
            z.append(jnp.log(values[..., k] / v.low) / np.log(v.high / v.low))
        else:
            z.append((values[..., k] - v.low) / (v.high - v.low))
    return jnp.stack(z, axis=-1) if z else values


def starts(space: Space, count: int) -> np.ndarray:
    """[count, n] well spread points of the unit cube: the centre, then a rank-1 lattice (Kronecker
    sequence of the generalised golden ratio), deterministic."""
    n = max(len(space), 1)
    golden = 2.0
    for _ in range(60):
        golden = (1.0 + golden) ** (1.0 / (n + 1))
    steps = golden ** -np.arange(1.0, n + 1.0)
    z = 0.08 + 0.84 * np.mod(0.5 + np.arange(count)[:, None] * steps, 1.0)
    return z[:, : len(space)]


def round_to_lattice(space: Space, values: np.ndarray) -> np.ndarray:
    """Nearest lattice indices [..., n] (ints, inside the range) of values [..., n]."""
    index = [
        np.clip(np.rint((values[..., k] - v.low) / v.step), 0, v.count - 1)
        for k, v in enumerate(space)
    ]
    return np.stack(index, axis=-1).astype(int) if index else values.astype(int)


def from_lattice(space: Space, index: np.ndarray) -> np.ndarray:
    """Values of lattice indices [..., n]."""
    low = np.array([v.low for v in space])
    step = np.array([v.step for v in space])
    return low + step * index


def neighbourhood(space: Space, index: np.ndarray, radius: int) -> np.ndarray:
    """All lattice indices within `radius` steps (maximum norm) of `index` [n], in range, [m, n]."""
    axes = [
        np.arange(max(0, i - radius), min(v.count - 1, i + radius) + 1)
        for i, v in zip(index, space, strict=True)
    ]
    if not axes:
        return np.zeros((1, 0), int)
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))


def ratio_moves(space: Space, index: np.ndarray, reach: int = 4) -> np.ndarray:
    """Lattice indices that move one logarithmic variable by up to `reach` steps and another in
    proportion, rounded both ways [m, n]: along constraints on their ratio (width to layers) the
    plain neighbourhood is a dead end."""
    logs = [k for k, v in enumerate(space) if v.scale == "log" and v.count > 1]
    values = from_lattice(space, index)
    moves = []
    for i, j in itertools.permutations(logs, 2):
        for step in range(-reach, reach + 1):
            new = index.copy()
            new[i] += step
            if step == 0 or not 0 <= new[i] < space[i].count:
                continue
            scaled = values[j] * (space[i].low + space[i].step * new[i]) / values[i]
            place = (scaled - space[j].low) / space[j].step
            for rounded in (np.floor(place), np.ceil(place)):
                if 0 <= rounded < space[j].count:
                    moves.append([*new[:j], int(rounded), *new[j + 1 :]])
    return np.array(moves, int).reshape(len(moves), len(space))


def lattice_size(space: Space) -> int:
    return int(np.prod([v.count for v in space], dtype=float)) if space else 1


def lattice(space: Space) -> np.ndarray:
    """Every lattice point's values, [size, n]."""
    if not space:
        return np.zeros((1, 0))
    return np.stack(np.meshgrid(*(v.grid() for v in space), indexing="ij"), -1).reshape(
        -1, len(space)
    )
