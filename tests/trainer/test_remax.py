"""ReMax through the trainer: the baseline is the greedy answer of this policy, and leaves no trace in the log."""

from __future__ import annotations

import torch

from trl_variants import VariantGRPOTrainer, check, variant

from . import toy
from .forked import run_forked

SEEN: list[tuple[str, str]] = []


def watched(prompts, completions, log_metric=None, log_extra=None, **_):
    SEEN.extend(zip(prompts, completions, strict=True))
    log_extra("text", list(completions))
    log_metric("called", 1.0)
    return toy.digits(completions)


def greedy(trainer, prompt: str) -> str:
    ids = torch.tensor([toy.tokenizer()(prompt).input_ids])
    out = trainer.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6,
                                 pad_token_id=toy.PAD, eos_token_id=toy.EOS)  # fmt: skip
    return toy.tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_baseline_is_the_reward_of_this_policy_s_greedy_answer():
    records, answers = [], {}

    def keep(trainer):
        answers.update({p: greedy(trainer, p) for p in toy.PROMPTS})
        after = trainer.team.after
        trainer.team.after = lambda scored, rows, a: records.append((scored, rows, a)) or after(scored, rows, a)

    SEEN.clear()
    out = toy.train(VariantGRPOTrainer, variant="remax", rewards=watched, max_steps=1, patch=keep, log_completions=True)
    assert len(SEEN) == 32, "sixteen samples, sixteen baselines"
    assert SEEN[16:] == [(p, answers[p]) for p, _ in SEEN[:16]]
    scored, _, advantage = records[0]
    wanted = torch.tensor(toy.digits([answers[p] for p, _ in SEEN[:16]]))
    torch.testing.assert_close(scored.keys["greedy_reward"], wanted)
    first = advantage[:, 0]  # beta times k1 is zero before the first update
    torch.testing.assert_close(first, torch.tensor(toy.digits([c for _, c in SEEN[:16]])) - wanted)
    assert out.trainer.generation_config.do_sample is True
    assert out.logged("called") == [1.0] and len(out.trainer._logs["extra"]["text"]) == 16, "samples alone are logged"
    assert out.tables[0]["completion"] == [c for _, c in SEEN[:16]]
    assert float(out.change.norm()) > 0


def test_without_the_greedy_answer_check_says_what_to_add():
    config = toy.build(VariantGRPOTrainer, variant="grpo", num_iterations=2).args
    [finding] = [
        f for f in check(variant("grpo", advantage="greedy_baseline"), config) if "greedy_baseline" in f.message
    ]
    assert finding.level == "error" and "learners: [greedy_answer]" in finding.hint


def test_two_processes_and_resume(tmp_path):
    def run(rank, folder, resume=None):
        out = toy.train(VariantGRPOTrainer, variant="remax", max_steps=6, save_strategy="steps", save_steps=1,
                        output_dir=str(folder), resume=resume, per_device_train_batch_size=4)  # fmt: skip
        return torch.cat([p.detach().flatten() for p in out.trainer.model.parameters()])

    toy.model()
    two = run_forked(lambda r: run(r, tmp_path / "two"), ranks=2)
    assert torch.equal(two[0], two[1])
    [whole] = run_forked(lambda r: run(r, tmp_path / "one"))
    [resumed] = run_forked(lambda r: run(r, tmp_path / "one", str(tmp_path / "one" / "checkpoint-3")))
    assert torch.equal(whole, resumed)
