"""Checks and times every kernel on the GPU of this machine, and a Llama-3.1-8B-shaped decoder.

    python -m experiments.gpu_suite --out DIR            # within 8 minutes on one GPU
    python -m experiments.gpu_suite --out DIR --smoke    # tiny shapes, interpreted, any machine

Writes DIR/gpu_suite.json and DIR/gpu_suite.md. Expected on an H100: no check fails; tree attention
reads a cache of 64 MB and more at >= 80 % of the measured copy bandwidth up to 32 nodes, and a pass
over more than 8 MB of logits does the same. Nothing of this has been measured yet: no result is
committed, and docs/kernels.md claims no speed. A smoke run checks correctness only; its times are
those of an interpreter and mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.provenance import provenance
from sdx.kernels import Request, ancestor_bits, cache_write, law, surplus, tree_attention
from sdx.kernels.tree_attention.shapes import CHECKED, TIMED, Shape, llama_8b
from sdx.models.cache import empty_cache
from sdx.models.config import ModelConfig
from sdx.models.llama import Llama
from sdx.theory.hardware import load_hardware, step_seconds
from sdx.theory.transformers import load_architecture

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


class Suite:
    """Results so far, and the clock: what does not fit into the budget is listed as skipped."""

    def __init__(self, smoke: bool, seconds: float, seed: int):
        self.smoke, self.begun, self.seconds = smoke, time.perf_counter(), seconds
        self.rng = np.random.default_rng(seed)
        self.kernel = "tpu" if jax.default_backend() == "tpu" else "triton"
        self.results = {"provenance": provenance(seed), "smoke": smoke, "kernel": self.kernel}
        self.results |= {"checks": [], "timings": [], "decode": [], "skipped": []}

    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.begun)

    def attempt(self, name: str, needs_seconds: float, job):
        """Runs one part; failures and lack of time are results too."""
        if self.left() < needs_seconds:
            self.results["skipped"].append({"name": name, "reason": "out of time"})
            return
        try:
            job()
        except Exception as error:  # noqa: BLE001 (a suite reports and goes on)
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            self.results["skipped"].append({"name": name, "reason": reason})
        print(f"{time.perf_counter() - self.begun:6.1f} s  {name}", flush=True)

    def seconds_per_call(self, function, operand_sets) -> float:
        """Median over runs of one compiled chain of calls on rotating operands.

        A barrier makes every call wait for the one before, so that none is merged or overlapped
        and the host's dispatch is paid once per chain.
        """

        def chain(sets):
            carry = jnp.float32(0)
            for operands in sets:
                operands, carry = jax.lax.optimization_barrier((operands, carry))
                first = jax.tree.leaves(function(*operands))[0]
                carry = first.reshape(-1)[0].astype(jnp.float32) + 0 * carry
            return carry

        compiled = jax.jit(chain).lower(operand_sets).compile()
        jax.block_until_ready(compiled(operand_sets))
        runs = []
        for _ in range(1 if self.smoke else 7):
            start = time.perf_counter()
            jax.block_until_ready(compiled(operand_sets))
            runs.append((time.perf_counter() - start) / len(operand_sets))
        return statistics.median(runs)

    def record(self, name: str, seconds: float, bytes_: float, flops: float = 0.0, **facts):
        self.results["timings"].append(
            {"name": name, "seconds": seconds, "bytes_per_second": bytes_ / seconds,
             "flops_per_second": flops / seconds, "bytes": bytes_, **facts}
        )  # fmt: skip


# ---------------------------------------------------------------------------- operands


def tree_operands(suite: Suite, shape: Shape, device_random: bool = False):
    b, k, g, t, s, d = shape[:6]
    key = jax.random.key(int(suite.rng.integers(1 << 30)))
    sizes = ((b, k * g, t, d), (b, k, s, d), (b, k, s, d), (b, k, t, d), (b, k, t, d))
    arrays = [
        jax.random.normal(jax.random.fold_in(key, i), n, shape.dtype) for i, n in enumerate(sizes)
    ]
    parents = [-1] + [int(suite.rng.integers(max(0, i - 3), i)) for i in range(1, t)]
    bits = ancestor_bits(range(-1, t - 1) if shape.tree == "chain" else parents)[None]
    lengths = jnp.asarray(shape.lengths or (s,) * b, jnp.int32)
    return (*arrays, lengths, jnp.asarray(bits))


def float64_attention(operands, b: int, h: int, window=None) -> np.ndarray:
    """Head h of sequence b by the definition, `[T, D]`."""
    q, k, v, dk, dv, lengths, bits = operands
    group, t = q.shape[1] // k.shape[1], q.shape[2]
    f64 = lambda x: np.asarray(x.astype(jnp.float32), np.float64)  # noqa: E731
    n, kv = int(lengths[b]), h // group
    keys = np.concatenate([f64(k[b, kv, :n]), f64(dk[b, kv])])
    values = np.concatenate([f64(v[b, kv, :n]), f64(dv[b, kv])])
    column = np.arange(t)
    words = np.asarray(bits)[0][:, column // 32]
    tree = (words >> (column % 32)) & 1 == 1
    depth = tree.sum(-1) - 1
    sees = np.concatenate([np.ones((t, n), bool), tree], 1)
    if window:
        position = np.concatenate([np.arange(n), n + depth])
        sees &= position[None] > (n + depth)[:, None] - window
    logits = np.where(sees, f64(q[b, h]) @ keys.T / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights @ values / weights.sum(-1, keepdims=True)


# ---------------------------------------------------------------------------- checks


def check_tree_attention(suite: Suite, name: str, shape: Shape):
    operands = tree_operands(suite, shape)
    out = tree_attention(*operands, window=shape.window, implementation=suite.kernel)
    worst = 0.0
    for _ in range(3):
        b, h = int(suite.rng.integers(out.shape[0])), int(suite.rng.integers(out.shape[1]))
        want = float64_attention(operands, b, h, shape.window)
        error = np.abs(np.asarray(out[b, h].astype(jnp.float32)) - want).max(-1)
        worst = max(worst, float((error / np.abs(want).max(-1)).max()))
    suite.results["checks"].append(
        {"name": f"tree_attention {name}", "error": worst, "ok": worst <= TOLERANCE[shape.dtype]}
    )


def check_verify(suite: Suite, rows: int, vocab: int, dtype: str):
    key = jax.random.key(int(suite.rng.integers(1 << 30)))
    logits = 3 * jax.random.normal(key, (rows, vocab), dtype)
    drafts = logits + jax.random.normal(jax.random.fold_in(key, 1), logits.shape, dtype)
    seeds = jax.random.bits(key, (rows, 2), jnp.uint32)
    index = jnp.arange(rows, dtype=jnp.int32)
    request = Request(
        index, index, jnp.ones(rows), jnp.ones(rows), jnp.full((rows, 1), -1, jnp.int32)
    )
    found = {}
    for implementation in ("reference", suite.kernel):
        options = dict(implementation=implementation)
        target = law(logits, 0.8, 50, 0.95, **options)
        draft = law(drafts, **options)
        answer = surplus(target, draft, request, seeds_Nx2=seeds, **options)
        found[implementation] = jax.tree.map(np.asarray, (target[2:], draft[2:], answer))
    x = np.asarray(drafts.astype(jnp.float32), np.float64)
    want = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)
    error = float(np.abs(found[suite.kernel][1][0] - want).max())
    a, b = found["reference"][2], found[suite.kernel][2]
    same = bool((a.token_N == b.token_N).all() and (a.left_token_N == b.left_token_N).all())
    suite.results["checks"].append(
        {"name": f"verify {rows} x {vocab} {dtype}", "error": error, "same_tokens": same,
         "ok": same and error < 1e-4}
    )  # fmt: skip


def check_cache_write(suite: Suite):
    draw = lambda *n: jnp.asarray(suite.rng.standard_normal(n), jnp.bfloat16)  # noqa: E731
    args = (
        draw(3, 2, 64, 80), draw(3, 2, 64, 80), draw(3, 2, 9, 80), draw(3, 2, 9, 80),
        jnp.asarray(suite.rng.integers(0, 9, (3, 4)), jnp.int32), jnp.array([0, 4, 3], jnp.int32),
        jnp.array([64, 5, 62], jnp.int32),
    )  # fmt: skip
    got, want = cache_write(*args, implementation="triton"), cache_write(*args)
    same = all(bool((a == b).all()) for a, b in zip(got, want, strict=True))
    suite.results["checks"].append({"name": "cache_write", "error": 0.0, "ok": same})


# ---------------------------------------------------------------------------- timings


def time_device(suite: Suite):
    """What copying and multiplying reach here: the yardsticks."""
    n = 1 << (16 if suite.smoke else 28)
    sets = [(jnp.full((n,), i, jnp.bfloat16),) for i in range(3)]
    suite.record("copy", suite.seconds_per_call(lambda x: x + 1, sets), 4.0 * n)
    m = 256 if suite.smoke else 8192
    sets = [(jnp.full((m, m), i, jnp.bfloat16), jnp.ones((m, m), jnp.bfloat16)) for i in range(3)]
    suite.record("matmul", suite.seconds_per_call(jnp.matmul, sets), 6.0 * m * m, 2.0 * m**3)


def attention_rivals(suite: Suite):
    """name -> function of the operands of `tree_attention`."""
    rivals = {
        suite.kernel: functools.partial(tree_attention, implementation=suite.kernel),
        "xla reference": functools.partial(tree_attention, implementation="reference"),
    }
    if jax.default_backend() == "gpu":
        rivals["cudnn + merge"] = cudnn_and_merge
    return rivals


def cudnn_and_merge(q, k, v, dk, dv, lengths, bits):
    """cuDNN over the cache, XLA over the nodes, merged by log-sum-exp."""
    swap = lambda x: jnp.swapaxes(x, 1, 2)  # noqa: E731
    b, heads, t, d = q.shape
    old, lse = jax.nn.dot_product_attention(
        swap(q), swap(k), swap(v), key_value_seq_lengths=lengths, implementation="cudnn",
        return_residual=True,
    )  # fmt: skip
    none = jnp.zeros((b,), jnp.int32)
    new, new_lse = tree_attention(
        q, k[:, :, :1], v[:, :, :1], dk, dv, none, bits, return_log_sum_exp=True,
        implementation="reference",
    )  # fmt: skip
    weight = jax.nn.sigmoid(jnp.swapaxes(lse.reshape(b, t, heads), 1, 2) - new_lse)[..., None]
    return (swap(old) * weight + new * (1 - weight)).astype(q.dtype)


def time_tree_attention(suite: Suite, shape: Shape):
    b, k, g, t, s, d = shape[:6]
    cache_bytes = 4.0 * b * k * s * d
    copies = 2 if suite.smoke else int(np.clip(2e8 / cache_bytes, 3, 24))
    sets = [tree_operands(suite, shape) for _ in range(copies)]
    bytes_ = cache_bytes + 2.0 * (2 * b * k * g * t * d + 2 * b * k * t * d)
    flops = 4.0 * b * k * g * t * (s + t) * d
    for name, function in attention_rivals(suite).items():
        job = lambda f=function, n=name: suite.record(  # noqa: E731
            f"tree_attention {n}", suite.seconds_per_call(f, sets), bytes_, flops,
            batch=b, context=s, nodes=t,
        )  # fmt: skip
        suite.attempt(f"tree_attention {name} {b} x {s}, {t} nodes", 15, job)
    suite.attempt("torch attention", 20, lambda: time_torch(suite, shape, bytes_, flops))


def time_torch(suite: Suite, shape: Shape, bytes_: float, flops: float):
    """SDPA with an additive mask and compiled FlexAttention, where torch sees a GPU."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    b, k, g, t, s, d = shape[:6]
    draw = lambda *n: torch.randn(n, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    tree = torch.tril(torch.ones(t, t, dtype=torch.bool, device="cuda"))
    sees = torch.cat([torch.ones(t, s, dtype=torch.bool, device="cuda"), tree], 1)
    mask = create_block_mask(lambda b, h, q, kv: sees[q, kv], None, None, t, s + t)
    flex = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True))
    dense = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
        q, k, v, attn_mask=sees, enable_gqa=True
    )
    sets = [(draw(b, k * g, t, d), *(draw(b, k, s + t, d) for _ in "kv")) for _ in range(4)]
    for name, function in (("torch sdpa", dense), ("torch flex", flex)):
        function(*sets[0])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(40):
            function(*sets[i % 4])
        end.record()
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 40e3
        suite.record(f"tree_attention {name}", seconds, bytes_, flops, batch=b, context=s, nodes=t)


