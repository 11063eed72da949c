"""A design -> the configuration of a serving engine: vLLM, SGLang or TensorRT-LLM.

    design (+ batch -> lookahead ranges)  --export-->  EngineConfig(options, command, files)

Field names are those of the engines' own sources (autumn 2026). What an engine cannot do is refused
with the reason (`UnsupportedByEngine`), never approximated: a configuration that runs another
policy than the one designed would make the prediction meaningless.

Counting: a lookahead and a tree budget count draft tokens; SGLang's `num_draft_tokens` counts the
root as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdx.records import (
    Autoregressive,
    Cascade,
    Chain,
    Design,
    DynamicTree,
    StaticTree,
    ThresholdChain,
)

BatchRange = tuple[int, int, int]  # (lowest batch, highest batch, lookahead), inclusive


class UnsupportedByEngine(ValueError):
    """The engine cannot run this policy or drafter; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to give to the engine.

    `options`: field -> value, exactly as the engine spells it (empty: run without speculation).
    `command`: what to paste. `files`: name -> content of every file the command refers to.
    `notes`: what the reader must know.
    """

    engine: str
    options: dict[str, Any]
    command: str
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What every exporter receives: the design with integers checked, and where the models are."""

    design: Design
    target: str
    draft: str
    schedule: tuple[BatchRange, ...]
    temperature: float
    draft_tensor_parallel: int
    prompt_lookup: tuple[int, int]

    @property
    def family(self) -> str:
        return self.design.drafter.family

    @property
    def tensor_parallel(self) -> int:
        return whole(self.design.tensor_parallel, "tensor_parallel")

    @property
    def lookahead(self) -> int:
        """The largest lookahead any batch uses: engines size their buffers by it."""
        if self.schedule:
            return max(k for _, _, k in self.schedule)
        return whole(self.design.policy.lookahead, "lookahead")


def whole(value: Any, name: str) -> int:
    number = float(value)
    if not number.is_integer():
        raise ValueError(f"{name} {number:g} is not an integer: round the design before exporting")
    return int(number)


# ---------------------------------------------------------------------------- schedules


def ranges_from_batches(best: Mapping[int, int], highest_batch: int | None = None):
    """Batch -> lookahead at designed batches, to inclusive ranges that start at batch 1.

    Between two designed batches the border is their geometric mean (step times are smooth in
    log batch). Neighbouring ranges of equal lookahead are merged. The last range ends at
    `highest_batch` (default: the largest designed batch).
    """
    if not best or min(best) < 1 or min(best.values()) < 0:
        raise ValueError(f"schedule {dict(best)}: needs batches >= 1 with lookaheads >= 0")
    batches = sorted(best)
    borders = [math.isqrt(a * b) for a, b in itertools.pairwise(batches)]
    last = max(batches[-1], highest_batch or 0)
    ranges: list[BatchRange] = []
    lows = [1, *(b + 1 for b in borders)]
    for low, high, batch in zip(lows, [*borders, last], batches, strict=True):
        if ranges and ranges[-1][2] == best[batch]:
            ranges[-1] = (ranges[-1][0], high, best[batch])
        else:
            ranges.append((low, high, best[batch]))
    return tuple(ranges)


def check_schedule(schedule: Sequence[Sequence[int]]) -> tuple[BatchRange, ...]:
    """Ranges must start at 1 and follow each other without gap or overlap."""
    ranges = tuple((int(a), int(b), int(k)) for a, b, k in schedule)
    expected = 1
    for low, high, lookahead in ranges:
        if low != expected or high < low or lookahead < 0:
            raise ValueError(
                f"schedule range ({low}, {high}, {lookahead}): ranges are inclusive, start at 1 "
                f"and follow each other; expected a range that starts at {expected}"
            )
        expected = high + 1
    if ranges and not any(k for _, _, k in ranges):
        raise ValueError("the schedule never speculates (lookahead 0 everywhere): run without one")
    return ranges


# ---------------------------------------------------------------------------- vLLM

VLLM_METHODS = {
    "independent": "draft_model",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "mtp": "mtp",
    "ngram": "ngram",
}


def vllm(request: Request) -> EngineConfig:
    method = _family(request, VLLM_METHODS, "vLLM")
    policy = request.design.policy
    if isinstance(policy, StaticTree | DynamicTree):
        raise UnsupportedByEngine(
            "vLLM cannot verify a token tree (tree attention was removed): "
            "design with a chain, or export the tree to sglang"
        )
    _chain_only(policy, "vLLM")
    options: dict[str, Any] = {"method": method, "num_speculative_tokens": request.lookahead}
    if method == "ngram":
        options["prompt_lookup_min"], options["prompt_lookup_max"] = request.prompt_lookup
    elif method != "mtp":
        options["model"] = _draft(request)
        options["draft_tensor_parallel_size"] = request.draft_tensor_parallel
    if method == "draft_model":
        options["draft_sample_method"] = "probabilistic" if request.temperature > 0 else "greedy"
    options["rejection_sample_method"] = {"token": "standard", "block": "block"}[
        policy.verification
    ]
    if request.schedule:
        options["num_speculative_tokens_per_batch_size"] = [list(r) for r in request.schedule]
    command = ["vllm", "serve", request.target]
    if request.tensor_parallel > 1:
        command += ["--tensor-parallel-size", str(request.tensor_parallel)]
    command += ["--speculative-config", json.dumps(options)]
    return EngineConfig(engine="vllm", options=options, command=shlex.join(command))


