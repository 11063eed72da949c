"""PosS Figure 5: time by phase, rounds, and total time over the draft depth.

    python -m paper_figs.poss_figure_5

The figure prints no numbers. Ours, in autoregressive steps of the target: the round costs fitted on
Tables 2 and 3 (60 tokens, T = 0), rounds from the printed lengths. Expected: drafting grows with
the depth and hardly with the specialists; PosS needs fewer rounds and less time than HASS.
"""

from __future__ import annotations

import itertools

import numpy as np

from experiments.heads_fit import fit_poss, poss_rows, specialists
from paper_figs.comparison import Comparison, finish
from paper_figs.style import panels, save, series

TARGET, DEPTHS = "Llama-3-8B-Instruct", range(6, 10)
METHODS = ("HASS", "PosS-1", "PosS-2", "PosS-3")
SHADES = ("#ffffff", "#d9d9d9", "#b3b3b3", "#8c8c8c")
TOKENS = 1000


def run() -> list[Comparison]:
    rows = poss_rows(TARGET)
    cost, _ = fit_poss(rows, np.ones(len(rows), bool))
    lengths = {
        (r["method"], int(r["tree_depth"])): float(r["mean_acceptance_length"])
        for r in rows
        if (r["temperature"], r["total_tokens"]) == ("0", "60")
    }
    figure, axes = panels(1, 2, width=9.0, height=4.4)
    right = axes[0].twinx()
    verify = float(cost.verify)
    totals = {}
    for i, method in enumerate(METHODS):
        places = np.array(DEPTHS) + 0.2 * (i - 1.5)
        steps = np.array(
            [float(cost.round_steps(d, 60.0, specialists(method, d), 0.0)) for d in DEPTHS]
        )
        rounds = np.array([TOKENS / lengths[method, d] for d in DEPTHS])
        style = dict(width=0.19, color=SHADES[i], edgecolor="#111111", linewidth=0.6)
        axes[0].bar(places, verify, **style, label=method)
        axes[0].bar(places, steps - verify, bottom=verify, hatch="////", **style)
        right.plot(places, rounds, **series(i), markersize=4, label=f"{method}, rounds")
        axes[1].bar(places, rounds * steps, **style, label=method)
        totals[method] = rounds * steps
    axes[0].bar(6, 0, color="white", edgecolor="#111111", hatch="////", label="drafting")
    axes[0].set(
        xlabel="draft depth", ylabel="time of a round (target steps)", xticks=DEPTHS, ylim=(0, 2.6)
    )
    axes[0].set_title("(a) per round: verification below, drafting above")
    right.set(ylabel=f"rounds for {TOKENS} tokens (lines)", ylim=(0, 240))
    bars, lines = (axis.get_legend_handles_labels() for axis in (axes[0], right))
    handles = [  # a method's bars above its line
        [*itertools.chain(*zip(above, below, strict=False)), above[-1]]
        for above, below in zip(bars, lines, strict=True)
    ]
    figure.legend(*handles, loc="outside lower center", ncols=5)
    right.spines["right"].set_visible(True)
    right.grid(False)
    axes[1].set(
        xlabel="draft depth", ylabel=f"time of {TOKENS} tokens (target steps)", xticks=DEPTHS
    )
    axes[1].set(title="(b) total time", ylim=(0, 400))
    less = {m: 1 - (totals[m] / totals["HASS"]).mean() for m in METHODS[1:]}
    table = Comparison(
        "poss_figure_5",
        "PosS Figure 5: time by phase, rounds, total",
        "drawn",
        "round costs fitted on Table 3, printed lengths of Table 2",
        [
            "Total time below HASS's by "
            + ", ".join(f"{share:.1%} ({m})" for m, share in less.items())
            + ", mean over depths 6 to 9. In autoregressive steps: seconds are only drawn there."
        ],
    )
    save(figure, "poss_figure_5", f"{table.title} (ours; {TARGET})")
    return finish(table)


if __name__ == "__main__":
    run()