def time_verify(suite: Suite, rows: int, vocab: int):
    key = jax.random.key(int(suite.rng.integers(1 << 30)))
    copies = 2 if suite.smoke else int(np.clip(2e8 / (2 * rows * vocab), 3, 24))
    sets = [
        (3 * jax.random.normal(jax.random.fold_in(key, i), (rows, vocab), jnp.bfloat16),)
        for i in range(copies)
    ]
    bytes_ = 2.0 * rows * vocab
    for implementation in (suite.kernel, "reference"):
        for name, filters in (("law", {}), ("law top-k top-p", dict(top_k=50, top_p=0.95))):
            function = lambda x, f=filters, i=implementation: law(x, **f, implementation=i)[2]  # noqa: E731
            passes = 1 + 8 * bool(filters)
            job = lambda f=function, n=name, p=passes, i=implementation: suite.record(  # noqa: E731
                f"{n} {i}", suite.seconds_per_call(f, sets), p * bytes_, rows=rows, vocab=vocab
            )
            suite.attempt(f"{name} {implementation} {rows} x {vocab}", 15, job)

        def draw(x, implementation=implementation):
            target = law(x, implementation="reference")._replace(log_normaliser_R=jnp.ones(rows))
            index = jnp.arange(rows, dtype=jnp.int32)
            request = Request(
                index, index, jnp.ones(rows), jnp.ones(rows), jnp.full((rows, 1), -1, jnp.int32)
            )
            seeds = jnp.ones((rows, 2), jnp.uint32)
            return surplus(
                target, target, request, seeds_Nx2=seeds, implementation=implementation
            ).score_N

        job = lambda f=draw, i=implementation: suite.record(  # noqa: E731
            f"surplus {i}", suite.seconds_per_call(f, sets), 2 * bytes_, rows=rows, vocab=vocab
        )
        suite.attempt(f"surplus {implementation} {rows} x {vocab}", 15, job)


