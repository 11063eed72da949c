"""Predicted against measured decoding of the small pair on this machine.

    python -m experiments.predicted_measured [--prompts 50] [--repeats 3] [--pair DIR]

Step times (StepTables) and acceptance come from calibration prompts; then every configuration
(3 drafts x 6 lookaheads, and autoregression) decodes *other* held-out prompts, prompt by prompt in
turns, at temperature 0, batch 1.

Expect: median |predicted / measured - 1| of tokens per second <= 10 %, none above 25 %; the
designed configuration within 5 % (or the printed noise) of the best measured one; its paired
speedup over autoregression with a bootstrap interval; every output identical to autoregression.
Writes experiments/results/predicted_measured.json. About 7 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro
from tokenizers import Tokenizer

from sdx.calibration import measure
from sdx.calibration.chains import ChainFit, fit_chains
from sdx.calibration.hardware import HardwareFit, fit_hardware
from sdx.decoding.generation import Generation
from sdx.decoding.heads import bind
from sdx.decoding.llama_target import as_target
from sdx.models.checkpoint import load_model
from sdx.models.heads import is_head, load_head
from sdx.records import Autoregressive, Chain, Design, DrafterSpec, Prediction, Workload
from sdx.reporting.progress import Reporter
from sdx.search.design import DesignResult, design
from sdx.theory.acceptance import BetaMixture, PerPosition
from sdx.theory.costs import draft_architecture
from sdx.theory.hardware import StepTable
from sdx.theory.throughput import predict
from sdx.theory.transformers import Architecture, load_architecture
from sdx.training import corpus

LOOKAHEADS = (1, 2, 3, 4, 6, 8)
NEAR_TIE = 1e-4  # a smaller gap between the two best logits may flip with the order of summation
RESULT = Path(__file__).parent / "results" / "predicted_measured.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    pair: Path = Path("experiments/small_pair")
    """Folder with target/, draft_*/, tokenizer.json, and perhaps a draft head in head/."""
    prompts: int = 50
    """Held-out prompts to decode; acceptance comes from as many others."""
    calibration_prompts: int = 50
    prompt_tokens: int = 64
    new_tokens: int = 128
    repeats: int = 3
    """Turns over all prompts."""
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its drafts, as networks and as architectures (float32, as they run here)."""

    target: Any
    drafts: dict[str, Any]
    architectures: dict[str, Architecture]
    calibration_prompts: list[list[int]]
    prompts: list[list[int]]


