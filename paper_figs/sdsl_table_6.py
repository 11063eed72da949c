"""SDSL Table 6: measured latency of OPT-13B with ten drafts on an A100, batch one.

    python -m paper_figs.sdsl_table_6

Expected: N* and the distances |N - N*| / M to every printed digit, from the models' configs. The
latencies are measurements: they are explained, not reproduced, by the drafts' layers (three
numbers for ten rows, within 5 %). They do not follow N: OPT-1.3B is faster than OPT-350M, both
have 24 layers.
"""

from __future__ import annotations

import numpy as np

from paper_figs.comparison import Comparison, finish, read
from paper_figs.style import panels, save, series
from sdx.theory.scaling import optimal_draft_size
from sdx.theory.transformers import load_architecture, parameters

M, D_TARGET = 12853473280.0, 180e9
DRAFT_TOKENS = {"OPT": 180e9, "Qwen1.5": 2.4e12, "Qwen2.5": 18e12}
NEW_TOKENS = 250  # of every run, the paper's appendix F
WITHIN = 0.05
LABEL_RISE = {"Qwen1.5-0.5B": -9, "Qwen1.5-1.8B": 3, "OPT-1.3B": -8}  # points; they share a spot
DODGE = {"Qwen1.5": -0.3, "Qwen2.5": 0.3}  # layers


def relative_fit(matrix, y) -> np.ndarray:
    """Predictions of the linear least-squares fit of the relative error."""
    beta = np.linalg.lstsq(matrix / y[:, None], np.ones_like(y), rcond=None)[0]
    return matrix @ beta


def seconds_from_layers(rows, layers) -> np.ndarray:
    """Seconds per output token: OPT a + b layers; the other vocabularies c layers (they detour
    through text, so that the target's share drowns)."""
    seconds = np.array([float(r["tpot_s"]) for r in rows])
    own = np.array([r["family"] == "OPT" for r in rows])
    fitted = np.empty_like(seconds)
    columns = np.stack([np.ones_like(layers), layers], axis=1)
    fitted[own] = relative_fit(columns[own], seconds[own])
    fitted[~own] = relative_fit(layers[~own, None], seconds[~own])
    return fitted


def run() -> list[Comparison]:
    table = Comparison(
        "sdsl_table_6",
        "SDSL Table 6: latency of OPT-13B",
        "N* and distance: every printed digit; latencies 5 %",
        "equation 9; configs of the models; layers of the drafts",
        [
            "The latency follows the draft's layers, not its size: three numbers explain the ten "
            "times per token, as when kernel launches bound decoding, which equation 9's FLOPs do "
            "not see. The table does not single out N*.",
            "Total time is 250 times the time per token; half-widths are not compared.",
        ],
    )
    rows = read("sdsl_table_6_latency_opt13b.csv")
    drafts = [load_architecture(r["draft"]) for r in rows]
    layers = np.array([d.layers for d in drafts])
    per_token = seconds_from_layers(rows, layers)
    first = np.empty_like(per_token)
    for own in (True, False):
        keep = [(r["family"] == "OPT") == own for r in rows]
        first[keep] = np.median([float(r["ttft_s"]) for r, k in zip(rows, keep, strict=True) if k])
    for i, r in enumerate(rows):
        best = float(optimal_draft_size(M, DRAFT_TOKENS[r["family"]], D_TARGET).N)
        table.add(r["draft"], "N* (millions)", r["predicted_optimum"].removesuffix("M"), best / 1e6)
        distance = abs(float(parameters(drafts[i])) - best) / M
        table.add(r["draft"], "|N - N*| / M", r["normalized_distance"], distance)
        table.add(r["draft"], "TPOT", r["tpot_s"], per_token[i], relative=WITHIN, kind="explained")
        total = NEW_TOKENS * per_token[i]
        table.add(r["draft"], "TTOT", r["ttot_s"], total, relative=WITHIN, kind="explained")
        table.add(r["draft"], "TTFT", r["ttft_s"], first[i], relative=WITHIN, kind="explained")
    draw(table.title, rows, layers, per_token)
    return finish(table)


def draw(title, rows, layers, per_token) -> None:
    figure, axes = panels(1, 2, width=8.4, height=3.6)
    groups = ((axes[0], ("OPT",)), (axes[1], ("Qwen1.5", "Qwen2.5")))
    for axis, families in groups:
        for family in families:
            i = list(DRAFT_TOKENS).index(family)
            keep = [j for j, r in enumerate(rows) if r["family"] == family]
            y = np.array([1e3 * float(rows[j]["tpot_s"]) for j in keep])
            margin = [1e3 * float(rows[j]["tpot_moe"]) for j in keep]
            style = series(i, line=False) | {"mfc": "white"}
            # Two families meet at 24 layers: side by side.
            at = layers[keep] + DODGE.get(family, 0)
            axis.errorbar(at, y, margin, capsize=3, label=f"paper, {family}", **style)
            for j, height in zip(keep, y, strict=True):
                text = rows[j]["draft"].split("-")[1]
                left = family == "Qwen1.5" or text == "1.3B"
                axis.annotate(
                    text,
                    (layers[j] + DODGE.get(family, 0), height),
                    (-7 if left else 7, LABEL_RISE.get(rows[j]["draft"], -9)),
                    textcoords="offset points",
                    fontsize=7,
                    ha="right" if left else "left",
                )
        keep = [j for j, r in enumerate(rows) if r["family"] in families]
        keep.sort(key=lambda j: layers[j])
        axis.plot(layers[keep], 1e3 * per_token[keep], color="#888888", label="ours, fit in layers")
        axis.set_xticks(sorted({int(layers[j]) for j in keep}))
        axis.set(xlabel="layers of the draft", ylabel="TPOT (milliseconds)")
        axis.set_title(" and ".join(families) + " drafts")
        axis.set_ylim(0, None)
        axis.legend(loc="upper left")
        axis.margins(x=0.18)
    save(figure, "sdsl_table_6", f"{title}: time per output token")


if __name__ == "__main__":
    run()
