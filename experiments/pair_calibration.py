"""A trained pair's step times and acceptance, measured before anything is predicted of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from experiments.trained_pair import Pair, Settings, context_and_capacity, is_head_name
from sdx.calibration import measure
from sdx.calibration.chains import ChainFit, fit_chains
from sdx.calibration.hardware import HardwareFit, fit_hardware
from sdx.records import Chain
from sdx.reporting.progress import Reporter
from sdx.theory.acceptance import BetaMixture, PerPosition
from sdx.theory.hardware import StepTable

LOOKAHEADS = (1, 2, 3, 4, 6, 8)


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


def times_and_runs(pair: Pair, settings: Settings, reporter: Reporter):
    """(owner -> step -> seconds of every turn, (draft, lookahead) -> [prompt][0] Generation).

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
    by_owner = {
        owner: {key[1:]: np.asarray(v) for key, v in samples.items() if key[0] == owner}
        for owner in pair.architectures
    }
    return by_owner, runs


def calibrate(pair: Pair, settings: Settings, reporter: Reporter) -> Calibration:
    """Step tables, roofline, and each draft's acceptance on the calibration prompts."""
    samples, runs = times_and_runs(pair, settings, reporter)
    table = measure.table_of_medians(samples["target"], "target")
    context = context_and_capacity(settings)[0]
    drafts, tables = {}, {"target": table}
    for name in pair.drafts:
        seconds = {key[0]: v for key, v in samples[name].items()}
        times = measure.draft_times(seconds, name, context)
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
