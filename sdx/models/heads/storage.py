"""Heads made, saved and loaded: a folder with `config.json` and `model.safetensors`.

Tensors are the head's own parameters under their own names and shapes; a head that was loaded and
is saved again comes out bit for bit. The engines' formats are `sdx.interop.heads`' business.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from sdx.models.checkpoint import DTYPES
from sdx.models.heads.base import Head, HeadConfig
from sdx.models.heads.eagle import Eagle
from sdx.models.heads.eagle3 import Eagle3
from sdx.models.heads.medusa import Medusa
from sdx.models.llama import TargetParts
from sdx.models.small_steps import PANELS, StepForms, prepare

MODEL_TYPE = "sdx_draft_head"  # what `config.json` says
NETWORKS = {"eagle": Eagle, "poss": Eagle, "eagle3": Eagle3, "medusa": Medusa}


def create_head(
    config: HeadConfig,
    key: jax.Array,
    parts: TargetParts | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> Head:
    """A head with random weights. parts: the target's; LM heads of its own then start as copies of
    the target's (of the kept tokens' columns)."""
    head = NETWORKS[config.kind](config, key, dtype)
    if parts is None:
        return head
    if config.kind == "eagle3":
        kept = np.asarray(config.kept) if config.kept else slice(None)
        head.head_DxU = nnx.Param(jnp.array(parts.head()[:, kept], dtype))
    for step in range(config.steps if config.own_head else 0):
        head.lm_head(step).weight_DxV = nnx.Param(jnp.array(parts.head(), dtype))
    return head


def named_parameters(head: Head) -> dict[str, nnx.Param]:
    """The parameters by name, like `blocks.0.qkv_DxN`; panels (copies) left out."""
    flat = nnx.to_flat_state(nnx.state(head, nnx.Param))
    named = {".".join(map(str, path)): value for path, value in flat}
    return {name: value for name, value in named.items() if not name.endswith(PANELS)}


def save_head(folder: str | Path, head: Head, dtype: str = "float32") -> None:
    """Writes `config.json` and, atomically, `model.safetensors` into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(np.asarray(value[...]).astype(DTYPES[dtype]))
        for name, value in named_parameters(head).items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial)
    os.replace(partial, folder / "model.safetensors")
    fields = {"model_type": MODEL_TYPE, "torch_dtype": dtype, "head": head.config.to_fields()}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def is_head(folder: str | Path) -> bool:
    """Whether a folder holds a head that `save_head` wrote."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return False
    try:
        fields = json.loads(path.read_text())
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("model_type") == MODEL_TYPE


def load_head(
    folder: str | Path, dtype: jnp.dtype = jnp.float32, forms: StepForms | None = None
) -> Head:
    """The head in `folder`, laid out for small steps (`forms`; None: the platform's).

    Raises FileNotFoundError or ValueError, each of one line: no head, missing, unknown or wrongly
    shaped tensors, a truncated file.
    """
    folder = Path(folder)
    if not is_head(folder):
        kind = ValueError if folder.is_dir() else FileNotFoundError
        raise kind(f"{folder}: no draft head; its folder has a config.json of type {MODEL_TYPE}")
    config = HeadConfig.from_fields(json.loads((folder / "config.json").read_text())["head"])
    path = folder / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a head's folder has its weights there")
    try:
        tensors = load_file(path)
    except (SafetensorError, ValueError, KeyError, OSError) as error:
        raise ValueError(f"{path}: corrupt or truncated safetensors ({error})") from None
    return prepare(from_tensors(config, tensors, dtype, str(path)), forms)


def from_tensors(
    config: HeadConfig, tensors: dict[str, Any], dtype: jnp.dtype = jnp.float32, where: str = "head"
) -> Head:
    """A head from tensors under the names of `named_parameters`. Raises ValueError."""
    head = nnx.eval_shape(lambda: NETWORKS[config.kind](config, jax.random.key(0), dtype))
    wanted = named_parameters(head)
    unknown = sorted(tensors.keys() - wanted.keys())
    if unknown:
        raise ValueError(f"{where}: tensor {unknown[0]} is unknown: not a {config.kind} head")
    state = {}
    for name, parameter in wanted.items():
        if name not in tensors:
            raise ValueError(f"{where}: tensor {name} is missing: not a {config.kind} head")
        if tensors[name].shape != parameter.shape:
            raise ValueError(
                f"{where}: tensor {name} has shape {tensors[name].shape}, the config says "
                f"{parameter.shape}"
            )
        path = tuple(int(part) if part.isdigit() else part for part in name.split("."))
        state[path] = nnx.Param(jnp.asarray(tensors[name], dtype))
    nnx.update(head, nnx.from_flat_state(state))
    return head
