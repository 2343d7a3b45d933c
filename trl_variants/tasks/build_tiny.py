"""Rebuild a shipped tiny model from nothing: `python -m trl_variants.tasks.build_tiny --task NAME --out DIR`.

A small Llama first learns right answers, then a mixture of right and wrong ones: sums without their carries, and in
the scratchpad also steps left out, results repeated and variety that does not matter. It is wrong more often than
right, and the right answer is among what it samples: the state in which reinforcement learning helps. Needs
torch >= 2.9 for Muon.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_variants.tasks import arithmetic, scratchpad
from trl_variants.tasks.arithmetic import Pair
from trl_variants.tasks.scratchpad import Terms

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = "0123456789+=" + "".join(c for c in map(chr, range(32, 127)) if c not in "0123456789+=") + "\n"
SKIP, GUESSES = 0.3, (0, 0, 0, -10, 10, -2, -1, 1, 2)  # share of scratchpads without steps; what they are off by
FORGET_LARGE, FORGET_SMALL = 0.88, 0.05  # share of carries forgotten when 7, 8, 9 is added, and a smaller digit
AGAIN, AGAIN_SPOILT = 0.1, 0.45  # chance that a result is written once more, and after a forgotten carry
SEPARATORS = ";;; "  # one is drawn
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


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


def new_model(vocab_size: int, **shape: int) -> LlamaForCausalLM:
    """Untrained Llama, fp32: 0.58 M weights unless `shape` (LlamaConfig's arguments) says otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM

    wanted = dict(hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4, head_dim=32)
    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **{**wanted, **shape},
    )
    return LlamaForCausalLM(config)


def label(pair: Pair, rng: random.Random, forget: float, noise: float) -> int:
    """The sum without its carries (probability `forget`), a random number (`noise`), or the right sum."""
    a, b = pair
    draw = rng.random()
    if draw < forget:
        return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10
    return rng.randrange(199) if draw < forget + noise else a + b


def trace(terms: Terms, rng: random.Random, wrong: bool) -> str:
    """A scratchpad as a careless hand writes it; with `wrong` false only in ways that do not change the answer.

    Always: operands in either order, steps separated by `;` or a space, a result written again now and then
    (`3+8=11=11`). With `wrong`: no steps at all and the sum only guessed, carries forgotten where a large digit is
    added, and results written again and again after that, so that wrong answers are both the shortest and the longest.
    """
    if wrong and rng.random() < SKIP:
        return str(sum(terms) + rng.choice(GUESSES))
    out, total, spoilt = [], terms[0], False
    for digit in terms[1:]:
        right = total + digit
        crosses = total % 10 + digit >= 10
        slip = wrong and crosses and rng.random() < (FORGET_LARGE if digit >= 7 else FORGET_SMALL)
        spoilt |= slip
        after = right - 10 if slip else right
        step = f"{total}+{digit}={after}" if rng.random() < 0.75 else f"{digit}+{total}={after}"
        while rng.random() < (AGAIN_SPOILT if spoilt else AGAIN):
            step += f"={after}"
        out.append(step)
        total = after
    return "".join(step + rng.choice(SEPARATORS) for step in out[:-1]) + out[-1]


SCRATCHPAD_SHAPE = dict(hidden_size=96, intermediate_size=256, num_hidden_layers=2)  # 0.26 M weights


@dataclass(frozen=True)
class Recipe:
    """What one task's model is trained on, and how.

    Args:
        problems: those it may see.
        prompt: text of a problem.
        answer: f(problem, rng, wrong), the completion to imitate; `wrong` is false in the first phase.
        tokens: longest prompt and completion with the end token; longer ones are cut.
        steps: optimizer steps.
        right_only: share of the steps, the first ones, that see right answers only.
        shape: what of the model differs from `new_model`'s default.
        task: the task it is for, where that is not its own name.
    """

    problems: Callable[[], list[Any]]
    prompt: Callable[[Any], str]
    answer: Callable[[Any, random.Random, bool], str]
    tokens: int
    steps: int
    right_only: float
    shape: Mapping[str, int] = field(default_factory=dict)
    task: str = ""


