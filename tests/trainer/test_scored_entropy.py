"""What advantages over tokens are given by the trainer: the sampling policy's entropy and the token ids."""

from __future__ import annotations

import pytest
import torch

from trl_variants.hooks.advantage_credit import EntropyShare, Process

from . import toy


def seen_by(monkeypatch, hook: type) -> list:
    seen: list = []
    call = hook.__call__
    monkeypatch.setattr(hook, "__call__", lambda self, scored: seen.append(scored) or call(self, scored))
    return seen


@pytest.mark.parametrize("iterations", [1, 2])
def test_advantages_see_the_sampling_policy_s_entropy(monkeypatch, iterations):
    seen = seen_by(monkeypatch, EntropyShare)
    run = toy.train(
        variant="gtpo", gradient_accumulation_steps=4, num_iterations=iterations, max_steps=2, plan_updates=False
    )
    entropy, mask = seen[0].tokens["entropy"], seen[0].tokens["mask"]
    assert not entropy.requires_grad and (entropy[mask > 0] > 0).all()
    # the first update of a generation is on-policy: its logged mean is over the same tokens and weights, with every row
    assert float((entropy * mask).sum() / mask.sum()) == pytest.approx(run.logged("entropy")[0], rel=1e-4)
    assert len(seen) == (2 if iterations == 1 else 1)
    assert seen[0].run.vocabulary == len(toy.CHARACTERS) + 2


def test_segments_end_at_token_ids(monkeypatch):
    seen = seen_by(monkeypatch, Process)
    end = toy.tokenizer().convert_tokens_to_ids(list("0123456789"))
    first, second = (lambda completions, value=v, **_: [value * len(c) for c in completions] for v in (1.0, -0.5))
    run = toy.train(
        variant="unified-interleaved-grpo",
        hooks={"advantage": {"process": {"delimiters": end}}},
        rewards=[first, second],
        max_steps=1,
    )
    [scored] = seen
    advantage = Process(delimiters=end)(scored)
    ids, mask = scored.tokens["ids"], scored.tokens["mask"]
    at_end = torch.isin(ids, torch.tensor(end))
    assert (at_end[:, :-1] & (mask[:, 1:] > 0)).any(), "no answer has two segments: the test is empty"
    changes = (advantage[:, 1:] - advantage[:, :-1]).abs() > 1e-6
    for i in range(len(ids)):
        here = (changes[i] & (mask[i, 1:] > 0)).nonzero().squeeze(1).tolist()
        ends = at_end[i].nonzero().squeeze(1).tolist()
        assert set(here) <= set(ends[:2]), "advantages change only behind the first two ends"
    assert torch.isfinite(run.change).all() and run.gradients[0].norm() > 0
