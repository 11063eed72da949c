"""Predicted against measured decoding of the small pair on this machine.

    python -m experiments.predicted_measured [--prompts 50] [--repeats 3] [--pair DIR]

Step times (StepTables) and acceptance come from calibration prompts; then every configuration
(3 drafts x 6 lookaheads, and autoregression) decodes *other* held-out prompts, prompt by prompt in
turns, at temperature 0, batch 1.

Expect: median |predicted / measured - 1| of tokens per second <= 10 %, none above 25 %; the
designed configuration within 5 % (or the printed noise) of the best measured one; its paired
speedup over autoregression with a bootstrap interval; every output identical to autoregression.
Writes experiments/results/predicted_measured.json. About nine minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from experiments import greedy_identity
from experiments.pair_calibration import LOOKAHEADS, Calibration, calibrate, calibration_as_data
from experiments.provenance import provenance
from experiments.trained_pair import Pair, Settings, context_and_capacity, load_pair
from sdx.calibration import measure
from sdx.decoding.generation import Generation
from sdx.records import Autoregressive, Chain, Design, DrafterSpec, Prediction, Workload
from sdx.reporting.progress import Reporter
from sdx.search import DesignResult, design
from sdx.theory.throughput import predict

RESULT = Path(__file__).parent / "results" / "predicted_measured.json"


def workload_of(settings: Settings) -> Workload:
    return Workload(
        batch=1, context=context_and_capacity(settings)[0], new_tokens=settings.new_tokens
    )


def predictions(pair: Pair, calibration: Calibration, settings: Settings):
    """(draft, lookahead) -> Prediction, and None -> autoregression."""
    workload, result = workload_of(settings), {}
    for name, known in calibration.drafts.items():
        spec = DrafterSpec(name=name, weight_dtype="float32")
        for gamma in (0, *LOOKAHEADS):
            prediction = predict(
                Design(drafter=spec, policy=Chain(lookahead=gamma)),
                workload,
                pair.architectures["target"],
                calibration.target_table,
                known.law,
                pair.architectures[name],
                draft_hardware=known.table,
                round_overhead_seconds=known.round_overhead_seconds,
            )
            result[(name, gamma) if gamma else None] = prediction
    return result


def designs(pair: Pair, calibration: Calibration, settings: Settings) -> dict[str, DesignResult]:
    """The best chain of each draft; the better of them is the design."""
    return {
        name: design(
            pair.architectures["target"],
            calibration.target_table,
            workload_of(settings),
            draft=pair.architectures[name],
            acceptance=known.law,
            draft_hardware=known.table,
            round_overhead_seconds=known.round_overhead_seconds,
            max_lookahead=max(LOOKAHEADS),
        )
        for name, known in calibration.drafts.items()
    }


def chosen_configuration(found: dict[str, DesignResult]) -> tuple[str, int] | None:
    """(draft, lookahead) of the best design; None where the verdict is not to speculate."""
    name = max(found, key=lambda n: float(found[n].prediction.tokens_per_second))
    if found[name].prediction.verdict != "speculate":
        return None
    return name, int(found[name].design.policy.lookahead)


# ------------------------------------------------------------------------------ measurement


def decode(pair: Pair, extra, settings: Settings, reporter: Reporter):
    """configuration -> [prompt][repeat] Generation; None is autoregression."""
    configurations = {None: (Autoregressive(), None)}
    for name, draft in pair.drafts.items():
        for gamma in LOOKAHEADS:
            configurations[name, gamma] = (Chain(lookahead=gamma), draft)
    if extra is not None and extra not in configurations:
        configurations[extra] = (Chain(lookahead=extra[1]), pair.drafts[extra[0]])
    total = len(configurations) + len(pair.prompts) * settings.repeats
    with reporter.stage("decoding other prompts", total) as report:
        return measure.decode(
            pair.target,
            None,
            pair.prompts,
            configurations,
            max_new_tokens=settings.new_tokens,
            repeats=settings.repeats,
            report=report,
        )


def seconds_of(runs: list[list[Generation]]) -> np.ndarray:
    """[prompt, repeat]"""
    return np.asarray([[run.seconds for run in prompt] for prompt in runs])


def tokens_of(runs: list[list[Generation]]) -> np.ndarray:
    """[prompt]: tokens emitted by rounds (the prompt's pass emits the first)."""
    return np.asarray([len(prompt[0].tokens[0]) - 1 for prompt in runs])


def tokens_per_second(runs) -> tuple[float, float]:
    """All tokens over the sum of each prompt's median seconds, and the noise of repeating: half
    the range of whole turns, relative (0 with one turn)."""
    seconds, tokens = seconds_of(runs), tokens_of(runs)
    turns = tokens.sum() / seconds.sum(0)
    value = tokens.sum() / np.median(seconds, axis=1).sum()
    return float(value), float((turns.max() - turns.min()) / 2 / np.median(turns))


def paired_speedup(runs, baseline, seed: int) -> dict[str, float]:
    """Median over prompts of baseline / policy seconds, with a bootstrap 95 % interval."""
    ratios = np.median(seconds_of(baseline), 1) / np.median(seconds_of(runs), 1)
    random = np.random.default_rng(seed)
    draws = random.choice(ratios, (2000, ratios.size))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return {
        "median": float(np.median(ratios)),
        "low": float(low),
        "high": float(high),
        "prompts": int(ratios.size),
    }


def identity(pair: Pair, results) -> dict[str, int]:
    """Outputs compared with autoregression's: identical, different at a near-tie, different."""
    counts = {"compared": 0, "identical": 0, "near_ties": 0, "different": 0}
    reference = first_outputs(results[None])
    for label, runs in results.items():
        if label is None:
            continue
        found = greedy_identity.compare(pair.target, pair.prompts, reference, first_outputs(runs))
        counts["compared"] += len(runs)
        counts["identical"] += found["identical"]
        counts["near_ties"] += len(found["near_ties"])
        counts["different"] += len(found["failures"])
    return counts


def first_outputs(runs: list[list[Generation]]) -> list[list[int]]:
    """Each prompt's tokens, of its first turn."""
    return [prompt[0].tokens[0] for prompt in runs]


def compare(
    predicted: dict[Any, Prediction], results, chosen, pair: Pair, settings: Settings
) -> dict[str, Any]:
    """The whole comparison as plain data."""
    rows = []
    for label, runs in results.items():
        value, noise = tokens_per_second(runs)
        row = {
            "draft": label[0] if label else None,
            "lookahead": label[1] if label else 0,
            "measured_tokens_per_second": value,
            "noise": noise,
            "measured_tokens_per_round": float(
                tokens_of(runs).sum() / sum(prompt[0].rounds for prompt in runs)
            ),
            "designed": label is not None and label == chosen,
        }
        if label in predicted:
            p = predicted[label]
            row |= {
                "predicted_tokens_per_second": float(p.tokens_per_second),
                "predicted_tokens_per_round": float(p.tokens_per_round),
                "error": float(p.tokens_per_second) / value - 1,
            }
        if label is not None:
            row["speedup"] = paired_speedup(runs, results[None], settings.seed)
        rows.append(row)
    speculative = [r for r in rows if r["draft"]]
    errors = np.abs([r["error"] for r in speculative if "error" in r])
    best = max(rows, key=lambda r: r["measured_tokens_per_second"])
    mine = next((r for r in rows if r["designed"]), rows[0])
    plain = next(r for r in rows if r["draft"] is None)
    return {
        "autoregression_error": plain["error"],
        "configurations": rows,
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
        "noise_of_repeating": float(np.median([r["noise"] for r in rows])),
        "designed": {k: mine[k] for k in ("draft", "lookahead", "measured_tokens_per_second")},
        "designed_over_best": mine["measured_tokens_per_second"]
        / best["measured_tokens_per_second"],
        "designed_speedup": mine.get("speedup"),
        "identity": identity(pair, results),
    }


def lines_of(comparison: dict[str, Any]) -> list[str]:
    """The comparison as a table of plain text."""
    lines = ["draft          lookahead  predicted  measured  error   noise  tokens/round  speedup"]
    for row in comparison["configurations"]:
        error = f"{100 * row['error']:+5.1f} %" if "error" in row else "      "
        speedup = f"{row['speedup']['median']:.2f}" if "speedup" in row else "1"
        lines.append(
            f"{row['draft'] or 'autoregression':14s} {row['lookahead']:9d} "
            f"{row.get('predicted_tokens_per_second', float('nan')):10.0f} "
            f"{row['measured_tokens_per_second']:9.0f} {error} {100 * row['noise']:5.1f} % "
            f"{row['measured_tokens_per_round']:11.2f} {speedup:>9s}"
            + ("  <- designed" if row["designed"] else "")
        )
    counts, speedup = comparison["identity"], comparison["designed_speedup"]
    lines += [
        f"median |predicted/measured - 1| {100 * comparison['median_error']:.1f} %, largest "
        f"{100 * comparison['largest_error']:.1f} %; noise of repeating a configuration "
        f"+-{100 * comparison['noise_of_repeating']:.1f} %",
        f"designed configuration reaches {100 * comparison['designed_over_best']:.1f} % of the "
        "best measured one",
        f"identical to autoregression: {counts['identical']} of {counts['compared']} outputs, "
        f"{counts['near_ties']} differ at a near-tie, {counts['different']} differ",
    ]
    if speedup:
        lines.append(
            f"designed against autoregression, paired over {speedup['prompts']} prompts: "
            f"{speedup['median']:.2f} x [{speedup['low']:.2f}, {speedup['high']:.2f}]"
        )
    return lines


def main() -> None:
    settings, reporter = tyro.cli(Settings, description=__doc__), Reporter()
    pair = load_pair(settings)
    calibration = calibrate(pair, settings, reporter)
    chosen = chosen_configuration(designs(pair, calibration, settings))
    predicted = predictions(pair, calibration, settings)
    results = decode(pair, chosen, settings, reporter)
    comparison = compare(predicted, results, chosen, pair, settings)
    print("\n".join(lines_of(comparison)))
    result = {
        "settings": dataclasses.asdict(settings) | {"pair": settings.pair.name},
        "calibration": calibration_as_data(calibration),
        **comparison,
        "provenance": provenance(settings.seed),
    }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
