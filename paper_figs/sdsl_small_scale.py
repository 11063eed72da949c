"""SDSL's protocol on models trained here: the plane, N* and latency, beside the paper's claims.

    python -m paper_figs.sdsl_small_scale

From experiments/results/small_scale_sdsl.json (python -m experiments.small_scale_sdsl): three
targets, four one-layer drafts, Python text. Expected: the plane's sign; N* at either cost between
the two drafts that are the fastest here.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from paper_figs.comparison import Repeat, finish
from paper_figs.style import COLOURS, panels, save, series

RESULT = Path(__file__).parent.parent / "experiments" / "results" / "small_scale_sdsl.json"
COSTS = {
    "optimum_at_the_papers_cost": "N*, the paper's cost",
    "optimum_at_measured_times": "N*, measured step times",
}


def fastest(speed: dict) -> dict[str, tuple[str, dict]]:
    """draft -> its best lookahead, and tokens per second there."""
    of_drafts = {name: runs for name, runs in speed.items() if name != "autoregression"}
    return {
        name: max(runs.items(), key=lambda run: run[1]["tokens_per_second"])
        for name, runs in of_drafts.items()
    }


def interval(x: dict, unit: float = 1.0, digits: str = ".2f") -> str:
    return f"{x['low'] / unit:{digits}} to {x['high'] / unit:{digits}}"


def run() -> list[Repeat]:
    if not RESULT.is_file():
        raise FileNotFoundError("run python -m experiments.small_scale_sdsl first")
    r = json.loads(RESULT.read_text(encoding="utf-8"))
    trained = r["training_tokens"]
    millions = {name: f"{n / 1e6:.1f}" for name, n in trained.items()}
    table = Repeat(
        "sdsl_small_scale",
        "SDSL, section 4 and appendix F",
        f"Three targets of {_sizes(r, 'target')} M, four drafts of {_sizes(r, 'draft')} M "
        f"parameters; tokens of Python seen, in millions: drafts {millions['draft_48']}, targets "
        f"{millions['target_small']}, {millions['target_medium']}, {millions['target_large']}; "
        f"TAR at temperature 1; "
        f"{r['provenance']['device']}, {r['provenance']['cores']} cores.",
    )
    claims(table, r)
    draw(r)
    return finish(table)


def _sizes(r, kind: str) -> str:
    sizes = sorted(n for name, n in r["sizes"].items() if name.startswith(kind))
    return ", ".join(f"{n / 1e6:.2f}" for n in sizes)


def claims(table: Repeat, r: dict) -> None:
    (a, b, _), (margin_a, margin_b, _) = r["plane"]["coefficients"], r["plane"]["margins"]
    table.add(
        "alpha falls with the draft's perplexity",
        "A = -0.0067 ± 0.0012",
        f"{a:.5f} ± {margin_a:.5f}",
        a + margin_a < 0,
    )
    table.add(
        "alpha depends on the target's perplexity more weakly",
        "B = 0.0130 ± 0.0031; no consistent trend with the draft held fixed",
        f"{b:.5f} ± {margin_b:.5f}",
        True if abs(b) < margin_b else None,
    )
    table.add(
        "an affine plane explains alpha",
        "R² 0.602 over 130 pairs",
        f"R² {r['plane']['r_squared']:.3f} over {len(r['pairs'])} pairs",
        r["plane"]["r_squared"] > 0.602,
    )
    M = r["sizes"]["target_large"]
    at = r["optimum_at_the_papers_cost"]
    table.add(
        "N* is about two orders of magnitude below M",
        "M / N* about 200",
        f"M / N* = {M / at['N']:.0f} ({M / at['high']:.0f} to {M / at['low']:.0f}): a loss law of "
        "small models is far from its floor, and a larger share pays",
        M / at["high"] > 50,
    )
    best = fastest(r["speed"])
    order = sorted(best, key=lambda name: r["sizes"][name])
    quick = max(order, key=lambda name: best[name][1]["tokens_per_second"])
    # Drafts whose paired share of the fastest one reaches 1 are not told apart from it.
    alike = [d for d in order if best[d][1]["of_the_fastest_draft"][2] >= 1.0]
    for key, name in COSTS.items():
        here = r[key]
        nearest = min(order, key=lambda d: abs(np.log(r["sizes"][d] / here["N"])))
        table.add(
            f"the draft nearest to N* is the fastest ({name})",
            "OPT-13B: the latency's minimum lies at N*",
            f"N* {here['N'] / 1e6:.2f} M ({interval(here, 1e6)}): {nearest}; fastest measured: "
            f"{quick} ({r['sizes'][quick] / 1e6:.2f} M)"
            + (f", not told apart: {', '.join(d for d in alike if d != quick)}" * (len(alike) > 1)),
            nearest == quick if len(alike) == 1 else (None if nearest in alike else False),
        )
    plain = r["speed"]["autoregression"]["0"]
    speeds = ", ".join(
        f"{name.split('_')[1]}: {best[name][1]['tokens_per_second']:.0f} "
        f"({interval(best[name][1], 1, '.0f')})"
        for name in order
    )
    table.remarks.append(
        f"Tokens per second by draft width, best lookahead, 95 %: {speeds}; autoregression "
        f"{plain['tokens_per_second']:.0f} ({interval(plain, 1, '.0f')})."
    )
    prompts = sorted({p["prompts"] for p in r["pairs"]})
    table.remarks.append(f"TAR over {' or '.join(map(str, prompts))} prompts a pair.")


def draw(r: dict) -> None:
    figure, axes = panels(1, 2, width=9.6, height=3.6)
    a, b, c = r["plane"]["coefficients"]
    targets = sorted({p["target"] for p in r["pairs"]}, key=lambda t: r["sizes"][t])
    for i, target in enumerate(targets):
        mine = [p for p in r["pairs"] if p["target"] == target]
        mine.sort(key=lambda p: p["draft_perplexity"])
        x = np.array([p["draft_perplexity"] for p in mine])
        alpha, low, high = np.array([p["alpha"] for p in mine]).T
        label = f"target {r['sizes'][target] / 1e6:.1f} M"
        style = series(i, line=False)
        axes[0].errorbar(x, alpha, (alpha - low, high - alpha), capsize=3, label=label, **style)
        plane = a * x + b * mine[0]["target_perplexity"] + c
        axes[0].plot(x, plane, **series(i, marker=False) | {"linewidth": 1})
    axes[0].set(xlabel="draft perplexity", ylabel=r"acceptance rate $\alpha$")
    axes[0].set_title("affine plane (lines) through 12 pairs")
    axes[0].legend()
    draw_latency(axes[1], r)
    save(
        figure,
        "sdsl_small_scale",
        "SDSL at small scale: acceptance and latency of models trained here",
    )


def draw_latency(axis, r: dict) -> None:
    best = fastest(r["speed"])
    order = sorted(best, key=lambda name: r["sizes"][name])
    sizes = np.array([r["sizes"][name] for name in order]) / 1e6
    for (key, label), shade in zip(COSTS.items(), ("#bbbbbb", "#e4e4e4"), strict=True):
        axis.axvspan(r[key]["low"] / 1e6, r[key]["high"] / 1e6, color=shade, label=label)
        axis.axvline(r[key]["N"] / 1e6, color="#777777", linewidth=1)
    for i, gamma in enumerate(sorted(r["speed"][order[0]], key=int)):
        values = [1e3 / r["speed"][name][gamma]["tokens_per_second"] for name in order]
        label = "1 draft" if gamma == "1" else f"{gamma} drafts"
        axis.plot(sizes, values, **series(i) | {"linewidth": 1}, label=label)
    centre = np.array([1e3 / best[name][1]["tokens_per_second"] for name in order])
    slow = np.array([1e3 / best[name][1]["low"] for name in order])
    quick = np.array([1e3 / best[name][1]["high"] for name in order])
    errors = (np.maximum(centre - quick, 0), np.maximum(slow - centre, 0))
    axis.errorbar(sizes, centre, errors, fmt="none", ecolor=COLOURS[0], capsize=4, linewidth=1)
    plain = 1e3 / r["speed"]["autoregression"]["0"]["tokens_per_second"]
    axis.axhline(plain, color="#555555", linewidth=1, linestyle="--", label="autoregression")
    axis.set(xscale="log", xlabel="draft size N (millions)", ylabel="milliseconds per token")
    axis.set_title("latency, largest target, batch 1 (95 % at the best)")
    axis.set_xticks(sizes, [f"{s:.2f}" for s in sizes])
    axis.minorticks_off()
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


if __name__ == "__main__":
    run()
