"""Metrics of a running engine -> counts per drafted position, from which acceptance is fitted.

    Prometheus page(s) of vLLM   --read_prometheus-->  EngineCounts  (two pages: their difference)
    vLLM's per-request metrics   --read_requests---->  EngineCounts  (requests are clusters)
    Prometheus page(s) of SGLang --read_prometheus-->  EngineMean    (a mean, no positions)

vLLM counts, per position i, the rounds in which draft i was accepted, hence all before it as well:
accepted[i] / drafts = S(i + 1), and the hazard of position i is accepted[i] / accepted[i - 1].
`calibration.fit` turns `reached` and `accepted` into laws with intervals.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from scipy import optimize, special

from sdx.records import Chain, Interval, Measurement
from sdx.theory.acceptance import Geometric

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
START = "process_start_time_seconds"
SGLANG_LENGTH = "sglang:spec_accept_length"
SGLANG_STEPS = "sglang:spec_num_steps"
SGLANG_DRAFT_TOKENS = "sglang:spec_num_draft_tokens"
SGLANG_CALLS = "sglang:spec_verify_calls"

# Below this share of the full lookahead, rounds were cut so often that accepted[i] / accepted[i-1]
# is no longer the hazard: a position that was not drafted would count as rejected.
FULL_ROUNDS = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCounts:
    """Rounds and, per position, rounds in which the drafts before it were accepted (`reached`) and
    in which it was accepted itself. `effective` scales both to independent trials: requests differ,
    so rounds of one request are not independent (1 where the source does not tell requests apart).
    """

    engine: str
    drafts: float
    draft_tokens: float
    accepted: tuple[float, ...]
    effective: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def lookahead(self) -> int:
        return len(self.accepted)

    @property
    def reached(self) -> tuple[float, ...]:
        return (self.drafts, *self.accepted[:-1])

    @property
    def tokens_per_round(self) -> float:
        """Mean length, the bonus token included."""
        return 1.0 + sum(self.accepted) / self.drafts

    def trials(self) -> tuple[np.ndarray, np.ndarray]:
        """(reached, accepted) in effective trials: the arguments of `calibration.fit_hazards`."""
        return np.asarray(self.reached) * self.effective, np.asarray(self.accepted) * self.effective

    def measurement(self) -> Measurement:
        """The same counts as sdx's own runtime would report them (no seconds)."""
        return Measurement(
            rounds=self.drafts,
            tokens=self.drafts + sum(self.accepted),
            seconds=math.nan,
            drafted_per_position=(self.drafts,) * self.lookahead,
            accepted_per_position=self.accepted,
            policy=Chain(lookahead=self.lookahead),
            note=f"{self.engine} metrics",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineMean:
    """SGLang's view: mean tokens per round (bonus included) at a lookahead, over `rounds`."""

    engine: str
    tokens_per_round: float
    lookahead: int
    rounds: float
    notes: tuple[str, ...] = ()

    def geometric(self) -> tuple[Geometric, Interval]:
        """The constant alpha of this mean length, E(gamma) = sum_{k<=gamma} alpha^k, and its 95 %
        interval: the mean's standard error under that law, divided by dE/d alpha."""
        alpha = _solve_alpha(self.tokens_per_round, self.lookahead)
        k = np.arange(self.lookahead + 1)
        survival = alpha**k
        mass = survival - np.append(survival[1:], 0.0)  # P(A = k)
        variance = mass @ k**2 - (mass @ k) ** 2
        slope = np.sum(k[1:] * alpha ** (k[1:] - 1.0))
        half = special.ndtri(0.975) * math.sqrt(variance / self.rounds) / slope
        interval = Interval(value=alpha, low=max(alpha - half, 0.0), high=min(alpha + half, 1.0))
        return Geometric(alpha=alpha), interval


def _solve_alpha(tokens_per_round: float, lookahead: int) -> float:
    def excess(alpha):
        return np.sum(alpha ** np.arange(lookahead + 1)) - tokens_per_round

    return float(optimize.brentq(excess, 0.0, 1.0, xtol=1e-14))


# ---------------------------------------------------------------------------- Prometheus pages


@dataclasses.dataclass(frozen=True)
class Page:
    """One scraped page: (metric without `_total`, position or "") -> value summed over engines."""

    name: str
    values: Mapping[tuple[str, str], float]
    starts: tuple[float, ...]

    def __contains__(self, metric: str) -> bool:
        return any(name == metric for name, _ in self.values)

    def __getitem__(self, metric: str) -> float:
        try:
            return self.values[metric, ""]
        except KeyError:
            raise ValueError(f"{self.name}: no {metric}; was the page scraped whole?") from None


def read_page(path: str | Path, model: str = "") -> Page:
    """A saved Prometheus text page; `model` picks one `model_name` where the page has several."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; save the engine's /metrics page there")
    try:
        samples = [s for f in text_string_to_metric_families(path.read_text()) for s in f.samples]
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a Prometheus text page ({error})") from None
    mine = [s for s in samples if s.name.startswith(("vllm:spec_decode", "sglang:spec_"))]
    models = {s.labels["model_name"] for s in mine if "model_name" in s.labels}
    if model and model not in models:
        raise ValueError(f"{path}: no model {model!r}; the page has {', '.join(sorted(models))}")
    if len(models) > 1 and not model:
        raise ValueError(f"{path}: several models ({', '.join(sorted(models))}): name one")
    values: dict[tuple[str, str], float] = defaultdict(float)
    starts = [s.value for s in samples if s.name == START]
    for sample in mine:
        if model and sample.labels.get("model_name", model) != model:
            continue
        if sample.name.endswith("_created"):
            starts.append(sample.value)
            continue
        name = sample.name.removesuffix("_total")
        values[name, sample.labels.get("position", "")] += sample.value
    if not values:
        raise ValueError(
            f"{path}: no speculative decoding metrics (vllm:spec_decode_* or sglang:spec_*); "
            "is speculation on, and has the engine served a request?"
        )
    return Page(str(path), dict(values), tuple(sorted(starts)))


def read_prometheus(
    path: str | Path, before: str | Path | None = None, model: str = ""
) -> EngineCounts | EngineMean:
    """Counts since the engine started, or between the page `before` and this one.

    Raises ValueError: counters that went backwards or a restart between the pages, positions that
    are missing, no drafts, rounds of mixed lookahead.
    """
    page = read_page(path, model)
    earlier = read_page(before, model) if before is not None else None
    if DRAFTS in page:
        return _vllm_counts(page, earlier)
    return _sglang_mean(page, earlier)


def _growth(page: Page, earlier: Page | None, metric: str, position: str = "") -> float:
    now = page.values[metric, position] if position else page[metric]
    if earlier is None:
        return now
    then = earlier.values.get((metric, position), 0.0)
    if now < then:
        raise ValueError(
            f"{metric} fell from {then:g} ({earlier.name}) to {now:g} ({page.name}): the engine "
            "restarted between the pages, or they are given in the wrong order; scrape two again"
        )
    return now - then


def _check_same_process(page: Page, earlier: Page | None):
    """A counter may pass its old value after a restart; the start times tell."""
    if earlier is None or not earlier.starts or not page.starts:
        return
    if page.starts[-1] > earlier.starts[-1]:
        raise ValueError(
            f"the engine restarted between {earlier.name} and {page.name} (its start time changed):"
            " scrape two pages of one run"
        )


def _vllm_counts(page: Page, earlier: Page | None) -> EngineCounts:
    _check_same_process(page, earlier)
    drafts = _growth(page, earlier, DRAFTS)
    tokens = _growth(page, earlier, DRAFT_TOKENS)
    total = _growth(page, earlier, ACCEPTED)
    if drafts <= 0:
        span = "between the two pages" if earlier else "so far"
        raise ValueError(f"{page.name}: no drafts {span}: send requests, then scrape again")
    positions = sorted(int(p) for name, p in page.values if name == PER_POSITION)
    if not positions or positions != list(range(positions[-1] + 1)):
        raise ValueError(
            f"{page.name}: positions {positions} of {PER_POSITION} are not 0, 1, 2, ...: a "
            "filter dropped some; scrape the page whole"
        )
    accepted = tuple(_growth(page, earlier, PER_POSITION, str(p)) for p in positions)
    if abs(sum(accepted) - total) > 0.01 * max(total, 1.0):
        raise ValueError(
            f"{page.name}: positions 0..{positions[-1]} sum to {sum(accepted):g} accepted tokens, "
            f"{ACCEPTED} says {total:g}: positions are missing or the page was cut"
        )
    return _checked(EngineCounts(
        engine="vllm", drafts=drafts, draft_tokens=tokens, accepted=accepted,
        notes=("counters do not tell requests apart: intervals take rounds as independent",),
    ), page.name)  # fmt: skip


def _checked(counts: EngineCounts, name: str) -> EngineCounts:
    """Counts of a chain fall with the position; rounds are (nearly) all of full lookahead."""
    for i, (high, low) in enumerate(zip(counts.reached, counts.accepted, strict=True)):
        if low > high:
            raise ValueError(
                f"{name}: position {i} accepted {low:g} times, but was reached {high:g} times: "
                "these are not counts of a chain"
            )
    full = counts.draft_tokens / (counts.drafts * counts.lookahead)
    if full < FULL_ROUNDS:
        raise ValueError(
            f"{name}: rounds drafted {full * counts.lookahead:.2f} of {counts.lookahead} tokens on "
            "average: with a lookahead that changes (a batch schedule, n-gram) the counters do "
            "not give acceptance per position; measure with one fixed lookahead"
        )
    if full < 0.999:
        note = f"{100 * (1 - full):.1f} % of the draft positions were cut at the end of requests"
        return dataclasses.replace(counts, notes=(*counts.notes, note))
    return counts


def _sglang_mean(page: Page, earlier: Page | None) -> EngineMean:
    _check_same_process(page, earlier)
    if SGLANG_CALLS in page:
        rounds = _growth(page, earlier, SGLANG_CALLS)
    else:
        raise ValueError(
            f"{page.name}: no {SGLANG_CALLS}_total: without the number of rounds a mean length has "
            "no interval; update SGLang or use vLLM's counters"
        )
    if rounds <= 0:
        raise ValueError(f"{page.name}: no drafts were verified: send requests, then scrape again")
    length, steps = page[SGLANG_LENGTH], page[SGLANG_STEPS]
    if page[SGLANG_DRAFT_TOKENS] != steps + 1:  # counts the root
        raise ValueError(
            f"{page.name}: {page[SGLANG_DRAFT_TOKENS]:g} draft tokens in {steps:g} steps is a tree:"
            " its mean length does not give the acceptance of a chain; measure with topk 1"
        )
    if not 1.0 <= length <= steps + 1:
        raise ValueError(
            f"{page.name}: {SGLANG_LENGTH} is {length:g}, with {steps:g} steps it lies in "
            f"1..{steps + 1:g}: has the engine served requests?"
        )
    return EngineMean(
        engine="sglang", tokens_per_round=length, lookahead=int(steps), rounds=rounds,
        notes=(
            "SGLang reports one mean length and no positions: one constant alpha is all it gives",
            "the mean is a gauge of the latest interval; its interval takes all counted rounds",
        ),
    )  # fmt: skip


# ---------------------------------------------------------------------------- per request


def read_requests(path: str | Path) -> EngineCounts:
    """vLLM's per-request metrics (`--per-request-spec-decode-metrics`): JSON lines or a JSON list
    of responses, or of their `metrics.speculative_decoding` objects.

    `acceptance_histogram[j]` counts the rounds that accepted j drafts. Requests are clusters: the
    effective number of trials is divided by the design effect (Korn and Graubard 1998).
    """
    path = Path(path)
    histograms, draft_tokens = [], 0.0
    for number, entry in enumerate(_json_entries(path), 1):
        fields = _speculative_fields(entry)
        if fields is None:
            raise ValueError(
                f"{path}: entry {number} has no metrics.speculative_decoding; start vLLM with "
                "--per-request-spec-decode-metrics summary"
            )
        histogram = fields.get("acceptance_histogram") or []
        lookahead = int(fields.get("num_spec_tokens") or len(histogram) - 1)
        if not histogram or len(histogram) > lookahead + 1 or min(histogram) < 0:
            raise ValueError(f"{path}: entry {number} has no valid acceptance_histogram")
        histograms.append([*histogram, *[0] * (lookahead + 1 - len(histogram))])
        draft_tokens += fields.get("num_draft_tokens", lookahead * sum(histogram))
    if not histograms or not any(map(sum, histograms)):
        raise ValueError(f"{path}: no drafts in {len(histograms)} requests: nothing to measure")
    if len({len(h) for h in histograms}) > 1:
        raise ValueError(f"{path}: requests of different lookaheads: measure with one")
    rounds = np.asarray(histograms, float)  # [requests, accepted]
    at_least = np.cumsum(rounds[:, ::-1], axis=1)[:, ::-1]
    reached, accepted = at_least[:, :-1], at_least[:, 1:]
    counts = EngineCounts(
        engine="vllm",
        drafts=float(reached[:, 0].sum()),
        draft_tokens=float(draft_tokens),
        accepted=tuple(accepted.sum(0).tolist()),
        effective=min(
            *map(_effective, reached.T, accepted.T),  # of the hazards
            *(_effective(reached[:, 0], a) for a in accepted.T),  # of the survival
        ),
        notes=(f"{len(rounds)} requests as clusters",),
    )
    return _checked(counts, str(path))


def _json_entries(path: Path) -> Iterable[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    text = path.read_text()
    try:
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path}: neither a JSON list nor JSON lines ({error})") from None


def _speculative_fields(entry: Any) -> Mapping[str, Any] | None:
    if not isinstance(entry, Mapping):
        return None
    if "acceptance_histogram" in entry:
        return entry
    return (entry.get("metrics") or {}).get("speculative_decoding")


def _effective(trials: Sequence[float], successes: Sequence[float]) -> float:
    """Effective / counted trials of a proportion over clusters, at most 1.

    Design effect: variance of the ratio estimate over clusters / binomial variance; the factor of
    quantiles pays for having estimated it from few clusters.
    """
    trials, successes = np.asarray(trials), np.asarray(successes)
    used = trials > 0
    clusters, total = int(used.sum()), trials.sum()
    rate = successes.sum() / total if total else 0.0
    if clusters < 2 or rate in (0.0, 1.0):
        return 1.0
    spread = clusters / (clusters - 1) * np.sum((successes - rate * trials) ** 2) / total**2
    effect = max(1.0, spread / (rate * (1 - rate) / total))
    quantiles = special.ndtri(0.975) / special.stdtrit(clusters - 1, 0.975)
    return float(min(1.0, quantiles**2 / effect))
