"""Teachers that do not fit the policy: refused or corrected before anything is generated, each in one line."""

from __future__ import annotations

import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.teachers.asked import by_hand, encode, question, teacher_of
from tests.trainer import toy
from trl_variants import VariantError
from trl_variants.divergence import Divergence, divergence
from trl_variants.teachers.compat import compare, ends_of

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def talk(end: str) -> str:
    """A chat template that writes `end` after each message."""
    return "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"


def tokenizer(tokens=None, eos="<eos>", template=None):
    tokens = ["<pad>", "<eos>", *toy.CHARACTERS] if tokens is None else tokens
    raw = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<pad>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token=eos, padding_side="left")
    made.chat_template = template
    return made


def saved(folder, made=None, *, vocabulary: int | None = None, eos: int = toy.EOS) -> str:
    """A teacher's folder; without a tokenizer where none is given."""
    config = toy._KINDS["llama"][1]()
    config.vocab_size = vocabulary or config.vocab_size
    config.eos_token_id = eos
    torch.manual_seed(11)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    if made is not None:
        made.save_pretrained(folder)
    return str(folder)


def notes_of(path, **given) -> tuple:
    """(trainer, what it warned about the teacher)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = toy.build(variant="grpo", teacher={"model": {"path": path, **given.pop("model", {})}}, **given)
    return trainer, [str(w.message) for w in caught if str(w.message).startswith("teacher ")]


def test_a_teacher_that_fits_is_used_without_a_word(tmp_path):
    assert notes_of(saved(tmp_path, tokenizer()))[1] == []


def test_the_same_tokens_under_other_ids_are_refused(tmp_path):
    shifted = tokenizer(["<pad>", "<eos>", *reversed(toy.CHARACTERS)])
    with pytest.raises(VariantError, match=r"reads 'The answer is .*must have the policy's tokenizer"):
        toy.build(variant="grpo", teacher=saved(tmp_path, shifted))


def test_one_token_that_moved_is_found_in_the_vocabulary(tmp_path):
    """The probes encode alike when the moved tokens are in none of them; the vocabularies still differ."""
    policy = tokenizer(["<pad>", "<eos>", *toy.CHARACTERS, "Q", "Z"])
    moved = tokenizer(["<pad>", "<eos>", *toy.CHARACTERS, "Z", "Q"])
    with pytest.raises(VariantError, match=r"token '[QZ]' is 2[34] for the policy and 2[34] for teacher t \(2 tokens"):
        compare(policy, moved, "t", policy_ends={1}, teacher_ends={1})


def test_a_teacher_that_splits_texts_otherwise_is_refused(tmp_path):
    class Pairs:
        def encode(self, text, add_special_tokens=False):
            return encode(text)[::2]

    with pytest.raises(VariantError, match="as the tokens .* and the policy as"):
        compare(tokenizer(), Pairs(), "t", policy_ends={1})


def test_a_folder_without_a_tokenizer_is_used_with_a_note(tmp_path):
    _, notes = notes_of(saved(tmp_path))
    [note] = notes
    assert "it has no tokenizer files, so its tokens were not compared" in note


def test_another_end_token_is_silence_at_that_position(tmp_path):
    """The policy ends with <eos>, a base teacher with 'j': what it thinks of <eos> would be a false penalty."""
    path = saved(tmp_path, tokenizer(eos="j"), eos=encode("j")[0])
    trainer, [note] = notes_of(path)
    assert "the policy ends with '<eos>' and it with 'j': it says nothing about the policy's end tokens" in note
    asked = question()
    answer = teacher_of(trainer).answer(asked)
    ids, live = asked.batch["completion_ids"], asked.batch["completion_mask"] > 0
    assert torch.equal(answer.said[live] == 0, (ids == toy.EOS)[live]) and (ids == toy.EOS)[live].sum() == 3
    hand = by_hand(LlamaForCausalLM.from_pretrained(path).eval(), asked)[0]
    said = live & (answer.said > 0)
    torch.testing.assert_close(answer.logps[said], hand[said], **CLOSE)


def test_one_shared_end_token_of_several_is_no_difference():
    """An instruct policy ends with two tokens, its base teacher with one of them: only the other is silent."""
    fit = compare(tokenizer(), tokenizer(), "t", policy_ends={1, 5}, teacher_ends={1})
    assert fit.silent == {5}
    assert compare(tokenizer(), tokenizer(), "t", policy_ends={1}, teacher_ends={1, 5}).silent == frozenset()
    assert "does not say which tokens end" in compare(tokenizer(), tokenizer(), "t", policy_ends={1}).notes[0]


def test_ends_are_read_from_every_place(tmp_path):
    made = tokenizer(eos="j")
    path = saved(tmp_path, made, eos=5)
    assert ends_of(path, made) == {5, encode("j")[0]}
    assert ends_of(None, None) == set()


def test_tokens_the_teacher_lacks_are_silence(tmp_path):
    short = [c for c in toy.CHARACTERS if c != "7"]
    # the same ids without "7": its place is held by another token
    tokens = ["<pad>", "<eos>", *(c if c in short else "<hole>" for c in toy.CHARACTERS)]
    fit = compare(
        tokenizer(["<pad>", "<eos>", *toy.CHARACTERS, "<own>"]),
        tokenizer(["<pad>", "<eos>", *toy.CHARACTERS]),
        "t",
        policy_ends={1},
        teacher_ends={1},
    )
    assert fit.silent == {2 + len(toy.CHARACTERS)} and "such as '<own>'" in fit.notes[0]
    with pytest.raises(VariantError, match="as the tokens"):  # a probe holds "7"
        compare(tokenizer(), tokenizer(tokens), "t", policy_ends={1})


@pytest.mark.parametrize("size", [23 + 9, 23 - 2])
def test_another_number_of_embeddings_is_cut_to_the_common_ones(tmp_path, size):
    """23 tokens in the policy: 9 rows of padding more or the last 2 tokens (' ' and 'j') less in the teacher."""
    path = saved(tmp_path, vocabulary=size)
    trainer, [note] = notes_of(path)
    assert f"it has {size} embeddings and the policy 23: divergences compare the first {min(size, 23)}" in note
    rows = [("a1", "2j3"), ("bc2", "d4e"), ("j", "0"), ("ef34", "77ab")]
    asked = question(rows, distribution=True)
    answer = teacher_of(trainer).answer(asked)
    live = asked.batch["completion_mask"] > 0
    unknown = torch.zeros_like(live)
    if size < 23:  # from the unknown token on, and all of a row whose prompt has one
        unknown[0, 1:], unknown[2] = True, True
    assert torch.equal((answer.said == 0)[live], unknown[live])
    model = LlamaForCausalLM.from_pretrained(path).eval()
    hand, whole = by_hand(model, question([("bc2", "d4e"), ("ef34", "77ab")]))
    assert answer.logps.shape[1] == hand.shape[1]
    for row, other in ((1, 0), (3, 1)):
        length = len(rows[row][1])
        torch.testing.assert_close(answer.logps[row][:length], hand[other][:length], **CLOSE)
    # the divergence of common entries, normalised over them on both sides
    student = torch.randn(int(live[3].sum()), 23, generator=torch.Generator().manual_seed(1), requires_grad=True)
    common = min(size, 23)
    other = teacher_of(trainer).head(answer.hidden[3][live[3]])
    found = divergence(student, other, Divergence("rkl"))
    p, q = student[:, :common].log_softmax(-1), other[:, :common].log_softmax(-1)
    torch.testing.assert_close(found, (p.exp() * (p - q)).sum(-1))
    assert (found > 0).all()


def test_the_exact_divergence_trains_with_a_padded_teacher(tmp_path):
    from tests.teachers.test_exact import PullTogether  # noqa: F401  (registers the hook)

    path = saved(tmp_path, tokenizer(), vocabulary=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = toy.train(variant="dapo", hooks={"regularizers": [{"test_pull_together": {}}]}, teacher=path, max_steps=2)
    assert all(torch.isfinite(g).all() and g.norm() > 0 for g in out.gradients)
    assert all(0 < x < 50 for x in out.logged("divergence/rkl/teacher") if x is not None)


def test_another_chat_template_is_said_or_used(tmp_path):
    policy, other = tokenizer(template=talk("j")), tokenizer(template=talk("h"))
    path = saved(tmp_path, other)
    talks = [[{"role": "user", "content": p}] for p in toy.PROMPTS]
    given = dict(
        data=toy.dataset().remove_columns("prompt").add_column("prompt", talks),
        trainer_arguments={"processing_class": policy},
    )
    _, [note] = notes_of(path, **given)
    assert (
        "its chat template differs: conversations reach it in the policy's, or in its own with `template: own`" in note
    )
    trainer, _ = notes_of(path, model={"template": "own"}, **given)
    asked = question()
    for row in asked.rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    answer = teacher_of(trainer).answer(asked)
    hand = question([(p + "h", c) for p, c in (("a1", "23"), ("bc2", "d4e"), ("d", "0"), ("ef34", "77ab"))])
    live = hand.batch["completion_mask"] > 0
    model = LlamaForCausalLM.from_pretrained(path).eval()
    torch.testing.assert_close(answer.logps[live], by_hand(model, hand)[0][live], **CLOSE)


def test_a_template_of_its_own_must_be_there(tmp_path):
    with pytest.raises(VariantError, match="has no chat template of its own"):
        notes_of(saved(tmp_path, tokenizer()), model={"template": "own"})
    policy = tokenizer(template=talk("j"))
    _, [note] = notes_of(saved(tmp_path, tokenizer()), trainer_arguments={"processing_class": policy})
    assert "it has no chat template: conversations reach it in the policy's" in note
