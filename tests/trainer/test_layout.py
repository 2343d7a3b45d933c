"""Layouts against one unpadded row at a time through the plain model: log-probs, entropy and their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from trl_variants import VariantGRPOTrainer
from trl_variants.trainer.batching import single
from trl_variants.trainer.forward import _clusters, _gathered, _probe, depends_on_length
from trl_variants.trainer.layout import Rows, compact, padded

from . import toy

TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def trainer():
    return toy.build(VariantGRPOTrainer, variant="dapo", temperature=0.7)


def row_by_row(trainer, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) log-probs and entropies of the completions, from the full logits of each row alone."""
    logps, entropy = torch.zeros(rows.shape), torch.zeros(rows.shape)
    for i in range(rows.shape[0]):
        prompt = rows.prompt_ids[i][rows.prompt_mask[i] > 0]
        completion = rows.completion_ids[i][rows.completion_mask[i] > 0]
        logits = trainer.model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0] / trainer.temperature
        log_p = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        for t, token in enumerate(completion):
            logps[i, t] = log_p[t, token]
            entropy[i, t] = -(log_p[t].exp() * log_p[t]).sum()
    return logps, entropy


RECTANGLES = {
    "a row a line": [[(i,)] for i in (3, 0, 2, 1, 4)],
    "two lines": [[(0,), (3,)], [(4,), (1,), (2,)]],
    "one line": [single(range(5))],
    "shared prompts": [[(0, 1)], [(2,)], [(4, 3)]],
    "shared prompts on one line": [[(2, 1, 0), (3, 4)]],
}


@pytest.mark.parametrize("name", RECTANGLES)
def test_a_layout_equals_each_row_alone(name, trainer):
    rows = _probe(len(toy.CHARACTERS) + 2, torch.device("cpu"))
    weights = torch.randn(2, *rows.shape, generator=torch.Generator().manual_seed(1))
    parameters = list(trainer.model.parameters())
    results = []
    layout = compact(rows, RECTANGLES[name], toy.PAD)
    output = _gathered(rows, [layout], [trainer.run_layout(trainer.model, layout, False)], (), False)
    for logps, entropy in ((output.logps, output.entropy), row_by_row(trainer, rows)):
        gradients = torch.autograd.grad((weights * torch.stack([logps, entropy])).sum(), parameters)
        results.append((logps, entropy, torch.cat([g.flatten() for g in gradients])))
    for mine, wanted in zip(*results, strict=True):
        assert toy.apart(mine.detach(), wanted.detach()) < TOLERANCE


def test_a_shared_prompt_is_processed_once():
    rows = _probe(20, torch.device("cpu"))
    apart = compact(rows, [single(range(5))], 0)
    joined = compact(rows, [_clusters(rows.lengths)], 0)
    completions = sum(rows.lengths.completion)
    assert apart.useful == 3 * 9 + 2 * 5 + completions
    assert joined.useful == 9 + 5 + completions


@pytest.mark.parametrize("trim", [False, True])
def test_trl_s_own_padding_scores_the_completions(trim, trainer):
    rows = _probe(len(toy.CHARACTERS) + 2, torch.device("cpu"))
    layout = padded(rows, trim)
    assert layout.input_ids.shape[1] == (9 + 8 if trim else 11 + 9)
    with torch.no_grad():
        output, hidden = trainer.run_layout(trainer.model, layout, False)
        wanted, _ = row_by_row(trainer, rows)
    assert hidden.shape == (int(rows.completion_mask.sum()), 32)
    assert toy.apart(layout.spread(output.log_probs.flatten(), rows.shape), wanted) < TOLERANCE


def test_only_completions_reach_the_head(trainer):
    """Also where TRL projects every position (no Triton), in passes with and without gradient."""
    rows, seen = _probe(len(toy.CHARACTERS) + 2, torch.device("cpu")), []
    batch = {name: getattr(rows, name) for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}
    stock = torch.mm

    def spy(a, b, **kwargs):
        seen.append(a.shape[0])
        return stock(a, b, **kwargs)

    torch.mm = spy
    try:
        with torch.no_grad():
            trainer.logps_and_entropy(trainer.model, batch)
    finally:
        torch.mm = stock
    assert seen and max(seen) == int(rows.completion_mask.sum())


def test_irregular_masks_keep_trl_s_padding():
    rows = _probe(20, torch.device("cpu"))
    assert rows.regular
    rows.completion_mask[0, 2] = 0
    assert not Rows(rows.prompt_ids, rows.prompt_mask, rows.completion_ids, rows.completion_mask).regular


# --- what a model can -----------------------------------------------------------------------------


def test_a_model_with_absolute_positions_keeps_trl_s_padding():
    shape = dict(vocab_size=2 + len(toy.CHARACTERS), n_positions=64, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    shape.update(eos_token_id=toy.EOS, pad_token_id=toy.PAD, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    gpt2 = GPT2LMHeadModel(GPT2Config(**shape))
    gpt2.config._name_or_path = "gpt2"
    for p in gpt2.parameters():
        p.data *= 10
    given = dict(variant="dapo", model_given=copy.deepcopy(gpt2))
    with pytest.warns(UserWarning, match="log-probs of GPT2LMHeadModel change with padding moved"):
        runs = [toy.train(VariantGRPOTrainer, **given)]
    runs.append(toy.train(VariantGRPOTrainer, **{**given, "model_given": gpt2}, plan_updates=False))
    can = runs[0].trainer.forward.abilities
    assert not (can.trim or can.pack or can.share)
    for a, b in zip(runs[0].gradients, runs[1].gradients, strict=True):
        assert toy.apart(a, b) < 5e-6


def test_rows_that_see_each_other_on_a_line_are_kept_apart():
    """A layer that carries a running sum over a line, padding apart: moving padding is harmless, a neighbour is not."""
    model, seen = toy.model(), []

    def leak(module, args, output):
        hidden = output * (seen[-1] != toy.PAD).unsqueeze(-1)
        return output + 0.1 * (hidden.cumsum(1) - hidden)

    trainer = toy.build(VariantGRPOTrainer, variant="dapo", model_given=model)
    can = trainer.forward.abilities
    assert can.trim and can.pack and can.share
    trainer.forward._abilities.clear()
    model.model.register_forward_pre_hook(lambda m, a, given: seen.append(given["input_ids"]), with_kwargs=True)
    model.model.layers[0].register_forward_hook(leak)
    with pytest.warns(UserWarning, match="Qwen3ForCausalLM change with rows packed and a shared prompt"):
        can = trainer.forward.abilities
    assert can.trim and not can.pack and not can.share


def test_no_variant_named_only_trims():
    can = toy.build(VariantGRPOTrainer).forward.abilities
    assert can.trim and not can.pack and not can.share


def test_the_settings_switch_layouts_off():
    can = toy.build(VariantGRPOTrainer, variant="dapo", packing="none").forward.abilities
    assert can.trim and not can.pack and can.share
    can = toy.build(VariantGRPOTrainer, variant="dapo", shared_prompt="none").forward.abilities
    assert can.trim and can.pack and not can.share


def test_rotary_frequencies_that_depend_on_the_length():
    config = toy.model().config
    assert not depends_on_length(config)
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert depends_on_length(config)
