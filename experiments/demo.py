"""The main job on this machine: calibrate, measure, design by gradient, decode, compare.

    make demo            (python -m experiments.demo [--pair DIR] [--out DIR])

A shorter run of experiments/predicted_measured.py on a trained pair of small models and held-out
Python text. Expect in about five minutes on two cores: 18 configurations predicted within a median
of 10 %, the designed one among the best, its output identical to autoregression and faster.
Writes out/demo/: demo.json, hardware.toml, throughput.png, index.html.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import time
from pathlib import Path

import jax
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import tyro
from rich.console import Console

from experiments import predicted_measured as study
from experiments import trained_pair
from experiments.pair_calibration import Calibration, calibrate, calibration_as_data, law_text
from sdx.reporting.progress import Reporter

matplotlib.use("Agg")  # no screen is needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(trained_pair.Settings):
    """What the demo runs: a shorter predicted_measured."""

    prompts: int = 20
    calibration_prompts: int = 40
    repeats: int = 2
    out: Path = Path("out/demo")


def figure(comparison, path: Path) -> None:
    """Predicted lines and measured points of tokens per second against the lookahead."""
    rows = comparison["configurations"]
    plain = next(r for r in rows if r["draft"] is None)
    fig, ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for style, draft in zip(
        ("o", "s", "^", "D"), sorted({r["draft"] for r in rows if r["draft"]}), strict=False
    ):
        mine = sorted((r for r in rows if r["draft"] == draft), key=lambda r: r["lookahead"])
        x = [r["lookahead"] for r in mine]
        (line,) = ax.plot(
            x,
            [r["predicted_tokens_per_second"] for r in mine],
            "--" if style == "o" else "-.",
            label=f"{draft}, predicted",
        )
        measured = np.asarray([r["measured_tokens_per_second"] for r in mine])
        noise = measured * [r["noise"] for r in mine]
        ax.errorbar(
            x, measured, noise, fmt=style, color=line.get_color(), label=f"{draft}, measured"
        )
    ax.axhline(
        plain["measured_tokens_per_second"], color="0.4", lw=1, label="autoregression, measured"
    )
    for row in rows:
        if row["designed"] and row["draft"]:
            ax.plot(
                row["lookahead"],
                row["measured_tokens_per_second"],
                "*",
                ms=18,
                mfc="none",
                mec="k",
                label="designed",
            )
    ax.set(xlabel="lookahead (drafts per round)", ylabel="tokens per second", ylim=(0, None))
    ax.legend(fontsize=8)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def page(lines: list[str], picture: Path) -> str:
    """One self-contained page."""
    image = base64.b64encode(picture.read_bytes()).decode()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>sdx demo</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font-family:system-ui,sans-serif;max-width:60rem;margin:1rem auto;padding:0 1rem}}
pre{{overflow-x:auto;background:#f4f4f4;padding:.75rem}}img{{max-width:100%}}</style></head>
<body><h1>sdx demo: predicted against measured</h1>
<p>Step times and acceptance were measured on other prompts than those decoded here.</p>
<img alt="Tokens per second against lookahead" src="data:image/png;base64,{image}">
<pre>{html.escape(chr(10).join(lines))}</pre></body></html>
"""


def calibration_lines(calibration: Calibration) -> list[str]:
    table, fit = calibration.target_table, calibration.hardware
    steps = zip(np.asarray(table.new_tokens, int), np.asarray(table.seconds)[0, :, 0], strict=True)
    lines = [
        "target, ms per step of n tokens: " + ", ".join(f"{n}: {1e3 * s:.2f}" for n, s in steps),
        f"roofline fitted to the steps: mean error {100 * fit.mean_absolute_error:.0f} %, largest "
        f"{100 * fit.largest_error:.0f} % (predictions use the measured steps)",
    ]
    for name, known in calibration.drafts.items():
        alone, step = (
            float(np.asarray(t.seconds).ravel()[0]) for t in (known.times.table, known.table)
        )
        alpha = known.chains.alpha.alpha
        lines.append(
            f"{name}: {1e3 * step:.3f} ms per draft ({1e3 * alone:.3f} alone), "
            f"{1e3 * known.round_overhead_seconds:.3f} ms more per round; "
            f"alpha {alpha.value:.3f} [{alpha.low:.3f}, {alpha.high:.3f}], "
            f"{law_text(known.law)}"
        )
    return lines


def design_lines(found, chosen) -> list[str]:
    lines = []
    for name, result in found.items():
        p = result.prediction
        steep = sorted(result.elasticities.items(), key=lambda kv: -abs(float(kv[1])))[:3]
        lines.append(
            f"{name}: lookahead {int(result.design.policy.lookahead)}, "
            f"{float(p.tokens_per_second):.0f} tokens/s predicted, x{float(p.speedup):.2f}, "
            f"{p.verdict}; d ln T / d ln: "
            + ", ".join(f"{key} {float(value):+.2f}" for key, value in steep)
        )
    text = "do not speculate" if chosen is None else f"{chosen[0]} at lookahead {chosen[1]}"
    return [*lines, f"designed: {text}"]


def main() -> None:
    begun = time.perf_counter()
    settings = tyro.cli(Settings, description=__doc__)
    console, reporter = Console(), Reporter()
    settings.out.mkdir(parents=True, exist_ok=True)

    def show(title, lines):
        console.rule(title, align="left")
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)

    pair = trained_pair.load_pair(settings)
    calibration = calibrate(pair, settings, reporter)
    shown = calibration_lines(calibration)
    show("calibrate and measure", shown)
    found = study.designs(pair, calibration, settings)
    chosen = study.chosen_configuration(found)
    designed = design_lines(found, chosen)
    show("design", designed)
    predicted = study.predictions(pair, calibration, settings)
    results = study.decode(pair, chosen, settings, reporter)
    comparison = study.compare(predicted, results, chosen, pair, settings)
    compared = study.lines_of(comparison)
    show("predicted against measured", compared)

    seconds = time.perf_counter() - begun
    data = {
        "settings": json.loads(json.dumps(dataclasses.asdict(settings), default=str)),
        "calibration": calibration_as_data(calibration),
        **comparison,
        "seconds": seconds,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    (settings.out / "demo.json").write_text(json.dumps(data, indent=1) + "\n")
    (settings.out / "hardware.toml").write_text(calibration.hardware.to_toml("the demo's machine"))
    figure(comparison, settings.out / "throughput.png")
    text = page([*shown, "", *designed, "", *compared], settings.out / "throughput.png")
    (settings.out / "index.html").write_text(text)
    console.print(f"{seconds:.0f} s; open {settings.out / 'index.html'}", highlight=False)


if __name__ == "__main__":
    main()
