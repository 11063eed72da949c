"""One training loop for every network: Muon for matrices, AdamW for the rest, Orbax checkpoints.

The loop knows no model: it moves a flat dict of weights down a loss, or down several in turn
(phases: a generator and its adversary). The learning rate follows the larger of two shares, steps
done and time gone, so that a run ends in time, annealed, on a machine of unknown speed. Without a
bound in time all is a function of the step: a run that was killed and goes on ends with the same
weights, bit for bit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from sdx.training.checkpoints import Checkpoints
from sdx.training.devices import Layout, mesh_of, place, place_batch, sharding_of
from sdx.training.metrics import MetricsLog

Weights = dict[str, jax.Array]
Loss = Callable[..., jax.Array]  # (model, batch, *context) -> scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm up, stay, decay to zero linearly over the last `decay` of the run (WSD).

    `steps` and `seconds` both bound the run; either may be infinite, not both.
    """

    steps: float = float("inf")
    seconds: float = float("inf")
    warmup_steps: int = 60
    decay: float = 0.4

    def progress(self, step: int, seconds: float) -> float:
        """Share of the run that is over, 0 to 1."""
        return min(1.0, max(step / self.steps, seconds / self.seconds))

    def factor(self, step: int, seconds: float) -> float:
        """Learning rate at this point as a share of its peak."""
        left = 1.0 - self.progress(step, seconds)
        return min(1.0, (step + 1) / self.warmup_steps, left / self.decay)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak learning rates: Muon's (spectral norm of one update; 0: AdamW for matrices too) and
    AdamW's."""

    matrix: float = 0.02
    rest: float = 3e-3
    newton_schulz_steps: int = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One update of a step: the weights that `trains` selects by name move down `loss`."""

    loss: Loss
    trains: Callable[[str], bool] = lambda name: True
    rates: Rates | None = None


def to_weights(model: Any) -> tuple[Weights, Callable[[Weights], Any]]:
    """A model as a flat dict of weights by name, and the way back."""
    paths, tree = jax.tree_util.tree_flatten_with_path(model)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    return (
        dict(zip(names, (leaf for _, leaf in paths), strict=True)),
        lambda weights: jax.tree.unflatten(tree, [weights[name] for name in names]),
    )


def is_matrix(name: str, weight: jax.Array) -> bool:
    """Whether Muon moves it: a matrix inside the network, no embedding, head or norm."""
    return weight.ndim == 2 and not any(word in name for word in ("embedding_VxD", "head_DxV"))


def optimizer(weights: Weights, rates: Rates) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the layers' matrices, AdamW for embeddings, head, norms."""
    rest = optax.adamw(rates.rest, b1=0.9, b2=0.95, weight_decay=1e-3)
    if not rates.matrix:
        return rest
    muon = optax.contrib.muon(rates.matrix, ns_steps=rates.newton_schulz_steps, weight_decay=0.01)
    labels = {name: "matrix" if is_matrix(name, w) else "rest" for name, w in weights.items()}
    return optax.partition({"matrix": muon, "rest": rest}, labels)


@dataclasses.dataclass(kw_only=True)
class Progress:
    """Where a run stands; `step` and `seconds` count earlier, interrupted parts too, `first_step`
    and `first_seconds` tell where this part began. `evaluation`: the last one's values."""

    step: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    first_step: int = 0
    first_seconds: float = 0.0
    evaluation: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def steps_per_second(self) -> float:
        """Of this part of the run."""
        return (self.step - self.first_step) / max(self.seconds - self.first_seconds, 1e-9)


