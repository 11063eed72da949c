"""FPGA Table I: Llama-3.1-8B with LongSpec on a V80, four ways of choosing the length.

    python -m paper_figs.fpga_table_1

Expected: autoregressive rows within 0.2 % from two numbers, all speculative speeds within 6 % from
one parameter set shared with Table IV, best length within one except at 16384 (a plateau).
"""

from __future__ import annotations

from paper_figs.comparison import Comparison, finish, read
from paper_figs.fpga_model import fitted
from paper_figs.style import panels, save, series

BOARD = "V80"


def run() -> list[Comparison]:
    model = fitted()
    table = Comparison(
        "fpga_table_1",
        "FPGA Table I: LongSpec on the V80",
        "speeds 6 %, autoregression 0.2 %, best length 1",
        "lengths, contexts; AAT law and roofline fitted on Tables I and IV",
    )
    rows = read("fpga_table_1_llama31_8b_longspec_v80.csv")
    for r in rows:
        context, method = int(r["context_length"]), r["method"]
        row, base = f"context {context} {method}", model.autoregressive(BOARD, context)
        if method == "autoregressive":
            table.add(row, "tokens/s", r["tokens_per_s"], base, relative=2e-3, kind="explained")
            continue
        ours = float(model.speed(BOARD, context, float(r["verification_length"])))
        table.add(row, "tokens/s", r["tokens_per_s"], ours, relative=0.06, kind="explained")
        table.add(row, "speedup", r["speedup"], ours / base, relative=0.06, kind="explained")
        if method == "best":
            best = model.best_length(BOARD, context)
            plateau = ours / float(model.speed(BOARD, context, float(best)))
            cause = f"plateau: the printed length reaches {100 * plateau:.1f} % of our maximum"
            table.add(
                row,
                "best length",
                r["verification_length"],
                best,
                absolute=1,
                kind="explained",
                cause=cause if plateau > 0.97 else "",
            )
    draw(rows, model)
    return finish(table)


def draw(rows, model) -> None:
    figure, axis = panels(height=3.4)
    contexts = sorted({int(r["context_length"]) for r in rows})
    for i, method in enumerate(("autoregressive", "original", "naive", "best")):
        mine = {int(r["context_length"]): r for r in rows if r["method"] == method}
        ours = [
            float(model.speed(BOARD, c, float(mine[c]["verification_length"])))
            if method != "autoregressive"
            else model.autoregressive(BOARD, c)
            for c in contexts
        ]
        axis.plot(contexts, ours, label=f"ours, {method}", **series(i, marker=False))
        printed = [float(mine[c]["tokens_per_s"]) for c in contexts]
        axis.plot(contexts, printed, **series(i, line=False) | {"mfc": "white"})
    axis.plot([], [], "o", color="#111111", mfc="white", label="markers: paper")
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [str(c) for c in contexts])
    axis.set(xlabel="context length", ylabel="tokens per second", ylim=(0, None))
    axis.legend(ncols=2)
    save(figure, "fpga_table_1")


if __name__ == "__main__":
    run()
