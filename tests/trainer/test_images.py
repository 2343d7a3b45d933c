"""Image inputs pass through: a tiny LLaVA built offline, the same gradients as TRL's trainer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.trainer.toy import _SHAPE, CHARACTERS, PROMPTS, Outcome, apart, digits, train, train_trl

VOCABULARY = {c: i for i, c in enumerate(["<pad>", "<eos>", *CHARACTERS, "<image>"])}
TEMPLATE = """\
{%- for m in messages %}
{%- if m['content'] is string %}{{ m['content'] }}
{%- else %}{%- for c in m['content'] %}{{ '<image>' if c['type'] == 'image' else c['text'] }}{%- endfor %}
{%- endif %}
{%- endfor %}"""


@functools.cache
def processor() -> LlavaProcessor:
    raw = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = dict(pad_token="<pad>", eos_token="<eos>", padding_side="left")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    small = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    vision = CLIPVisionConfig(**small, image_size=16, patch_size=8, projection_dim=16)
    text = LlamaConfig(**{**_SHAPE, "vocab_size": len(VOCABULARY)})
    token = VOCABULARY["<image>"]
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=token, vision_feature_layer=-1)
    )


def pictured(seed: int = 0) -> Dataset:
    g = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 255, (len(PROMPTS), 16, 16, 3), generator=g, dtype=torch.uint8).numpy()
    prompts = [[{"role": "user", "content": p}] for p in PROMPTS]
    return Dataset.from_dict({"prompt": prompts, "image": [Image.fromarray(p) for p in pixels]})


def digits_said(completions: list, **_: Any) -> list[float]:
    return digits([c[0]["content"] for c in completions])


def on_images(run: Any = train, seed: int = 0, **settings: Any) -> Outcome:
    return run(
        model_given=llava(),
        data=pictured(seed),
        rewards=digits_said,
        trainer_arguments={"processing_class": processor()},
        dtype=torch.float64,
        **settings,
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss_type": "bnpo", "entropy_coef": 0.1, "gradient_accumulation_steps": 3}],
    ids=["direct", "parts of generations"],
)
def test_parity_with_images(settings):
    theirs, ours = on_images(train_trl, **settings), on_images(**settings)
    assert len(ours.gradients) == len(theirs.gradients) >= 4
    assert max(apart(a, b) for a, b in zip(ours.gradients, theirs.gradients, strict=True)) <= 1e-5
    assert apart(ours.change, theirs.change) <= 1e-5
    assert apart(on_images(seed=1, **settings).gradients[0], ours.gradients[0]) > 1e-3  # the pictures matter


@pytest.mark.parametrize("hooks", [None, {"weight": [{"entropy_quantile": {"keep": 0.5}}]}], ids=["local", "window"])
def test_a_named_method_trains_on_images(hooks):
    run = on_images(variant="dapo", hooks=hooks, self_test=True, max_steps=4)
    assert run.trainer.variant.scope == ("local" if hooks is None else "window")
    assert all(bool(g.any()) and bool(torch.isfinite(g).all()) for g in run.gradients)
