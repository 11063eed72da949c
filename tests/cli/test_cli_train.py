"""`sdx train`: heads that come out, that go on after a kill, and bad input in one line."""

import json
import random

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sdx.calibration import draft_heads
from sdx.calibration.draft_heads import StepCosts
from sdx.cli import main
from sdx.models.checkpoint import save_model
from sdx.models.config import ModelConfig
from sdx.models.heads import load_head
from sdx.models.heads.storage import named_parameters
from sdx.models.llama import Llama
from sdx.training.metrics import read_metrics
from sdx.training.trainer import Trainer

WORDS = "a b c d e f g h i j".split()
TARGET = ModelConfig(
    vocab_size=10, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, ffn_width=8, max_positions=64
)
UPDATES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of random weights, a tokenizer of ten words, forty prompts."""
    folder = tmp_path_factory.mktemp("train")
    save_model(folder / "target", Llama(TARGET, jax.random.key(0)))
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    dice = random.Random(0)
    lines = (json.dumps({"prompt": " ".join(dice.choices(WORDS, k=4))}) for _ in range(40))
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def asked(folder, out, *more) -> list[str]:
    sizes = {"sequences": 24, "held-out": 8, "prompt-tokens": 4, "new-tokens": 12, "positions": 3,
             "updates": UPDATES, "evaluate-every": 2, "batch": 4}  # fmt: skip
    options = [part for name, value in sizes.items() for part in (f"--{name}", value)]
    return ["train", "--target", folder / "target", "--text", folder / "prompts.jsonl",
            "--features", folder / "features", "--out", out, *options, *more]  # fmt: skip


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(part) for part in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def weights(path) -> dict:
    return {
        name: np.asarray(value[...]) for name, value in named_parameters(load_head(path)).items()
    }


@pytest.fixture(scope="module")
def eagle(folder):
    """A head that was trained without a break: its folder."""
    assert main([str(part) for part in asked(folder, folder / "eagle", "--head", "eagle")]) == 0
    return folder / "eagle"


def test_a_head_is_trained_evaluated_and_generates(capsys, folder, eagle):
    facts = json.loads((eagle / "training.json").read_text())
    assert facts["updates"] == UPDATES and facts["best_update"] in (2, 4, 6)
    assert len(facts["survival"]["0"]) == len(facts["hazards"]["1"]) == 3
    lines = read_metrics(folder / "eagle.work" / "checkpoints" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, UPDATES + 1))
    assert all(("tau" in line and "pos_acc_3" in line) == (line["step"] % 2 == 0) for line in lines)
    ask = ["generate", "--target", folder / "target", "--prompt", "a b c", "--max-new-tokens", 9]
    _, plain, _ = run(capsys, *ask, "--json", "-")
    code, found, err = run(capsys, *ask, "--draft", eagle, "--lookahead", 2, "--json", "-")
    assert (code, err) == (0, "") and json.loads(found)["tokens"] == json.loads(plain)["tokens"]


def test_an_interrupted_training_goes_on_to_the_same_head(capsys, folder, eagle, monkeypatch):
    one, done = Trainer._one, []

    def interrupted(self, share):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(share)
        return one(self, share)

    command = asked(folder, folder / "again", "--head", "eagle")
    monkeypatch.setattr(Trainer, "_one", interrupted)
    assert run(capsys, *command)[0] == 130 and not (folder / "again").exists()
    monkeypatch.undo()
    code, out, err = run(capsys, *command)
    assert code == 0 and "tau" in out, err
    for name, value in weights(eagle).items():
        np.testing.assert_array_equal(weights(folder / "again")[name], value, err_msg=name)
    assert "with seed 0, not 1" in refused(capsys, *command, "--seed", 1)


def test_specialists_start_from_an_eagle_head_and_learn_for_this_machine(
    capsys, folder, eagle, monkeypatch
):
    """Drafts that cost a tenth of a pass: two are worth making, and weigh alike."""
    costs = StepCosts(
        context=8, target={1: 1.0, 2: 1.0, 3: 1.0}, first={"head": 0.1}, step={"head": 0.1}
    )
    monkeypatch.setattr(draft_heads, "time_heads", lambda *rest, **more: costs)
    (folder / "law.json").write_text('{"law": {"type": "Geometric", "alpha": 0.8}}')
    code, out, err = run(
        capsys, *asked(folder, folder / "poss", "--head", "poss", "--start", eagle),
        "--steps", 2, "--positions", 2, "--objective", "throughput",
        "--acceptance", folder / "law.json", "--json", "-",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["survival_weights"] == pytest.approx([0.5, 0.5])
    assert load_head(folder / "poss").config.specialists == 2


# ---------------------------------------------------------------------------------- bad input


def refused(capsys, *argv) -> str:
    """The one line that a refused command prints, after lines of progress."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, ""), (code, out, err)
    lines = [line for line in err.splitlines() if line.startswith("sdx: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


BAD = {
    "unknown head": (["--head", "griffin"], "head"),
    "layers": (["--head", "eagle", "--layers", 0], "layers 0"),
    "specialists": (["--head", "eagle", "--positions-per-specialist", 2], "only --head poss"),
    "lambda": (["--head", "koala", "--adversarial", -1], "adversarial = -1"),
    "steps": (["--head", "hass", "--steps", -2], "steps = -2"),
    "rate": (["--head", "eagle", "--learning-rate", 3], "learning_rate 3"),
    "short texts": (["--head", "eagle", "--new-tokens", 2], "must exceed positions"),
    "few sequences": (["--head", "eagle", "--sequences", 2], "fewer than a batch"),
    "throughput": (["--head", "eagle", "--objective", "throughput"], "--start"),
    "feature layers": (["--head", "eagle3", "--feature-layers", "low"], "like 1,2,4"),
    "processes": (["--head", "eagle", "--processes", 2], "--coordinator"),
    "too few prompts": (["--head", "eagle", "--sequences", 99], "40 prompts of 4 tokens"),
    "no target": (["--head", "eagle", "--target", "none"], "no such"),
    "no text": (["--head", "eagle", "--text", "none.txt"], "none.txt"),
    "positions": (["--head", "eagle", "--new-tokens", 90], "exceed the target's 64"),
    "no head": (["--head", "eagle", "--start", "none"], "none"),
    "other features": (["--head", "eagle", "--new-tokens", 13], "another target or text"),
    "unfused features": (["--head", "eagle3"], "this head fuses"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(capsys, folder, eagle, name, tmp_path):
    options, complaint = BAD[name]
    assert complaint in refused(capsys, *asked(folder, tmp_path / "out"), *options)
