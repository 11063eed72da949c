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


def _head(folder: str, target):
    """The draft head in a folder, bound to its target; None if it holds another model."""
    from sdx.decoding.heads import bind
    from sdx.interop.draft_heads import is_draft_head, load_draft_head

    if not is_draft_head(folder):
        return None
    return bind(load_draft_head(folder, target.model.config.layers), target)


def _draft(folder: str, target, tokenizer):
    """The draft in the target's token ids: one of another family proposes the tokens whose text
    both vocabularies have."""
    draft = _model(folder)
    try:
        own = _tokenizer(folder).get_vocab()
    except FileNotFoundError:  # no tokenizer beside the draft: it has the target's
        own = tokenizer.get_vocab()
    if own == tokenizer.get_vocab():
        if draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"draft {folder} has {draft.vocab_size} tokens, the target {target.vocab_size} and "
                "no tokenizer of its own: put its tokenizer.json beside it"
            )
        return draft
    from sdx.decoding.cross_vocabulary import cross_vocabulary

    return cross_vocabulary(draft, tokenizer.get_vocab(), own, target.vocab_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure(Command):
    """Acceptance of a draft by a target on prompts: alpha, per position and rank, perplexities,
    with intervals."""

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
    state: str = ""
    """File that keeps finished prompts: started again with it, the measurement goes on."""

    def run(self) -> Outcome:
        from sdx.calibration.chains import fit_chains
        from sdx.decoding.sampling import check_sampling
        from sdx.records import Sampling
        from sdx.reporting.data import to_data
        from sdx.reporting.progress import Reporter

        sampling = Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        check_sampling(sampling)
        lookaheads = [int(x) for x in numbers(self.lookaheads, "lookaheads")]
        tokenizer = _tokenizer(self.target)
        prompts = read_prompts(self.prompts, tokenizer, self.prompt_tokens)
        target = _model(self.target)
        head = _head(self.draft, target)
        draft = head or _draft(self.draft, target, tokenizer)
        with Reporter().stage("measuring") as report:
            runs = self._chains(target, draft, prompts, lookaheads, sampling, report)
            # A head's law depends on how many of its own features it stands on: no perplexity.
            text = None if head else self._text(target, draft, prompts, sampling)
        found = fit_chains(runs)
        data = to_data(
            {
                "target": self.target,
                "draft": self.draft,
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
        if text is None:
            return data, found.lines()
        data |= to_data(
            {
                "target_perplexity": text.target_perplexity,
                "draft_perplexity": text.draft_perplexity,
                "rank_acceptance": text.rank_acceptance,
                "confidence": text.confidence,
                "shared_tokens": text.shared,
            }
        )
        return data, [*found.lines(), *text.lines()]

    def _chains(self, target, draft, prompts, lookaheads, sampling, report):
        from sdx.calibration.measure import measure_acceptance
        from sdx.cli.resume import measured_in_chunks

        def measure(chunk):
            return measure_acceptance(
                target,
                draft,
                chunk,
                lookaheads,
                max_new_tokens=self.new_tokens,
                sampling=sampling,
                key=self.seed,
                report=report,
            )

        mine = dataclasses.asdict(self)
        identity = {name: value for name, value in mine.items() if name not in ("json", "state")}
        return measured_in_chunks(self.state, identity, prompts, lookaheads, measure)

    def _text(self, target, draft, prompts, sampling):
        from sdx.calibration.pair import read_pair
        from sdx.decoding.generation import generate

        new = generate(
            target, None, prompts, sampling=sampling, max_new_tokens=self.new_tokens,
            key=self.seed, stop_ids=(),
        ).tokens  # fmt: skip
        return read_pair(target, draft, prompts, new, temperature=sampling.temperature)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(Command):
    """Decode a prompt with a policy; prints the text, tokens per second, tokens per round."""

    target: str
    """Checkpoint folder or hub id."""
    draft: str = ""
    """Checkpoint folder or hub id of the draft; or the folder of a draft head."""
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
    kernels: Literal["auto", "reference", "triton", "tpu"] = "auto"
    """Implementation of attention and verification; interpreted (slow) where not compilable."""
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
        target = _model(self.target)
        policy, drafter = self._policy(target)
        result = generate(
            target, drafter, [prompt], policy, sampling, self.max_new_tokens,
            self.seed, kernels=self.kernels,
        )  # fmt: skip
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

    def _policy(self, target):
        from sdx.decoding.ngram import NgramDrafter
        from sdx.records import Autoregressive, Chain, DynamicTree, ThresholdChain

        name = self.policy
        if self.lookahead < 1:
            raise ValueError(f"lookahead {self.lookahead} must be at least 1")
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
        return policy, _head(self.draft, target) or _model(self.draft)