# ---------------------------------------------------------------------------- SGLang

SGLANG_ALGORITHMS = {
    "independent": "STANDALONE",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "ngram": "NGRAM",
}


def sglang(request: Request) -> EngineConfig:
    algorithm = _family(request, SGLANG_ALGORITHMS, "SGLang")
    steps, topk, draft_tokens = _sglang_shape(request)
    options: dict[str, Any] = {"speculative-algorithm": algorithm}
    if algorithm not in ("NGRAM", "NEXTN"):
        options["speculative-draft-model-path"] = _draft(request)
    if algorithm != "NGRAM":
        options |= {"speculative-num-steps": steps, "speculative-eagle-topk": topk}
    options["speculative-num-draft-tokens"] = draft_tokens
    files, notes = {}, ["num-draft-tokens counts the root: it is the number of drafts + 1"]
    if request.schedule:
        if topk != 1 or algorithm == "NGRAM":
            raise UnsupportedByEngine(
                "SGLang changes the number of steps with the batch only for a draft model's chain "
                f"(--speculative-adaptive needs topk 1, not {algorithm} with topk {topk}): "
                "export one design without a schedule"
            )
        slots = {str(low): {"candidate_steps": [k]} for low, _, k in request.schedule}
        lines = (f"  {json.dumps(low)}: {json.dumps(slot)}" for low, slot in slots.items())
        files["speculative-adaptive.json"] = "{\n" + ",\n".join(lines) + "\n}\n"
        options["speculative-adaptive"] = True
        options["speculative-adaptive-config"] = "speculative-adaptive.json"
        notes.append("save the file as speculative-adaptive.json; keys are lowest batch sizes")
    command = ["python", "-m", "sglang.launch_server", "--model-path", request.target]
    if request.tensor_parallel > 1:
        command += ["--tp-size", str(request.tensor_parallel)]
    for flag, value in options.items():
        command += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    return EngineConfig(
        engine="sglang",
        options=options,
        command=shlex.join(command),
        files=files,
        notes=tuple(notes),
    )


def _sglang_shape(request: Request) -> tuple[int, int, int]:
    """(steps, topk, num_draft_tokens): the last counts the root and is at most steps * topk + 1."""
    policy = request.design.policy
    if isinstance(policy, StaticTree):
        raise UnsupportedByEngine(
            "SGLang builds its tree at run time from confidences and cannot hold a fixed shape: "
            "design a dynamic tree"
        )
    if isinstance(policy, DynamicTree):
        if request.family == "ngram":
            raise UnsupportedByEngine(
                "SGLang's NGRAM has its own trie and takes no (depth, top-k) tree: design a chain"
            )
        depth, budget = whole(policy.depth, "depth"), whole(policy.budget, "budget")
        if budget > depth * policy.branching:
            raise UnsupportedByEngine(
                f"SGLang keeps at most steps * topk = {depth} * {policy.branching} = "
                f"{depth * policy.branching} draft nodes, the design has {budget}: "
                "raise the depth or the branching, or lower the budget"
            )
        return depth, policy.branching, budget + 1
    _chain_only(policy, "SGLang")
    if policy.verification == "block":
        raise UnsupportedByEngine(
            "SGLang has no block verification: design with verification='token', or export to vllm"
        )
    return request.lookahead, 1, request.lookahead + 1


# ---------------------------------------------------------------------------- TensorRT-LLM

TENSORRT_TYPES = {
    "independent": "DraftTarget",
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "ngram": "NGram",
    "medusa": "Medusa",
}


