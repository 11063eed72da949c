"""FPGA Table I: Llama-3.1-8B with LongSpec on a V80, four verification lengths per context.

    python -m paper_figs.fpga_table_1

Expected: all 18 speculative throughputs explained within 8 % by one parameter set for all boards
(experiments/fpga_fit.py), autoregression within 0.2 %; best lengths within 1 but on the plateau.
Figures 1 and 2 of the paper are drawn from the same model.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish, read
from paper_figs.fpga_model import LENGTHS, V80, autoregressive, law_and_roofline, speed
from paper_figs.style import PAPER, panels, save, series

PLATEAU = "plateau: the printed length reaches {:.1%} of the model's own maximum"


def best_length(table, row, context, printed, board=V80):
    """Adds the cell of the best verification length."""
    curve = speed(*board, context, LENGTHS)
    share = curve[int(printed) - 1] / curve.max()
    ours = LENGTHS[curve.argmax()]
    cause = PLATEAU.format(share) if share >= 0.97 else ""
    table.add(row, "best length", printed, ours, absolute=1, kind="explained", cause=cause)


def run() -> list[Comparison]:
    table = Comparison(
        "fpga_table_1",
        "FPGA Table I: throughput by context and verification length",
        "8 %, autoregression 0.2 %, best length 1",
        "AAT law, compute line and draft time fitted on Tables I and IV, memory line on the "
        "autoregressive rows (in sample)",
        ["The original and naive lengths fall on the compute roof: one line explains both."],
    )
    rows = read("fpga_table_1_llama31_8b_longspec_v80.csv")
    for r in rows:
        context, name = float(r["context_length"]), f"{r['context_length']} {r['method']}"
        plain = autoregressive(V80[1], context)
        if r["method"] == "autoregressive":
            table.add(name, "tokens/s", r["tokens_per_s"], plain, relative=0.002, kind="explained")
            continue
        length = float(r["verification_length"])
        ours = float(speed(*V80, context, length))
        table.add(name, "tokens/s", r["tokens_per_s"], ours, relative=0.08, kind="explained")
        table.add(name, "speedup", r["speedup"], ours / plain, relative=0.08, kind="explained")
        if r["method"] == "best":
            best_length(table, name, context, r["verification_length"])
    draw(rows)
    draw_model()
    return finish(table)


def draw(rows) -> None:
    """Figure 1: speedup over the verification length, with the printed points."""
    figure, axes = panels(1, 2, height=3.0)
    law, _ = law_and_roofline()
    for i, context in enumerate((128, 2048, 16384)):
        plain = autoregressive(V80[1], context)
        axes[0].plot(
            LENGTHS[1:],
            speed(*V80, context, LENGTHS[1:]) / plain,
            **series(i, marker=False),
            label=f"context {context}",
        )
        points = [
            (float(r["verification_length"]), float(r["speedup"]))
            for r in rows
            if int(r["context_length"]) == context and r["verification_length"]
        ]
        axes[0].plot(*zip(*points, strict=True), **{**PAPER, "label": None if i else "paper"})
    axes[0].axhline(1, color="#888888", linewidth=1)
    axes[0].set(xlabel="verification length", ylabel="speedup over autoregression")
    axes[0].legend()
    axes[1].plot(LENGTHS[1:], np.asarray(law.aat(LENGTHS[1:])), **series(0, marker=False))
    axes[1].set(xlabel="verification length", ylabel="average accepted tokens (AAT)")
    save(figure, "fpga_figure_1")


def draw_model() -> None:
    """Figure 2: roofline, discounted roofline, AAT and acceptance rate, effective performance."""
    figure, axes = panels(2, 2, height=5.2, sharex=True)
    law, roofline = law_and_roofline()
    x = LENGTHS
    axes[0, 0].set(ylabel="verified tokens/s: roofline")
    axes[0, 1].set(ylabel="tokens/s after drafting")
    axes[1, 0].set(ylabel="AAT (rising), AAT/x (falling)", xlabel="verification length")
    axes[1, 1].set(ylabel="effective tokens/s", xlabel="verification length")
    for i, context in enumerate((128, 4096, 16384)):
        style = dict(**series(i, marker=False), label=f"context {context}")
        verify = np.asarray(roofline.verify_seconds(x, context, *V80))
        draft = np.asarray(roofline.draft_seconds(x, context, V80[1]))
        axes[0, 0].plot(x, x / verify, **style)
        axes[0, 1].plot(x, x / (verify + draft), **style)
        axes[1, 1].plot(x, speed(*V80, context, x), **style)
    aat = np.asarray(law.aat(x))
    axes[1, 0].plot(x, aat, **series(0, marker=False))
    right = axes[1, 0].twinx()
    right.plot(x, aat / x, **series(1, marker=False))
    right.grid(False)
    axes[0, 0].legend()
    save(figure, "fpga_figure_2")


if __name__ == "__main__":
    run()
