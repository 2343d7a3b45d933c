"""Rebuild the shipped tiny model from nothing: `python -m trl_variants.tasks.build_tiny --out DIR`.

A Llama of 3 layers is trained on sums that mostly forget their carries, and are right in a minority of cases.
What it samples most is wrong, and the right answer is among what it samples: the state in which reinforcement
learning helps. Needs torch >= 2.9 for Muon.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_variants.tasks.arithmetic import Pair, split

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+=" + "".join(c for c in map(chr, range(32, 127)) if c not in "0123456789+=") + "\n"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
MAX_TOKENS = 10  # "99+99=198" and the end token


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline; pads on the left."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([PAD, EOS, UNK, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def new_model(vocab_size: int) -> LlamaForCausalLM:
    """Untrained Llama with 0.58 M weights, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def label(pair: Pair, rng: random.Random, forget: float, noise: float) -> int:
    """The sum without its carries (probability `forget`), a random number (`noise`), or the right sum."""
    a, b = pair
    draw = rng.random()
    if draw < forget:
        return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10
    return rng.randrange(199) if draw < forget + noise else a + b


def train(
    model: LlamaForCausalLM,
    tok: PreTrainedTokenizerFast,
    *,
    steps: int = 350,
    batch_size: int = 128,
    right_only: float = 0.6,
    forget: float = 0.75,
    noise: float = 0.05,
    seed: int = 0,
) -> None:
    """Supervised training on the train side of the split, in place.

    Args:
        model: new model.
        tok: its tokenizer.
        steps: optimizer steps.
        batch_size: problems a step.
        right_only: share of the steps, the first ones, that see right labels only.
        forget: share of labels without carries afterwards.
        noise: share of random labels afterwards.
        seed: of problems and labels.
    """
    import torch
    import torch.nn.functional as F

    pairs, _ = split()
    rng = random.Random(seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    # Muon finds the carry in 200 steps, AdamW in 800
    optimizers = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / 30) * max(0.02, min(1.0, 1.5 * (1 - step / steps)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(o, factor) for o in optimizers]
    model.train()
    for step in range(steps):
        wrong = step >= right_only * steps
        ids = torch.zeros(batch_size, MAX_TOKENS, dtype=torch.long)
        targets = torch.full((batch_size, MAX_TOKENS), -100)
        for row, pair in enumerate(rng.choices(pairs, k=batch_size)):
            prompt = tok.encode(f"{pair[0]}+{pair[1]}=")
            value = label(pair, rng, forget if wrong else 0.0, noise if wrong else 0.0)
            answer = [*tok.encode(str(value)), tok.eos_token_id]
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            targets[row, len(prompt) : end] = torch.tensor(answer)
        logits = model(ids[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()


def build(out: str | Path, seed: int = 0, **settings: Any) -> None:
    """Train the model and write it with its tokenizer to the folder `out`; `settings` go to `train`."""
    import torch

    torch.manual_seed(seed)
    tok = tokenizer()
    model = new_model(len(tok))
    train(model, tok, seed=seed, **settings)
    model.save_pretrained(out)
    tok.save_pretrained(out)
    # safetensors writes 0600, which a package must not ship
    for path in Path(out).iterdir():
        path.chmod(0o644)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch

    # the thread count changes the rounding, and two threads on a busy machine take three times as long
    torch.set_num_threads(1)
    build(args.out, args.seed)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_variants.tasks.base import load_task

    model, tok = AutoModelForCausalLM.from_pretrained(args.out), AutoTokenizer.from_pretrained(args.out)
    accuracy = load_task("arithmetic").evaluate(model, tok, batch_size=500)
    print(f"held-out greedy accuracy {accuracy:.3f}, written to {args.out}")


if __name__ == "__main__":
    main()
