"""A training that is killed, whose checkpoints rot, or that runs on many devices, is the same."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import worker

from sdx.training.metrics import read_metrics

WORKER = Path(worker.__file__)
KILLS = 3


def begin(*arguments, devices: int = 1) -> subprocess.Popen:
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, str(WORKER), *map(str, arguments)],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen) -> None:
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 0, complaint.decode()[-2000:]


def steps_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that nothing disturbs: (folder, final weights)."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = worker.new_trainer(folder)
    trainer.fit(save_steps=5)
    return folder, trainer.weights


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """Losses of the same training on 8 devices, by layout, and in two processes; at once."""
    devices, processes = (tmp_path_factory.mktemp(name) for name in ("devices", "processes"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    running = [begin(devices, "data,fsdp", devices=8)]
    running += [begin(processes, "data", address, 2, i) for i in range(2)]
    for process in running:
        finish(process)
    folders = {"data": devices / "data", "fsdp": devices / "fsdp", "processes": processes}
    return {name: losses(folder) for name, folder in folders.items()}


def test_killed_three_times_it_ends_with_the_same_weights(whole, tmp_path):
    dice = random.Random(time.time_ns())
    kills = sorted(dice.sample(range(1, worker.STEPS - 3), KILLS))
    print("killed at about step", kills)
    for step in kills:
        process = begin(tmp_path, "none")
        while process.poll() is None and steps_done(tmp_path) < step:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        assert process.returncode == -9, "it ended before it was killed"
    trainer = worker.new_trainer(tmp_path)
    assert trainer.resume()
    assert 0 < trainer.progress.step < worker.STEPS
    trainer.fit()
    for name, weight in whole[1].items():
        np.testing.assert_array_equal(trainer.weights[name], weight, err_msg=name)
    assert losses(tmp_path) == losses(whole[0])


@pytest.mark.parametrize("layout", ["data", "fsdp", "processes"])
def test_many_devices_follow_the_same_trajectory(whole, spread, layout):
    alone = losses(whole[0])
    assert len(alone) == worker.STEPS and alone[-1] < alone[0] - 1
    np.testing.assert_allclose(spread[layout], alone, rtol=1e-5, atol=1e-5)


def test_a_truncated_checkpoint_is_told_of_and_the_one_before_is_used(whole, tmp_path):
    trainer = worker.new_trainer(tmp_path, steps=9)
    trainer.fit(save_steps=4)
    file = max((tmp_path / "9").rglob("d/*"), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-50])
    said = []
    again = worker.new_trainer(tmp_path, steps=9, say=said.append)
    assert again.resume() and again.progress.step == 8
    assert len(said) == 1 and "damaged" in said[0] and "using step 8" in said[0]
    again.fit()
    for name, weight in trainer.weights.items():
        np.testing.assert_array_equal(again.weights[name], weight, err_msg=name)


def test_last_two_and_best_are_kept(tmp_path):
    trainer = worker.new_trainer(tmp_path, steps=6)
    values = iter([3.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    trainer.evaluate = lambda model: {"loss": next(values)}
    kept = {}
    while trainer.progress.step < 6:
        trainer.fit(save_steps=1, evaluate_steps=1, stop_step=trainer.progress.step + 1)
        kept[trainer.progress.step] = {k: np.asarray(w) for k, w in trainer.weights.items()}
    steps = {int(p.name) for p in tmp_path.iterdir() if p.name.isdecimal()}
    assert steps == {2, 5, 6}
    assert trainer.restore_best() == 2
    for name, weight in trainer.weights.items():
        np.testing.assert_array_equal(weight, kept[2][name])


def test_another_models_folder_is_refused(tmp_path):
    worker.new_trainer(tmp_path, steps=1).fit()
    other = worker.new_trainer(tmp_path, steps=1)
    other.weights = {**other.weights, "more": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match="another model"):
        other.resume()


def test_metrics_are_rewound_to_the_step_that_is_resumed(whole, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text((whole[0] / "metrics.jsonl").read_text() + '{"step": 25, "lo')
    log = worker.new_trainer(tmp_path).log
    log.rewind(7)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert all(line["loss"] > 0 and 0 < line["factor"] <= 1 for line in lines)
