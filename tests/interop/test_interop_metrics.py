"""Engine metrics: a simulated server with known hazards, and every way a page can be bad."""

import json
import re

import numpy as np
import pytest

from sdx.calibration.fit import fit_hazards
from sdx.interop.metrics import EngineMean, read_page, read_prometheus, read_requests

HAZARDS = np.array([0.67, 0.74, 0.80, 0.84, 0.88])  # rising, as engines report
K = len(HAZARDS)
NAMES = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "per_pos": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}


def serve(rng, rounds, hazards=HAZARDS):
    """Drafts accepted in each round: a draft is accepted with its position's hazard."""
    accepted = rng.random((rounds, len(hazards))) < hazards
    return np.where(accepted.all(1), len(hazards), accepted.argmin(1))


def page(lengths, lookahead=K, engines=1, model="m", drop=(), extra=""):
    """A vLLM page after rounds that accepted `lengths`, its counters split over engines."""
    lines = []
    for engine, part in enumerate(np.array_split(np.asarray(lengths), engines)):
        label = f'engine="{engine}",model_name="{model}"'
        lines += [
            f"{NAMES['drafts']}{{{label}}} {float(len(part))}",
            f"{NAMES['tokens']}{{{label}}} {float(len(part) * lookahead)}",
            f"{NAMES['accepted']}{{{label}}} {float(part.sum())}",
        ]
        lines += [
            f'{NAMES["per_pos"]}{{{label},position="{i}"}} {float((part > i).sum())}'
            for i in range(lookahead)
            if i not in drop
        ]
    return "\n".join(lines) + "\n" + extra


