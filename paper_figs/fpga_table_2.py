"""FPGA Table II: does one verification length serve five tasks?

    python -m paper_figs.fpga_table_2

A task's AAT is 1 + f (AAT(x) - 1), f from its printed best speedup; its best length and what the
unified length costs it follow. The unified length is the optimum of the geometric mean of the five
laws. Expected: lengths within 1 of the printed ones, unified speedups within 1.5 %.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq

from paper_figs.comparison import Comparison, finish, read
from paper_figs.fpga_model import LENGTHS, V80, autoregressive, law_and_roofline
from paper_figs.fpga_table_1 import PLATEAU
from paper_figs.style import pairs_of_bars, panels, save

CONTEXT = 128.0


def run() -> list[Comparison]:
    table = Comparison(
        "fpga_table_2",
        "FPGA Table II: best and unified length per task",
        "length 1, speedup 1.5 %",
        "the printed best speedup of each task (one number a task); V80, context 128",
    )
    law, roofline = law_and_roofline()
    x = LENGTHS
    seconds = np.asarray(roofline.verify_seconds(x, CONTEXT, *V80))
    seconds = seconds + np.asarray(roofline.draft_seconds(x, CONTEXT, V80[1]))
    gain = np.asarray(law.aat(x)) - 1.0
    plain = autoregressive(V80[1], CONTEXT)

    def speedup(factor):
        return (1.0 + factor * gain) / seconds / plain

    rows = read("fpga_table_2_tasks.csv")
    factors = [
        brentq(lambda f, r=r: speedup(f).max() - float(r["best_speedup"]), 0.1, 3.0) for r in rows
    ]
    mean = np.exp(np.mean([np.log(1.0 + f * gain) for f in factors], axis=0))
    unified = (mean / seconds).argmax()
    drawn = []
    for r, factor in zip(rows, factors, strict=True):
        curve = speedup(factor)
        name = r["task"]
        printed = r["best_verification_length"]
        share = curve[int(printed) - 1] / curve.max()
        table.add(
            name,
            "best length",
            printed,
            x[curve.argmax()],
            absolute=1,
            kind="predicted",
            cause=PLATEAU.format(share) if share >= 0.97 else "",
        )
        table.add(
            name,
            "unified speedup",
            r["unified_speedup"],
            curve[unified],
            relative=0.015,
            kind="predicted",
        )
        best = f"{name}\n{printed} / {x[curve.argmax()]:.0f}"
        drawn.append((best, float(r["unified_speedup"]), curve[unified]))
    table.remarks.append(f"Unified length by the geometric mean of the laws: {x[unified]:.0f}.")
    figure, axis = panels(height=3.2)
    pairs_of_bars(axis, *zip(*drawn, strict=True))
    axis.set(ylabel="unified speedup", ylim=(0, 3.4))
    axis.set_xlabel("task; best length (best set): paper / ours")
    axis.legend(ncols=2, loc="upper left")
    save(figure, "fpga_table_2", table.title)
    return finish(table)


if __name__ == "__main__":
    run()
