"""Golden numbers of TRL 1.12's PPOTrainer: its own lines, run on fixed tensors.

    pip download trl==1.12.0 --no-deps -d /tmp/trl && (cd /tmp/trl && unzip -q trl-1.12.0*.whl)
    python tests/reference/trl_ppo_1_12.py /tmp/trl/trl/experimental/ppo/ppo_trainer.py \\
        > tests/reference/trl_ppo_1_12.json

Needs torch alone. The statements of `PPOTrainer.train` from "# 4. compute rewards" to the whitened advantages, and
those of one micro-batch's losses, are cut out of the file and executed; nothing is written again here.
"""

from __future__ import annotations

import ast
import json
import sys
import textwrap
from types import SimpleNamespace

import torch

INVALID_LOGPROB = 1.0
SETTINGS = {
    "default": dict(kl_estimator="k1", kl_coef=0.05, gamma=1.0, lam=0.95, whiten_rewards=False),
    "k3, discounted": dict(kl_estimator="k3", kl_coef=0.2, gamma=0.9, lam=0.8, whiten_rewards=False),
    "whitened rewards": dict(kl_estimator="k1", kl_coef=0.1, gamma=1.0, lam=1.0, whiten_rewards=True),
}
LOSS = dict(cliprange=0.2, cliprange_value=0.2, vf_coef=0.1)


def inputs() -> dict[str, torch.Tensor]:
    """Four answers of at most six tokens: two at the limit, one of four tokens, one of a single token."""
    g = torch.Generator().manual_seed(12)
    normal = lambda scale: torch.randn(4, 6, generator=g, dtype=torch.float64) * scale  # noqa: E731
    logprobs = -torch.rand(4, 6, generator=g, dtype=torch.float64) * 2 - 0.1
    return {
        "logprobs": logprobs,
        "ref_logprobs": logprobs + normal(0.4),
        "values": normal(0.5) + 0.3,
        "new_logprobs": logprobs + normal(0.3),
        "vpred": normal(0.5) + 0.3,
        "scores": torch.tensor([1.0, -0.5, 0.7, 2.0], dtype=torch.float64),
        "sequence_lengths": torch.tensor([5, 5, 3, 0]),  # index of the last token
    }


def between(source: str, first: str, last: str) -> str:
    """The lines from the one that contains `first` up to, without, the first later one that contains `last`."""
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    stop = next(i for i, line in enumerate(lines) if last in line and i > start)
    return textwrap.dedent("\n".join(lines[start:stop]))


def run(source: str, settings: dict) -> dict:
    tree = ast.parse(source)
    helpers = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("masked_")]
    names: dict = {"torch": torch, "INVALID_LOGPROB": INVALID_LOGPROB}
    exec(compile(ast.Module(helpers, []), "helpers", "exec"), names)
    x = inputs()
    names |= {k: x[k].clone() for k in ("logprobs", "ref_logprobs", "values", "scores", "sequence_lengths")}
    names |= {"args": SimpleNamespace(**settings, **LOSS), "responses": torch.zeros(4, 6, dtype=torch.long)}
    exec(between(source, "response_idxs = torch.arange(responses.shape[1]", "# 4. compute rewards"), names)
    exec(between(source, "# 4. compute rewards", "empty_cache()"), names)
    out = {k: names[k].tolist() for k in ("rewards", "advantages", "returns")}

    new = x["new_logprobs"].clone().requires_grad_()
    predicted = x["vpred"].clone().requires_grad_()
    names |= {f"mb_{a}": names[b] for a, b in (("logprobs", "logprobs"), ("values", "values"), ("return", "returns"))}
    names |= {"mb_advantage": names["advantages"], "micro_batch_inds": torch.arange(4)}
    names["new_logprobs"] = torch.masked_fill(new, names["padding_mask"], INVALID_LOGPROB)
    names["vpred"] = torch.masked_fill(predicted, names["padding_mask_p1"], 0)
    exec(between(source, "vpredclipped = torch.clamp(", "accelerator.backward(loss)"), names)
    names["loss"].backward()
    exec(between(source, "pg_clipfrac = masked_mean(", "prob_dist = "), names)
    for key in ("pg_loss", "vf_loss", "vf_clipfrac", "pg_clipfrac", "loss"):
        out[key] = float(names[key].detach())
    return out | {"policy_gradient": new.grad.tolist(), "value_gradient": predicted.grad.tolist()}


if __name__ == "__main__":
    torch.set_default_dtype(
        torch.float64
    )  # else the Bessel correction, an integer by an integer, is rounded to float32
    with open(sys.argv[1]) as f:
        text = f.read()
    json.dump({name: run(text, settings) for name, settings in SETTINGS.items()}, sys.stdout, indent=1)
    print()
