"""The door: what it prints, its JSON, and that bad input is one line and exit code 2."""

import json

import jax
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sdx.cli import main
from sdx.cli.base import numbers
from sdx.models.checkpoint import save_model
from sdx.models.config import ModelConfig, read_config
from sdx.models.heads import HeadConfig, create_head, save_head
from sdx.models.llama import Llama
from sdx.theory.hardware import load_hardware

WORDS = "a b c d e f g h".split()
PAIR = dict(vocab_size=10, heads=2, kv_heads=1, head_dim=8, max_positions=64)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with a target and a draft of random weights, and a tokenizer of ten words."""
    folder = tmp_path_factory.mktemp("pair")
    target = ModelConfig(**PAIR, width=16, layers=1, ffn_width=16)
    draft = ModelConfig(**PAIR, width=8, layers=1, ffn_width=8)
    save_model(folder / "target", Llama(target, jax.random.key(0)))
    save_model(folder / "draft", Llama(draft, jax.random.key(1)))
    vocabulary = {word: i for i, word in enumerate([*WORDS, "i", "j"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(part) for part in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# ------------------------------------------------------------------------------------ results


DESIGN = ["design", "--hardware", "h100-sxm"]


def test_design_prints_every_cell(capsys, tmp_path):
    path = tmp_path / "design.json"
    code, out, err = run(
        capsys, *DESIGN, "--target", "llama-3.1-8b", "--batch", "1,8,4096",
        "--max-lookahead", "8", "--json", path,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "use more devices" in out  # the batch of 4096, which does not fit
    for word in ("speculate", "layers x", "lookahead", "tokens/s", "bound by: draft", "elasticit"):
        assert out.count(word) >= 2, word
    cells = json.loads(path.read_text())["cells"]
    assert [cell["batch"] for cell in cells] == [1, 8]
    for cell in cells:
        assert (cell["verdict"] == "speculate") == (cell["speedup"] > 1)
        assert len(cell["elasticities"]) >= 5 and cell["bounds"].keys() == {"draft", "verify"}
        line = next(part for part in out.splitlines() if f"batch {cell['batch']}  " in part)
        assert f"x{cell['speedup']:.2f}" in line and cell["verdict"] in line
    code, out, err = run(capsys, "export", "--design", path, "--engine", "vllm", "--draft", "D")
    assert (code, err) == (0, "") and "num_speculative_tokens" in out


def test_design_of_a_given_draft(capsys):
    code, out, _ = run(
        capsys, *DESIGN, "--target", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--alpha", "0.8",
        "--json", "-", "--max-lookahead", "8",
    )  # fmt: skip
    cell = json.loads(out)["cells"][0]
    assert code == 0 and cell["draft"]["name"] == "llama-3.2-1b" and cell["lookahead"] >= 1


def test_generate_is_the_same_with_and_without_a_draft(capsys, pair):
    common = ["--target", pair / "target", "--prompt", "a b c", "--max-new-tokens", "9"]
    code, out, _ = run(capsys, "generate", *common, "--json", "-")
    plain = json.loads(out)
    assert code == 0 and len(plain["tokens"]) == 9 and plain["text"]
    code, out, err = run(
        capsys, "generate", *common, "--draft", pair / "draft", "--lookahead", "2", "--stats"
    )
    assert (code, err) == (0, "")
    assert out.startswith(plain["text"]) and "tokens per round" in out and "per position" in out


def test_a_draft_head_generates_and_is_measured(capsys, pair, tmp_path):
    config = HeadConfig.for_target(read_config(pair / "target"), kind="eagle")
    save_head(tmp_path / "head", create_head(config, jax.random.key(0)))
    common = ["--target", pair / "target", "--prompt", "a b c", "--max-new-tokens", "9"]
    _, plain, _ = run(capsys, "generate", *common, "--json", "-")
    draft = ["--draft", tmp_path / "head", "--lookahead", "2"]
    code, out, err = run(capsys, "generate", *common, *draft, "--json", "-")
    assert (code, err) == (0, "") and json.loads(out)["tokens"] == json.loads(plain)["tokens"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b c\n\nd e f")
    code, out, err = run(
        capsys, "measure", "--target", pair / "target", "--draft", tmp_path / "head",
        "--prompts", prompts, "--lookaheads", "2", "--new-tokens", "8",
    )  # fmt: skip
    assert code == 0 and "position 2" in out, err


def test_measure_writes_a_law_that_design_reads(capsys, pair, tmp_path):
    prompts, path = tmp_path / "prompts.txt", tmp_path / "acceptance.json"
    prompts.write_text("a b c\n\nd e f\n\ng h a")
    code, out, err = run(
        capsys, "measure", "--target", pair / "target", "--draft", pair / "draft",
        "--prompts", prompts, "--lookaheads", "2", "--new-tokens", "20", "--json", path,
    )  # fmt: skip
    assert code == 0, err
    assert "beta mixture" in out and "position 2" in out
    assert not any(line.startswith("Traceback") for line in err.splitlines())
    data = json.loads(path.read_text())
    assert data["law"]["type"] == "BetaMixture"
    assert all(h["low"] <= h["value"] <= h["high"] for h in data["hazards"])
    code, out, _ = run(
        capsys, *DESIGN, "--target", "llama-3.1-8b", "--draft", "llama-3.2-1b", "--acceptance",
        path, "--max-lookahead", "8",
    )  # fmt: skip
    assert code == 0 and "batch 1" in out


def test_calibrate_from_a_sweep(capsys, tmp_path):
    steps, toml = tmp_path / "steps.csv", tmp_path / "out.toml"
    rows = [f"{b},{t},1024,{1e-3 * (1 + 0.01 * b * t)}" for b in (1, 8) for t in (1, 2, 4, 8)]
    steps.write_text("\n".join(["batch,tokens,context,seconds", *rows]))
    code, out, err = run(
        capsys, "calibrate", "--steps", steps, "--model", "llama-3.1-8b", "--out", toml
    )
    assert (code, err) == (0, "") and "mean error" in out
    assert load_hardware(str(toml)).memory_bandwidth_bytes_per_second > 0
    assert "[residuals]" in toml.read_text()


def test_lists_of_numbers():
    assert numbers("1,8,32", "batch") == [1, 8, 32]
    assert numbers("1-4,9", "lookaheads") == [1, 2, 3, 4, 9]


# ---------------------------------------------------------------------------------- bad input


def refused(capsys, *argv) -> str:
    """The one line that a refused command prints."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, ""), (code, out, err)
    lines = [line for line in err.splitlines() if "..." not in line and not line.endswith(" s")]
    assert len(lines) == 1 and lines[0].startswith("sdx: "), err
    return lines[0]


