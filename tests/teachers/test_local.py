"""Teachers whose weights are in the process: what they answer, and that the policy comes back as it was."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer

from tests.teachers.asked import by_hand, keep_generations, question, teacher_of
from tests.trainer import toy
from trl_variants import VariantError, variant, variants
from trl_variants.teachers.weights import adapter, average_into, beginning, swapped

CLOSE = {"atol": 1e-5, "rtol": 1e-5}  # two ways of summing in fp32
PEFT = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}


def built(teacher, *, lora: bool = False, **changes):
    given = dict(PEFT) if lora else {}
    return toy.build(variant="grpo", teacher=teacher, trainer_arguments=given, **changes)


def other_model(kind: str = "llama", seed: int = 7, **config):
    torch.manual_seed(seed)
    cls, configuration = toy._KINDS[kind]
    shape = configuration()
    for name, value in config.items():
        setattr(shape, name, value)
    return cls(shape).float().eval()


def active_adapter(folder) -> str:
    """A trained-looking LoRA adapter on the toy, with dropout in its configuration."""
    torch.manual_seed(5)
    model = get_peft_model(
        toy.model(), LoraConfig(r=4, lora_dropout=0.4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data.normal_(0, 0.2)
    model.save_pretrained(str(folder))
    return str(folder)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_model_answers_what_its_own_softmax_says_at_the_runs_temperature(temperature):
    trainer = built({"model": {"path": toy.model_path("llama")}}, temperature=temperature)
    asked = question(distribution=True)
    answer = teacher_of(trainer).answer(asked)
    logps, whole = by_hand(toy._loaded("llama"), asked, temperature)
    live = asked.batch["completion_mask"] > 0
    torch.testing.assert_close(answer.logps[live], logps[live], **CLOSE)
    mine = teacher_of(trainer).head(answer.hidden).log_softmax(-1)
    torch.testing.assert_close(mine[live], whole[live], **CLOSE)


def test_the_same_model_at_the_same_temperature_is_no_teacher():
    """Atlas: logits (2,1,0), T 0.7 against 1 gives a false gap of (-0.147488, 0.281084, 0.709655); both must be 0."""
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    false = logits.log_softmax(0) - (logits / 0.7).log_softmax(0)
    torch.testing.assert_close(false, torch.tensor([-0.147488, 0.281084, 0.709655]).double(), atol=1e-6, rtol=0)
    out = toy.train(
        variant="grpo", teacher={"model": {"path": toy.model_path()}}, temperature=0.7, max_steps=1, learning_rate=0.0
    )
    assert out.logged("teacher/kl") == [0.0]


def test_an_instance_is_used_as_it_is():
    model = other_model()
    trainer = toy.build(variant="grpo", trainer_arguments={"teacher": model})
    asked = question()
    live = asked.batch["completion_mask"] > 0
    answer = teacher_of(trainer).answer(asked)
    torch.testing.assert_close(answer.logps[live], by_hand(model, asked)[0][live], **CLOSE)
    assert not any(p.requires_grad for p in model.parameters())


def test_an_instance_with_adapters_is_used_with_them(tmp_path):
    expert = PeftModel.from_pretrained(toy.model(), active_adapter(tmp_path)).eval()
    trainer = toy.build(variant="grpo", trainer_arguments={"teacher": expert})
    asked = question(distribution=True)
    live = asked.batch["completion_mask"] > 0
    answer = teacher_of(trainer).answer(asked)
    hand, whole = by_hand(_WithConfig(expert), asked)
    torch.testing.assert_close(answer.logps[live], hand[live], **CLOSE)
    mine = teacher_of(trainer).head(answer.hidden).log_softmax(-1)
    torch.testing.assert_close(mine[live], whole[live], **CLOSE)


def test_the_policys_own_instance_is_no_teacher():
    model = toy.model()
    with pytest.raises(VariantError, match="own model was given as its teacher: write teacher: base, or live"):
        toy.build(variant="grpo", model_given=model, trainer_arguments={"teacher": model})


def test_the_base_under_a_fresh_adapter_is_the_policy_to_the_bit():
    """Atlas, teacher-provider: B = 0 at step 0, so rt = 0 everywhere."""
    seen: list[dict] = []
    toy.train(variant="grpo", teacher="base", max_steps=1, trainer_arguments=PEFT, patch=keep_generations(seen))
    [generation] = seen
    assert generation["teacher_mask"].sum() == generation["completion_mask"].sum() > 0
    gap = generation["teacher_logps"] - generation["old_per_token_logps"]
    assert torch.equal(gap[generation["teacher_mask"] > 0], torch.zeros(int(generation["teacher_mask"].sum())))


def without_teacher(v):
    """The variant with every hook that reads a teacher taken out, or its host's in its place."""
    reads = lambda h: "teacher_logps" in h.needs  # noqa: E731
    host = variant(v.about.host)
    kept = {seam: [h for h in v.at(seam) if not reads(h)] for seam in ("rewards", "credit", "weight", "regularizers")}
    swaps = {seam: getattr(host, seam) for seam in ("advantage", "ratio", "clip") if reads(getattr(v, seam))}
    return v.with_(**kept, **swaps, teacher=None)


