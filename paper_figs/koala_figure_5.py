"""KOALA Figure 5: speedup against the number of layers, greedy.

    python -m paper_figs.koala_figure_5

Speed over the plain head, the band being all y that give every printed winner (`koala_table_1`
holds the winners' cells). The text prints two gains: 0.21x (Medusa, 33B) and 0.31x (EAGLE, 33B).
Expected: the peak of every curve at K = 2, of Medusa-33B at 3; the printed gains not reached.
"""

from __future__ import annotations

import numpy as np

from experiments.heads_fit import lengths_by_layers, printed_best
from paper_figs.comparison import Comparison, finish
from paper_figs.koala_speedups import (
    BEYOND,
    FAMILIES,
    PLAIN_SPEEDUP,
    fit,
    layer_cost,
    relative,
)
from paper_figs.style import PAPER, panels, save, series

PRINTED = {"Medusa": "0.21", "EAGLE": "0.31"}  # Vicuna-33B, times


def speeds(of_layers: dict[int, float], y: float) -> np.ndarray:
    """Speed relative to one layer, K = 1, 2, 3."""
    return np.array([relative(v, of_layers[1], k, y) for k, v in of_layers.items()])


def by_layers(axis, places, of_layers, plain, y, interval, **style) -> None:
    """Speedup ratios at y, the bars reaching to the ends of the interval of y."""
    at = plain * speeds(of_layers, y)
    ends = np.array([plain * speeds(of_layers, end) for end in interval])
    reach = (at - ends.min(axis=0), ends.max(axis=0) - at)
    axis.errorbar(places, at, reach, capsize=3, linewidth=1, **style)


def run() -> list[Comparison]:
    y, interval = layer_cost()
    table = Comparison(
        "koala_figure_5",
        "KOALA Figure 5: gain of more layers in speed (33B), times",
        "half a unit of the last digit",
        "lengths of Table 1, one cost per layer, the plain heads' speedups behind the text",
        [
            BEYOND,
            f"For any y in ({interval[0]:.3f}, {interval[1]:.3f}) every printed winner comes out.",
            *(
                f"The roofline gives y {min(v.values()):.3f} to {max(v.values()):.3f} for {f}: "
                "the cost is fitted, not derived."
                for f, v in fit()["roofline_y"].items()
            ),
        ],
    )
    figure, axes = panels(1, 2, width=8.4, height=3.8)
    for axis, family in zip(axes, FAMILIES, strict=True):
        of, plain = lengths_by_layers(family), PLAIN_SPEEDUP[family]
        gain = plain * (speeds(of["Vicuna-33B"], y).max() - 1)
        table.add(f"{family} Vicuna-33B", "gain of the best K", PRINTED[family], gain)
        draw(axis, family, of, y, interval)
    axes[0].set_ylabel("speedup ratio")
    words = "ours, y fitted; bars: every y that gives the printed best K"
    handles, labels = axes[0].get_legend_handles_labels()
    labels[labels.index("ours")] = words
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    title = "KOALA Figure 5: speedup ratios with K layers (relative to the text's plain heads)"
    save(figure, "koala_figure_5", title)
    return finish(table)


def draw(axis, family, of, y, interval) -> None:
    """A group of three heads a target, the printed best head's place starred."""
    plain, names, places = PLAIN_SPEEDUP[family], [], []
    for i, (target, of_layers) in enumerate(of.items()):
        at = 4 * i + np.arange(3)
        by_layers(
            axis, at, of_layers, plain, y, interval, **series(1), label="ours" if not i else ""
        )
        best = printed_best(target, family)
        top = 1.155 * plain
        star = dict(marker="*", markersize=9, color="white", mec="#111111", linestyle="none")
        axis.plot(at[best - 1], top, **star, label="paper, best K" if not i else "")
        axis.text(at[1], 0.945 * plain, target, ha="center", fontsize=8)
        names += [f"{family[0]} w/ {k}" for k in of_layers]
        places += list(at)
        if target == "Vicuna-33B":
            printed = plain + float(PRINTED[family])
            axis.plot(at[best - 1], printed, **PAPER | {"label": "paper, 33B (text's gain)"})
    axis.axhline(plain, color="#888888", linewidth=0.8)
    axis.set_xticks(places, names, fontsize=7, rotation=40)
    axis.set(title=f"{family} (plain: {plain:.2f}x)", ylim=(0.94 * plain, 1.17 * plain))
    axis.grid(False, axis="x")


if __name__ == "__main__":
    run()
