"""KOALA Figure 5: speedup against the number of layers, greedy.

    python -m paper_figs.koala_figure_5

Speed over the plain head, the band being all y that give every printed winner (`koala_table_1`
holds the winners' cells). The text prints two gains: 0.21x (Medusa, 33B) and 0.31x (EAGLE, 33B).
Expected: the peak of every curve at K = 2, of Medusa-33B at 3; the printed gains not reached.
"""

from __future__ import annotations

import numpy as np

from experiments.heads_fit import TARGETS, lengths_by_layers
from paper_figs.comparison import Comparison, finish
from paper_figs.koala_speedups import (
    BEYOND,
    FAMILIES,
    PLAIN_SPEEDUP,
    fit,
    layer_cost,
    relative,
)
from paper_figs.style import panels, save, series

PRINTED = {"Medusa": "0.21", "EAGLE": "0.31"}  # Vicuna-33B, times


def speeds(of_layers: dict[int, float], y: float) -> np.ndarray:
    """Speed relative to one layer, K = 1, 2, 3."""
    return np.array([relative(v, of_layers[1], k, y) for k, v in of_layers.items()])


def band(axis, of_layers, y, interval, i, label) -> None:
    """Curve at y, shaded between the ends of the interval of y."""
    k = list(of_layers)
    ends = [speeds(of_layers, end) for end in interval]
    style = series(i)
    axis.fill_between(k, *ends, color=style["color"], alpha=0.12, linewidth=0)
    axis.plot(k, speeds(of_layers, y), **style, label=label)
    axis.set_xticks(k)


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
    figure, axes = panels(1, 2, width=7.2, height=3.2, sharey=True)
    for axis, family in zip(axes, FAMILIES, strict=True):
        of = lengths_by_layers(family)
        for i, target in enumerate(TARGETS):
            band(axis, of[target], y, interval, i, target)
        gain = PLAIN_SPEEDUP[family] * (speeds(of["Vicuna-33B"], y).max() - 1)
        table.add(f"{family} Vicuna-33B", "gain of the best K", PRINTED[family], gain)
        axis.set(title=family, xlabel="layers K")
        axis.legend(loc="upper left" if family == "Medusa" else "lower left")
    axes[0].set_ylabel("speed over the one-layer head")
    save(figure, "koala_figure_5")
    return finish(table)


if __name__ == "__main__":
    run()
