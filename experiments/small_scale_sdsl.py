"""SDSL's protocol (their section 4 and appendix F) at small scale, on models trained here.

    python -m experiments.small_scale_sdsl [--stage all|models|latency|report] [--work DIR]

Three targets (1.5, 3.1 and 5.5 M parameters, the largest is the small pair's) and four one-layer
drafts, trained on the standard library's sources for a stated number of updates; perplexities on
held-out text, every draft's above every target's; alpha of all twelve pairs from TAR(gamma) at
temperature 1; the affine plane alpha = a x + b y + c; a loss law through the drafts; N* with its
interval by the plane's covariance, once at the paper's cost (N / M per draft) and once at this
machine's (step times, linear in N); then tokens per second of the largest target with every draft.

Expect: alpha falls with the draft's perplexity (a < 0, its interval without 0); N* at either cost
between the two smallest drafts, which are the two fastest here and not told apart. What is
done stays in --work, and a killed run goes on where it was. Stage `models` (training, alpha) takes
three quarters of an hour on two cores and no clock enters its numbers; stage `latency` is timed
and wants the machine for itself (three minutes). `report` writes
experiments/results/small_scale_sdsl.json.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optimistix
import tyro
from tokenizers import Tokenizer

from experiments.provenance import provenance
from experiments.train_small_models import held_out_loss, say, shape
from sdx.calibration import measure
from sdx.calibration.fit import fit_alpha
from sdx.decoding.generation import generate
from sdx.decoding.llama_target import as_target
from sdx.models.checkpoint import load_model, save_model
from sdx.models.llama import Llama
from sdx.records import Autoregressive, Chain, Sampling
from sdx.theory.numerics import float64
from sdx.theory.scaling import LossLaw, fit_perplexity_law
from sdx.training import corpus
from sdx.training.losses import language_model_loss
from sdx.training.trainer import Schedule, Trainer

RESULT = Path(__file__).parent / "results" / "small_scale_sdsl.json"
draft_shape = functools.partial(shape, layers=1, head_dim=16, tie_embedding=True)
CONFIGS = {
    "target_small": shape(width=192, layers=2, heads=6, kv_heads=3, ffn_width=448),
    "target_medium": shape(width=256, layers=3, heads=8, kv_heads=4, ffn_width=640),
    "draft_48": draft_shape(width=48, heads=3, kv_heads=3, ffn_width=128),
    "draft_96": draft_shape(width=96, heads=6, kv_heads=6, ffn_width=256),
    "draft_160": draft_shape(width=160, heads=10, kv_heads=10, ffn_width=448),
    "draft_256": draft_shape(width=256, heads=16, kv_heads=16, ffn_width=704),
}
FROM_PAIR = {"target_large": "target"}
LONGER = {"target_medium": 2}  # times the updates of the others; target_large had 2488
DRAFTS = tuple(name for name in CONFIGS if name.startswith("draft"))
LOOKAHEADS = (1, 2, 3, 5, 7, 9)
SAMPLING = Sampling(temperature=1.0)
TOKENS = 2048  # of an update


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args:
    """How much training, which part, where."""

    stage: Literal["all", "models", "latency", "report"] = "all"
    updates: int = 600
    """Of 2048 tokens each: one D for the smallest target and all drafts."""
    prompts: int = 24
    new_tokens: int = 96
    seed: int = 0
    pair: Path = Path("experiments/small_pair")
    """Its target is the largest one here, its tokenizer is everybody's."""
    work: Path = Path("out/small_scale_sdsl")


def trained(name: str, args: Args, stream: np.ndarray) -> tuple[Llama, int]:
    """The model (trained now, or found in `work`) and the tokens it was trained on."""
    updates = args.updates * LONGER.get(name, 1)
    trainer = Trainer(
        Llama(CONFIGS[name], jax.random.key(args.seed)),
        language_model_loss,
        corpus.lengthening_batches(stream, TOKENS, (256, 512), 0.75, args.seed),
        Schedule(steps=updates),
        folder=args.work / "checkpoints" / name,
    )
    trainer.resume()

    def report(trainer: Trainer) -> None:
        now = trainer.progress
        say(f"{name} update {now.step} of {updates}, {now.seconds:.0f} s, {now.loss:.3f}")

    done = trainer.fit(report)
    save_model(args.work / name, trainer.model)
    return load_model(args.work / name)[0], done.step * TOKENS


def tokens_per_round(target, draft, prompts, lookahead: int, args: Args) -> float:
    """TAR(gamma): tokens per target call, bonus included, over all prompts, all at once."""
    total = generate(
        target,
        draft,
        prompts,
        Chain(lookahead=lookahead),
        SAMPLING,
        args.new_tokens,
        args.seed,
        stop_ids=(),
    ).measurement()
    return float(total.tokens / total.rounds)


@float64
def _fit_loss_law(sizes, losses):
    def residuals(theta, data):
        N, L = data
        return theta[0] + jnp.exp(theta[1] - theta[2] * jnp.log(N)) - L

    start = jnp.array([losses.min() - 0.5, 3.0, 0.3])
    solver = optimistix.LevenbergMarquardt(rtol=1e-10, atol=1e-10)
    return optimistix.least_squares(
        residuals, solver, start, args=(sizes, losses), max_steps=500, throw=False
    ).value


