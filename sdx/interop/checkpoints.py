"""Hugging Face checkpoints in and out: config, tokenizer, sharded safetensors.

    folder or hub id --> Stored (headers only, checked) --> parameters, one at a time --> model
    model + Stored   --> the same files, bit for bit

Weights go straight from the files to the device or mesh: the host holds one parameter at a time
beyond the model. Only safetensors are read; a pickle is never opened.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from sdx.models.config import ModelConfig
from sdx.models.layout import Leaf, Part, Region, get, layout, put, skeleton
from sdx.models.opt import OptConfig
from sdx.models.small_steps import to_matrix

FLOATS = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
INDEX = "model.safetensors.index.json"
CHUNK_BYTES = 32 << 20  # read at once; bounds what is mapped from a file
IGNORED = ("rotary_emb.inv_freq", ".attn.masked_bias")  # recomputed, not weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint on disk, read up to its headers.

    fields: config.json. files: name of each safetensors file -> names of its tensors. shapes,
    dtypes: of each tensor (safetensors' names of dtypes). metadata: of each file. index_metadata:
    of the shard index, None for a single file.
    """

    folder: Path
    fields: Mapping[str, Any]
    files: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, Mapping[str, str]]
    index_metadata: Mapping[str, Any] | None = None

    def path(self, tensor: str) -> Path:
        return self.folder / next(f for f, names in self.files.items() if tensor in names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded model with its config, and how it was stored (to save it back the same way)."""

    model: Any
    config: ModelConfig | OptConfig
    stored: Stored


# ---------------------------------------------------------------------------- finding the files


def find(name_or_folder: str | Path) -> Path:
    """A local folder as it is; anything of the form org/name from the Hugging Face hub (or its
    local cache). Raises FileNotFoundError with the remedy where that fails."""
    folder = Path(name_or_folder)
    if folder.is_dir():
        return folder
    name = str(name_or_folder)
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith("/"):
        raise FileNotFoundError(f"{name}: no such checkpoint folder (nor a hub id, org/name)")
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub client raises its own, requests' and httpx's errors
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{name}: no such folder, and the hub gave nothing ({reason[:120]}); offline, "
            "download the checkpoint elsewhere and pass its folder"
        ) from None


def read_fields(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a checkpoint folder has a config.json")
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise ValueError(
            f"{path}: a config.json is a JSON object, this is a {type(fields).__name__}"
        )
    return fields


def read_config(fields: Mapping[str, Any]) -> ModelConfig | OptConfig:
    return (OptConfig if fields.get("model_type") == "opt" else ModelConfig).from_hf(dict(fields))


def load_tokenizer(name_or_folder: str | Path) -> Tokenizer:
    """The checkpoint's tokenizer.json."""
    path = find(name_or_folder) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; sdx reads tokenizer.json (save a fast tokenizer)"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer ({error})") from None


# ---------------------------------------------------------------------------- headers


def inspect(name_or_folder: str | Path) -> Stored:
    """Reads config.json and all headers, no weights.

    Raises FileNotFoundError or ValueError, one line: no safetensors (or pickles only), a missing
    shard, a corrupt file, a tensor that the index has and the shard has not.
    """
    folder = find(name_or_folder)
    fields = read_fields(folder)
    names, weight_map, index_metadata = _weight_files(folder)
    files, shapes, dtypes, metadata = {}, {}, {}, {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: shard is missing, {INDEX} lists it: fetch the checkpoint again"
            )
        with _open(path) as file:
            files[name] = tuple(file.keys())
            metadata[name] = dict(file.metadata() or {})
            for tensor in files[name]:
                view = file.get_slice(tensor)
                shapes[tensor], dtypes[tensor] = tuple(view.get_shape()), view.get_dtype()
    for tensor, name in weight_map.items():
        if tensor not in files[name]:
            raise ValueError(
                f"{folder / name}: has no tensor {tensor}, {INDEX} says so: a torn set"
            )
    return Stored(
        folder=folder, fields=fields, files=files, shapes=shapes, dtypes=dtypes,
        metadata=metadata, index_metadata=index_metadata,
    )  # fmt: skip


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str], dict[str, Any] | None]:
    """Files in order, tensor -> file, and the index's metadata (None: one file)."""
    index = folder / INDEX
    if index.is_file():
        try:
            content = json.loads(index.read_text())
            weight_map = dict(content["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index}: not a shard index ({error!r})") from None
        if any(Path(name).name != name for name in weight_map.values()):
            raise ValueError(f"{index}: names a file outside its folder")
        return sorted(set(weight_map.values())), weight_map, content.get("metadata", {})
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"], {}, None
    pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder / pickles[0]}: a pickle, which sdx never opens: convert the checkpoint to "
            "safetensors"
        )
    raise FileNotFoundError(f"{folder}: no model.safetensors and no {INDEX}")


