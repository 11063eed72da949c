"""KOALA Figure 7: layers and adversary at temperature 1, Vicuna-7B.

    python -m paper_figs.koala_figure_7

From the lengths of Table 2 and the greedy plain heads' speedups, which scale with the length. The
text prints that the adversary gains 0.08x to 0.10x, that layers help Medusa and hurt EAGLE (those
two cells are `koala_table_1`'s). Expected: the signs; the gains half as large.
"""

from __future__ import annotations

import numpy as np

from experiments.heads_fit import lengths_at_1
from paper_figs.comparison import Comparison, finish, read
from paper_figs.koala_figure_5 import by_layers
from paper_figs.koala_speedups import (
    BEYOND,
    FAMILIES,
    PLAIN_SPEEDUP,
    layer_cost,
    lengths,
    printed_range,
)
from paper_figs.style import panels, save, series

PRINTED = ("0.08", "0.10")
EFFECT = {"Medusa": "layers help", "EAGLE": "layers hurt"}  # in the text


def run() -> list[Comparison]:
    y, interval = layer_cost()
    table = Comparison(
        "koala_figure_7",
        "KOALA Figure 7: gain of the adversary at T = 1, times",
        "half a unit of the last digit",
        "lengths of Table 2, the plain heads' speedups behind the text's ranges",
        [BEYOND],
    )
    figure, axes = panels(1, 2, width=8.4, height=3.8)
    gains = {}
    rows = {r["base"]: r for r in read("koala_table_2_temperature_1_vicuna7b.csv")}
    for axis, family in zip(axes, FAMILIES, strict=True):
        base, with_adversary = (float(rows[family][k]) for k in ("base_length", "with_adversarial"))
        plain = PLAIN_SPEEDUP[family] * base / lengths()["Vicuna-7B", family]
        gains[family] = plain * (with_adversary / base - 1)
        places = np.array([0, 2, 3])  # K = 1, 2, 3; the adversary's head between
        style = series(1) | {"linestyle": "none"}
        by_layers(
            axis,
            places,
            lengths_at_1(family),
            plain,
            y,
            interval,
            **style,
            label="ours (bars: all y)",
        )
        axis.plot(1, plain + gains[family], **style)
        ends = [plain + float(end) for end in PRINTED]
        axis.fill_between([0.6, 1.4], *ends, **printed_range(PRINTED, "x"), linewidth=0)
        axis.axhline(plain, color="#888888", linewidth=0.8)
        m = family[0]
        axis.set_xticks(range(4), [m, f"{m} w/ AL", f"{m} w/ 2", f"{m} w/ 3"])
        effect = EFFECT[family]
        axis.annotate(
            f"paper: {effect}",
            (2.5, 1.063 * plain),
            ha="center",
            va="top",
            fontsize=8,
            style="italic",
        )
        axis.set(title=f"{family}, T = 1", ylim=(0.94 * plain, 1.07 * plain), xlim=(-0.5, 3.5))
    for name, printed, ours in zip(
        ("least", "largest"), PRINTED, sorted(gains.values()), strict=True
    ):
        table.add(f"{name} of two heads", "gain", printed, ours)
    axes[0].set_ylabel("speedup ratio")
    axes[1].legend(loc="lower left")
    save(figure, "koala_figure_7", "KOALA Figure 7: speedup ratios at T = 1, Vicuna-7B")
    return finish(table)


if __name__ == "__main__":
    run()
