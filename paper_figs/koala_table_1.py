"""KOALA Table 1: which number of layers K is best, and the chain of acceptance rates.

    python -m paper_figs.koala_table_1

Expected: one cost per layer y, from the interval all six targets admit, gives the six best K
(explained) and at temperature 1 EAGLE's K = 1 and Medusa's K >= 2 (predicted). The GPU roofline's
y is too small for Medusa and too large for EAGLE. Mean lengths are not tied by a chain of
alpha_1..alpha_3 (tree attention verifies several candidates): the chain gives a lower bound.
"""

from __future__ import annotations

import json

import numpy as np

from experiments.heads_fit import RESULT, TARGETS, lengths_at_1, lengths_by_layers, printed_best
from paper_figs.comparison import Comparison, finish, read
from paper_figs.style import panels, save, series

FAMILIES = ("Medusa", "EAGLE")


def best_layers(lengths: dict[int, float], y: float) -> int:
    """K that maximises length / (1 + y (K - 1))."""
    return max(lengths, key=lambda k: lengths[k] / (1 + y * (k - 1)))


def chain_length(rates: list[float]) -> float:
    """1 + a1 + a1 a2 + a1 a2 a3 and on, the last rate repeated: EAGLE's rates are conditional."""
    product, total = 1.0, 1.0
    for rate in rates:
        product *= rate
        total += product
    return total + product * rates[-1] / (1 - rates[-1])


def run() -> list[Comparison]:
    fit = json.loads(RESULT.read_text(encoding="utf-8"))["koala"]
    y, roofline = fit["per_layer_beyond_1"]["fitted_y"], fit["roofline_y"]
    low, high = fit["per_layer_beyond_1"]["all_six"]
    best = Comparison(
        "koala_table_1_best_layers",
        "KOALA: best number of layers K",
        "equal",
        "printed mean lengths, one cost per layer for all six targets",
        [f"All six targets admit y in ({low:.3f}, {high:.3f}); {y:.3f} is used."],
    )
    for family in FAMILIES:
        for target, lengths in lengths_by_layers(family).items():
            row = f"{family} {target}"
            printed = printed_best(target, family)
            best.add(row, "best K", printed, best_layers(lengths, y), kind="explained")
            if best_layers(lengths, roofline[family][target]) != printed:
                best.remarks.append(
                    f"{row}: the A100 roofline's y = {roofline[family][target]:.3f} gives K = "
                    f"{best_layers(lengths, roofline[family][target])} instead."
                )
    eagle, medusa = (best_layers(lengths_at_1(f), y) for f in ("EAGLE", "Medusa"))
    best.add("EAGLE Vicuna-7B, temperature 1", "best K", 1, eagle, kind="predicted")
    best.add("Medusa Vicuna-7B, temperature 1", "best K >= 2", 2, medusa, kind="predicted")
    best.remarks.append("Speedups (Figures 4-7) are only drawn in the paper, not printed.")
    draw(low, high, y)
    return finish(best, chain())


def chain() -> Comparison:
    """Mean length of EAGLE's heads from their printed n-alpha by the chain rule."""
    table = Comparison(
        "koala_table_1_chain",
        "KOALA Table 1: EAGLE lengths from the chain rule",
        "5 %",
        "printed alpha_1..alpha_3 of the same head",
        [
            "The chain alone gives the length of a single branch; EAGLE verifies a tree of "
            "26 nodes, whose further candidates make the rest."
        ],
    )
    cause = "tree verification: the chain rule sees one branch"
    for r in read("koala_table_1_greedy.csv"):
        if r["head"].startswith("EAGLE"):
            ours = chain_length([float(r[f"alpha{k}"]) for k in (1, 2, 3)])
            row = f"{r['target']} {r['head']}"
            lower = ours < float(r["mean_acceptance_length"])
            table.add(
                row,
                "mean length",
                r["mean_acceptance_length"],
                ours,
                relative=0.05,
                cause=cause if lower else "",
            )
    return table


def draw(low: float, high: float, y: float) -> None:
    costs = np.linspace(0, 0.12, 121)
    figure, axes = panels(2, 3, width=9.0, height=5.2, sharex=True, sharey=True)
    for row, family in zip(axes, FAMILIES, strict=True):
        for axis, target in zip(row, TARGETS, strict=True):
            lengths = lengths_by_layers(family)[target]
            for i, (k, length) in enumerate(lengths.items()):
                relative = length / lengths[1] / (1 + costs * (k - 1))
                axis.plot(costs, relative, label=f"K = {k}", **series(i, marker=False))
            axis.axvspan(low, high, color="#dddddd", zorder=0, label="y of all six best K")
            axis.axvline(y, color="#888888", linewidth=0.8, label=f"y = {y:.3f}")
            axis.set_title(f"{family}, {target}: paper's best K = {printed_best(target, family)}")
            axis.set_ylim(0.92, 1.17)
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5)
    axes[1, 1].set_xlabel("cost of one more layer y, in rounds")
    figure.supylabel("speed relative to K = 1", fontsize=9)
    save(figure, "koala_table_1", "KOALA Table 1: which number of layers K is fastest (ours)")


if __name__ == "__main__":
    run()
