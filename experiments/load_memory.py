"""Peak memory of loading a random Llama checkpoint of 1.5 GB in 5 shards.

    python -m experiments.load_memory            # writes experiments/results/load_memory.json

Expected: the peak above the idle process is at most the model plus its largest tensor. The
checkpoint (bfloat16, 23 layers of width 1536) is written to a temporary folder, loaded by a fresh
process that reports its own high-water mark (VmHWM, which counts mapped pages of the files too),
and deleted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from experiments.provenance import provenance
from sdx.interop.checkpoints import INDEX
from sdx.models.config import ModelConfig
from sdx.models.layout import layout

RESULT = Path(__file__).parent / "results" / "load_memory.json"
SHARDS = 5
CONFIG = ModelConfig(
    vocab_size=32000, width=1536, layers=23, heads=12, kv_heads=4, head_dim=128, ffn_width=4864,
    max_positions=2048,
)  # fmt: skip

LOADER = """
import json, sys, time
import jax, jax.numpy as jnp
from sdx.interop.checkpoints import load_checkpoint

def status(name):
    line = next(l for l in open("/proc/self/status") if l.startswith(name))
    return int(line.split()[1]) * 1024

jnp.zeros(1).block_until_ready()
idle = status("VmRSS")
start = time.perf_counter()
loaded = load_checkpoint(sys.argv[1], dtype=None)
jax.block_until_ready(loaded.model)
seconds = time.perf_counter() - start
sizes = [x.nbytes for x in jax.tree.leaves(loaded.model)]
print(json.dumps({"idle_bytes": idle, "peak_bytes": status("VmHWM"), "model_bytes": sum(sizes),
                  "load_seconds": seconds}))
"""


def write_checkpoint(folder: Path, seed: int) -> int:
    """Random bfloat16 weights in SHARDS files; returns the bytes of the largest stored tensor."""
    rng = np.random.default_rng(seed)
    parts = [part for leaf in layout(CONFIG) for part in leaf.parts]
    sizes = [2 * int(np.prod(p.shape)) for p in parts]
    budget, weight_map = sum(sizes) / SHARDS, {}
    shard_of = np.minimum((np.cumsum(sizes) - 1) // budget, SHARDS - 1).astype(int)
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        mine = [p for p, s in zip(parts, shard_of, strict=True) if s == shard]
        tensors = {
            p.name: (0.02 * rng.standard_normal(p.shape, np.float32)).astype(ml_dtypes.bfloat16)
            for p in mine
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= {p.name: name for p in mine}
    content = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return max(sizes)


def measure(seed: int = 0) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        largest = write_checkpoint(Path(folder), seed)
        on_disk = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        done = subprocess.run(
            [sys.executable, "-c", LOADER, folder], capture_output=True, text=True, check=True
        )
    found = json.loads(done.stdout)
    beyond = found["peak_bytes"] - found["idle_bytes"] - found["model_bytes"]
    return {
        **provenance(seed),
        "checkpoint_bytes": on_disk,
        "shards": SHARDS,
        "largest_tensor_bytes": largest,
        **found,
        "beyond_model_bytes": beyond,
        "beyond_model_in_largest_tensors": beyond / largest,
        "within_model_plus_one_tensor": beyond <= largest,
    }


def main():
    result = measure()
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if not result["within_model_plus_one_tensor"]:
        sys.exit("the peak exceeds the model plus its largest tensor")


if __name__ == "__main__":
    main()