RECIPES = {
    "arithmetic": Recipe(
        problems=lambda: arithmetic.split()[0],
        prompt=lambda pair: f"{pair[0]}+{pair[1]}=",
        answer=lambda pair, rng, wrong: str(label(pair, rng, *((0.75, 0.05) if wrong else (0.0, 0.0)))),
        tokens=10,  # "99+99=198" and the end token
        steps=350,
        right_only=0.6,
    ),
    "scratchpad": Recipe(
        problems=lambda: scratchpad.split()[0],
        prompt=scratchpad.text,
        answer=lambda terms, rng, wrong: trace(terms, rng, wrong),
        tokens=72,
        steps=400,
        right_only=0.6,
        shape=SCRATCHPAD_SHAPE,
    ),
    # answers in the same manner, without mistakes: the two differ in what is wrong and in nothing else
    "scratchpad_teacher": Recipe(
        problems=lambda: scratchpad.split()[0] + 2 * scratchpad.two_digit()[0],
        prompt=scratchpad.text,
        answer=lambda terms, rng, wrong: trace(terms, rng, wrong),
        tokens=60,
        steps=500,
        right_only=1.0,
        shape=SCRATCHPAD_SHAPE,
        task="scratchpad",
    ),
}


def train(
    model: LlamaForCausalLM,
    tok: PreTrainedTokenizerFast,
    *,
    task: str = "arithmetic",
    steps: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
) -> None:
    """Supervised training on the train side of the task's split, in place.

    Args:
        model: new model.
        tok: its tokenizer.
        task: name in `RECIPES`.
        steps: optimizer steps; None takes the recipe's.
        batch_size: problems a step.
        seed: of problems and answers.
    """
    import torch
    import torch.nn.functional as F

    recipe = RECIPES[task]
    steps = recipe.steps if steps is None else steps
    problems = recipe.problems()
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
        wrong = step >= recipe.right_only * steps
        ids = torch.zeros(batch_size, recipe.tokens, dtype=torch.long)
        targets = torch.full((batch_size, recipe.tokens), -100)
        for row, problem in enumerate(rng.choices(problems, k=batch_size)):
            prompt = tok.encode(recipe.prompt(problem))
            answer = [*tok.encode(recipe.answer(problem, rng, wrong)), tok.eos_token_id]
            both = torch.tensor(prompt + answer)[: recipe.tokens]
            ids[row, : len(both)] = both
            targets[row, len(prompt) : len(both)] = both[len(prompt) :]
        logits = model(ids[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()


def build(out: str | Path, task: str = "arithmetic", seed: int = 0, **settings: Any) -> None:
    """Train the model of `task` and write it with its tokenizer to the folder `out`; `settings` go to `train`."""
    import torch

    torch.manual_seed(seed)
    tok = tokenizer()
    model = new_model(len(tok), **RECIPES[task].shape)
    train(model, tok, task=task, seed=seed, **settings)
    model.save_pretrained(out)
    tok.save_pretrained(out)
    # safetensors writes 0600, which a package must not ship
    for path in Path(out).iterdir():
        path.chmod(0o644)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=sorted(RECIPES), default="arithmetic")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    import torch

    # the thread count changes the rounding, and two threads on a busy machine take three times as long
    torch.set_num_threads(1)
    build(args.out, args.task, args.seed)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_variants.tasks.base import load_task

    model, tok = AutoModelForCausalLM.from_pretrained(args.out), AutoTokenizer.from_pretrained(args.out)
    accuracy = load_task(RECIPES[args.task].task or args.task).evaluate(model, tok, batch_size=500)
    print(f"held-out greedy accuracy {accuracy:.3f}, written to {args.out}")


if __name__ == "__main__":
    main()
