"""FPGA Table IV: four boards, four contexts.

    python -m paper_figs.fpga_table_4

Autoregression: the memory line of V80 (Table I) predicts the boards of other bandwidths. Best
throughputs: a board's cells come from a fit that has not seen the board (V80's from the fit on all:
without it Table I is gone too). Expected: within 8 %, U280 5 %; lengths within 1 in 11 of the 12
cells of U280, VHK158, V80, the rest on a plateau.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish, read
from paper_figs.fpga_model import LENGTHS, autoregressive, speed
from paper_figs.fpga_table_1 import best_length
from paper_figs.style import PAPER, pairs_of_bars, panels, save, series

MEANS = {"U280": "2.13", "VHK158": "2.32", "V80": "2.44", "U250": "2.49"}  # the last row


def v80_line():
    """Memory line of Table I alone."""
    rows = [
        r
        for r in read("fpga_table_1_llama31_8b_longspec_v80.csv")
        if r["method"] == "autoregressive"
    ]
    context = np.array([float(r["context_length"]) for r in rows])
    bytes_ = 819e9 / np.array([float(r["tokens_per_s"]) for r in rows])
    return np.polyfit(context, bytes_, 1)


def run() -> list[Comparison]:
    table = Comparison(
        "fpga_table_4",
        "FPGA Table IV: four boards",
        "best throughput 8 %, autoregression 0.6 % or the last digit, best length 1",
        "Table I (autoregression); the other boards (best throughput; V80: all, in sample); "
        "lengths in sample",
    )
    slope, weights = v80_line()
    rows = read("fpga_table_4_boards.csv")
    for r in rows:
        board, context = r["board"], float(r["context_length"])
        elements = float(r["pe_rows"]) * float(r["pe_cols"])
        bandwidth = float(r["bandwidth_gb_per_s"]) * 1e9
        name = f"{board} {r['context_length']}"
        plain = bandwidth / (weights + slope * context)
        table.add(
            name,
            "AR tokens/s",
            r["autoregressive_tokens_per_s"],
            plain,
            relative=0.006,
            kind="predicted",
        )
        seen = board == "V80"
        ours = float(
            speed(
                elements,
                bandwidth,
                context,
                float(r["best_verification_length"]),
                None if seen else board,
            )
        )
        kind = "explained" if seen else "predicted"
        table.add(name, "best tokens/s", r["best_tokens_per_s"], ours, relative=0.08, kind=kind)
        table.add(name, "speedup", r["speedup"], ours / plain, relative=0.08, kind=kind)
        printed = r["best_verification_length"]
        best_length(table, name, context, printed, (elements, bandwidth))
    for board, printed in MEANS.items():
        ours = [c.ours for c in table.cells if c.row.startswith(board) and c.quantity == "speedup"]
        kind = "explained" if board == "V80" else "predicted"
        table.add(board, "mean speedup", printed, np.mean(ours), relative=0.08, kind=kind)
    draw(table.title, rows)
    return finish(table)


def draw(title, rows) -> None:
    """Figure 4's idea for the boards: speedup (bars) and best length (lines) per context."""
    boards = ("U280", "VHK158", "V80", "U250")
    figure, axes = panels(2, 4, width=9.6, height=5.2, sharey="row", height_ratios=(3, 2))
    for above, below, board in zip(*axes, boards, strict=True):
        mine = [r for r in rows if r["board"] == board]
        size, bandwidth = (
            f"{mine[0]['pe_rows']}x{mine[0]['pe_cols']}",
            mine[0]["bandwidth_gb_per_s"],
        )
        speedups, lengths = optima(mine)
        contexts, printed = ([r[k] for r in mine] for k in ("context_length", "speedup"))
        pairs_of_bars(above, contexts, [float(p) for p in printed], speedups)
        found = [float(r["best_verification_length"]) for r in mine]
        places = np.arange(len(mine))
        below.plot(places, lengths, **series(1), label="ours")
        below.plot(places, found, **PAPER | {"linestyle": ":"})
        below.set_xticks(places, contexts)
        below.set(xlabel="context length", xlim=above.get_xlim(), ylim=(0, 55))
        above.set(title=f"{board}\n{size} PEs, {bandwidth} GB/s", ylim=(0, 3.3))
    axes[0, 0].set_ylabel("speedup")
    axes[1, 0].set_ylabel("best set\n(verification length)")
    axes[0, 0].legend(loc="upper left", ncols=2)
    axes[1, 0].legend(loc="upper left")
    save(figure, "fpga_table_4", title)


def optima(rows) -> tuple[list[float], list[float]]:
    """Best speedup and its verification length, of the fit on all boards."""
    speedups, lengths = [], []
    for r in rows:
        bandwidth = float(r["bandwidth_gb_per_s"]) * 1e9
        elements, context = float(r["pe_rows"]) * float(r["pe_cols"]), float(r["context_length"])
        curve = speed(elements, bandwidth, context, LENGTHS)
        speedups.append(curve.max() / autoregressive(bandwidth, context))
        lengths.append(LENGTHS[curve.argmax()])
    return speedups, lengths


if __name__ == "__main__":
    run()
