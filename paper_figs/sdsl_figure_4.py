"""SDSL Figure 4: latency of OPT-13B against the draft's distance from the predicted optimum.

    python -m paper_figs.sdsl_figure_4

Expected: the paper's measurements over distances computed by sdx. Within the OPT family the time
per token is not monotone in the distance (350M is slower than 1.3B): see Table 6.
"""

from __future__ import annotations

from paper_figs.comparison import Comparison, finish, read
from paper_figs.sdsl_table_6 import D_TARGET, DRAFT_TOKENS, M
from paper_figs.style import panels, save, series
from sdx.theory.scaling import optimal_draft_size
from sdx.theory.transformers import load_architecture, parameters


def run() -> list[Comparison]:
    rows = read("sdsl_table_6_latency_opt13b.csv")
    names = (
        "(a) time to first token, TTFT",
        "(b) total time of 250 tokens, TTOT",
        "(c) time per output token, TPOT",
    )
    figure, axes = panels(1, 3, width=9.6, height=3.2)
    for axis, key, name in zip(axes, ("ttft", "ttot", "tpot"), names, strict=True):
        for i, (family, tokens) in enumerate(DRAFT_TOKENS.items()):
            best = float(optimal_draft_size(M, tokens, D_TARGET).N)
            mine = [r for r in rows if r["family"] == family]
            x = [abs(float(parameters(load_architecture(r["draft"]))) - best) / M for r in mine]
            y = [float(r[f"{key}_s"]) for r in mine]
            margin = [float(r[f"{key}_moe"]) for r in mine]
            style = series(i) | {"mfc": "white"}
            axis.errorbar(x, y, margin, capsize=3, label=f"paper, {family} drafts", **style)
        axis.axvline(0, color="#888888", linestyle="--", linewidth=1, label="N = N* (ours)")
        axis.set(xlabel=r"$|N - N^*| / M$", ylabel="seconds", ylim=(0, None), title=name)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    title = "SDSL Figure 4: measured latency over computed distance from N*"
    save(figure, "sdsl_figure_4", f"{title}, OPT-13B")
    return finish(Comparison("sdsl_figure_4", title, "drawn"))


if __name__ == "__main__":
    run()