def load_pair(settings: Settings) -> Pair:
    """The networks, and two disjoint sets of held-out prompts, alternating through the text."""
    folder = settings.pair
    names = sorted(p.parent.name for p in folder.glob("draft_*/config.json"))
    if not names:
        raise FileNotFoundError(
            f"{folder}: no draft_*/config.json; train the pair first "
            "(python -m experiments.train_small_models) or name another folder with --pair"
        )
    models = {name: load_model(folder / name)[0] for name in ("target", *names)}
    architectures = {
        name: load_architecture(str(folder / name), "float32", "float32") for name in models
    }
    target = as_target(models["target"])
    drafts = {name: as_target(models[name]) for name in names}
    if is_head(folder / "head"):
        head = bind(load_head(folder / "head"), target)
        kind, layers = head.head.config.kind, head.head.config.layers
        drafts[f"{kind}_head"] = head
        spec = DrafterSpec(family=kind, layers=layers, weight_dtype="float32")
        architectures[f"{kind}_head"] = draft_architecture(spec, architectures["target"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = corpus.tokenise(tokenizer, corpus.texts("held_out"))
    count = settings.prompts + settings.calibration_prompts
    windows = corpus.held_out_prompts(stream, count, settings.prompt_tokens).tolist()
    # Every k-th window is for decoding: both sets are spread over all files.
    chosen = set(np.linspace(0, count - 1, settings.prompts).round().astype(int).tolist())
    return Pair(
        target=target,
        drafts=drafts,
        architectures=architectures,
        calibration_prompts=[w for i, w in enumerate(windows) if i not in chosen],
        prompts=[w for i, w in enumerate(windows) if i in chosen],
    )


def is_head_name(name: str) -> bool:
    """Whether a draft of `Pair.drafts` is a head."""
    return name.endswith("_head")


# ------------------------------------------------------------------------------ calibration


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCalibration:
    """What is known of one draft before anything is predicted. `times`: its steps alone; `table`:
    its step within a round. `law`: the beta mixture of a model; a head drafts from features of its
    own making, which no mixture over contexts describes: its measured hazards stand."""

    times: measure.DraftTimes
    chains: ChainFit
    law: BetaMixture | PerPosition
    table: StepTable
    round_overhead_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """The machine and the pair, measured."""

    target_table: StepTable
    hardware: HardwareFit
    drafts: dict[str, DraftCalibration]


def context_and_capacity(settings: Settings) -> tuple[int, int]:
    """Mean context while decoding, and the slots that the runtime will allocate."""
    longest = settings.prompt_tokens + settings.new_tokens
    capacity = -(-longest // 32) * 32
    return settings.prompt_tokens + settings.new_tokens // 2, capacity


def step_timers(pair: Pair, settings: Settings, reporter: Reporter) -> dict:
    """("target", batch, tokens, context) and (draft, lookahead) -> timer."""
    context, capacity = context_and_capacity(settings)
    tokens = [1, *(gamma + 1 for gamma in LOOKAHEADS)]
    with reporter.stage("compiling the steps", len(tokens) + 2 * len(pair.drafts)) as report:
        found = measure.target_timers(
            pair.target, tokens, [context], capacity=capacity, rounds=16, report=report
        )
        timers = {("target", *key): timer for key, timer in found.items()}
        for name, draft in pair.drafts.items():
            found = measure.draft_timers(
                draft, (1, 4), context, capacity=capacity, rounds=16, report=report
            )
            timers |= {(name, key): timer for key, timer in found.items()}
    return timers


def costs_in_company(seconds_per_round, table: StepTable, times: measure.DraftTimes):
    """(overhead, more per draft): what a round takes beyond the steps timed alone, as a constant
    and per draft, by least relative squares over the lookaheads decoded for acceptance.

    Draft and target push each other's weights out of the cache: a draft's step costs more between
    two target passes than in a loop of its own.
    """
    lookaheads = np.asarray(sorted(seconds_per_round), float)
    rounds = np.asarray([seconds_per_round[int(g)] for g in lookaheads])
    step = float(np.asarray(times.table.seconds).ravel()[0])
    verify = np.interp(lookaheads + 1, table.new_tokens, np.asarray(table.seconds)[0, :, 0])
    rest = rounds - step * lookaheads - verify
    matrix = np.stack([np.ones_like(lookaheads), lookaheads], 1) / rounds[:, None]
    overhead, more = np.linalg.lstsq(matrix, rest / rounds)[0]
    return float(overhead), float(more)


def calibrate(pair: Pair, settings: Settings, reporter: Reporter) -> Calibration:
    """Step tables, roofline, and each draft's acceptance on the calibration prompts.

    Steps are timed after every calibration prompt: what a round costs beside its steps is then a
    difference of medians over the same minutes, whatever else the machine was doing.
    """
    timers = step_timers(pair, settings, reporter)
    samples = {key: [] for key in timers}

    def time_every_step():
        for key, timer in timers.items():
            samples[key].append(timer())

    policies = {
        (name, gamma): (Chain(lookahead=gamma), draft)
        for name, draft in pair.drafts.items()
        for gamma in LOOKAHEADS
    }
    total = len(policies) + len(pair.calibration_prompts)
    with reporter.stage("timing steps, measuring acceptance", total) as report:
        runs = measure.decode(
            pair.target,
            None,
            pair.calibration_prompts,
            policies,
            max_new_tokens=settings.new_tokens,
            between=time_every_step,
            report=report,
        )
    of = {
        owner: {key[1:]: np.asarray(v) for key, v in samples.items() if key[0] == owner}
        for owner in pair.architectures
    }
    table = measure.table_of_medians(of["target"], "target")
    context = context_and_capacity(settings)[0]
    drafts, tables = {}, {"target": table}
    for name in pair.drafts:
        times = measure.draft_times({key[0]: v for key, v in of[name].items()}, name, context)
        tables[name] = times.table
        chains = fit_chains(
            {gamma: [run[0].measurement() for run in runs[name, gamma]] for gamma in LOOKAHEADS}
        )
        overhead, more = costs_in_company(chains.seconds_per_round, table, times)
        drafts[name] = DraftCalibration(
            times=times,
            chains=chains,
            law=chains.hazards.law if is_head_name(name) else chains.law,
            table=dataclasses.replace(times.table, seconds=times.table.seconds + more),
            round_overhead_seconds=overhead,
        )
    # A head's step is no decoder's: the roofline is fitted to the models.
    models = [name for name in pair.architectures if not is_head_name(name)]
    hardware = fit_hardware(
        [pair.architectures[name] for name in models], [tables[name] for name in models]
    )
    return Calibration(target_table=table, hardware=hardware, drafts=drafts)


# ------------------------------------------------------------------------------- prediction


def workload_of(settings: Settings) -> Workload:
    return Workload(batch=1, context=context_and_capacity(settings)[0], new_tokens=128)


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


def top_two_gap(target, tokens: Sequence[int]) -> float:
    """Gap of the two best logits after these tokens, in one pass over all of them."""
    model = as_target(target)
    cache = model.empty_cache(1, -(-len(tokens) // 32) * 32)
    logits = np.asarray(model(jnp.asarray([tokens], jnp.int32), cache).logits_BxTxV[0, -1])
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


def identity(pair: Pair, results) -> dict[str, int]:
    """Outputs compared with autoregression's: identical, different at a near-tie, different."""
    counts = {"compared": 0, "identical": 0, "near_ties": 0, "different": 0}
    for label, runs in results.items():
        if label is None:
            continue
        for prompt, mine, base in zip(pair.prompts, runs, results[None], strict=True):
            a, b = mine[0].tokens[0], base[0].tokens[0]
            counts["compared"] += 1
            if a == b:
                counts["identical"] += 1
                continue
            same = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            gap = top_two_gap(pair.target, [*prompt, *b[:same]])
            counts["near_ties" if gap < NEAR_TIE else "different"] += 1
    return counts


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


def law_text(law: BetaMixture | PerPosition) -> str:
    """The law and its numbers, for a person."""
    if isinstance(law, BetaMixture):
        return f"BetaMixture({float(law.a):.2f}, {float(law.b):.2f})"
    return "hazards " + " ".join(f"{float(rate):.2f}" for rate in np.asarray(law.rates))


def calibration_as_data(calibration: Calibration) -> dict[str, Any]:
    """Plain data of what was calibrated."""

    def interval(i):
        return [float(i.value), float(i.low), float(i.high)]

    table = calibration.target_table
    return {
        "target_step_seconds": dict(
            zip(
                map(str, np.asarray(table.new_tokens, int)),
                np.asarray(table.seconds)[0, :, 0].tolist(),
                strict=True,
            )
        ),
        "roofline_mean_error": calibration.hardware.mean_absolute_error,
        "roofline_largest_error": calibration.hardware.largest_error,
        "drafts": {
            name: {
                "step_seconds_alone": float(np.asarray(known.times.table.seconds).ravel()[0]),
                "step_seconds": float(np.asarray(known.table.seconds).ravel()[0]),
                "first_pass_extra_seconds": known.times.extra_seconds,
                "round_overhead_seconds": known.round_overhead_seconds,
                "alpha": interval(known.chains.alpha.alpha),
                "hazards": [interval(h) for h in known.chains.hazards.hazards],
                "law": law_text(known.law),
            }
            for name, known in calibration.drafts.items()
        },
    }


def study(settings: Settings, reporter: Reporter):
    """Everything: (pair, calibration, designs, predictions, comparison)."""
    pair = load_pair(settings)
    calibration = calibrate(pair, settings, reporter)
    found = designs(pair, calibration, settings)
    predicted = predictions(pair, calibration, settings)
    chosen = chosen_configuration(found)
    results = decode(pair, chosen, settings, reporter)
    comparison = compare(predicted, results, chosen, pair, settings)
    return pair, calibration, found, predicted, comparison


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
    from experiments.provenance import provenance

    settings = tyro.cli(Settings, description=__doc__)
    _, calibration, _, _, comparison = study(settings, Reporter())
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
