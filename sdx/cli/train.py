"""`sdx train`: a draft head for a target, on the target's own text."""

from __future__ import annotations

import dataclasses
import json as json_module
from pathlib import Path
from typing import Any, Literal

from sdx.cli.base import Command, Outcome, read_json

# What may change between two parts of one training.
FREE = ("json", "out", "work", "features", "layout", "coordinator", "processes", "process")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Command):
    """A draft head: the target continues prompts, a head learns from its features of them."""

    target: str
    """Checkpoint folder or hub id (a Llama-like decoder)."""
    head: Literal["eagle", "hass", "eagle3", "medusa", "poss", "koala"]
    """The paper's recipe: network and losses."""
    out: str
    """Folder of the finished head (config.json, model.safetensors, training.json)."""
    layers: int = 1
    """K: decoder layers of the head, or residual blocks per Medusa position."""
    positions_per_specialist: int = 0
    """n of PosS-n; 0 is 1 for --head poss and none for the others."""
    steps: int = 0
    """Drafts in a row that are trained (Medusa: that can be drafted); 0: the paper's."""
    adversarial: float | None = None
    """KOALA's lambda; 0: no adversary. Not given: 0.2 for --head koala, 0 for the others."""
    objective: Literal["ce", "tv", "throughput"] = "ce"
    """Cross-entropy, total variation (1 - acceptance), or tokens per second on this machine."""
    feature_layers: str = ""
    """EAGLE-3: whose outputs are fused, like 1,2,4; none: low, middle and high."""
    start: str = ""
    """A head to go on from; --head poss also takes an EAGLE head."""
    acceptance: str = ""
    """For throughput without --start: a head's survival, a JSON file of `sdx measure`."""
    text: str = "corpus"
    """Prompts: a text, .json or .jsonl file as `sdx measure` takes, or "corpus", the Python sources
    of this interpreter's standard library."""
    sequences: int = 1024
    """Prompts that are trained on."""
    held_out: int = 64
    """Further prompts, on which the head is judged."""
    prompt_tokens: int = 32
    new_tokens: int = 96
    """What the target adds to each prompt, greedily and sampled in turn."""
    updates: int = 600
    batch: int = 8
    """Sequences per update, of all devices together."""
    learning_rate: float = 3e-3
    positions: int = 8
    """Drafts per chain when judged."""
    evaluate_every: int = 50
    """Updates between two evaluations, each followed by a checkpoint."""
    seed: int = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the finished head's file."""
    work: str = ""
    """Folder of checkpoints and metrics.jsonl, from which the same command goes on where it was
    stopped; OUT.work if not given."""
    features: str = ""
    """Folder of the target's text and features, which trainings can share; WORK/features if not
    given."""
    layout: Literal["data", "fsdp"] = "data"
    """Over several devices: whole weights on each, or parts of each weight."""
    coordinator: str = ""
    """host:port of process 0, for a training of several processes (jax.distributed)."""
    processes: int = 1
    process: int = 0
    """Which of them this one is, from 0."""

    def run(self) -> Outcome:
        plan = self._plan()
        if self.processes > 1 or self.coordinator:
            from sdx.training.devices import join

            if not self.coordinator:
                raise ValueError(f"{self.processes} processes need --coordinator host:port")
            join(self.coordinator, self.processes, self.process)
        self._claim()
        from sdx.reporting.progress import Reporter

        target, tokenizer = self._target()
        prompts, held_out = self._prompts(tokenizer)
        config = plan.config(target.config)
        with Reporter().stage("the target's text and features") as report:
            self._text(target, prompts, held_out, config.feature_layers, report)
        return self._fit(plan, target, Reporter())

    # -------------------------------------------------------------------------- what is asked

    @property
    def _work(self) -> Path:
        return Path(self.work or self.out.rstrip("/") + ".work")

    @property
    def _features(self) -> Path:
        return Path(self.features) if self.features else self._work / "features"

    def _plan(self):
        """The plan; ValueError for what does not belong together."""
        from sdx.training.heads import Plan

        for name in ("layers", "sequences", "held_out", "updates", "batch", "positions",
                     "evaluate_every", "new_tokens"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.prompt_tokens < 3:
            raise ValueError(f"prompt_tokens {self.prompt_tokens} must be at least 3")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate {self.learning_rate:g} must lie inside (0, 1)")
        if self.new_tokens <= self.positions:
            raise ValueError(
                f"new_tokens {self.new_tokens} must exceed positions {self.positions}: chains are "
                "judged on the target's continuations"
            )
        if self.sequences < self.batch:
            raise ValueError(f"sequences {self.sequences} are fewer than a batch of {self.batch}")
        if self.positions_per_specialist and self.head != "poss":
            raise ValueError(f"a {self.head} head has no specialists: only --head poss has")
        if self.objective == "throughput" and not (self.start or self.acceptance):
            raise ValueError(
                "objective throughput needs a head's survival to start from: add --start HEAD, or "
                "--acceptance FILE of sdx measure"
            )
        layers = [part for part in self.feature_layers.split(",") if part]
        if not all(part.strip().isdigit() for part in layers):
            raise ValueError(f"feature_layers {self.feature_layers!r}: write them like 1,2,4")
        return Plan(
            recipe=self.head,
            layers=self.layers,
            positions_per_specialist=self.positions_per_specialist or int(self.head == "poss"),
            steps=self.steps,
            objective=self.objective,
            adversarial=self._lambda(),
            feature_layers=tuple(map(int, layers)),
        )

    def _lambda(self) -> float:
        if self.adversarial is None:
            return 0.2 if self.head == "koala" else 0.0
        return self.adversarial

    def _claim(self) -> None:
        """The work folder belongs to one training: its options are kept there."""
        mine = {k: v for k, v in dataclasses.asdict(self).items() if k not in FREE}
        path = self._work / "options.json"
        if path.is_file():
            known = read_json(path)
            changed = sorted(k for k in mine if known.get(k) != mine[k])
            if changed:
                name = changed[0]
                raise ValueError(
                    f"{self._work}: belongs to a training with {name} {known.get(name)!r}, not "
                    f"{mine[name]!r}; choose another --work or remove it"
                )
        elif self.process == 0:
            self._work.mkdir(parents=True, exist_ok=True)
            path.write_text(json_module.dumps(mine, indent=1) + "\n", encoding="utf-8")

    def _target(self):
        from sdx.cli.pair import _tokenizer
        from sdx.interop.checkpoints import load_checkpoint
        from sdx.models.llama import Llama

        model = load_checkpoint(self.target).model
        if not isinstance(model, Llama):
            raise ValueError(f"target {self.target}: draft heads are for Llama-like decoders")
        longest = self.prompt_tokens + self.new_tokens
        if longest > model.config.max_positions:
            raise ValueError(
                f"prompt_tokens + new_tokens = {longest} exceed the target's "
                f"{model.config.max_positions} positions"
            )
        return model, _tokenizer(self.target)

    def _prompts(self, tokenizer):
        """(`[sequences, prompt_tokens]` to train on, `[held_out, prompt_tokens]` to judge on)"""
        import numpy as np

        from sdx.cli.pair import read_prompts
        from sdx.training import corpus

        if self.text == "corpus":
            sides = (("train", self.sequences), ("held_out", self.held_out))
            mark = tokenizer.token_to_id(corpus.END_OF_TEXT)
            streams = [
                (corpus.tokenise(tokenizer, corpus.texts(split), 0 if mark is None else mark), n)
                for split, n in sides
            ]
            return [corpus.held_out_prompts(s, n, self.prompt_tokens) for s, n in streams]
        length, windows = self.prompt_tokens, []
        for ids in read_prompts(self.text, tokenizer, 10**9):
            whole = len(ids) // length * length
            windows += [ids[start : start + length] for start in range(0, whole, length)]
        wanted = self.sequences + self.held_out
        if len(windows) < wanted:
            raise ValueError(
                f"{self.text}: {len(windows)} prompts of {length} tokens, {wanted} are wanted; "
                "lower --sequences, --held-out or --prompt-tokens"
            )
        spread = np.linspace(0, len(windows) - 1, wanted).astype(int)
        chosen = np.asarray([windows[i] for i in spread], np.int32)
        judged = np.linspace(0, wanted - 1, self.held_out).astype(int)
        return np.delete(chosen, judged, axis=0), chosen[judged]

    # -------------------------------------------------------------------------- what is done

    def _text(self, target, prompts, held_out, layers, report) -> None:
        """Written by the first process, read by all."""
        import jax

        from sdx.training.devices import barrier
        from sdx.training.head_data import distil

        if jax.process_index() == 0:
            distil(
                self._features, target, prompts, held_out, self.new_tokens, layers,
                seed=self.seed, report=report,
            )  # fmt: skip
        barrier("text")

    def _fit(self, plan, target, reporter) -> Outcome:
        import jax

        from sdx.interop.draft_heads import load_draft_head
        from sdx.models.heads import save_head
        from sdx.models.small_steps import PLAIN, prepare
        from sdx.training.devices import gathered, mesh_of
        from sdx.training.head_data import TRAIN, Features, feature_batches, teacher_of
        from sdx.training.heads import head_trainer, judged
        from sdx.training.trainer import Rates, Schedule

        teacher, key = teacher_of(target), jax.random.key(self.seed)
        start = None
        if self.start:
            start = prepare(load_draft_head(self.start, target.config.layers), PLAIN)
        head = plan.first_head(target.config, teacher.parts, key, start)
        weights = self._survival_weights(plan, target, teacher, start, reporter)
        count = len(jax.devices())
        if self.batch % count:
            raise ValueError(f"batch {self.batch} is not divisible by {count} devices")
        features = Features(self._features / TRAIN)
        fused = bool(head.config.feature_layers)
        judge = self._judge(teacher)
        trainer = head_trainer(
            head, teacher, plan.loss(weights),
            feature_batches(features, self.batch, self.seed, with_fused=fused),
            Schedule(steps=self.updates, warmup_steps=min(10, self.updates)),
            rates=Rates(matrix=0.0, rest=self.learning_rate),
            adversarial=plan.adversarial, key=key, folder=self._work.absolute() / "checkpoints",
            mesh=mesh_of() if count > 1 else None, layout=self.layout,
            evaluate=lambda head: judge(gathered(head)), say=reporter.console.print,
        )  # fmt: skip
        resumed = trainer.progress.step if trainer.resume() else 0
        with reporter.stage(f"training ({self.head})", self.updates - resumed) as report:
            done = trainer.fit(
                lambda trainer: report(self._note(trainer)), report_seconds=0.0,
                save_steps=self.evaluate_every, evaluate_steps=self.evaluate_every,
            )  # fmt: skip
        best = trainer.restore_best()
        head = gathered(trainer.model["head"])
        found = judged(head, teacher, self._features, self.prompt_tokens, self.positions)
        facts = self._facts(plan, head, done, best, weights) | found
        if jax.process_index() == 0:
            save_head(self.out, head, self.dtype)
            text = json_module.dumps(facts, indent=1) + "\n"
            (Path(self.out) / "training.json").write_text(text, encoding="utf-8")
            return facts, self._lines(facts)
        return facts, [f"process {self.process} is done; process 0 writes {self.out}"]

    def _judge(self, teacher):
        from sdx.training.head_data import GREEDY, Features
        from sdx.training.heads import evaluator

        batch = Features(self._features / GREEDY).all()
        return evaluator(teacher, batch, self.prompt_tokens, self.positions, greedy=True)

    def _survival_weights(self, plan, target, teacher, start, reporter) -> tuple[float, ...]:
        """dT/dS(k) on this machine, as shares, for the throughput objective; () for others.
        Measured once per training, by its first process."""
        if plan.objective != "throughput":
            return ()
        import jax

        from sdx.training.devices import barrier

        path = self._work / "survival_weights.json"
        if jax.process_index() == 0 and not path.is_file():
            weights = self._measured_weights(plan, target, teacher, start, reporter)
            path.write_text(json_module.dumps(weights) + "\n", encoding="utf-8")
        barrier("survival weights")
        return tuple(read_json(path))

    def _measured_weights(self, plan, target, teacher, start, reporter) -> list[float]:
        import jax

        from sdx.calibration.draft_heads import survival_weights, time_heads
        from sdx.decoding.heads import bind
        from sdx.decoding.llama_target import as_target
        from sdx.models.heads import create_head
        from sdx.training.heads import judged

        if self.acceptance:
            hazards = self._hazards(plan.unrolled)
        else:
            at = (self._features, self.prompt_tokens, self.positions)
            hazards = judged(start, teacher, *at)["hazards"]["0"]
        decoder, config = as_target(target), plan.config(target.config)
        timed = create_head(config, jax.random.key(0), teacher.parts)
        room = self.prompt_tokens + self.new_tokens
        with reporter.stage("timing steps") as report:
            costs = time_heads(
                decoder, {"head": bind(timed, decoder)}, range(1, plan.unrolled + 2),
                context=room // 2, capacity=room, report=report,
            )  # fmt: skip
        weights = survival_weights(hazards[: plan.unrolled], costs, "head")
        return (weights / weights.sum()).tolist()

    def _hazards(self, positions: int) -> list[float]:
        """P(draft k accepted | those before were) by the law in --acceptance."""
        from sdx.cli.design import load_acceptance

        law = load_acceptance(self.acceptance)
        survival = [1.0, *(float(law.survival(k)) for k in range(1, positions + 1))]
        return [b / max(a, 1e-9) for a, b in zip(survival, survival[1:], strict=False)]

    def _note(self, trainer) -> str:
        now = trainer.progress
        tau = f", tau {now.evaluation['tau']:.3f}" if now.evaluation else ""
        return f"loss {now.loss:.3f}{tau}"

    def _facts(self, plan, head, done, best, weights) -> dict[str, Any]:
        """What `training.json` and the summary say."""
        import jax

        numbers = sum(leaf.size for leaf in jax.tree.leaves(head))
        options = {k: v for k, v in dataclasses.asdict(self).items() if k not in FREE}
        options["target"] = Path(self.target).name
        options["start"] = Path(self.start).name
        return {
            "options": options,
            "parameters": numbers,
            "updates": done.step,
            "best_update": best,
            "seconds": round(done.seconds, 1),
            "final_loss": done.loss,
            "survival_weights": list(weights),
            "devices": len(jax.devices()),
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        }

    def _lines(self, facts) -> list[str]:
        lines = [
            f"{self.head}: {facts['parameters'] / 1e6:.2f} M parameters, {facts['updates']} "
            f"updates in {facts['seconds']:.0f} s, best at {facts['best_update']}; "
            f"written: {self.out}"
        ]
        for temperature, survival in facts["survival"].items():
            rates = " ".join(f"{h:.3f}" for h in facts["hazards"][temperature])
            lines.append(
                f"T = {temperature}: tau {1 + sum(survival):.3f}, accepted per position {rates}"
            )
        return lines
