"""PosS on heads trained here: acceptance by position, beside the paper's claims.

    python -m paper_figs.poss_small_scale

From experiments/results/draft_heads.json (python -m experiments.draft_heads): EAGLE, HASS and
PosS-n heads on the small target, intervals over seeds. Expected: from random weights specialists
lengthen, and hold the later positions up; on a trained head there is little left to repair.
"""

from __future__ import annotations

import itertools

import numpy as np

from paper_figs.comparison import Repeat, finish
from paper_figs.koala_small_scale import above_zero, heads, which_models, with_interval
from paper_figs.style import panels, save, series

ARMS = ("EAGLE", "HASS", "PosS-1", "PosS-2", "PosS-3")
CLAIMS = (  # comparison, measure, statement, what the paper prints
    ("HASS - EAGLE", "tau, T = 0", "unrolled training lengthens", "+0.33 (8B), +0.53 (13B)"),
    ("PosS-1 - HASS", "tau, T = 0", "specialists lengthen further", "+0.15 (8B), +0.02 (13B)"),
    ("PosS-2 - HASS", "tau, T = 0", "specialists lengthen further", "+0.16 (8B), +0.04 (13B)"),
    ("PosS-3 - HASS", "tau, T = 0", "specialists lengthen further", "+0.15 (8B), +0.05 (13B)"),
    ("PosS-1 - HASS", "tau, T = 1", "and at T = 1", "+0.12 (8B), -0.01 (13B)"),
    ("HASS - EAGLE", "pos-acc 4, T = 0", "later positions hold", "drawn"),
    ("PosS-2 - EAGLE", "tau, T = 0", "both together", "+0.49 (8B), +0.57 (13B)"),
    ("PosS-2 - EAGLE", "pos-acc 4, T = 1", "later positions hold", "drawn at T = 0"),
    ("PosS-1 - HASS", "pos-acc 4, T = 0", "later positions hold better", "drawn"),
    ("PosS-1 - HASS", "pos-acc 1, T = 0", "one layer for all pays at the first", "about 0.01"),
)


STARTS = {"": "from random weights", "trained ": "from a trained head"}  # prefix of the arms' names


def run() -> list[Repeat]:
    r = heads()
    models = (
        f"{which_models(r)} HASS and PosS do the second half of their updates from EAGLE's first; "
        f"from a trained EAGLE head all do {r['settings']['further_updates']}."
    )
    table = Repeat("poss_small_scale", "PosS, Figures 1 and 3, Tables 1 to 5", models)
    for (start, words), (pair, measure, statement, printed) in itertools.product(
        STARTS.items(), CLAIMS
    ):
        values = r["compared"][" - ".join(start + arm for arm in pair.split(" - "))][measure]
        name = f"{pair}, {measure}, {words}: {statement}"
        table.add(name, printed, with_interval(values), above_zero(values))
    law = r["head_law"]["n"]
    mine, truth = law["predicted_best"], law["measured_best"]
    table.add(
        "the fastest head",
        "PosS-2 (8B), PosS-3 (13B)",
        f"law: {mine[0]}, lookahead {mine[1]}; measured: {truth[0]}, lookahead {truth[1]}; the "
        f"law's choice reaches {law['measured_at_predicted_over_best']:.1%} of the best",
        "PosS" in truth[0],
    )
    draw(r)
    return finish(table)


def draw(r: dict) -> None:
    figure, axes = panels(2, 2, width=8.4, height=6.0, sharey=True)
    for row, (start, words) in zip(axes, STARTS.items(), strict=True):
        for axis, t in zip(row, ("0", "1"), strict=True):
            for i, arm in enumerate(ARMS):
                values = 100 * np.array(r["arms"][start + arm]["pos_acc"][t])
                half = values[:, 2] - values[:, 0]
                at = np.arange(1, len(values) + 1) + 0.06 * (i - 2)
                style = series(i)
                axis.errorbar(at, values[:, 0], half, capsize=2, markersize=4, label=arm, **style)
            axis.set(title=f"T = {t}, {words}", xlabel="position")
        row[0].set_ylabel("pos-acc, %")
    axes[0][1].legend(ncols=2, loc="upper left")
    save(
        figure,
        "poss_small_scale",
        "PosS at small scale: acceptance by position of heads trained here",
    )


if __name__ == "__main__":
    run()
