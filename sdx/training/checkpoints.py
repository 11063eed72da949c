"""Checkpoints of a training: asynchronous, atomic, the last two and the best are kept.

Orbax writes into a temporary folder and renames it when everything is there, so that a process
killed at any moment leaves whole checkpoints only. What a disk or a copy truncated or altered
later is found by digests of the files, and the checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

Tree = Any
DIGESTS = "digests.json"
DAMAGED = "damaged-"  # before the names of damaged checkpoints

copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


class Checkpoints:
    """The checkpoints of one training in `folder`, shared by all its processes.

    say: where the line about a damaged checkpoint goes.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = print):
        self.folder, self.say = Path(folder).absolute(), say
        self._set_damaged_aside()

        def score(metrics):
            return metrics["score"]

        self.manager = ocp.CheckpointManager(
            self.folder,
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(
                best_fn=score,
                best_mode="min",
                preservation_policy=AnyPreservationPolicy(
                    [LatestN(2), BestN(get_metric_fn=score, reverse=True, n=1)]
                ),
                cleanup_tmp_directories=True,
            ),
        )

    def save(self, step: int, tree: Tree, score: float) -> None:
        """Begins to write `tree`; returns when its arrays are copied.

        score: smaller is better. A step that is already there is left alone.
        """
        self.wait()
        if step in self.manager.all_steps():
            return
        args = ocp.args.StandardSave(copied(tree))
        score = score if math.isfinite(score) else 1e30
        self.manager.save(step, args=args, metrics={"score": score})

    def restore(self, like: Tree, step: int | None = None) -> tuple[int, Tree] | None:
        """The checkpoint of a step (None: the newest): its step and its tree, which lies on the
        devices where `like` lies; None if there is none.

        Raises ValueError if it is of another model.
        """
        step = self.manager.latest_step() if step is None else step
        if step is None:
            return None
        if _shapes(self.manager.item_metadata(step)) != _shapes(like):
            raise ValueError(f"{self.folder}: checkpoints of another model; choose a new folder")
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return step, self.manager.restore(step, args=ocp.args.StandardRestore(like))

    @property
    def best_step(self) -> int | None:
        """The step of the smallest score; None without checkpoints."""
        self.wait()
        return self.manager.best_step()

    def wait(self) -> None:
        """Until what was begun is on the disk, with its digests."""
        self.manager.wait_until_finished()
        self.seal()

    def seal(self) -> None:
        """Writes the digests of what has arrived on the disk; returns at once."""
        if jax.process_index() != 0 or self.manager.is_saving_in_progress():
            return
        for step in self.manager.all_steps():
            path = self.folder / str(step)
            if path.is_dir() and not (path / DIGESTS).exists():
                partial = path.with_name(DIGESTS)
                partial.write_text(json.dumps(digests(path)), encoding="utf-8")
                partial.rename(path / DIGESTS)

    def _set_damaged_aside(self) -> None:
        """Renames checkpoints whose files are not those that were written, and says so."""
        steps = [int(p.name) for p in self.folder.glob("*") if p.name.isdecimal()]
        for step in sorted(steps, reverse=True):
            path = self.folder / str(step)
            reason = damage(path)
            if not reason:
                continue
            before = [other for other in steps if other < step]
            then = f"using step {max(before)}" if before else "starting anew"
            if jax.process_index() == 0:
                self.say(f"{path}: damaged checkpoint ({reason}); {then}")
                renamed = path.with_name(DAMAGED + path.name)
                shutil.rmtree(renamed, ignore_errors=True)
                path.rename(renamed)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below `folder`, by its path there."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != DIGESTS)
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint's files; "" if nothing is, or if the process was killed
    before it had written their digests."""
    path = folder / DIGESTS
    if not path.exists():
        return ""
    try:
        expected = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return f"{DIGESTS} is not whole"
    found = digests(folder)
    missing = sorted(expected.keys() - found.keys())
    if missing:
        return f"{missing[0]} is missing"
    altered = [name for name in expected if found[name] != expected[name]]
    return f"{altered[0]} is truncated or altered" if altered else ""


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Path of every array, in any notation of its steps -> its shape."""

    def name(key) -> str:
        return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(map(name, path)): tuple(leaf.shape) for path, leaf in leaves}
