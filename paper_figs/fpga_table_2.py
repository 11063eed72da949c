"""FPGA Table II: five tasks, their own best length and the unified one.

    python -m paper_figs.fpga_table_2

One number per task, the slope B of its AAT law, is fitted to its printed best speedup; its best
length, and the speedup at the one length that is best for the geometric mean of the five laws, are
then predictions. Context 128, where Table I prints GovReport's 2.47 at 13. Expected: lengths
within one or two, unified speedups within 1 %.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.optimize import brentq

from experiments.fpga_fit import LENGTHS
from paper_figs.comparison import Comparison, finish, read
from paper_figs.fpga_model import fitted
from paper_figs.style import panels, save, series

BOARD, CONTEXT = "V80", 128


def task_law(model, speedup: float):
    """The AAT law of a task whose best speedup is `speedup`."""
    base = model.autoregressive(BOARD, CONTEXT)

    def off(slope):
        law = dataclasses.replace(model.law, B=slope)
        return model.speed(BOARD, CONTEXT, LENGTHS, law).max() / base - speedup

    return dataclasses.replace(model.law, B=brentq(off, 0.05, 2.0, xtol=1e-6))


def run() -> list[Comparison]:
    model, rows = fitted(), read("fpga_table_2_tasks.csv")
    table = Comparison(
        "fpga_table_2",
        "FPGA Table II: five tasks",
        "length 1, unified speedup 1 %",
        "each task's printed best speedup (one slope each), the V80 of Table I",
    )
    base = model.autoregressive(BOARD, CONTEXT)
    laws = {r["task"]: task_law(model, float(r["best_speedup"])) for r in rows}
    curves = {t: model.speed(BOARD, CONTEXT, LENGTHS, law) / base for t, law in laws.items()}
    # The round's seconds are common to the tasks: the mean of the laws is that of the speeds.
    unified = int(np.exp(np.mean([np.log(c) for c in curves.values()], axis=0)).argmax())
    for r in rows:
        curve = curves[r["task"]]
        best = LENGTHS[curve.argmax()]
        printed = r["best_verification_length"]
        table.add(r["task"], "best length", printed, best, absolute=1, kind="predicted")
        table.add(
            r["task"],
            "unified speedup",
            r["unified_speedup"],
            curve[unified],
            relative=0.01,
            kind="predicted",
        )
    table.remarks.append(
        f"The unified length is {LENGTHS[unified]:.0f}. Multi-News prints a loss of 2 % one length "
        "away from its optimum, which no smooth law gives."
    )
    figure, axis = panels(height=3.2)
    for i, (task, curve) in enumerate(curves.items()):
        axis.plot(LENGTHS[:40], curve[:40], label=task, **series(i, marker=False))
        r = next(r for r in rows if r["task"] == task)
        at = float(r["best_verification_length"]), float(r["best_speedup"])
        axis.plot(*at, **series(i, line=False))
    axis.set(xlabel="verification length (root included)", ylabel="speedup; markers: paper")
    axis.legend()
    save(figure, "fpga_table_2")
    return finish(table)


if __name__ == "__main__":
    run()