# ---------------------------------------------------------------------------- decoding


def decode(suite: Suite):
    """One verification step of a random decoder in Llama-3.1-8B's shape, against the roofline."""
    if suite.smoke:
        sizes = dict(vocab_size=64, width=64, layers=1, heads=4, kv_heads=2, head_dim=16)
        config = ModelConfig(**sizes, ffn_width=96, max_positions=256)
        contexts, nodes = (64, 200), (1, 4)
    else:
        sizes = dict(vocab_size=128256, width=4096, layers=32, heads=32, kv_heads=8, head_dim=128)
        config = ModelConfig(**sizes, ffn_width=14336, max_positions=33024, rope_theta=5e5)
        contexts, nodes = (1024, 8192, 32768), (1, 2, 4, 8, 16, 32, 64)
    model = jax.jit(lambda key: Llama(config, key, jnp.bfloat16))(jax.random.key(0))
    cache = empty_cache(
        config, 1, config.max_positions, jnp.bfloat16, slots_last=False, kernels=suite.kernel
    )
    architecture = None if suite.smoke else load_architecture("llama-3.1-8b")
    hardware = None if suite.smoke else load_hardware("h100-sxm")
    for t in nodes:

        def measure(t=t):
            step = jax.jit(lambda m, c, x: m(x, c).logits_BxTxV[..., 0])
            tokens = jnp.zeros((1, t), jnp.int32)
            for context in contexts:
                at = cache.replace(lengths_B=jnp.array([context], jnp.int32))
                jax.block_until_ready(step(model, at, tokens))
                runs = []
                for _ in range(1 if suite.smoke else 12):
                    start = time.perf_counter()
                    jax.block_until_ready(step(model, at, tokens))
                    runs.append(time.perf_counter() - start)
                row = {"nodes": t, "context": context, "seconds": statistics.median(runs)}
                if architecture is not None:
                    row["roofline_seconds"] = float(
                        step_seconds(architecture, hardware, 1, t, context)
                    )
                suite.results["decode"].append(row)

        suite.attempt(f"decode step of {t} tokens", 40, measure)