@pytest.fixture
def save(tmp_path):
    def write(text, name="page.txt"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def test_counts_of_one_page_are_the_servers(save):
    lengths = serve(np.random.default_rng(0), 1000)
    counts = read_prometheus(save(page(lengths, engines=3)))
    assert counts.drafts == 1000 and counts.lookahead == K
    assert counts.accepted == tuple(float((lengths > i).sum()) for i in range(K))
    assert counts.tokens_per_round == pytest.approx(1 + lengths.mean())
    assert counts.measurement().tokens == 1000 + lengths.sum()


def test_two_pages_are_a_difference(save):
    rng = np.random.default_rng(1)
    first, second = serve(rng, 400), serve(rng, 900)
    before = save(page(first), "before.txt")
    after = save(page(np.concatenate([first, second])), "after.txt")
    assert read_prometheus(after, before).accepted == tuple(
        float((second > i).sum()) for i in range(K)
    )


def test_hazards_lie_in_their_intervals_in_at_least_93_percent_of_300_trials(save):
    rng = np.random.default_rng(2026)
    hits = np.zeros(K)  # true coverage 95.4-96.0 % (40 000 trials): the seed only fixes the draw
    for _ in range(300):
        counts = read_prometheus(save(page(serve(rng, 800))))
        fit = fit_hazards(*counts.trials())
        hits += [h.low <= truth <= h.high for h, truth in zip(fit.hazards, HAZARDS, strict=True)]
    assert (hits / 300 >= 0.93).all(), hits / 300


def test_clustered_requests_are_covered_too_and_would_not_be_as_independent_rounds(save):
    """Requests differ (logit-normal shift): rounds of one request are not independent."""
    rng = np.random.default_rng(7)
    logit = np.log(HAZARDS / (1 - HAZARDS))
    # The truth is the ratio of expectations over requests: a long simulation of the same server.
    shifts = rng.normal(0, 0.8, 200_000)
    hazards = 1 / (1 + np.exp(-(logit[0] + shifts)))
    truth = hazards.mean()
    hits = naive = 0
    for _ in range(300):
        lines = []
        for shift in rng.normal(0, 0.8, 60):
            lengths = serve(rng, 25, 1 / (1 + np.exp(-(logit + shift))))
            histogram = np.bincount(lengths, minlength=K + 1).tolist()
            lines.append(json.dumps({"acceptance_histogram": histogram, "num_spec_tokens": K}))
        counts = read_requests(save("\n".join(lines), "requests.jsonl"))
        first = fit_hazards(*counts.trials()).hazards[0]
        plain = fit_hazards(counts.reached, counts.accepted).hazards[0]
        hits += first.low <= truth <= first.high
        naive += plain.low <= truth <= plain.high
    assert hits / 300 >= 0.93
    assert naive / 300 < 0.8


def sglang(length, calls, steps=3, draft_tokens=None):
    draft_tokens = steps + 1 if draft_tokens is None else draft_tokens
    return (
        f'sglang:spec_accept_length{{model_name="m"}} {length}\n'
        f'sglang:spec_accept_rate{{model_name="m"}} {(length - 1) / steps}\n'
        f'sglang:spec_num_steps{{model_name="m"}} {float(steps)}\n'
        f'sglang:spec_num_draft_tokens{{model_name="m"}} {float(draft_tokens)}\n'
        f'sglang:spec_verify_calls_total{{model_name="m"}} {float(calls)}\n'
    )


def test_sglang_alpha_lies_in_its_interval_in_at_least_93_percent_of_300_trials(save):
    rng, hits = np.random.default_rng(3), 0
    for _ in range(300):
        lengths = serve(rng, 500, np.full(3, 0.7))
        mean = read_prometheus(save(sglang(1 + lengths.mean(), 500)))
        law, interval = mean.geometric()
        hits += interval.low <= 0.7 <= interval.high
    assert isinstance(mean, EngineMean) and law.alpha == interval.value
    assert hits / 300 >= 0.93


def error_line(call, *args):
    with pytest.raises(ValueError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_counter_reset_is_an_error(save):
    rng = np.random.default_rng(0)
    many, few = save(page(serve(rng, 500)), "many"), save(page(serve(rng, 100)), "few")
    assert re.search("fell from 500 .* to 100 .* restarted", error_line(read_prometheus, few, many))


def test_restart_hidden_by_larger_counters_is_an_error(save):
    rng = np.random.default_rng(0)
    before = page(serve(rng, 100), extra="process_start_time_seconds 1000.0\n")
    after = page(serve(rng, 500), extra="process_start_time_seconds 2000.0\n")
    line = error_line(read_prometheus, save(after, "after"), save(before, "before"))
    assert "start time changed" in line


@pytest.mark.parametrize("drop", [(0,), (2,)])
def test_missing_position_is_an_error(save, drop):
    lengths = serve(np.random.default_rng(0), 100)
    assert "are not 0, 1, 2" in error_line(read_prometheus, save(page(lengths, drop=drop)))


def test_missing_last_positions_show_in_the_sum(save):
    text = page(serve(np.random.default_rng(0), 100), drop=(4,))
    assert "positions are missing" in error_line(read_prometheus, save(text))


def test_zero_drafts_are_an_error(save):
    text = page(np.zeros(0, int))
    assert "no drafts so far" in error_line(read_prometheus, save(text))
    text = page(serve(np.random.default_rng(0), 10))
    line = error_line(read_prometheus, save(text, "a"), save(text, "b"))
    assert "no drafts between the two pages" in line
    assert "no drafts" in error_line(read_prometheus, save(sglang(1.0, 0)))
    assert "no drafts" in error_line(read_requests, save('{"acceptance_histogram": [0, 0]}'))


def test_mixed_lookaheads_are_an_error(save):
    lengths = serve(np.random.default_rng(0), 100)
    text = page(lengths).replace(
        f'{NAMES["tokens"]}{{engine="0",model_name="m"}} 500.0',
        f'{NAMES["tokens"]}{{engine="0",model_name="m"}} 310.0',
    )
    assert "drafted 3.10 of 5 tokens" in error_line(read_prometheus, save(text))


def test_impossible_counts_are_an_error(save):
    lengths = np.full(10, 3)
    text = page(lengths).replace('position="1"} 10.0', 'position="1"} 8.0')
    text = text.replace("accepted_tokens_total{engine=\"0\",model_name=\"m\"} 30.0",
                        "accepted_tokens_total{engine=\"0\",model_name=\"m\"} 28.0")  # fmt: skip
    assert "position 2 accepted 10 times" in error_line(read_prometheus, save(text))


def test_other_bad_pages(save, tmp_path):
    assert "no speculative decoding metrics" in error_line(read_page, save("up 1.0\n"))
    assert "not a Prometheus" in error_line(read_page, save("}}} {{{ not a page\n"))
    two = page([1, 2]) + page([1, 2], model="other")
    assert "several models (m, other)" in error_line(read_page, save(two))
    assert read_prometheus(save(two), model="other").drafts == 2
    assert "no model 'x'" in error_line(read_page, save(two), "x")
    assert "is a tree" in error_line(read_prometheus, save(sglang(2.0, 9, draft_tokens=8)))
    assert "it lies in 1..4" in error_line(read_prometheus, save(sglang(0.0, 9)))
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_page(tmp_path / "absent")


def test_vllm_per_request_responses(save):
    """The objects as vLLM sends them, one response a line."""
    response = {
        "choices": [],
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 1.2325581395348837,
                "draft_acceptance_rate": 0.07751937984496124,
                "acceptance_histogram": [39, 1, 0, 3],
                "num_spec_steps": 43,
                "num_accepted_draft_tokens": 10,
                "num_draft_tokens": 129,
                "num_spec_tokens": 3,
            }
        },
    }
    counts = read_requests(save("\n".join([json.dumps(response)] * 2)))
    assert (counts.drafts, counts.accepted) == (86, (8, 6, 6))
    assert counts.tokens_per_round == pytest.approx(1.2325581395348837)
    assert "entry 1 has no metrics" in error_line(read_requests, save('{"choices": []}'))
    assert "neither a JSON list" in error_line(read_requests, save("{"))
