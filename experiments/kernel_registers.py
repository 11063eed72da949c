"""Compiles the Triton kernels for an H100 without a device and reports what the compiler made.

    python -m venv cuda && cuda/bin/pip install jax==0.12.0.1 jax-cuda13-plugin jax-cuda13-pjrt \
        nvidia-cuda-nvcc nvidia-nvvm nvidia-nvjitlink nvidia-cublas nvidia-cudnn-cu13 \
        nvidia-cuda-cupti nvidia-cufft nvidia-cusolver nvidia-cusparse nvidia-nccl-cu13 \
        nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-nvshmem-cu13 nvidia-cuda-cuobjdump
    PYTHONPATH=. cuda/bin/python experiments/kernel_registers.py

Needs an environment of its own (the plugin's libraries); too heavy for `make test`. Expected:
every kernel compiles (a spill fails the compilation: the flag below), so none spills. Registers
are read from the binary where the serialised executable stores it in one piece.
Writes results/kernel_registers.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from datetime import date
from pathlib import Path

TOOLS = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
os.environ.update(
    JAX_PLATFORMS="cpu",
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    XLA_FLAGS=f"--xla_gpu_cuda_data_dir={TOOLS} --xla_gpu_autotune_level=0 "
    "--xla_gpu_fail_ptx_compilation_on_register_spilling=true",
)

import jax  # noqa: E402 (the environment must be set first)
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import (  # noqa: E402
    AbstractDevice,
    AbstractMesh,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from sdx.kernels import Request, cache_write, law, surplus, tree_attention  # noqa: E402
from sdx.kernels.tree_attention.shapes import Shape, llama_8b  # noqa: E402

KIND = "NVIDIA H100 80GB HBM3"
H100 = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }} device_description_str: "{KIND}"
"""


def unpacked(data: bytes, at: int) -> tuple[bytes, int]:
    """A Snappy block that starts at `at` (code is stored so), and where it ends."""
    size = shift = 0
    while True:
        byte, at = data[at], at + 1
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if not 1000 < size < 50_000_000:
        raise ValueError("not a block of code")
    out = bytearray()
    while len(out) < size:
        tag, at = data[at], at + 1
        kind = tag & 3
        if kind == 0:
            length = tag >> 2
            if length >= 60:
                wide = length - 59
                length, at = int.from_bytes(data[at : at + wide], "little"), at + wide
            out += data[at : at + length + 1]
            at += length + 1
            continue
        wide = {1: 1, 2: 2, 3: 4}[kind]
        back, at = int.from_bytes(data[at : at + wide], "little"), at + wide
        length = (tag >> 2) + 1
        if kind == 1:
            length, back = 4 + ((tag >> 2) & 7), ((tag >> 5) << 8) | back
        if not 0 < back <= len(out):
            raise ValueError("not a block of code")
        for _ in range(length):
            out.append(out[-back])
    return bytes(out), at


def whole(binary: bytes) -> bool:
    """Whether an ELF file's table of sections is intact (a block read from a wrong start decodes
    to garbage)."""
    table = int.from_bytes(binary[0x28:0x30], "little")
    names = table + 64 * int.from_bytes(binary[0x3E:0x40], "little")
    at = int.from_bytes(binary[names + 0x18 : names + 0x20], "little")
    size = int.from_bytes(binary[names + 0x20 : names + 0x28], "little")
    return 0 < size < 1 << 20 and b"\0.shstrtab\0" in binary[at : at + size]


def cubins(executable: bytes) -> list[bytes]:
    """The GPU binaries inside a serialised executable; [] where its code is stored in pieces."""
    elf, best = b"\x7fELF", []
    first = executable.find(elf)
    for at in range(max(0, first - 20_000), first + 1):
        try:
            code = unpacked(executable, at)[0]
        except (ValueError, IndexError):
            continue
        starts = [m.start() for m in re.finditer(re.escape(elf), code)]
        if not starts:
            continue
        parts = [code[a:b] for a, b in zip(starts, [*starts[1:], len(code)], strict=True)]
        best = max(best, [part for part in parts if whole(part)], key=len)
    return best


