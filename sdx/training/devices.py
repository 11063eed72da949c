"""Where a training runs: one device, many, or several processes; the same script on all.

Data parallel: every device holds all weights and its rows of the batch. FSDP: every device also
holds only its part of each weight and of its moments; the compiler gathers a weight when a layer
needs it (Rajbhandari et al. 2020, ZeRO stage 3).
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Layout = Literal["data", "fsdp"]
AXIS = "data"


def join(coordinator: str, processes: int, index: int) -> None:
    """Joins `processes` processes into one training, before anything else of JAX is used.

    coordinator: "host:port" of process 0. On CPUs the collectives are gloo's.
    """
    if not 0 <= index < processes:
        raise ValueError(f"process index {index} must lie in 0 .. {processes - 1}")
    jax.distributed.initialize(coordinator, num_processes=processes, process_id=index)


def mesh_of(devices: list[Any] | None = None) -> Mesh:
    """All devices of all processes (or the given ones) along one axis."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices), (AXIS,), axis_types=(AxisType.Auto,))


def sharding_of(shape: tuple[int, ...], mesh: Mesh, layout: Layout) -> NamedSharding:
    """Of a weight (or moment): FSDP splits the longest axis that the devices divide; what has none
    is on every device, as everything is under `data`."""
    axes = [None] * len(shape)
    if layout == "fsdp":
        fitting = [i for i, size in enumerate(shape) if size and size % mesh.size == 0]
        if fitting:
            axes[max(fitting, key=lambda i: shape[i])] = AXIS
    return NamedSharding(mesh, PartitionSpec(*axes))


def place(tree: Any, mesh: Mesh, layout: Layout) -> Any:
    """Weights or moments, which every process holds whole, spread over the mesh."""

    def one(leaf):
        whole = np.asarray(leaf)
        sharding = sharding_of(whole.shape, mesh, layout)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(one, tree)


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """This process's rows of a batch (leaves `[rows, ...]`; scalars are the same everywhere) as
    arrays of all rows, spread over the devices."""

    def one(leaf):
        leaf = np.asarray(leaf)
        spec = PartitionSpec(AXIS) if leaf.ndim else PartitionSpec()
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), leaf)

    return jax.tree.map(one, batch)


def gathered(tree: Any) -> Any:
    """Arrays that are spread over devices (of all processes) as whole arrays of this process; all
    processes must ask."""

    def one(leaf):
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
        if leaf.is_fully_replicated:
            return np.asarray(leaf.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(one, tree)


def barrier(name: str) -> None:
    """Waits until every process of the training is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def own_rows(batch: int) -> slice:
    """Which rows of a batch of so many are this process's.

    Raises ValueError if the processes do not divide it.
    """
    processes, index = jax.process_count(), jax.process_index()
    if batch % processes:
        raise ValueError(f"batch of {batch} rows: not divisible by {processes} processes")
    return slice(batch // processes * index, batch // processes * (index + 1))
