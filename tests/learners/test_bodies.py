"""Bodies: adapters switched exactly and put back whatever happens; what a state sees."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from tests.trainer import toy
from trl_variants import VariantError, VariantGRPOTrainer
from trl_variants.learners.base import take
from trl_variants.learners.bodies import backbone_of

LORA = dict(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def trainer_with(body: str, peft: bool | None = None, **changes):
    critic = changes.pop("critic", {})
    given = {"peft_config": LoraConfig(**LORA)} if (body == "adapter" if peft is None else peft) else {}
    hooks = {"advantage": "gae", "learners": [{"critic": {"body": body, **critic}}]}
    return toy.build(VariantGRPOTrainer, variant="dapo", hooks=hooks, trainer_arguments=given, **changes)


def rows(count: int = 4, prompt: int = 3, width: int = 5) -> dict:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 20, (count, prompt + width), generator=g)
    mask = torch.ones(count, prompt + width, dtype=torch.long)
    mask[0, :2] = 0
    mask[1, -3:] = 0
    names = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
    return dict(zip(names[0], ids.split([prompt, width], 1), strict=True)) | dict(
        zip(names[1], mask.split([prompt, width], 1), strict=True)
    )


def flags(model) -> dict[str, bool]:
    return {n: p.requires_grad for n, p in model.named_parameters()}


def test_the_adapter_is_there_and_the_policy_does_not_see_it():
    trainer = trainer_with("adapter")
    [worker] = trainer.team.workers.values()
    assert trainer.model.active_adapters == ["default"]
    assert all(flag == ("lora_" in name and ".default." in name) for name, flag in flags(trainer.model).items())
    names = set(worker.parameters())
    assert names == {n for n in names if ".critic." in n or n.startswith("value.")} and len(names) == 2 * 2 * 2 + 2
    assert {n.split(".")[-4] for n in names if ".critic." in n} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("fails", [False, True])
def test_switching_restores_flags_and_adapter_even_when_a_step_fails(fails):
    trainer = trainer_with("adapter")
    body = next(iter(trainer.team.workers.values())).body
    trainer.model.base_model.set_adapter(["default"])
    frozen = next(p for n, p in trainer.model.named_parameters() if ".default." in n)
    frozen.requires_grad_(False)  # a policy weight its owner froze stays frozen
    before = flags(trainer.model)
    try:
        with body.active():
            inside = flags(trainer.model)
            assert trainer.model.active_adapters == ["critic"]
            assert all(flag == (".critic." in name) for name, flag in inside.items())
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert flags(trainer.model) == before and trainer.model.active_adapters == ["default"]


def test_the_adapter_s_features_are_its_own():
    trainer = trainer_with("adapter")
    body = next(iter(trainer.team.workers.values())).body
    batch = rows()
    with torch.no_grad():
        for p in body.parameters().values():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        policy = backbone_of(trainer.model)(
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            attention_mask=torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
        ).last_hidden_state[:, 2:]
        with body.active():
            own = body.hidden(batch)
        again = body.hidden(batch)  # outside: the policy's
    assert own.shape == policy.shape == (4, 6, 32)
    assert torch.equal(again, policy) and float((own - policy).abs().max()) > 0.01


def test_a_state_does_not_see_what_comes_after_it():
    trainer = trainer_with("model")
    body = next(iter(trainer.team.workers.values())).body
    batch, other = rows(), rows()
    other["completion_ids"][:, 2:] = 7
    with torch.no_grad():
        a, b = body.hidden(batch), body.hidden(other)
    # column t is the state before token t: 0, 1 and 2 do not depend on tokens 2 and later
    assert torch.equal(a[:, :3], b[:, :3]) and not torch.equal(a[:, 3:], b[:, 3:])


def test_rows_are_cut_behind_the_longest():
    part = take(rows(), torch.tensor([1]))
    assert part["completion_ids"].shape == (1, 2) and part["prompt_ids"].shape == (1, 3)
    assert take(rows(), torch.tensor([0, 1]))["completion_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]


def test_auto_is_the_adapter_with_peft_and_a_model_without():
    for peft, kind in ((True, "adapter"), (False, "model")):
        [worker] = trainer_with("auto", peft=peft).team.workers.values()
        assert worker.body.kind == kind


def test_a_model_of_its_own_begins_as_the_policy_and_is_another():
    trainer = trainer_with("model")
    body = next(iter(trainer.team.workers.values())).body
    own, policy = dict(body.model.named_parameters()), dict(trainer.model.base_model.named_parameters())
    assert own.keys() == policy.keys()
    assert all(torch.equal(own[n], policy[n]) and own[n] is not policy[n] for n in own)


def test_a_policy_with_an_adapter_may_have_a_critic_of_its_own():
    trainer = trainer_with("model", peft=True)
    body = next(iter(trainer.team.workers.values())).body
    assert not any("lora" in n for n in body.parameters()) and all(p.requires_grad for p in body.parameters().values())
    plain = toy.model().base_model.state_dict()
    assert all(torch.equal(plain[n], p) for n, p in body.model.state_dict().items())


def test_the_order_of_mini_batches_depends_on_the_seed_and_the_place():
    drawn = []
    for seed in (1, 2):
        [worker] = trainer_with("trunk", seed=seed).team.workers.values()
        drawn.append(torch.randperm(50, generator=worker.rng).tolist())
    assert drawn[0] != drawn[1]


def test_wrong_bodies_say_what_to_set():
    with pytest.raises(VariantError, match="peft_config=LoraConfig.*or set body: model"):
        trainer_with("adapter", peft=False)
    with pytest.raises(VariantError, match="no linear layer named 'nope'.*q_proj"):
        trainer_with("adapter", critic={"targets": "nope"})


def test_all_linear_targets_are_those_of_the_base():
    trainer = trainer_with("adapter", critic={"targets": "all-linear"})
    [worker] = trainer.team.workers.values()
    found = {n.split(".lora_")[0].split(".")[-1] for n in worker.body.parameters()}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
