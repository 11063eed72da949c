"""FPGA Table IV: four boards, best length and speed.

    python -m paper_figs.fpga_table_4

Expected: all speeds within 6 %, the best length within one on U280, VHK158 and V80 but for the
plateau at 16384; on the U250 (least bandwidth) every length near the printed one is as good.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish, read
from paper_figs.fpga_model import BOARDS, fitted
from paper_figs.style import panels, save, series


def run() -> list[Comparison]:
    model = fitted()
    table = Comparison(
        "fpga_table_4",
        "FPGA Table IV: four boards",
        "speeds 6 %, autoregression 0.2 %, best length 1",
        "PEs, bandwidth; AAT law and roofline fitted on Tables I and IV",
    )
    rows = read("fpga_table_4_boards.csv")
    for r in rows:
        board, context = r["board"], int(r["context_length"])
        row, base = f"{board} context {context}", model.autoregressive(board, context)
        printed = r["autoregressive_tokens_per_s"]
        table.add(row, "autoregressive", printed, base, relative=2e-3, kind="explained")
        length, best = float(r["best_verification_length"]), model.best_length(board, context)
        ours = float(model.speed(board, context, length))
        table.add(row, "tokens/s", r["best_tokens_per_s"], ours, relative=0.06, kind="explained")
        table.add(row, "speedup", r["speedup"], ours / base, relative=0.06, kind="explained")
        share = ours / float(model.speed(board, context, float(best)))
        cause = f"plateau: the printed length reaches {100 * share:.1f} % of our maximum"
        table.add(
            row,
            "best length",
            r["best_verification_length"],
            best,
            absolute=1,
            kind="explained",
            cause=cause if share > 0.97 else "",
        )
    errors = ", ".join(f"{b} {100 * e['mean_error']:.1f} %" for b, e in model.held_out.items())
    table.remarks.append(f"Mean error on a board left out of the fit: {errors}.")
    draw(rows, model)
    return finish(table)


def draw(rows, model) -> None:
    figure, axes = panels(2, 2, height=4.8, sharex=True)
    lengths = np.arange(1.0, 61.0)
    for axis, board in zip(axes.flat, BOARDS, strict=True):
        for i, r in enumerate([r for r in rows if r["board"] == board]):
            context = int(r["context_length"])
            style = series(i, marker=False)
            axis.plot(lengths, model.speed(board, context, lengths), label=f"{context}", **style)
            at = float(r["best_verification_length"]), float(r["best_tokens_per_s"])
            axis.plot(*at, "*", color=style["color"], mec="black", mew=0.5, markersize=10)
        axis.set(title=board, ylim=(0, None))
    axes[0, 1].legend(title="context", fontsize=7, ncols=2)
    figure.supxlabel("verification length (root included)", fontsize=9)
    figure.supylabel("tokens per second; stars: paper's best", fontsize=9)
    save(figure, "fpga_table_4")


if __name__ == "__main__":
    run()