def tensorrt_llm(request: Request) -> EngineConfig:
    decoding_type = _family(request, TENSORRT_TYPES, "TensorRT-LLM")
    policy = request.design.policy
    options: dict[str, Any] = {"decoding_type": decoding_type}
    notes = []
    if decoding_type not in ("MTP", "NGram"):
        options["speculative_model"] = _draft(request)
    if isinstance(policy, DynamicTree):
        if decoding_type != "Eagle3":
            raise UnsupportedByEngine(
                f"TensorRT-LLM grows a dynamic tree for Eagle3 heads only, not {decoding_type}: "
                "design a chain"
            )
        if request.schedule:
            raise UnsupportedByEngine(
                "TensorRT-LLM schedules the draft length of chains, not of trees: export one design"
            )
        options["max_draft_len"] = whole(policy.depth, "depth")
        options["max_total_draft_tokens"] = whole(policy.budget, "budget")
        options["use_dynamic_tree"] = True
        options["dynamic_tree_max_topK"] = policy.branching
    else:
        _chain_only(policy, "TensorRT-LLM")
        if policy.verification == "block":
            raise UnsupportedByEngine(
                "TensorRT-LLM has no block verification: design with verification='token'"
            )
        options["max_draft_len"] = request.lookahead
    if request.schedule:
        _tensorrt_schedule(request.schedule, options, notes)
    files = {"config.yaml": _yaml({"speculative_config": options})}
    command = ["trtllm-serve", request.target]
    if request.tensor_parallel > 1:
        command += ["--tp_size", str(request.tensor_parallel)]
    command += ["--config", "config.yaml"]
    return EngineConfig(
        engine="trtllm",
        options=options,
        command=shlex.join(command),
        files=files,
        notes=tuple(notes),
    )


def _tensorrt_schedule(schedule: Sequence[BatchRange], options: dict[str, Any], notes: list[str]):
    """Keys are the highest batch of each range; above the last one the engine stops speculating.

    A lone range with a border is `max_concurrency`, which excludes a schedule.
    """
    speculating = [r for r in schedule if r[2] > 0]
    if len(speculating) == 1 and speculating[0][0] == 1:
        options["max_concurrency"] = speculating[0][1]
        return
    options["draft_len_schedule"] = {high: lookahead for _, high, lookahead in schedule}
    notes.append(
        "draft_len_schedule keys are the highest batch of each range and larger batches do not "
        "speculate; older releases read the keys as lowest batches: check yours"
    )


def _yaml(value: Mapping[Any, Any], indent: int = 0) -> str:
    """Nested mappings of scalars as YAML; JSON scalars are YAML scalars."""
    lines = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            lines.append(f"{' ' * indent}{key}:\n{_yaml(item, indent + 2)}")
        else:
            lines.append(f"{' ' * indent}{key}: {json.dumps(item)}\n")
    return "".join(lines)


# ---------------------------------------------------------------------------- the door

ENGINES: dict[str, Callable[[Request], EngineConfig]] = {
    "vllm": vllm,
    "sglang": sglang,
    "trtllm": tensorrt_llm,
}


def export(
    design: Design,
    engine: str,
    *,
    target: str = "TARGET_MODEL",
    draft: str = "",
    schedule: Sequence[Sequence[int]] = (),
    temperature: float = 0.0,
    draft_tensor_parallel: int = 1,
    prompt_lookup: tuple[int, int] = (2, 5),
) -> EngineConfig:
    """The engine's configuration of a design.

    target, draft: folder or hub id of the models (draft defaults to `design.drafter.name`; for
    heads the head's folder). schedule: inclusive (lowest batch, highest batch, lookahead) ranges
    from batch 1, lookahead 0 = no speculation (see `ranges_from_batches`). temperature: of the
    workload. draft_tensor_parallel: 1 or the target's. prompt_lookup: sizes for vLLM's `ngram`.

    Raises UnsupportedByEngine (a ValueError) with the reason where the engine cannot do it.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: one of {', '.join(ENGINES)}")
    if isinstance(design.policy, Autoregressive):
        return EngineConfig(
            engine=engine,
            options={},
            command="",
            notes=("the design does not speculate: start the engine without a speculative config",),
        )
    request = Request(
        design=design,
        target=target,
        draft=draft or design.drafter.name,
        schedule=check_schedule(schedule),
        temperature=float(temperature),
        draft_tensor_parallel=int(draft_tensor_parallel),
        prompt_lookup=prompt_lookup,
    )
    if request.draft_tensor_parallel not in (1, request.tensor_parallel):
        raise ValueError(
            f"draft_tensor_parallel {request.draft_tensor_parallel}: engines take 1 or the "
            f"target's {request.tensor_parallel}"
        )
    return ENGINES[engine](request)


def _family(request: Request, known: Mapping[str, str], engine: str) -> str:
    if request.family in known:
        return known[request.family]
    raise UnsupportedByEngine(
        f"{engine} cannot run drafter family {request.family!r}: it takes {', '.join(known)}"
    )


def _draft(request: Request) -> str:
    if request.draft:
        return request.draft
    raise ValueError(
        f"exporting a {request.family} drafter needs its checkpoint: pass the folder or hub id"
    )


def _chain_only(policy: Any, engine: str):
    if isinstance(policy, Chain):
        return
    reason = {
        ThresholdChain: "has no confidence threshold that stops drafting: design a chain",
        Cascade: "runs one drafter, not a cascade: design a chain with one of its levels",
        StaticTree: "takes no tree of fixed shape: design a dynamic tree or a chain",
    }[type(policy)]
    raise UnsupportedByEngine(f"{engine} {reason}")
