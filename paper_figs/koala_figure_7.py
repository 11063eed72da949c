"""KOALA Figure 7: layers and adversary at temperature 1, Vicuna-7B.

    python -m paper_figs.koala_figure_7

From the lengths of Table 2 and the greedy plain heads' speedups, which scale with the length. The
text prints that the adversary gains 0.08x to 0.10x, that layers help Medusa and hurt EAGLE (those
two cells are `koala_table_1`'s). Expected: the signs; the gains half as large.
"""

from __future__ import annotations

from experiments.heads_fit import lengths_at_1
from paper_figs.comparison import Comparison, finish, read
from paper_figs.koala_figure_5 import band
from paper_figs.koala_speedups import BEYOND, FAMILIES, PLAIN_SPEEDUP, layer_cost, lengths
from paper_figs.style import panels, save

PRINTED = ("0.08", "0.10")


def run() -> list[Comparison]:
    y, interval = layer_cost()
    table = Comparison(
        "koala_figure_7",
        "KOALA Figure 7: gain of the adversary at T = 1, times",
        "half a unit of the last digit",
        "lengths of Table 2, the plain heads' speedups behind the text's ranges",
        [BEYOND],
    )
    figure, axes = panels(1, 2, width=7.2, height=3.2)
    gains = {}
    rows = {r["base"]: r for r in read("koala_table_2_temperature_1_vicuna7b.csv")}
    for i, family in enumerate(FAMILIES):
        band(axes[0], lengths_at_1(family), y, interval, i, family)
        base, with_adversary = (float(rows[family][k]) for k in ("base_length", "with_adversarial"))
        plain = PLAIN_SPEEDUP[family] * base / lengths()["Vicuna-7B", family]
        gains[family] = plain * (with_adversary / base - 1)
    for name, printed, ours in zip(
        ("least", "largest"), PRINTED, sorted(gains.values()), strict=True
    ):
        table.add(f"{name} of two heads", "gain", printed, ours)
    axes[0].set(xlabel="layers K", ylabel="speed over the one-layer head", title="layers, T = 1")
    axes[0].axhline(1, color="#888888", linewidth=0.8)
    axes[0].legend(loc="lower left")
    axes[1].axhspan(*map(float, PRINTED), color="#dddddd", label="paper, range in the text")
    axes[1].bar(
        list(gains), list(gains.values()), 0.5, color="#5b7db5", edgecolor="#111111", label="ours"
    )
    axes[1].set(ylabel="gain in speedup", title="adversary, T = 1", ylim=(0, 0.14))
    axes[1].legend(loc="upper left")
    save(figure, "koala_figure_7")
    return finish(table)


if __name__ == "__main__":
    run()