@pytest.mark.parametrize("name", ["rlad", "rlsd", "kdrl", "dgrpo", "opd-sampled-token", "tb-direct-interpolation"])
def test_step_zero_identities_of_the_atlas(name):
    """Where rt = 0 a teacher's operator is not there, a teacher's advantage is 0, and (1 - a) A + a rt is (1 - a) A."""
    if name not in {v.name for v in variants}:
        pytest.skip(f"{name} is not in the catalog")
    taught = toy.train(variant=name, teacher="base", max_steps=1, trainer_arguments=PEFT).gradients[0]
    if name == "opd-sampled-token":
        assert taught.norm() == 0.0
        return
    plain = toy.train(variant=without_teacher(variant(name)), max_steps=1, trainer_arguments=PEFT).gradients[0]
    share = 1 - variant(name).credit[0].a if name == "tb-direct-interpolation" else 1.0
    assert toy.apart(taught, share * plain) < 1e-5


def test_a_frozen_base_without_adapters_stays_where_the_policy_began():
    out = toy.train(variant="dapo", teacher="base", max_steps=3)
    asked = question()
    live = asked.batch["completion_mask"] > 0
    answer = teacher_of(out.trainer).answer(asked)
    torch.testing.assert_close(answer.logps[live], by_hand(toy.model(), asked)[0][live], **CLOSE)
    assert float(out.change.norm()) > 0


def test_live_is_the_policy_as_it_stands():
    out = toy.train(variant="dapo", teacher="live", max_steps=2)
    asked = question()
    live = asked.batch["completion_mask"] > 0
    now = teacher_of(out.trainer).answer(asked).logps
    torch.testing.assert_close(now[live], by_hand(out.trainer.model.eval(), asked)[0][live], **CLOSE)


def test_a_named_adapter_answers_without_its_dropout(tmp_path):
    path = active_adapter(tmp_path)
    trainer = built({"adapter": {"name": "expert", "path": path}}, lora=True)
    trainer.model.train()
    asked = question()
    first, second = (teacher_of(trainer).answer(asked).logps for _ in range(2))
    assert torch.equal(first, second)
    expert = PeftModel.from_pretrained(toy.model(), path).eval()
    live = asked.batch["completion_mask"] > 0
    hand = by_hand(_WithConfig(expert), asked)[0]
    torch.testing.assert_close(first[live], hand[live], **CLOSE)
    assert (first - by_hand(toy.model(), asked)[0])[live].abs().max() > 0.1  # and it is not the base


class _WithConfig(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, ids):
        return self.model(input_ids=ids)


def test_an_adapter_that_is_not_there_is_named():
    with pytest.raises(VariantError, match=r"adapters \['default'\] and none named 'expert': give its path"):
        built({"adapter": {"name": "expert"}}, lora=True)
    with pytest.raises(VariantError, match="needs a policy with PEFT"):
        built({"adapter": {"name": "expert"}})


# --- switching --------------------------------------------------------------------------------------------------------


def snapshot(model):
    weights = {n: (p.requires_grad, p.detach().clone(), p.data_ptr()) for n, p in model.named_parameters()}
    return weights, list(model.active_adapters), switches(model)


