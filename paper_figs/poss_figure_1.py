"""PosS Figure 1: acceptance by position (pos-acc), drafts of six.

    python -m paper_figs.poss_figure_1

The figure prints no numbers. Ours: the law fitted on the mean lengths of Table 2 (T = 0, no rate
enters), one drift of its own for EAGLE-2, from its one printed length (Table 1). The two targets
side by side. Expected: EAGLE-2 falls fastest, then HASS; PosS-n the slower the fewer positions a
specialist serves.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.optimize import brentq

from experiments.heads_fit import SPECIALIST_POSITIONS, poss_rows
from paper_figs.comparison import Comparison, finish, read
from paper_figs.poss_table_1 import DEPTH
from paper_figs.poss_table_3 import TARGETS, lengths
from paper_figs.style import panels, save, series
from sdx.theory.heads import head_acceptance, head_length

METHODS = ("EAGLE-2", "HASS", "PosS-1", "PosS-2", "PosS-3")


def mean_length(target: str, method: str) -> float:
    """Of Table 1, averaged over its six datasets."""
    rows = read("poss_table_1_datasets.csv")
    mine = [r for r in rows if (r["target"], r["method"]) == (target, method)]
    return float(np.mean([float(r["mean_acceptance_length"]) for r in mine]))


def hazards(target: str, positions: int) -> dict[str, np.ndarray]:
    """pos-acc 1..positions of every method."""
    law, _ = lengths(poss_rows(target))
    law = dataclasses.replace(law, **{k: float(v) for k, v in vars(law).items()})
    printed = mean_length(target, "EAGLE-2")

    def excess(drift):
        mine = dataclasses.replace(law, drift=drift)
        return float(head_length(mine, float(DEPTH[target]), nodes=60.0)) - printed

    eagle = dataclasses.replace(law, drift=brentq(excess, 0.0, 5.0))
    return {
        m: np.asarray(
            head_acceptance(
                eagle if m == "EAGLE-2" else law,
                positions,
                specialist_positions=float(SPECIALIST_POSITIONS[m]),
                nodes=60.0,
            ).rates
        )
        for m in METHODS
    }


def draw(axis, rates: dict[str, np.ndarray]) -> None:
    for i, (method, mine) in enumerate(rates.items()):
        axis.plot(range(1, len(mine) + 1), 100 * mine, **series(i), label=method)
    axis.set(xlabel="position i", ylabel="pos-acc (%)", ylim=(35, 100))


def run() -> list[Comparison]:
    table = Comparison(
        "poss_figure_1",
        "PosS Figure 1: acceptance by position, drafts of six",
        "drawn",
        "lengths of Tables 1, 2 and 4 (no rate by position)",
    )
    figure, axes = panels(1, 2, width=8.4, height=3.8, sharey=True)
    for axis, target in zip(axes, TARGETS, strict=True):
        draw(axis, hazards(target, 6))
        axis.set_title(target)
    axes[1].set_ylabel("")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    save(figure, "poss_figure_1", f"{table.title} (ours, from the lengths)")
    return finish(table)


if __name__ == "__main__":
    run()
