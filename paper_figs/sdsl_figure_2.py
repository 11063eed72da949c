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
LINE = 0.038  # height of a curve's name, in decades of throughput


def name_curves(axis, starts) -> None:
    """Each curve's target left of its first point (starts: height, name), spread out where curves
    lie closer than a line of text."""
    heights = []
    for height, _ in sorted(starts, reverse=True):
        heights.append(min(np.log10(height), heights[-1] - LINE if heights else np.inf))
    for (height, name), place in zip(sorted(starts, reverse=True), heights, strict=True):
        axis.annotate(
            name, (1e-2, height), (6.5e-3, 10**place), fontsize=6, ha="right", va="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": "#888888", "shrinkA": 0,
                        "relpos": (1, 0.5)},
        )  # fmt: skip


def run() -> list[Comparison]:
    rows, best = optima()
    figure, axes = panels(1, 3, width=10.4, height=4.6, sharey=True)
    for letter, axis, (family, D) in zip("abc", axes, DRAFT_TOKENS.items(), strict=True):
        mine = [i for i, r in enumerate(rows) if r["draft_family"] == family]
        mine.sort(key=lambda i: float(rows[i]["target_params"]))
        used = np.array([float(parameters(load_architecture(d))) for d in DRAFTS[family]])
        labels = []
        for i, shade in zip(mine, shades(len(mine)), strict=True):
            M, D_target = float(rows[i]["target_params"]), tokens(rows[i]["target_tokens"])
            N = np.geomspace(1e7, 0.97 * M, 240)
            axis.plot(N / 1e9, sdsl_throughput(N, M, D, D_target), color=shade, linewidth=1)
            inside = used[used < M]
            at = sdsl_throughput(inside, M, D, D_target)
            axis.plot(inside / 1e9, at, "k.", markersize=3.5)
            star = float(best.throughput[i])
            axis.plot(best.N[i] / 1e9, star, "*", color=shade, markersize=9, mec="black", mew=0.5)
            labels.append((float(sdsl_throughput(1e7, M, D, D_target)), rows[i]["target"]))
        name_curves(axis, labels)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="draft size N (billions)",
            title=f"({letter}) {family} drafts",
        )
        axis.set_xlim(4e-4, 150)
        axis.set_xticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
        axis.set_xticks([], minor=True)
        axis.plot([], [], "k.", label="drafts used")
        axis.plot([], [], "*", color="white", mec="black", markersize=9, label="N*")
    axes[0].set_ylabel("tokens per FLOP")
    axes[0].legend(loc="lower left", bbox_to_anchor=(0.12, 0.0))
    title = "SDSL Figure 2: throughput of equation 9 against draft size"
    save(figure, "sdsl_figure_2", title)
    return finish(Comparison("sdsl_figure_2", title, "drawn"))


if __name__ == "__main__":
    run()