def fit_loss_law(sizes, losses) -> LossLaw:
    """L(N) = E + A / N^nu through drafts of one training budget (no term in D)."""
    E, log_A, nu = (float(x) for x in _fit_loss_law(np.asarray(sizes, float), np.asarray(losses)))
    return LossLaw(E=E, A=float(np.exp(log_A)), nu=nu, B=0.0, delta=1.0)


def best_by_time(plane, loss_law, target_perplexity, line, target_seconds, sizes) -> dict:
    """N* on a grid of sizes where a draft takes line[0] + line[1] N seconds, the verification
    target_seconds(gamma + 1), and gamma is the best integer; the 95 % interval from draws of the
    plane's coefficients."""
    grid = np.geomspace(min(sizes) / 3, max(sizes) * 3, 200)
    gammas = np.arange(1, 10)
    seconds = (line[0] + line[1] * grid)[:, None] * gammas + target_seconds[gammas + 1]
    perplexity = np.asarray(loss_law.perplexity(grid, 1.0))

    def best(coefficients) -> float:
        a, b, c = coefficients
        alpha = np.clip(a * perplexity + b * target_perplexity + c, 1e-6, 1 - 1e-6)
        powers = alpha[:, None, None] ** np.arange(10)  # S(k)
        tokens = np.cumsum(powers, axis=-1)[:, 0, 1:]
        return float(grid[np.argmax((tokens / seconds).max(axis=1))])

    random = np.random.default_rng(0)
    draws = random.multivariate_normal(plane.coefficients, plane.covariance, 400)
    low, high = np.quantile([best(d) for d in draws], [0.025, 0.975])
    return {"N": best(np.asarray(plane.coefficients)), "low": float(low), "high": float(high)}


def measured_speed(target, drafts, prompts, args: Args) -> dict:
    """Tokens per second of every draft at its lookaheads, prompts and policies in turns; 95 % from
    prompts drawn with replacement, the same for all, so that shares of the fastest are paired."""
    policies = {("autoregression", 0): (Autoregressive(), None)}
    for name, draft in drafts.items():
        for gamma in (1, 2, 3, 5):
            policies[name, gamma] = (Chain(lookahead=gamma), draft)
    runs = measure.decode(
        target, None, prompts, policies, max_new_tokens=args.new_tokens, sampling=SAMPLING,
        repeats=3, report=say,
    )  # fmt: skip
    chosen = np.random.default_rng(1).integers(len(prompts), size=(1000, len(prompts)))
    rates, draws = {}, {}
    for policy, of_prompts in runs.items():
        seconds = np.asarray([np.median([run.seconds for run in prompt]) for prompt in of_prompts])
        tokens = np.asarray([np.mean([len(run.tokens[0]) - 1 for run in p]) for p in of_prompts])
        rates[policy] = tokens.sum() / seconds.sum()
        draws[policy] = tokens[chosen].sum(axis=1) / seconds[chosen].sum(axis=1)
    best = max((p for p in rates if p[1]), key=lambda policy: rates[policy])
    found: dict = {}
    for policy, rate in rates.items():
        low, high = np.quantile(draws[policy], [0.025, 0.975])
        share = np.quantile(draws[policy] / draws[best], [0.025, 0.975])
        found.setdefault(policy[0], {})[policy[1]] = {
            "tokens_per_second": float(rate), "low": float(low), "high": float(high),
            "of_the_fastest_draft": [float(rate / rates[best]), *map(float, share)],
        }  # fmt: skip
    return found


def acceptance(models, losses, prompts, args: Args) -> list[dict]:
    """alpha of every target with every draft, beside their perplexities; pairs that an earlier,
    killed run measured are read back."""
    path = args.work / "pairs.jsonl"
    pairs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(p["target"], p["draft"]) for p in pairs}
    wrapped = {name: as_target(model) for name, model in models.items()}
    targets = sorted(n for n in models if n.startswith("target"))
    for target, draft in itertools.product(targets, DRAFTS):
        if (target, draft) in done:
            continue
        tar = [
            tokens_per_round(wrapped[target], wrapped[draft], prompts, gamma, args)
            for gamma in LOOKAHEADS
        ]
        alpha = fit_alpha(LOOKAHEADS, tar).alpha
        pair = {
            "target": target,
            "draft": draft,
            "prompts": len(prompts),
            "tokens_per_round": tar,
            "target_perplexity": float(np.exp(losses[target])),
            "draft_perplexity": float(np.exp(losses[draft])),
            "alpha": [float(alpha.value), float(alpha.low), float(alpha.high)],
        }
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(pair) + "\n")
        pairs.append(pair)
        say(f"{target} with {draft}: alpha {alpha.value:.3f}")
    return pairs