def _open(path: Path):
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError, ValueError) as error:
        with open(path, "rb") as file:
            magic = file.read(2)
        if magic == b"PK" or magic[:1] == b"\x80":  # torch's zip, a bare pickle
            raise ValueError(
                f"{path}: a pickle under a safetensors name, which sdx never opens: convert it"
            ) from None
        raise ValueError(
            f"{path}: corrupt or truncated safetensors ({error}); fetch or write it again"
        ) from None


def _check(leaves: Sequence[Leaf], stored: Stored, kind: str):
    """Every tensor is there with its shape and a float dtype, and none is left over."""
    left = set(stored.shapes)
    for part in (part for leaf in leaves for part in leaf.parts):
        if part.name not in stored.shapes:
            raise ValueError(f"{stored.folder}: tensor {part.name} is missing: not a {kind} model?")
        left.discard(part.name)
        shape, dtype = stored.shapes[part.name], stored.dtypes[part.name]
        if shape != part.shape:
            raise ValueError(
                f"{stored.path(part.name)}: tensor {part.name} has shape {list(shape)}, "
                f"config.json says {list(part.shape)}"
            )
        if dtype not in FLOATS:
            raise ValueError(
                f"{stored.path(part.name)}: tensor {part.name} has dtype {dtype}, sdx reads "
                f"{', '.join(FLOATS)}: use an unquantised checkpoint"
            )
    left = {n for n in left if not n.endswith(IGNORED) and n != "lm_head.weight"}
    if left:
        raise ValueError(
            f"{stored.folder}: tensor {min(left)} is unknown: not a plain {kind} model"
        )


# ---------------------------------------------------------------------------- reading


def load_checkpoint(
    name_or_folder: str | Path,
    dtype: jnp.dtype | None = jnp.float32,
    mesh: Mesh | None = None,
    axis: str = "model",
) -> Checkpoint:
    """The model of a folder or hub id, its weights as `dtype` (None: as stored).

    With a `mesh` the matrices are split over its axis `axis` (tensor parallel: columns of what goes
    in, rows of what comes out; the rest is replicated), each device reading its part only.
    Host memory beyond the model: one parameter.
    """
    stored = inspect(name_or_folder)
    config = read_config(stored.fields)
    leaves = layout(config)
    _check(leaves, stored, config.kind)
    if dtype is None:
        dtype = FLOATS[stored.dtypes[leaves[0].parts[0].name]]
    model = skeleton(config, dtype)
    for leaf in leaves:
        sharding = _sharding(leaf, mesh, axis)
        value = jax.make_array_from_callback(
            leaf.shape, sharding, lambda index, leaf=leaf: _read(leaf, index, stored, dtype)
        )
        put(model, leaf.path, value)
    return Checkpoint(model=model, config=config, stored=stored)


def _sharding(leaf: Leaf, mesh: Mesh | None, axis: str) -> jax.sharding.Sharding:
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    spec = [None] * len(leaf.shape)
    if leaf.shard_axis is not None and leaf.shape[leaf.shard_axis] % mesh.shape[axis] == 0:
        spec[leaf.shard_axis] = axis
    return NamedSharding(mesh, PartitionSpec(*spec))


