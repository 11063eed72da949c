"""The shape list of tree attention, shared by tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """B sequences, K key-value heads, G query heads each, T nodes, S slots, head size D.

    `lengths`: live slots per sequence, None: S for all. `tree`: "chain", or "random" (parents drawn
    uniformly among earlier nodes).
    """

    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    nodes: int = 8
    slots: int = 128
    head_size: int = 64
    dtype: str = "float32"
    lengths: tuple[int, ...] | None = None
    tree: str = "random"
    window: int | None = None


# Small: what the tests run in interpret mode (few, large blocks).
CHECKED = {
    "ragged": Shape(batch=3, kv_heads=2, group=2, nodes=5, slots=200, lengths=(0, 77, 200)),
    "one_node": Shape(batch=2, kv_heads=1, group=4, nodes=1, slots=130, lengths=(1, 129)),
    "no_multiples": Shape(kv_heads=1, group=3, nodes=37, slots=333, head_size=80, lengths=(321,)),
    "many_nodes": Shape(kv_heads=1, group=1, nodes=256, slots=96, lengths=(90,)),
    "wide_group": Shape(kv_heads=1, group=8, nodes=9, slots=256, head_size=128, lengths=(255,)),
    "wide_head": Shape(group=2, nodes=16, slots=160, head_size=256, lengths=(100,)),
    "chain": Shape(batch=2, group=4, nodes=6, slots=128, lengths=(128, 63), tree="chain"),
    "window": Shape(batch=2, group=2, nodes=12, slots=300, lengths=(290, 20), window=50),
    "window_in_tree": Shape(group=2, nodes=40, slots=64, lengths=(9,), window=7, tree="chain"),
    "bfloat16": Shape(batch=2, kv_heads=2, group=4, nodes=33, slots=256, head_size=128,
                      dtype="bfloat16", lengths=(256, 11)),
    "float16": Shape(group=2, nodes=8, slots=128, dtype="float16", lengths=(100,)),
}  # fmt: skip


def llama_8b(batch: int, context: int, nodes: int) -> Shape:
    """One layer of Llama-3.1-8B: 32 query heads, 8 key-value heads of size 128, bfloat16."""
    return Shape(
        batch=batch,
        kv_heads=8,
        group=4,
        nodes=nodes,
        slots=context,
        head_size=128,
        dtype="bfloat16",
        lengths=(context,) * batch,
    )


# Large: what the GPU suite checks and times.
TIMED = tuple(
    llama_8b(batch, context, nodes)
    for batch, context in ((1, 1024), (1, 16384), (1, 65536), (8, 4096), (8, 16384), (32, 4096))
    for nodes in (1, 8, 16, 32, 64)
)
