"""`sdx design` and `sdx export`: from a question to a design, and on to an engine."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sdx.cli.base import Command, Outcome, numbers, read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Design(Command):
    """The best speculative decoder for a target on a device, per batch and context."""

    target: str
    """Preset name (llama-3.1-70b) or path of a config.json."""
    hardware: str
    """Device name (h100-sxm) or path of a hardware TOML."""
    devices: int = 1
    """Tensor parallel degrees up to this number are tried."""
    batch: str = "1"
    """Batch sizes, like 1,8,32."""
    context: str = "1024"
    """Committed tokens per sequence, like 1024,8192."""
    new_tokens: int = 256
    draft_family: str = "llama"
    """Family of drafts whose size and shape are designed."""
    draft: str = ""
    """A given draft (preset or config.json) instead; needs --alpha or --acceptance."""
    alpha: float | None = None
    """Acceptance rate of the given draft, in (0, 1)."""
    acceptance: str = ""
    """Acceptance of the given draft: a JSON file of `sdx measure` or `sdx calibrate`."""
    draft_tokens: float = 15e12
    """Training tokens of a designed draft."""
    target_tokens: float = 15e12
    policies: str = "chain"
    """Kinds of policy to compare, like chain,tree,threshold."""
    objective: str = "tokens_per_second"
    """tokens_per_second, latency, tokens_per_joule or tokens_per_dollar."""
    max_lookahead: int = 16
    weight_dtype: str = "bfloat16"

    def run(self) -> Outcome:
        from sdx.records import Workload
        from sdx.search.design import design
        from sdx.theory.hardware import load_hardware
        from sdx.theory.transformers import load_architecture

        target = load_architecture(self.target, self.weight_dtype)
        hardware = load_hardware(self.hardware)
        cells = [
            Workload(batch=b, context=c, new_tokens=float(self.new_tokens))
            for b in numbers(self.batch, "batch")
            for c in numbers(self.context, "context", 0.0)
        ]
        fitting, refused = _fitting(target, hardware, cells, self.devices)
        results = design(
            target,
            hardware,
            fitting,
            devices=self.devices,
            draft_tokens=self.draft_tokens,
            target_tokens=self.target_tokens,
            objective=self.objective,
            max_lookahead=self.max_lookahead,
            weight_dtypes=(self.weight_dtype,),
            policies=tuple(part.strip() for part in self.policies.split(",")),
            **self._drafts(target),
        )
        data = {
            "target": self.target,
            "hardware": self.hardware,
            "devices": self.devices,
            "cells": [_design_data(r) for r in results],
            "refused": refused,
        }
        lines = [line for cell in data["cells"] for line in _design_lines(cell)]
        return data, lines + refused

    def _drafts(self, target) -> dict[str, Any]:
        """What `design` is told of the drafts: a family, or one draft with its acceptance."""
        if not self.draft:
            if self.alpha is not None or self.acceptance:
                raise ValueError("--alpha and --acceptance describe a given draft: add --draft")
            return {"family": self.draft_family}
        from sdx.theory.acceptance import Geometric
        from sdx.theory.transformers import load_architecture, parameters

        draft = load_architecture(self.draft, self.weight_dtype)
        N, M = float(parameters(draft)), float(parameters(target))
        if N >= M:
            raise ValueError(
                f"draft {self.draft} has {N:.3g} parameters, not fewer than the target's {M:.3g}: "
                "give a smaller draft"
            )
        if self.alpha is None and not self.acceptance:
            raise ValueError("a given draft needs --alpha or --acceptance FILE")
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ValueError(f"alpha {self.alpha:g} must lie inside (0, 1)")
        law = load_acceptance(self.acceptance) if self.acceptance else Geometric(alpha=self.alpha)
        return {"draft": draft, "acceptance": law}


def _fitting(target, hardware, cells, devices: int):
    """Cells whose weights and KV fit, and a line for each of the others; ValueError if none."""
    from sdx.theory.hardware import require_fit

    if devices < 1:
        raise ValueError(f"devices {devices} must be at least 1")
    degree = 2 ** int(math.log2(devices))
    fitting, refused = [], []
    for cell in cells:
        try:
            longest = cell.context + cell.new_tokens
            require_fit([target], hardware, cell.batch, longest, degree)
            fitting.append(cell)
        except ValueError as error:
            refused.append(str(error))
    if not fitting:
        raise ValueError(refused[0])
    return fitting, refused


def _design_data(result) -> dict[str, Any]:
    """One cell as plain data; the five largest elasticities come first in the listing."""
    from sdx.reporting.data import to_data

    drafter, prediction = result.design.drafter, result.prediction
    return to_data(
        {
            "batch": result.workload.batch,
            "context": result.workload.context,
            "verdict": prediction.verdict,
            "speedup": prediction.speedup,
            "tokens_per_second": prediction.tokens_per_second,
            "autoregressive_tokens_per_second": prediction.autoregressive_tokens_per_second,
            "tokens_per_round": prediction.tokens_per_round,
            "lookahead": _lookahead(result.design.policy),
            "policy": _policy_text(result.design.policy),
            "tensor_parallel": result.design.tensor_parallel,
            "draft": {
                "name": drafter.name,
                "layers": drafter.layers,
                "width": drafter.width,
                "parameters": result.draft_parameters,
            },
            "bounds": dict(result.bounds),
            "elasticities": dict(result.elasticities),
            "certificate_gap": result.certificate_gap,
            "design": result.design,
            "prediction": prediction,
        }
    )


def _lookahead(policy) -> int:
    """Draft passes per round: a chain's lookahead, a tree's depth."""
    from sdx.records import Chain, StaticTree, ThresholdChain

    if isinstance(policy, Chain):
        return int(policy.lookahead)
    if isinstance(policy, ThresholdChain):
        return int(policy.max_lookahead)
    if isinstance(policy, StaticTree):
        depths = [0]
        for parent in policy.parents:
            depths.append(depths[parent + 1] + 1)
        return max(depths)
    return int(policy.depth)


def _policy_text(policy) -> str:
    from sdx.records import Chain, StaticTree, ThresholdChain

    gamma = _lookahead(policy)
    if isinstance(policy, Chain):
        return f"lookahead {gamma}"
    if isinstance(policy, ThresholdChain):
        return f"threshold {float(policy.threshold):.3g}, at most {gamma} drafts"
    nodes = len(policy.parents) if isinstance(policy, StaticTree) else int(policy.budget)
    return f"tree of {nodes} nodes, depth {gamma}"


def _design_lines(cell: dict[str, Any]) -> list[str]:
    draft, bounds = cell["draft"], cell["bounds"]
    name = f"{draft['name']} " if draft["name"] else ""
    gap = cell["certificate_gap"]
    certificate = "not certified" if gap is None else f"certified within {100 * gap:.2g} %"
    largest = sorted(cell["elasticities"].items(), key=lambda kv: -abs(kv[1]))[:5]
    return [
        f"batch {cell['batch']:g}  context {cell['context']:g}  ->  {cell['verdict']}"
        f"  (x{cell['speedup']:.2f})",
        f"    draft {name}{draft['layers']:g} layers x {draft['width']:g} wide "
        f"({draft['parameters'] / 1e9:.3g} B), {cell['policy']}, tensor parallel "
        f"{cell['tensor_parallel']}",
        f"    {cell['tokens_per_second']:.4g} tokens/s against "
        f"{cell['autoregressive_tokens_per_second']:.4g} without; {cell['tokens_per_round']:.2f} "
        f"tokens per round; {certificate}",
        f"    bound by: draft {bounds['draft']}, verification {bounds['verify']}",
        "    elasticities: " + ", ".join(f"{key} {value:+.2f}" for key, value in largest),
    ]


def load_acceptance(path: str):
    """The acceptance law in a JSON file of `sdx measure` or `sdx calibrate --metrics`."""
    from sdx.theory import acceptance

    data = read_json(path)
    law = dict(data.get("law", {})) if isinstance(data, dict) else {}
    kind = law.pop("type", None)
    known = {c.__name__: c for c in (acceptance.Geometric, acceptance.BetaMixture)}
    known["PerPosition"] = acceptance.PerPosition
    if kind not in known:
        raise ValueError(
            f"{path}: no acceptance law in it (key 'law' with a type of {', '.join(known)}); "
            "write it with sdx measure --json"
        )
    return known[kind](**law)
