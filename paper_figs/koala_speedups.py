"""Speedups of KOALA's heads from their lengths: what Figures 4 to 7 share.

The figures draw speedups and print none; the text prints ranges of their gains, in factors and in
percent, whose quotients are the plain heads' speedups. Ours: speed proportional to
length / (1 + y K), one y for all heads (experiments/heads_fit.py).
"""

from __future__ import annotations

import functools
import json

from experiments.heads_fit import RESULT
from paper_figs.comparison import read
from paper_figs.style import OURS_BAR

FAMILIES = ("Medusa", "EAGLE")
# 0.24 / 10.57 % and 0.29 / 12.83 %; 0.35 / 11.55 % and 0.41 / 14.09 %: their means.
PLAIN_SPEEDUP = {"Medusa": 2.266, "EAGLE": 2.970}
GAINS = {"Medusa": ("10.57", "12.83"), "EAGLE": ("11.55", "14.09")}  # of KOALA, percent
BEYOND = (
    "The printed gains in speed exceed the gains in mean length (but for Medusa on 33B), which no "
    "cost of a layer, however small, can give: lengths alone do not explain them."
)


@functools.cache
def fit() -> dict:
    return json.loads(RESULT.read_text(encoding="utf-8"))["koala"]


def layer_cost() -> tuple[float, tuple[float, float]]:
    """y, and the interval of y that gives all six printed winners."""
    part = fit()["per_layer_of_K"]
    return part["fitted_y"], tuple(part["all_six"])


@functools.cache
def lengths() -> dict[tuple[str, str], float]:
    """(target, head) -> printed mean length, T = 0."""
    rows = read("koala_table_1_greedy.csv")
    return {(r["target"], r["head"]): float(r["mean_acceptance_length"]) for r in rows}


def relative(length: float, plain: float, layers: int, y: float) -> float:
    """Speed over the plain one-layer head's."""
    return length / plain * (1 + y) / (1 + y * layers)


def printed_range(ends, unit: str) -> dict:
    """Keywords of the band between the ends of a range that the text prints."""
    low, high = ends
    return dict(color="#dddddd", label=f"paper, text: +{low}{unit} to +{high}{unit}")


def rises(axis, places, gains, family: str, width: float = 0.6, **style) -> None:
    """Bars that rise from the plain head's speedup by `gains` (factors)."""
    plain = PLAIN_SPEEDUP[family]
    axis.bar(places, gains, width, bottom=plain, **OURS_BAR | style)


def plain_level(axis, level: float, family: str) -> None:
    """The plain head's speedup as the text's ranges give it, for all targets."""
    words = f"plain {family} (from the text): {level:.2f}x"
    axis.axhline(level, color="#111111", linewidth=1.2, label=words)