def resources(function, shapes, sharding) -> dict:
    """Registers, spilled bytes and static shared memory per Pallas kernel, and device traffic."""
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes
    )
    device = AbstractDevice(device_kind=KIND, num_cores=None, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    found = {
        "bytes_in": memory.argument_size_in_bytes,
        "bytes_out": memory.output_size_in_bytes,
        "bytes_of_intermediates": memory.temp_size_in_bytes,
        "kernels": {},
    }
    for binary in cubins(compiled.runtime_executable().serialize()):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            text = subprocess.run(
                [TOOLS / "bin" / "cuobjdump", "--dump-resource-usage", file.name],
                capture_output=True, text=True,
            ).stdout  # fmt: skip
        for name, reg, stack, _, local in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text
        ):
            if name.endswith("_triton") or "_triton_" in name:
                found["kernels"][name] = {
                    "registers": int(reg), "stack": int(stack), "spilled": int(local),
                }  # fmt: skip
    return found


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention_case(shape: Shape):
    b, k, g, t, s, d = shape[:6]
    x = lambda *n: struct(*n, dtype=shape.dtype)  # noqa: E731
    shapes = (
        x(b, k * g, t, d), x(b, k, s, d), x(b, k, s, d), x(b, k, t, d), x(b, k, t, d),
        struct(b, dtype="int32"), struct(b, t, -(-t // 32), dtype="int32"),
    )  # fmt: skip

    def run(*operands):
        return tree_attention(
            *operands, window=shape.window, implementation="triton", interpret=False
        )

    return run, shapes


def verify_case(rows, vocab, dtype):
    def run(logits, drafts, tokens, seeds):
        options = dict(implementation="triton", interpret=False)
        target, draft = law(logits, 0.8, 50, 0.9, **options), law(drafts, **options)
        n = tokens.shape[0]
        request = Request(jnp.arange(n), jnp.arange(n), jnp.ones(n), jnp.ones(n), tokens)
        return surplus(target, draft, request, seeds_Nx2=seeds, **options)

    x = struct(rows, vocab, dtype=dtype)
    return run, (x, x, struct(8, 1, dtype="int32"), struct(8, 2, dtype="uint32"))


def write_case():
    cache, fresh = struct(8, 8, 16384, 128), struct(8, 8, 33, 128)
    ints = lambda *n: struct(*n, dtype="int32")  # noqa: E731
    run = lambda *a: cache_write(*a, implementation="triton", interpret=False)  # noqa: E731
    return run, (cache, cache, fresh, fresh, ints(8, 6), ints(8), ints(8))


CASES = {
    **{
        f"tree_attention, batch {b}, {s} slots, {t} nodes": attention_case(llama_8b(b, s, t))
        for b, s, t in ((1, 16384, 1), (1, 16384, 8), (1, 16384, 32), (8, 16384, 32), (8, 4096, 64))
    },
    "tree_attention, float32, 16 nodes": attention_case(
        llama_8b(1, 8192, 16)._replace(dtype="float32")
    ),
    "tree_attention, head size 256": attention_case(llama_8b(1, 8192, 16)._replace(head_size=256)),
    "tree_attention, head size 64, window": attention_case(
        llama_8b(1, 8192, 16)._replace(head_size=64, window=4096)
    ),
    "verify, 65 x 128256 bfloat16": verify_case(65, 128256, "bfloat16"),
    "verify, 65 x 152064 float32": verify_case(65, 152064, "float32"),
    "cache_write, batch 8": write_case(),
}


def main() -> int:
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H100, topology="1x1x1"
    )
    sharding = SingleDeviceSharding(topology.devices[0])
    results, spilled = {}, False
    for name, (function, shapes) in CASES.items():
        print(name)
        try:
            results[name] = resources(function, shapes, sharding) | {"spills": False}
        except jax.errors.JaxRuntimeError as error:
            if "register spilling" not in str(error):
                raise
            results[name], spilled = {"kernels": {}, "spills": True}, True
            print("    spills")
        for kernel, facts in results[name]["kernels"].items():
            print(f"    {kernel}: {facts}")
            spilled |= facts["spilled"] > 0
    out = Path(__file__).parent / "results" / "kernel_registers.json"
    facts = {"date": date.today().isoformat(), "device": f"{KIND} (not present: compiled only)"}
    facts["jax"] = jax.__version__
    out.write_text(json.dumps({"provenance": facts, "cases": results}, indent=1) + "\n")
    print("spills" if spilled else "no spills")
    return int(spilled)


if __name__ == "__main__":
    sys.exit(main())
