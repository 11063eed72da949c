"""Hugging Face transformers on torch CPU, driven by lines of JSON (see bench_decode.py).

    python experiments/peer_transformers.py TARGET_FOLDER DRAFT_FOLDER THREADS

Runs in an environment of its own (torch, transformers); imports nothing of sdx. Each line read is
{"mode": "autoregressive" | "assisted", "prompt": [ids], "new_tokens": n}; each line written is
{"tokens": [new ids], "seconds": s}. The first line written is {"versions": {...}}.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    target_folder, draft_folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()

    def load(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generation_config.eos_token_id = None  # fixed length, as sdx without stop ids
        model.generation_config.pad_token_id = 0
        return model.eval()

    target, draft = load(target_folder), load(draft_folder)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompt = torch.tensor([request["prompt"]])
        extra = {"assistant_model": draft} if request["mode"] == "assisted" else {}
        begun = time.perf_counter()
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request["new_tokens"],
            do_sample=False,
            **extra,
        )
        seconds = time.perf_counter() - begun
        tokens = output[0, prompt.shape[1] :].tolist()
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
