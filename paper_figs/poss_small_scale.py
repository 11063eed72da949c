"""PosS on heads trained here: acceptance by position, beside the paper's claims.

    python -m paper_figs.poss_small_scale

From experiments/results/draft_heads.json (python -m experiments.draft_heads): EAGLE, HASS and
PosS-n heads on the small target, intervals over seeds. Expected: EAGLE falls fastest with the
position; unrolled training holds the later positions up.
"""

from __future__ import annotations

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
    ("PosS-1 - HASS", "pos-acc 4, T = 0", "later positions hold better", "drawn"),
    ("PosS-1 - HASS", "pos-acc 1, T = 0", "one layer for all pays at the first", "about 0.01"),
)


def start_of(r: dict) -> str:
    """Prefix of the arms that went on from a trained head, as the paper's do, where there are."""
    return "trained " if "trained HASS" in r["arms"] else ""


def run() -> list[Repeat]:
    r = heads()
    further = " All went on from one trained EAGLE head." if start_of(r) else ""
    models = which_models(r) + further
    table = Repeat("poss_small_scale", "PosS, Figures 1 and 3, Tables 1 to 5", models)
    start = start_of(r)
    for pair, measure, statement, printed in CLAIMS:
        key = " - ".join(start + arm for arm in pair.split(" - "))
        if key in r["compared"]:
            values = r["compared"][key][measure]
            name = f"{pair}, {measure}: {statement}"
            table.add(name, printed, with_interval(values), above_zero(values))
    law = r["head_law"]["n"]
    mine, truth = law["predicted_best"], law["measured_best"]
    table.add(
        "the fastest head",
        "PosS-2 (8B), PosS-3 (13B)",
        f"law: {mine[0]}, {mine[1]} drafts; measured: {truth[0]}, {truth[1]} drafts; the law's "
        f"choice reaches {law['measured_at_predicted_over_best']:.1%} of the best",
        "PosS" in truth[0],
    )
    draw(r)
    return finish(table)


def draw(r: dict) -> None:
    figure, axes = panels(1, 2, width=8.4, height=3.4, sharey=True)
    start = start_of(r)
    arms = [arm for arm in ARMS if start + arm in r["arms"]]
    for axis, t in zip(axes, ("0", "1"), strict=True):
        for i, arm in enumerate(arms):
            values = 100 * np.array(r["arms"][start + arm]["pos_acc"][t])
            half = np.nan_to_num(values[:, 2] - values[:, 0])
            at = np.arange(1, len(values) + 1) + 0.06 * (i - 2)
            axis.errorbar(at, values[:, 0], half, capsize=2, markersize=4, label=arm, **series(i))
        axis.set(title=f"T = {t}", xlabel="position")
    axes[0].set_ylabel("pos-acc, %")
    axes[0].legend()
    save(figure, "poss_small_scale")


if __name__ == "__main__":
    run()