# ---------------------------------------------------------------------------- report


def table(results: dict) -> str:
    """The results as Markdown."""
    copy = next((r["bytes_per_second"] for r in results["timings"] if r["name"] == "copy"), None)
    lines = [f"# Kernels on {results['provenance']['device']}", ""]
    if results["smoke"]:
        lines += ["Smoke run: interpreted, tiny; the times mean nothing.", ""]
    lines += ["| check | error | ok |", "|---|---|---|"]
    lines += [f"| {c['name']} | {c['error']:.1e} | {c['ok']} |" for c in results["checks"]]
    lines += ["", "| timed | shape | µs | GB/s | of copy | TFLOP/s |", "|---|---|---|---|---|---|"]
    for r in results["timings"]:
        facts = ("batch", "context", "nodes", "rows", "vocab")
        shape = ", ".join(f"{k} {r[k]}" for k in facts if k in r)
        share = f"{r['bytes_per_second'] / copy:.0%}" if copy else ""
        lines.append(
            f"| {r['name']} | {shape} | {1e6 * r['seconds']:.1f} | "
            f"{r['bytes_per_second'] / 1e9:.0f} | {share} | {r['flops_per_second'] / 1e12:.1f} |"
        )
    lines += ["", "| decode: tokens | context | ms | roofline ms |", "|---|---|---|---|"]
    for r in results["decode"]:
        roofline = f"{1e3 * r['roofline_seconds']:.2f}" if "roofline_seconds" in r else ""
        lines.append(f"| {r['nodes']} | {r['context']} | {1e3 * r['seconds']:.2f} | {roofline} |")
    lines += ["", "Skipped:", *(f"- {s['name']}: {s['reason']}" for s in results["skipped"])]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--seconds", type=float, default=440.0, help="budget of the whole run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if jax.default_backend() == "cpu" and not options.smoke:
        parser.error("this machine has no GPU: give --smoke to run tiny shapes in interpret mode")
    options.out.mkdir(parents=True, exist_ok=True)
    suite = Suite(options.smoke, options.seconds, options.seed)
    small = ("ragged", "window", "bfloat16")
    for name, shape in CHECKED.items():
        if not options.smoke or name in small:
            job = functools.partial(check_tree_attention, suite, name, shape)
            suite.attempt(f"check tree_attention {name}", 10, job)
    suite.attempt("check cache_write", 10, lambda: check_cache_write(suite))
    for rows, vocab, dtype in [(3, 1000, "bfloat16")] if options.smoke else [
        (9, 128256, "bfloat16"), (5, 152064, "float32"), (4, 262144, "bfloat16")
    ]:  # fmt: skip
        job = functools.partial(check_verify, suite, rows, vocab, dtype)
        suite.attempt(f"check verify {rows} x {vocab} {dtype}", 15, job)
    suite.attempt("yardsticks", 10, lambda: time_device(suite))
    # The decoder before the long tail of shapes: it calibrates hw_models.
    suite.attempt("decode", 60, lambda: decode(suite))
    timed = [Shape(nodes=4, slots=128, lengths=(128,), dtype="bfloat16")] if options.smoke else [
        llama_8b(1, 16384, 32), llama_8b(8, 16384, 32), *TIMED
    ]  # fmt: skip
    for rows, vocab in (
        [(4, 1000)] if options.smoke else [(65 * 8, 128256), (33, 128256), (8, 152064)]
    ):
        time_verify(suite, rows, vocab)
    for shape in timed:
        time_tree_attention(suite, shape)
    (options.out / "gpu_suite.json").write_text(json.dumps(suite.results, indent=1) + "\n")
    (options.out / "gpu_suite.md").write_text(table(suite.results))
    bad = [c["name"] for c in suite.results["checks"] if not c["ok"]]
    print(f"{len(suite.results['checks'])} checks, failed: {', '.join(bad) or 'none'}")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
