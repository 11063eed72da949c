"""KOALA Table 2: lengths at temperature 1 (Vicuna-7B).

    python -m paper_figs.koala_table_2

What another layer or the adversary adds to the length at T = 1, from what it adds at T = 0: the
gain over the base head scales with (base length - 1). Expected: all six within 4 %.
"""

from __future__ import annotations

from paper_figs.comparison import Comparison, finish, read
from paper_figs.style import pairs_of_bars, panels, save

COLUMNS = {"with_adversarial": "+AL", "with_2_layers": " x2", "with_3_layers": " x3"}


def run() -> list[Comparison]:
    table = Comparison(
        "koala_table_2",
        "KOALA Table 2: lengths at temperature 1",
        "4 %",
        "Table 1 (T = 0) and the base length at T = 1",
        ["EAGLE gains less from layers at T = 1 than at T = 0, Medusa as much."],
    )
    greedy = {
        r["head"]: float(r["mean_acceptance_length"])
        for r in read("koala_table_1_greedy.csv")
        if r["target"] == "Vicuna-7B"
    }
    for r in read("koala_table_2_temperature_1_vicuna7b.csv"):
        family, base = r["base"], float(r["base_length"])
        for column, suffix in COLUMNS.items():
            gain = (greedy[family + suffix] - 1) / (greedy[family] - 1)
            ours = 1 + (base - 1) * gain
            table.add(family, column, r[column], ours, relative=0.04, kind="predicted")
    figure, axis = panels(width=6.4, height=3.0)
    names = {"with_adversarial": "w/ AL", "with_2_layers": "w/ 2", "with_3_layers": "w/ 3"}
    labels = [f"{c.row}\n{names[c.quantity]}" for c in table.cells]
    pairs_of_bars(axis, labels, [c.paper for c in table.cells], [c.ours for c in table.cells])
    axis.set(ylabel=r"average acceptance length $\ell$", ylim=(0, 4.4))
    axis.legend(ncols=2, loc="upper left")
    save(figure, "koala_table_2", f"{table.title}, Vicuna-7B")
    return finish(table)


if __name__ == "__main__":
    run()
