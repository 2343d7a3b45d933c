"""The server teacher against a real vLLM server on this machine; skipped where vLLM is not importable.

`make test-vllm` runs it beside vLLM; `VLLM_PYTHON=/path/to/python pytest -m slow tests/vllm` starts the server
from another environment.
"""

from __future__ import annotations

import pytest
import torch

from tests.teachers.asked import by_hand, padded, teacher_of
from tests.vllm.serving import LONGEST, PYTHON, serving
from trl_variants import VariantError, VariantGRPOConfig, VariantGRPOTrainer
from trl_variants.divergence import Divergence
from trl_variants.tasks import load_task
from trl_variants.teachers import Question

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="vLLM is not importable and VLLM_PYTHON names no Python that has it"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("vllm")) as address:
        yield address


def trainer_with(teacher, tmp_path, **changes):
    task = load_task("arithmetic")
    args = VariantGRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        max_steps=2,
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=4,
        learning_rate=1e-4,
        logging_steps=1,
        self_test=False,
        teacher=teacher,
        **changes,
    )
    return VariantGRPOTrainer(task.model_path(), task.reward_funcs, args, task.train_dataset, variant="dapo")


def asked_of(trainer, distribution: bool) -> Question:
    tokenizer = trainer.processing_class
    rows = [("12+7=", "19"), ("3+4=", "7"), ("99+1=", "12")]
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    prompt_ids, prompt_mask = padded([encode(p) for p, _ in rows], "left")
    completion_ids, completion_mask = padded([encode(c) + [tokenizer.eos_token_id] for _, c in rows], "right")
    batch = dict(zip(("prompt_ids", "prompt_mask"), (prompt_ids, prompt_mask), strict=True))
    batch |= {"completion_ids": completion_ids, "completion_mask": completion_mask}
    return Question(batch, [{"prompt": p} for p, _ in rows], torch.arange(3), None, distribution)


def test_log_probs_and_top_entries_are_the_models(url, tmp_path):
    trainer = trainer_with({"server": {"url": url, "top_k": 5, "timeout": 300.0}}, tmp_path)
    teacher = teacher_of(trainer)
    teacher.require((Divergence("fkl", top_k=5),))
    asked = asked_of(trainer, distribution=True)
    answer = teacher.answer(asked)
    logps, whole = by_hand(trainer.model.eval(), asked)
    live = asked.batch["completion_mask"] > 0
    torch.testing.assert_close(answer.logps[live], logps[live], atol=2e-3, rtol=1e-3)
    best = whole[live].topk(5)
    torch.testing.assert_close(answer.topk[1][live], best.values, atol=2e-3, rtol=1e-3)
    assert (answer.topk[0][live] == best.indices).float().mean() > 0.9  # ties of rounding may trade places
    assert (answer.said[live] == 1).all()  # the server's folder is here, and its end token is the policy's


def test_a_run_hears_what_the_same_model_says_here(url, tmp_path):
    served = trainer_with({"server": {"url": url, "timeout": 300.0}}, tmp_path)
    served.train()
    local = trainer_with({"model": {"path": load_task("arithmetic").model_path()}}, tmp_path)
    local.train()
    kl = [[line["teacher/kl"] for line in t.state.log_history if "teacher/kl" in line] for t in (served, local)]
    assert len(kl[0]) == 2 and kl[0] == pytest.approx(kl[1], abs=2e-3)


def test_its_refusals_are_explained(url, tmp_path):
    with pytest.raises(VariantError, match="no model 'other': set server.model to one of tiny"):
        trainer_with({"server": {"url": url, "model": "other"}}, tmp_path)
    trainer = trainer_with({"server": {"url": url, "top_k": 21, "timeout": 300.0}}, tmp_path)
    with pytest.raises(VariantError, match="max allowed: 20.*larger --max-logprobs, or lower server.top_k"):
        teacher_of(trainer).answer(asked_of(trainer, distribution=True))
    asked = asked_of(trainer, distribution=False)
    asked.batch["prompt_ids"] = asked.batch["prompt_ids"].repeat(1, LONGEST)
    asked.batch["prompt_mask"] = asked.batch["prompt_mask"].repeat(1, LONGEST)
    with pytest.raises(VariantError, match=f"maximum context length is {LONGEST} tokens"):
        teacher_of(trainer).answer(asked)
