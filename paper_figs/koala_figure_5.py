"""KOALA Figures 4 to 7: which number of layers is fastest.

    python -m paper_figs.koala_figure_5

The figures print no numbers but the winners. Speedup is taken proportional to length/(1 + y K), y
the cost of one layer per round against the rest of the round: one y for all six heads, the band
being all y that give every printed winner (`koala_table_1` holds those cells). Expected: the peak
of every greedy curve at K = 2, of Medusa-33B at 3, of EAGLE at T = 1 at 1.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from experiments.heads_fit import TARGETS, lengths_at_1, lengths_by_layers
from paper_figs.comparison import Comparison, finish, read
from paper_figs.style import panels, save, series

RESULT = Path(__file__).parent.parent / "experiments" / "results" / "heads_fit.json"


def speeds(lengths, y):
    """K -> speedup relative to one layer."""
    relative = {k: v / (1 + y * k) for k, v in lengths.items()}
    return {k: v / relative[1] for k, v in relative.items()}


def run() -> list[Comparison]:
    koala = json.loads(RESULT.read_text(encoding="utf-8"))["koala"]
    part, rooflines = koala["per_layer_of_K"], koala["roofline_y"]
    y, (low, high) = part["fitted_y"], part["all_six"]
    drawn = Comparison(
        "koala_figure_5",
        "KOALA Figures 4-7: speedup against layers, drawn",
        "",
        "Table 1 and 2 lengths, one y for all heads",
        [
            f"Speedup relative to one layer, length/(1 + y K), for y in ({low:.3f}, {high:.3f}): "
            "every printed winner, the two at T = 1 included, for the drawn middle.",
            *(
                f"The roofline gives y {min(v.values()):.3f} to {max(v.values()):.3f} for {f}: "
                "explained by a fitted cost, not derived."
                for f, v in rooflines.items()
            ),
        ],
    )
    draw(y, (low, high))
    draw_adversary()
    return finish(drawn)


def draw(y, interval) -> None:
    """Figures 5 and 7: relative speedup against K, the band over all admissible y."""
    figure, axes = panels(1, 3, height=3.0, sharey=True)
    greedy = {f: lengths_by_layers(f) for f in ("Medusa", "EAGLE")}
    for axis, family in zip(axes, ("Medusa", "EAGLE"), strict=False):
        for i, target in enumerate(TARGETS):
            band(axis, greedy[family][target], y, interval, i, target)
        axis.set(title=f"{family}, greedy", xlabel="layers K")
    for i, family in enumerate(("Medusa", "EAGLE")):
        band(axes[2], lengths_at_1(family), y, interval, i, family)
    axes[2].set(title="Vicuna-7B, T = 1", xlabel="layers K")
    axes[0].set_ylabel("speedup / speedup of one layer")
    for axis in axes:
        axis.set_xticks([1, 2, 3])
        axis.legend()
    save(figure, "koala_figure_5")


def band(axis, lengths, y, interval, i, label) -> None:
    k = list(lengths)
    ends = np.array([list(speeds(lengths, end).values()) for end in interval])
    style = series(i)
    axis.fill_between(k, ends.min(axis=0), ends.max(axis=0), color=style["color"], alpha=0.12)
    axis.plot(k, list(speeds(lengths, y).values()), **style, label=label)


def draw_adversary() -> None:
    """Figures 4 and 6: adversarial training costs nothing at decoding, so speedups scale with
    lengths."""
    figure, axes = panels(1, 2, height=2.8, sharey=True)
    table = {
        (r["target"], r["head"]): float(r["mean_acceptance_length"])
        for r in read("koala_table_1_greedy.csv")
    }
    places = np.arange(len(TARGETS))
    for axis, family in zip(axes, ("Medusa", "EAGLE"), strict=True):
        for i, (head, shade) in enumerate(
            (("", "#dddddd"), ("+AL", "#888888"), (" KOALA", "#222222"))
        ):
            values = [table[t, family + head] for t in TARGETS]
            axis.bar(
                places + 0.27 * (i - 1),
                values,
                0.25,
                color=shade,
                edgecolor="#111111",
                label=(family + head),
            )
        axis.set(xticks=places, title=family)
        axis.set_xticklabels(TARGETS)
        axis.set_ylim(0, 6.2)
        axis.legend(loc="upper left", ncols=3, fontsize=7)
    axes[0].set_ylabel("mean acceptance length (printed)")
    save(figure, "koala_figure_6")


if __name__ == "__main__":
    run()