class Trainer:
    """Trains one model: `fit` runs to the end of the schedule, resuming from its folder.

    loss: `loss(model, batch, *context) -> scalar`, or phases that are updated in turn.
    batches: `batches(step, progress)` is the batch of a step, a tree of arrays `[rows, ...]`
    (scalars are the same for all rows); of several processes each gives its own rows.
    context: arrays or models that are not trained (a teacher).
    folder: of checkpoints and `metrics.jsonl`; None keeps nothing.
    mesh, layout: devices (None: one) and how weights lie on them (sdx.training.devices).
    evaluate: `evaluate(model) -> {name: value}`, a value "loss" is what "best" means.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss | Sequence[Phase],
        batches: Callable[[int, float], Any],
        schedule: Schedule,
        *,
        rates: Rates | None = None,
        context: tuple[Any, ...] = (),
        folder: Path | None = None,
        mesh: Mesh | None = None,
        layout: Layout = "data",
        evaluate: Callable[[Any], dict[str, float]] | None = None,
        say: Callable[[str], None] = print,
    ):
        if jax.process_count() > 1 and np.isfinite(schedule.seconds):
            raise ValueError("processes have different clocks: bound the schedule by steps")
        self.mesh = mesh_of() if mesh is None and jax.process_count() > 1 else mesh
        self.layout: Layout = layout
        self.weights, self.rebuild = to_weights(model)
        self.batches, self.schedule, self.evaluate = batches, schedule, evaluate
        self.context = self._spread(context, "data")
        phases = [Phase(loss=loss)] if callable(loss) else list(loss)
        transforms = [optimizer(self._own(p), p.rates or rates or Rates()) for p in phases]
        moments = [t.init(self._own(p)) for p, t in zip(phases, transforms, strict=True)]
        self.moments = self._spread(moments[0] if len(phases) == 1 else tuple(moments), layout)
        self.weights = self._spread(self.weights, layout)
        self.progress = Progress()
        self.checkpoints = None if folder is None else Checkpoints(folder, say)
        self.log = MetricsLog(None if folder is None else Path(folder) / "metrics.jsonl")
        self.step = self._compiled(phases, transforms)

    @property
    def model(self) -> Any:
        """The model with the present weights."""
        return self.rebuild(self.weights)

    def _own(self, phase: Phase) -> Weights:
        return {name: w for name, w in self.weights.items() if phase.trains(name)}

    def _spread(self, tree, layout: Layout):
        return tree if self.mesh is None else place(tree, self.mesh, layout)

    def _compiled(self, phases, transforms):
        """(weights, moments, batch, factor, context) -> weights, moments, losses of the phases."""

        def update(phase, transform, weights, moments, batch, factor, context):
            own = {name: w for name, w in weights.items() if phase.trains(name)}

            def loss(own):
                return phase.loss(self.rebuild({**weights, **own}), batch, *context)

            value, slope = jax.value_and_grad(loss)(own)
            clip = jnp.minimum(1.0, 1.0 / (optax.tree.norm(slope) + 1e-6))
            slope = jax.tree.map(lambda g: g * clip, slope)
            change, moments = transform.update(slope, moments, own)
            own = jax.tree.map(lambda w, d: w + factor * d, own, change)
            return {**weights, **own}, moments, value

        def step(weights, moments, batch, factor, context):
            parts = (moments,) if len(phases) == 1 else moments
            new, values = [], []
            for phase, transform, part in zip(phases, transforms, parts, strict=True):
                weights, part, value = update(
                    phase, transform, weights, part, batch, factor, context
                )
                new.append(part)
                values.append(value)
            return weights, new[0] if len(phases) == 1 else tuple(new), jnp.stack(values)

        if self.mesh is None:
            return jax.jit(step, donate_argnums=(0, 1))
        kept = jax.tree.map(
            lambda leaf: sharding_of(leaf.shape, self.mesh, self.layout),
            (self.weights, self.moments),
        )
        return jax.jit(
            step, donate_argnums=(0, 1), out_shardings=(*kept, sharding_of((), self.mesh, "data"))
        )

    # ------------------------------------------------------------------ checkpoints

    def _tree(self):
        """What a checkpoint holds."""
        seconds = np.asarray(self.progress.seconds)
        return {"weights": self.weights, "moments": self.moments, "seconds": seconds}

    def save(self) -> None:
        """Begins an atomic checkpoint of weights, moments and progress."""
        if self.checkpoints is not None:
            now = self.progress
            self.checkpoints.save(now.step, self._tree(), now.evaluation.get("loss", now.loss))

    def resume(self) -> bool:
        """Continues from the newest undamaged checkpoint in the folder; False if there is none.

        Raises ValueError if the folder belongs to another model.
        """
        found = None if self.checkpoints is None else self.checkpoints.restore(self._tree())
        if found is None:
            self.log.rewind(0)
            return False
        step, tree = found
        self.weights, self.moments = tree["weights"], tree["moments"]
        seconds = float(tree["seconds"])
        self.progress = Progress(step=step, seconds=seconds, first_step=step, first_seconds=seconds)
        self.log.rewind(step)
        return True

    def restore_best(self) -> int | None:
        """Takes the weights of the best checkpoint; its step, None without checkpoints."""
        best = None if self.checkpoints is None else self.checkpoints.best_step
        if best is not None:
            self.weights = self.checkpoints.restore(self._tree(), best)[1]["weights"]
        return best

    # ------------------------------------------------------------------ the loop

    def fit(
        self,
        report: Callable[[Trainer], None] = lambda trainer: None,
        *,
        report_seconds: float = 30.0,
        save_seconds: float = 180.0,
        save_steps: float = float("inf"),
        evaluate_steps: float = float("inf"),
        log_steps: int = 1,
        stop_step: float = float("inf"),
    ) -> Progress:
        """Steps until the schedule ends (or until `stop_step`: an interruption).

        Of several processes all save at the same steps: then only `save_steps` counts.
        """
        try:
            self._loop(
                report, report_seconds, save_seconds, save_steps, evaluate_steps, log_steps,
                stop_step,
            )  # fmt: skip
            self.save()
        finally:  # an interruption waits for the checkpoint that was begun
            if self.checkpoints is not None:
                self.checkpoints.wait()
        return self.progress

    def _loop(
        self, report, report_seconds, save_seconds, save_steps, evaluate_steps, log_steps, stop_step
    ) -> None:
        now = self.progress
        begin = time.monotonic() - now.seconds
        reported = saved = now.seconds
        alone = jax.process_count() == 1
        while now.step < stop_step:
            share = self.schedule.progress(now.step, now.seconds)
            if share >= 1.0:
                break
            losses, factor = self._one(share)
            now.loss = float(losses[0])
            now.step, now.seconds = now.step + 1, time.monotonic() - begin
            due = self.evaluate is not None and now.step % evaluate_steps == 0
            if due:
                now.evaluation = self.evaluate(self.model)
            if due or now.step % log_steps == 0:
                self.log.write(now, losses, factor, now.evaluation if due else {})
            if now.seconds - reported > report_seconds:
                reported = now.seconds
                report(self)
            if now.step % save_steps == 0 or (alone and now.seconds - saved > save_seconds):
                saved = now.seconds
                self.save()
            elif self.checkpoints is not None:
                self.checkpoints.seal()

    def _one(self, share: float) -> tuple[np.ndarray, float]:
        """One step: the losses of its phases, the learning rate's factor."""
        now = self.progress
        batch = self.batches(now.step, share)
        if self.mesh is not None:
            batch = place_batch(batch, self.mesh)
        factor = np.float32(self.schedule.factor(now.step, now.seconds))
        self.weights, self.moments, losses = self.step(
            self.weights, self.moments, batch, factor, self.context
        )
        return np.asarray(losses), float(factor)