def switches(model):
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    return {n: (list(m.active_adapters), m.disable_adapters, m.merged) for n, m in layers.items()}


def assert_untouched(model, before):
    weights, active, layers = before
    for name, p in model.named_parameters():
        flag, value, place = weights[name]
        assert p.requires_grad == flag and p.data_ptr() == place and torch.equal(p, value), name
    assert model.active_adapters == active and model.active_adapter == active[0]
    assert layers and switches(model) == layers


@pytest.mark.parametrize("teacher", ["base", "adapter", "ema", "live"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_policy_comes_back_as_it_was_even_when_a_forward_raises(teacher, fails, tmp_path):
    spec = {"adapter": {"adapter": {"name": "expert", "path": active_adapter(tmp_path)}}}.get(teacher, teacher)
    trainer = built(spec, lora=True)
    model = trainer.unwrapped
    before = snapshot(model)

    def stumble(*_):
        raise RuntimeError("out of memory")

    handle = model.get_base_model().base_model.layers[1].register_forward_hook(stumble) if fails else None
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            teacher_of(trainer).answer(question())
        handle.remove()
    else:
        teacher_of(trainer).answer(question())
    assert_untouched(model, before)
    assert any(p.requires_grad for p in model.parameters())


def test_switches_by_themselves():
    model = get_peft_model(toy.model(), PEFT["peft_config"])
    model.add_adapter("other", PEFT["peft_config"])
    model.set_adapter("default")
    before = snapshot(model)
    with pytest.raises(KeyError), adapter(model, "other"):
        assert model.active_adapters == ["other"]
        raise KeyError
    assert_untouched(model, before)
    with pytest.raises(KeyError), adapter(model, None):
        raise KeyError
    assert_untouched(model, before)
    shadow = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(KeyError), swapped(model, shadow):
        assert all(not p.any() for n, p in model.named_parameters() if n in shadow)
        raise KeyError
    assert_untouched(model, before)


# --- averages ---------------------------------------------------------------------------------------------------------


def test_average_numbers_by_hand():
    """shadow 1, policy 3: rate 0.05 gives 0.95 * 1 + 0.05 * 3 = 1.1, then 0.95 * 1.1 + 0.15 = 1.195."""
    layer = torch.nn.Linear(1, 1, bias=False).double()
    layer.weight.data.fill_(1.0)
    shadow = beginning(layer, 0.05)
    layer.weight.data.fill_(3.0)
    average_into(shadow, layer, 0.05)
    assert float(shadow["weight"]) == pytest.approx(1.1, abs=1e-12)
    average_into(shadow, layer, 0.05)
    assert float(shadow["weight"]) == pytest.approx(1.195, abs=1e-12)


def test_factors_are_averaged_not_their_product():
    """Atlas: zero adapter, A=2, B=3 constant, rate 0.05, 20 steps: each factor reaches (1 - 0.95^20) of its value,
    so the product is 0.641514^2 * 6 = 2.469242; the average of the product would be 0.641514 * 6 = 3.849084."""
    a, b = torch.nn.Linear(1, 1, bias=False).double(), torch.nn.Linear(1, 1, bias=False).double()
    pair = torch.nn.ModuleList([a, b])
    for layer in pair:
        layer.weight.data.zero_()
    shadow = beginning(pair, 0.05)
    a.weight.data.fill_(2.0), b.weight.data.fill_(3.0)
    for _ in range(20):
        average_into(shadow, pair, 0.05)
    assert float(shadow["0.weight"] * shadow["1.weight"]) == pytest.approx(2.469242, abs=1e-6)


def test_an_average_of_bf16_weights_moves():
    """1 and 1.0078125 are neighbours in bf16: rate 0.01 would be rounded away for ever, in fp32 it gets there."""
    layer = torch.nn.Linear(1, 1, bias=False).bfloat16()
    layer.weight.data.fill_(1.0)
    shadow = beginning(layer, 0.01)
    layer.weight.data.fill_(1.0078125)
    for _ in range(200):
        average_into(shadow, layer, 0.01)
    assert float(shadow["weight"]) == pytest.approx(1 + 0.0078125 * (1 - 0.99**200), rel=1e-6)
    with swapped(layer, shadow):
        assert layer.weight.dtype == torch.bfloat16 and layer.weight.item() == 1.0078125  # the nearer one


@pytest.mark.parametrize("lora", [False, True])
def test_the_shadow_follows_the_policy_step_by_step(lora):
    """shadow <- 0.7 shadow + 0.3 policy every second step, recomputed here from the weights after each step."""
    after: list[dict] = []

    def patch(trainer):
        moved = trainer.policy_moved

        def note():
            moved()
            after.append({n: p.detach().clone() for n, p in trainer.unwrapped.named_parameters() if p.requires_grad})

        trainer.policy_moved = note
        after.append({n: p.detach().clone() for n, p in trainer.unwrapped.named_parameters() if p.requires_grad})

    out = toy.train(
        variant="dapo",
        teacher={"ema": {"rate": 0.3, "every": 2}},
        max_steps=5,
        patch=patch,
        trainer_arguments=PEFT if lora else {},
    )
    expected = after[0]
    for step in (2, 4):
        expected = {n: 0.7 * expected[n] + 0.3 * after[step][n] for n in expected}
    shadow = teacher_of(out.trainer).shadow
    assert shadow.keys() == expected.keys() and len(after) == 6
    for name in shadow:
        torch.testing.assert_close(shadow[name], expected[name], atol=1e-6, rtol=1e-6)
    assert any(not torch.equal(shadow[n], after[-1][n]) for n in shadow)


def test_a_snapshot_is_the_policy_of_the_last_renewal():
    after = []

    def patch(trainer):
        moved = trainer.policy_moved

        def note():
            moved()
            after.append(next(p for p in trainer.model.parameters() if p.requires_grad).detach().clone())

        trainer.policy_moved = note

    out = toy.train(variant="dapo", teacher={"ema": {"rate": 1.0, "every": 2}}, max_steps=5, patch=patch)
    first = next(iter(teacher_of(out.trainer).shadow.values()))
    assert torch.equal(first, after[3]) and not torch.equal(first, after[4])  # renewed after steps 2 and 4


def test_a_scheduled_rate_is_the_one_of_its_step():
    out = toy.train(variant="dapo", teacher={"ema": {"rate": {"schedule": {"start": 1.0, "end": 0.0}}}}, max_steps=1)
    shadow = teacher_of(out.trainer).shadow  # progress 1 after the only step: rate 0, nothing moved
    model = dict(toy.model().named_parameters())
    assert all(torch.equal(shadow[n], model[n]) for n in shadow)


# --- surroundings -----------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_changes_nothing():
    plain, saved = ([], [])
    for into, on in ((plain, False), (saved, True)):
        toy.train(
            variant="dapo",
            teacher="base",
            max_steps=2,
            gradient_checkpointing=on,
            trainer_arguments=PEFT,
            patch=keep_generations(into),
        )
    assert len(plain) == 1
    torch.testing.assert_close(saved[0]["teacher_logps"], plain[0]["teacher_logps"], atol=1e-6, rtol=0)


def test_a_teacher_in_4_bit_on_a_cpu():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    out = toy.train(variant="dapo", teacher={"model": {"path": toy.model_path(), "load_in_4bit": True}}, max_steps=2)
    model = teacher_of(out.trainer).model
    assert any(type(m).__name__ == "Linear4bit" for m in model.modules())
    rounded = toy.model().eval()  # the weights NF4 keeps, in a plain model
    with torch.no_grad():
        for name, layer in model.named_modules():
            if type(layer).__name__ == "Linear4bit":
                whole = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
                rounded.get_submodule(name).weight.copy_(whole)
    asked = question()
    live = asked.batch["completion_mask"] > 0
    answer = teacher_of(out.trainer).answer(asked).logps
    torch.testing.assert_close(answer[live], by_hand(rounded, asked)[0][live], atol=1e-4, rtol=1e-4)
    assert (answer - by_hand(toy.model(), asked)[0])[live].abs().max() > 0.01  # and NF4 is seen
    assert all(g.norm() > 0 for g in out.gradients)