LLAMA = [*DESIGN, "--target", "llama-3.1-8b"]
BAD = {
    "unknown model": (["design", "--hardware", "h100-sxm", "--target", "llama-3.1-8c"],
                      "llama-3.1-8b"),
    "unknown hardware": (["design", "--hardware", "h100", "--target", "llama-3.1-8b"], "h100-sxm"),
    "negative batch": ([*LLAMA, "--batch", "-1"], "batch -1"),
    "batch of zero": ([*LLAMA, "--batch", "8,0"], "batch 0"),
    "not a list": ([*LLAMA, "--context", "1k"], "'1k' is not a number"),
    "N above M": ([*LLAMA, "--draft", "llama-3.1-70b", "--alpha", "0.5"], "not fewer than"),
    "N equal to M": ([*LLAMA, "--draft", "llama-3.1-8b", "--alpha", "0.5"], "not fewer than"),
    "alpha of one": ([*LLAMA, "--draft", "llama-3.2-1b", "--alpha", "1"], "inside (0, 1)"),
    "alpha below zero": ([*LLAMA, "--draft", "llama-3.2-1b", "--alpha", "-0.1"], "inside (0, 1)"),
    "no acceptance": ([*LLAMA, "--draft", "llama-3.2-1b"], "--alpha or --acceptance"),
    "does not fit": (["design", "--hardware", "rtx-4090", "--target", "llama-3.1-70b"],
                     "use more devices"),
    "KV does not fit": ([*LLAMA, "--batch", "4096", "--context", "8192"], "use more devices"),
    "unknown objective": ([*LLAMA, "--objective", "speed"], "tokens_per_second"),
    "unknown option": ([*LLAMA, "--bach", "1"], "--bach"),
    "not a number": ([*LLAMA, "--devices", "two"], "--devices"),
    "unknown command": (["desing"], "desing"),
    "missing option": (["design", "--target", "llama-3.1-8b"], "--hardware"),
    "no such file": ([*LLAMA, "--draft", "llama-3.2-1b", "--acceptance", "none.json"], "none.json"),
    "not timed here": (["calibrate", "--hardware", "h100-sxm"], "only 'here'"),
    "sweep without its model": (["calibrate", "--steps", "steps.csv"], "--model"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(capsys, name):
    argv, remedy = BAD[name]
    assert remedy in refused(capsys, *argv)


FILES = {
    "malformed JSON": ("config.json", '{"model_type": "llama"', "--target", "not valid JSON"),
    "missing key": ("config.json", '{"model_type": "llama"}', "--target", "is missing"),
    "unknown architecture": ("config.json", '{"model_type": "rwkv"}', "--target", "rwkv"),
    "malformed TOML": ("device.toml", "[device\n", "--hardware", "not valid TOML"),
    "missing number": ("device.toml", "[device]\n", "--hardware", "is missing"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files(capsys, tmp_path, name):
    file, text, option, complaint = FILES[name]
    path = tmp_path / file
    path.write_text(text)
    argv = {"--target": "llama-3.1-8b", "--hardware": "h100-sxm"} | {option: path}
    assert complaint in refused(capsys, "design", *(x for item in argv.items() for x in item))


GENERATE = {
    "long prompt": (["--prompt-ids", ",".join(["1"] * 60)], "positions"),
    "id beyond the vocabulary": (["--prompt-ids", "1,10"], "outside the vocabulary"),
    "negative id": (["--prompt-ids", "1,-3"], "outside the vocabulary"),
    "temperature": (["--prompt-ids", "1", "--temperature", "-0.5"], "temperature"),
    "top-p": (["--prompt-ids", "1", "--top-p", "0"], "top_p"),
    "two prompts": (["--prompt-ids", "1", "--prompt", "a"], "exactly one"),
    "no draft": (["--prompt-ids", "1", "--policy", "chain"], "--draft"),
    "lookahead": (["--prompt-ids", "1", "--policy", "ngram", "--lookahead", "-2"], "lookahead"),
    "no words": (["--prompt-ids", "one"], "like 1,5,7"),
}


@pytest.mark.parametrize("name", GENERATE)
def test_bad_requests(capsys, pair, name):
    argv, complaint = GENERATE[name]
    line = refused(capsys, "generate", "--target", pair / "target", "--max-new-tokens", "8", *argv)
    assert complaint in line


def test_bad_checkpoints(capsys, pair, tmp_path):
    ask = ["--prompt-ids", "1,2"]
    assert "no such" in refused(capsys, "generate", "--target", tmp_path / "none", *ask)
    whole = (pair / "target" / "model.safetensors").read_bytes()
    for content in (whole[: len(whole) // 2], b"\x80" * 64, b""):
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "config.json").write_text((pair / "target" / "config.json").read_text())
        (broken / "model.safetensors").write_bytes(content)
        assert "model.safetensors" in refused(capsys, "generate", "--target", broken, *ask)


def test_bad_prompts(capsys, pair, tmp_path):
    path = tmp_path / "prompts.json"
    ask = ["measure", "--target", pair / "target", "--draft", pair / "draft", "--prompts", path]
    for text, complaint in (("[", "not valid JSON"), ("[]", "no prompts"), ("[7.5]", "neither")):
        path.write_text(text)
        assert complaint in refused(capsys, *ask)
    assert "temperature" in refused(capsys, *ask, "--temperature", "-1")


def test_help_is_no_error(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "design" in out