def step_times(models, args: Args) -> tuple[dict[int, float], dict[str, list[float]]]:
    """Seconds of the largest target's pass over n tokens, and [step, once per round] of every
    draft; samples are taken in turns."""
    context = 64 + args.new_tokens // 2
    sizes = {"capacity": 192, "rounds": 16}
    passes = measure.target_timers(
        as_target(models["target_large"]), [1, 2, 3, 4, 6, 8, 10], [context], **sizes
    )
    timers = {("target", key[1]): timer for key, timer in passes.items()}
    for name in DRAFTS:
        mine = measure.draft_timers(as_target(models[name]), (1, 4), context, **sizes)
        timers |= {(name, gamma): timer for gamma, timer in mine.items()}
    samples = measure.interleaved(timers, 9, say)
    verify, steps = {}, {}
    for name in ("target", *DRAFTS):
        of = {n: values for (whose, n), values in samples.items() if whose == name}
        if name == "target":
            verify = {n: float(np.median(values)) for n, values in of.items()}
        else:
            times = measure.draft_times(of, name, context)
            steps[name] = [float(np.ravel(times.table.seconds)[0]), times.extra_seconds]
    return verify, steps


def latency(models, prompts, args: Args) -> None:
    """The timed part, into work/latency.json."""
    verify, steps = step_times(models, args)
    target = as_target(models["target_large"])
    speed = measured_speed(target, {n: as_target(models[n]) for n in DRAFTS}, prompts, args)
    found = {"verify_seconds": verify, "draft_step_seconds": steps, "speed": speed}
    (args.work / "latency.json").write_text(json.dumps(found))


def optima(pairs, sizes, losses, fit, timed) -> dict:
    """The loss law of the drafts and N* at both costs."""
    draft_sizes = [sizes[n] for n in DRAFTS]
    loss_law = fit_loss_law(draft_sizes, [losses[n] for n in DRAFTS])
    steps = np.asarray([timed["draft_step_seconds"][n] for n in DRAFTS])
    line = np.polynomial.polynomial.polyfit(draft_sizes, steps[:, 0], 1)
    verify = {int(n): seconds for n, seconds in timed["verify_seconds"].items()}
    # Once per round whatever the lookahead: the target's pass and the drafts' intercept.
    curve = np.interp(np.arange(11), list(verify), list(verify.values())) + steps[:, 1].mean()
    largest = float(np.exp(losses["target_large"]))
    parameters_only = (0.0, 1.0 / sizes["target_large"])
    optimum = functools.partial(best_by_time, fit.law, loss_law, largest, sizes=draft_sizes)
    return {
        "loss_law": {k: float(getattr(loss_law, k)) for k in ("E", "A", "nu")},
        "draft_step_line": [float(x) for x in line],
        "optimum_at_the_papers_cost": optimum(line=parameters_only, target_seconds=np.ones(11)),
        "optimum_at_measured_times": optimum(line=line, target_seconds=curve),
    }


def report(sizes, tokens, losses, args: Args) -> None:
    pairs = [json.loads(line) for line in (args.work / "pairs.jsonl").read_text().splitlines()]
    timed = json.loads((args.work / "latency.json").read_text())
    x, y = (np.asarray([p[f"{who}_perplexity"] for p in pairs]) for who in ("draft", "target"))
    fit = fit_perplexity_law(x, np.asarray([p["alpha"][0] for p in pairs]), y)
    result = {
        "sizes": sizes,
        "training_tokens": tokens,
        "held_out_loss_nats": losses,
        "pairs": pairs,
        "plane": {
            "coefficients": np.asarray(fit.law.coefficients).tolist(),
            "margins": np.asarray(fit.margins).tolist(),
            "r_squared": float(fit.r_squared),
            "mean_squared_error": float(fit.mean_squared_error),
        },
        **optima(pairs, sizes, losses, fit, timed),
        **timed,
        "provenance": provenance(args.seed),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    keys = ("plane", "optimum_at_the_papers_cost", "optimum_at_measured_times", "speed")
    print(json.dumps({k: result[k] for k in keys}, indent=1))


def main(args: Args) -> None:
    tokenizer = Tokenizer.from_file(str(args.pair / "tokenizer.json"))
    streams = {s: corpus.tokenise(tokenizer, corpus.texts(s)) for s in ("train", "held_out")}
    models, tokens = {}, {}
    for name in CONFIGS:
        models[name], tokens[name] = trained(name, args, streams["train"])
    records = json.loads((args.pair / "training.json").read_text())["models"]
    for name, folder in FROM_PAIR.items():
        models[name] = load_model(args.pair / folder)[0]
        stages = records[folder]["stages"].values()
        tokens[name] = sum(stage["tokens"] for stage in stages)
    sizes = {name: model.config.parameters() for name, model in models.items()}
    losses = {n: held_out_loss(m, streams["held_out"], 32768) for n, m in models.items()}
    for name, loss in losses.items():
        say(f"{name}: {sizes[name] / 1e6:.2f} M, held-out {loss:.3f} nats")
    prompts = corpus.held_out_prompts(streams["held_out"], args.prompts, 64).tolist()
    if args.stage in ("all", "models"):
        acceptance(models, losses, prompts, args)
    if args.stage in ("all", "latency"):
        latency(models, prompts, args)
    if args.stage in ("all", "report"):
        report(sizes, tokens, losses, args)


if __name__ == "__main__":
    main(tyro.cli(Args))
