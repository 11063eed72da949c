"""SDSL Figure 2: throughput against draft size for 13 targets, one panel per draft family.

    python -m paper_figs.sdsl_figure_2

Expected: stars (N*) near 0.1-0.4 billion on every curve, far left of the drafts the paper used;
the bend at N -> M is the unclamped formula's (a negative lookahead), not a gain.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish, tokens
from paper_figs.sdsl_table_5 import optima
from paper_figs.sdsl_table_6 import DRAFT_TOKENS
from paper_figs.style import panels, save, shades
from sdx.theory.scaling import sdsl_throughput
from sdx.theory.transformers import load_architecture, parameters

DRAFTS = {
    "OPT": ("opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b"),
    "Qwen1.5": ("qwen1.5-0.5b", "qwen1.5-1.8b", "qwen1.5-4b"),
    "Qwen2.5": ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"),
}


def run() -> list[Comparison]:
    rows, best = optima()
    figure, axes = panels(1, 3, width=9.6, height=4.2, sharey=True)
    for axis, (family, D) in zip(axes, DRAFT_TOKENS.items(), strict=True):
        mine = [i for i, r in enumerate(rows) if r["draft_family"] == family]
        mine.sort(key=lambda i: float(rows[i]["target_params"]))
        used = np.array([float(parameters(load_architecture(d))) for d in DRAFTS[family]])
        written = 0.0
        for i, shade in zip(mine, shades(len(mine)), strict=True):
            M, D_target = float(rows[i]["target_params"]), tokens(rows[i]["target_tokens"])
            N = np.geomspace(1e7, 0.97 * M, 240)
            axis.plot(N / 1e9, sdsl_throughput(N, M, D, D_target), color=shade, linewidth=1)
            inside = used[used < M]
            at = sdsl_throughput(inside, M, D, D_target)
            axis.plot(inside / 1e9, at, "k.", markersize=3.5)
            star = float(best.throughput[i])
            axis.plot(best.N[i] / 1e9, star, "*", color=shade, markersize=9, mec="black", mew=0.5)
            # One label per bundle of curves: targets of one size share theirs.
            if abs(np.log(star) - written) > 0.12:
                start = float(sdsl_throughput(1e7, M, D, D_target))
                axis.text(9e-3, start, f"{M / 1e9:.0f}B", fontsize=7, ha="right", va="center")
                written = np.log(star)
        axis.set(xscale="log", yscale="log", xlabel="draft size N (billions)", title=family)
        axis.set_xlim(3.5e-3, 150)
        axis.plot([], [], "k.", label="drafts used")
        axis.plot([], [], "*", color="white", mec="black", markersize=9, label="N*")
    axes[0].set_ylabel("tokens per FLOP")
    axes[0].legend(loc="lower left", bbox_to_anchor=(0.12, 0.0))
    save(figure, "sdsl_figure_2")
    title = "SDSL Figure 2: throughput of equation 9 against draft size"
    return finish(Comparison("sdsl_figure_2", title, "drawn"))


if __name__ == "__main__":
    run()
