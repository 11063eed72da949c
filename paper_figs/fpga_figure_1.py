"""FPGA Figure 1: speedup and AAT against verification length, and AAT of many trees.

    python -m paper_figs.fpga_figure_1

(a) the model of Table I on the V80 at context 2048, with the printed rows of that context: the
speedup rises, falls and drops below 1 while AAT goes on rising. (b) one verification length, many
trees: random subtrees of LongSpec's beam under the rank law of Table III's script, the searched
trees above all of them. Expected: the speedup below 1 beyond some 55 tokens.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish, read
from paper_figs.fpga_model import LENGTHS, V80, autoregressive, law_and_roofline, speed
from paper_figs.fpga_table_3 import X, beam, searched_rank_law
from paper_figs.style import COLOURS, PAPER, panels, save, series

CONTEXT = 2048
SIZES, TREES = range(4, 66, 6), 14  # nodes of the random trees, and how many of each size


def random_trees(q, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Verification length and AAT of random subtrees of the beam: nodes are hung one after another
    under what is there."""
    scores, parents, _ = beam(q)
    random, points = np.random.default_rng(seed), []
    for size in SIZES:
        for _ in range(TREES):
            chosen: set[int] = set()
            while len(chosen) < size:
                free = [
                    i
                    for i, parent in enumerate(parents)
                    if i not in chosen and (parent < 0 or parent in chosen)
                ]
                chosen.add(int(random.choice(free)))
            points.append((size + 1, 1 + scores[list(chosen)].sum()))
    x, aat = np.array(points).T
    return x, aat


def run() -> list[Comparison]:
    law, _ = law_and_roofline()
    curve = speed(*V80, CONTEXT, LENGTHS) / autoregressive(V80[1], CONTEXT)
    _, aat, q = searched_rank_law()
    table = Comparison(
        "fpga_figure_1",
        "FPGA Figure 1: speedup and AAT against verification length",
        "drawn",
        "",
        [f"At context {CONTEXT} the speedup falls below 1 at {LENGTHS[5:][curve[5:] < 1][0]:.0f}."],
    )
    figure, axes = panels(1, 2, width=9.0, height=3.4)
    (speedup,) = axes[0].plot(LENGTHS[1:], curve[1:], **series(0, marker=False))
    rows = [
        (float(r["verification_length"]), float(r["speedup"]))
        for r in read("fpga_table_1_llama31_8b_longspec_v80.csv")
        if int(r["context_length"]) == CONTEXT and r["verification_length"]
    ]
    (points,) = axes[0].plot(*zip(*rows, strict=True), **PAPER)
    axes[0].axhline(1, color="#888888", linewidth=1)
    axes[0].set(xlabel="verification length", ylabel="speedup over autoregression", ylim=(0, 3))
    axes[0].set_title(f"(a) speedup and AAT, V80, context {CONTEXT}")
    right = axes[0].twinx()
    (rising,) = right.plot(LENGTHS[1:], np.asarray(law.aat(LENGTHS[1:])), **series(2, marker=False))
    right.set(ylabel="average accepted tokens (AAT)", ylim=(0, 6))
    right.spines["right"].set_visible(True)
    right.grid(False)
    names = ["speedup, ours", "speedup, paper (Table I)", "AAT, ours (right axis)"]
    axes[0].legend([speedup, points, rising], names, loc="lower right")
    x, random = random_trees(q)
    axes[1].plot(x, random, ".", color=COLOURS[0], alpha=0.55, mew=0, label="a random tree (ours)")
    searched = aat["tree_search"][1 : len(X)]
    axes[1].plot(X[1:], searched, **series(1, marker=False), label="the searched tree (ours)")
    axes[1].set(
        xlabel="verification length",
        ylabel="average accepted tokens (AAT)",
        title="(b) AAT of trees of one length, LongSpec",
    )
    axes[1].legend(loc="lower right")
    figure.get_layout_engine().set(wspace=0.08)
    save(figure, "fpga_figure_1", table.title)
    return finish(table)


if __name__ == "__main__":
    run()
