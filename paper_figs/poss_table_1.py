"""PosS Table 1: lengths and speedups of five methods on six datasets, two targets.

    python -m paper_figs.poss_table_1

Speedup = printed length / round cost, the cost fitted on the dataset means of Tables 2-5 (no cell
of a single dataset, and no EAGLE-2) at T = 0. Expected: 60 single-dataset speedups predicted within
6 %; CNN/DM, whose prompts are the longest, falls below.
"""

from __future__ import annotations

import numpy as np

from experiments.heads_fit import fit_poss, poss_rows, specialists
from paper_figs.comparison import Comparison, finish, read
from paper_figs.style import panels, save, series

DEPTH = {"Llama-3-8B-Instruct": 6, "Llama-2-13B-chat": 7}  # Table 1's, paper appendix B.2
LONG = "longest prompts: verification reads more KV cache than the dataset mean"


def run() -> list[Comparison]:
    table = Comparison(
        "poss_table_1",
        "PosS Table 1: speedups by dataset",
        "6 %",
        "the printed length of the cell, round costs from Tables 2-5",
    )
    points = []
    for target, depth in DEPTH.items():
        rows = poss_rows(target)
        cost, _ = fit_poss(rows, np.ones(len(rows), bool))
        for r in read("poss_table_1_datasets.csv"):
            if r["target"] != target:
                continue
            length = float(r["mean_acceptance_length"])
            ours = float(cost.speedup(length, depth, 60.0, specialists(r["method"], depth), 0.0))
            name = f"{target.split('-Inst')[0]} {r['method']} {r['dataset']}"
            cause = LONG if r["dataset"] == "CNN/DM" else ""
            table.add(
                name, "speedup", r["speedup"], ours, relative=0.06, kind="predicted", cause=cause
            )
            points.append((r["dataset"], target, float(r["speedup"]), ours))
    draw(table.title, points)
    return finish(table)


def draw(title, points) -> None:
    figure, axis = panels(height=4.6, width=6.0)
    for i, dataset in enumerate(dict.fromkeys(p[0] for p in points)):
        for target in DEPTH:
            mine = [p[2:] for p in points if p[:2] == (dataset, target)]
            style, large = series(i, line=False), "13B" in target
            style |= {"mfc": "white", "label": ""} if large else {"label": dataset}
            axis.plot(*zip(*mine, strict=True), **style)
    ends = [2.2, 4.3]
    axis.plot(ends, ends, color="#888888", linewidth=1, label="ours = paper")
    for face, target in (("#555555", "L3 8B (filled)"), ("white", "L2 13B (open)")):
        axis.plot([], [], "o", color="#555555", mfc=face, label=target)
    axis.set(xlabel="speed-up ratio, paper", ylabel="speed-up ratio, ours")
    axis.legend()
    save(figure, "poss_table_1", title)


if __name__ == "__main__":
    run()
