"""Peak memory of one micro-batch's forward and backward, by its tokens: the head's part beside T x V logits.

TRL's head works on tiles of 4096 tokens x 32768 entries, on a CPU with about eight of them at a time: up to there
memory grows with the tokens, beyond it does not.

    python benchmarks/update_memory.py [--tokens 1024,2048,4096,8192,16384] [--vocabulary 32768] [--device cuda]

Each size runs in a process of its own: a one-layer model, so that the head is what could grow, and one line of rows.
Prints the peak resident memory (on a GPU the allocator's) above that before the pass, and what logits of every position
would take.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MIB = 1 << 20
TILE = 4096  # tokens TRL's head projects at a time
ROW, PROMPT = 512, 64  # tokens of a row, and of its prompt


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """Samples resident memory every two milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._going = resident(), True

    def run(self) -> None:
        while self._going:
            self.most = max(self.most, resident())
            time.sleep(0.002)

    def stop(self) -> int:
        self._going = False
        self.join()
        return self.most


def measure(tokens: int, vocabulary: int, width: int, device: str, answer: Any) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from trl_variants import VariantGRPOConfig, VariantGRPOTrainer
    from trl_variants.tasks.arithmetic import tiny_model_path

    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=1024,
            pad_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=True,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = VariantGRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=VariantGRPOConfig(
                folder,
                use_cpu=device == "cpu",
                bf16=False,
                report_to="none",
                num_generations=2,
                per_device_train_batch_size=2,
            ),
            train_dataset=Dataset.from_list([{"prompt": "1"}] * 4),
            processing_class=AutoTokenizer.from_pretrained(tiny_model_path()),
            variant="dapo",
        )
    rows = tokens // ROW
    ids = torch.randint(3, vocabulary, (rows, ROW), device=device)
    batch = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones_like(ids[:, :PROMPT]),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": torch.ones_like(ids[:, PROMPT:]),
    }
    _ = trainer.forward.abilities
    model.zero_grad(set_to_none=False)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        before, peak = resident(), Peak()
        peak.start()
    logps, entropy, _ = trainer.logps_and_entropy(model, batch)
    (logps.sum() + 0.1 * entropy.sum()).backward()
    answer.put((torch.cuda.max_memory_allocated() if device == "cuda" else peak.stop()) - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    fork = multiprocessing.get_context("spawn")
    sizes, peaks = [int(n) for n in args.tokens.split(",")], []
    print(f"vocabulary {args.vocabulary}, width {args.width}, rows of {ROW} tokens\n")
    print("| tokens | peak above the start, MiB | logits of every position in fp32, MiB |\n|---|---|---|")
    for size in sizes:
        answer = fork.Queue()
        process = fork.Process(target=measure, args=(size, args.vocabulary, args.width, args.device, answer))
        process.start()
        peaks.append(answer.get() / MIB)
        process.join()
        print(f"| {size} | {peaks[-1]:.0f} | {4 * size * args.vocabulary / MIB:.0f} |", flush=True)
    full = [(size, peak) for size, peak in zip(sizes, peaks, strict=True) if size - PROMPT * size // ROW >= TILE]
    growth = (full[-1][1] - full[0][1]) / max(full[-1][0] - full[0][0], 1) * MIB if full else 0.0
    logits = 4 * args.vocabulary
    print(f"\nbytes a token beyond a full tile: {growth:.0f}; a row of logits: {logits}")
    if growth > 0.1 * logits:
        print("BROKEN: memory grows with tokens times vocabulary")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