def _read(leaf: Leaf, index: tuple[slice, ...], stored: Stored, dtype) -> np.ndarray:
    """The part of a parameter that one device holds."""
    wanted: Region = tuple(s.indices(size)[:2] for s, size in zip(index, leaf.shape, strict=True))
    out = _aligned([stop - start for start, stop in wanted], dtype)
    for part in leaf.parts:
        common = tuple(
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(part.region, wanted, strict=True)
        )
        if not all(start < stop for start, stop in common):
            continue
        here = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(common, wanted, strict=True))
        inside = [(a - c, b - c) for (a, b), (c, _) in zip(common, part.region, strict=True)]
        lead = len(leaf.shape) - len(part.shape)  # 1 for a stack of experts
        _fill(out[here][(0,) * lead], part, inside[lead:], stored)
    return out


def _fill(target: np.ndarray, part: Part, inside: list[tuple[int, int]], stored: Stored):
    """Copies a block of a stored tensor, a few rows at a time: the file is mapped anew for each
    chunk, so that its pages do not add up in memory."""
    rows, *columns = reversed(inside) if part.transpose else inside
    target = target.T if part.transpose else target  # now [rows, columns] as stored
    path = stored.path(part.name)
    width = int(np.prod([b - a for a, b in columns], initial=1))
    step = max(1, CHUNK_BYTES // (4 * width))
    for start in range(rows[0], rows[1], step):
        stop = min(start + step, rows[1])
        with _open(path) as file:
            view = file.get_slice(part.name)
            block = view[(slice(start, stop), *(slice(a, b) for a, b in columns))]
            if not np.isfinite(block).all():
                raise ValueError(f"{path}: tensor {part.name} holds NaN or infinite weights")
            target[start - rows[0] : stop - rows[0]] = block


def _aligned(shape: Sequence[int], dtype) -> np.ndarray:
    """Memory that a CPU device adopts without a copy (64-byte aligned)."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


# ---------------------------------------------------------------------------- writing


def save_checkpoint(
    folder: str | Path,
    model: Any,
    like: Stored | None = None,
    dtype: str = "BF16",
) -> None:
    """Writes config.json and safetensors of a Llama-family or OPT model.

    `like`: the same files, tensors, dtypes and config fields as that checkpoint had; what was
    loaded from it comes out bit for bit. Without it: one file, all weights as `dtype` (BF16, F16,
    F32).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {part.name: (leaf, part) for leaf in layout(model.config) for part in leaf.parts}
    fields = model.config.to_hf() | {"torch_dtype": np.dtype(FLOATS[dtype]).name}
    files = {"model.safetensors": tuple(parts)}
    metadata = {"model.safetensors": {"format": "pt"}}
    if like is not None:
        fields, files, metadata = dict(like.fields), like.files, like.metadata
    tied = next(iter(parts))  # the embedding: some writers store a tied head a second time
    for name, tensors in files.items():
        written = {}
        for tensor in tensors:
            if tensor not in parts and tensor != "lm_head.weight":
                continue
            leaf, part = parts.get(tensor, parts[tied])
            kind = FLOATS[like.dtypes[tensor] if like else dtype]
            parameter = get(model, leaf.path)[...]
            matrix = to_matrix(parameter) if len(leaf.shape) == 2 else parameter
            written[tensor] = _take(matrix, part).astype(kind)
        partial = folder / f"{name}.partial"
        save_file(written, partial, metadata=dict(metadata[name]) or None)
        os.replace(partial, folder / name)
    if like is not None and like.index_metadata is not None:
        weight_map = {t: name for name, tensors in files.items() for t in tensors}
        content = {"metadata": dict(like.index_metadata), "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def _take(parameter: jax.Array, part: Part) -> np.ndarray:
    """A stored tensor out of its parameter."""
    block = np.asarray(parameter[tuple(slice(a, b) for a, b in part.region)])
    block = block.reshape(block.shape[-len(part.shape) :])
    return np.ascontiguousarray(block.T if part.transpose else block)
