"""`sdx measure` and `sdx generate`: a target and a draft at work."""

from __future__ import annotations

import dataclasses
import json as json_module
from pathlib import Path
from typing import Literal

from sdx.cli.base import Command, Outcome, numbers, read_json


def read_prompts(path: str, tokenizer, most_tokens: int) -> list[list[int]]:
    """Token ids of the prompts in a file: a JSON list or JSON lines (strings, id lists, objects
    with "prompt"), otherwise text with blank lines between prompts."""
    text = Path(path).read_text(encoding="utf-8")
    if path.endswith(".jsonl"):
        try:
            items = [json_module.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON lines ({error}); mend the file") from None
    elif path.endswith(".json"):
        items = read_json(path)
    else:
        items = [part for part in text.split("\n\n") if part.strip()]
    prompts = []
    for item in items:
        item = item.get("prompt") if isinstance(item, dict) else item
        ids = tokenizer.encode(item).ids if isinstance(item, str) else item
        if not (isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids)):
            raise ValueError(f"{path}: prompt {item!r:.60} is neither text nor a list of token ids")
        prompts.append(ids[:most_tokens])
    if not prompts:
        raise ValueError(f"{path}: no prompts in it")
    return prompts


def _tokenizer(folder: str):
    """The tokenizer of a checkpoint folder, or of the folder above it."""
    from sdx.interop.checkpoints import load_tokenizer

    above = Path(folder).parent
    here = Path(folder) / "tokenizer.json"
    return load_tokenizer(above if not here.exists() and Path(folder).is_dir() else folder)


def _model(folder: str):
    """A checkpoint, its matrices laid out once for decoding on this device."""
    from sdx.decoding.llama_target import as_target
    from sdx.interop.checkpoints import load_checkpoint

    return as_target(load_checkpoint(folder).model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure(Command):
    """Acceptance of a draft by a target on prompts: alpha, per position, with intervals."""

    target: str
    """Checkpoint folder or hub id."""
    draft: str
    prompts: str
    """File: JSON list, JSON lines, or text with blank lines between prompts."""
    lookaheads: str = "1-9"
    prompt_tokens: int = 64
    """Prompts are cut to this length."""
    new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def run(self) -> Outcome:
        from sdx.calibration import measure
        from sdx.calibration.chains import fit_chains
        from sdx.decoding.sampling import check_sampling
        from sdx.records import Sampling
        from sdx.reporting.data import to_data
        from sdx.reporting.progress import Reporter

        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        check_sampling(sampling)
        lookaheads = [int(x) for x in numbers(self.lookaheads, "lookaheads")]
        prompts = read_prompts(self.prompts, _tokenizer(self.target), self.prompt_tokens)
        target, draft = _model(self.target), _model(self.draft)
        with Reporter().stage("measuring", len(lookaheads) + len(prompts)) as report:
            runs = measure.measure_acceptance(
                target,
                draft,
                prompts,
                lookaheads,
                max_new_tokens=self.new_tokens,
                sampling=sampling,
                key=self.seed,
                report=report,
            )
        found = fit_chains(runs)
        data = to_data(
            {
                "law": found.law,
                "alpha": found.alpha and found.alpha.alpha,
                "hazards": found.hazards.hazards,
                "survival": found.hazards.survival,
                "tokens_per_round": found.tokens_per_round,
                "seconds_per_round": found.seconds_per_round,
                "design_effect": found.design_effect,
                "prompts": len(prompts),
            }
        )
        return data, found.lines()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(Command):
    """Decode a prompt with a policy; prints the text, tokens per second, tokens per round."""

    target: str
    """Checkpoint folder or hub id."""
    draft: str = ""
    """Checkpoint folder or hub id of the draft."""
    prompt: str = ""
    """Text; or --prompt-ids, or --prompt-file."""
    prompt_ids: str = ""
    """Token ids, like 1,5,7."""
    prompt_file: str = ""
    policy: Literal[
        "auto", "autoregressive", "chain", "block", "threshold", "ngram", "dynamic-tree"
    ] = "auto"
    """auto: chain with a draft, autoregressive without."""
    lookahead: int = 4
    threshold: float = 0.3
    tree_nodes: int = 8
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int = 0
    stats: bool = False
    """Also acceptance per position."""

    def run(self) -> Outcome:
        from sdx.decoding.generation import generate
        from sdx.decoding.sampling import check_sampling
        from sdx.records import Sampling
        from sdx.reporting.data import to_data

        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        check_sampling(sampling)
        prompt, tokenizer = self._prompt()
        policy, drafter = self._policy()
        result = generate(
            _model(self.target), drafter, [prompt], policy, sampling, self.max_new_tokens, self.seed
        )
        measured = result.measurement()
        ids = result.tokens[0]
        rate = measured.tokens / max(measured.seconds, 1e-9)
        per_round = measured.tokens / max(measured.rounds, 1)
        text = tokenizer.decode(ids) if tokenizer else None
        data = {
            "tokens": ids,
            "text": text,
            "tokens_per_second": rate,
            "tokens_per_round": per_round,
            "measurement": measured,
        }
        lines = [
            text if text is not None else " ".join(map(str, ids)),
            f"-- {rate:.0f} tokens/s (first call: compilation included), {per_round:.2f} tokens "
            f"per round, {measured.rounds} rounds",
        ]
        if self.stats and measured.drafted_per_position:
            counts = zip(measured.accepted_per_position, measured.drafted_per_position, strict=True)
            shares = [f"{k}/{n}" for k, n in counts]
            lines.append("-- accepted per position: " + ", ".join(shares))
        return to_data(data), lines

    def _prompt(self):
        """(ids, tokenizer or None if ids were given)"""
        given = [bool(x) for x in (self.prompt, self.prompt_ids, self.prompt_file)]
        if sum(given) != 1:
            raise ValueError("give exactly one of --prompt, --prompt-ids and --prompt-file")
        if self.prompt_ids:
            try:
                return [int(part) for part in self.prompt_ids.split(",")], None
            except ValueError:
                raise ValueError(f"prompt ids {self.prompt_ids!r}: write them like 1,5,7") from None
        text = self.prompt or Path(self.prompt_file).read_text(encoding="utf-8")
        tokenizer = _tokenizer(self.target)
        return tokenizer.encode(text).ids, tokenizer

    def _policy(self):
        from sdx.decoding.ngram import NgramDrafter
        from sdx.records import Autoregressive, Chain, DynamicTree, ThresholdChain

        name = self.policy
        if name == "auto":
            name = "chain" if self.draft else "autoregressive"
        if name == "autoregressive":
            return Autoregressive(), None
        if name == "ngram":
            return Chain(lookahead=self.lookahead), NgramDrafter(lookahead=self.lookahead)
        if not self.draft:
            raise ValueError(f"policy {name} needs a draft model: add --draft FOLDER")
        policy = {
            "chain": Chain(lookahead=self.lookahead),
            "block": Chain(lookahead=self.lookahead, verification="block"),
            "threshold": ThresholdChain(threshold=self.threshold, max_lookahead=self.lookahead),
            "dynamic-tree": DynamicTree(budget=self.tree_nodes, depth=self.lookahead),
        }[name]
        return policy, _model(self.draft)
