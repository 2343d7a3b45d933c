"""A teacher behind HTTP, against a stand-in with vLLM's routes and JSON (tests/vllm asks the real one)."""

from __future__ import annotations

import dataclasses
import socket

import pytest
import torch

from tests.teachers.asked import ROWS, by_hand, keep_generations, question, teacher_of
from tests.teachers.stub import Stub
from tests.trainer import toy
from tests.trainer.forked import run_forked
from trl_variants import VariantError, http_json
from trl_variants.divergence import Divergence, divergence, divergence_topk
from trl_variants.teachers import server as module
from trl_variants.teachers.server import read_prompt_logprobs

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http_json, "LONGEST_WAIT", 0.02)


def stub(**changes) -> Stub:
    return Stub(toy.model("llama").eval(), toy.tokenizer(), **changes)


def built(url: str, **parameters):
    return toy.build(variant="grpo", teacher={"server": {"url": url, "timeout": 5.0, **parameters}})


def patient(number: int, path: str):
    """Nothing wrong while the run begins: the first requests ask for the models and encode the probes."""
    return None


# --- values -----------------------------------------------------------------------------------------------------------


def test_log_probs_are_the_models_own():
    with stub() as server:
        trainer = built(server.url)
        asked = question()
        answer = teacher_of(trainer).answer(asked)
        live = asked.batch["completion_mask"] > 0
        torch.testing.assert_close(answer.logps[live], by_hand(server.model, asked)[0][live], **CLOSE)
        assert answer.topk is None and (answer.said[live] == 1).all()
        # one request a row: ids without padding, one token, no top entries, nothing added in front
        bodies = sorted(server.bodies, key=lambda body: len(body["prompt"]))
        assert len(bodies) == len(ROWS)
        assert all(
            (b["max_tokens"], b["prompt_logprobs"], b["temperature"], b["add_special_tokens"]) == (1, 0, 1.0, False)
            for b in bodies
        )
        assert [len(b["prompt"]) for b in bodies] == [3, 5, 7, 8]  # "d"+"0"+end, "a1"+"23"+end, ..., no end


def test_top_entries_give_the_divergence_that_the_whole_distribution_gives():
    spec = Divergence("fkl", top_k=3)
    with stub() as server:
        trainer = built(server.url, top_k=3)
        teacher_of(trainer).require((spec,))
        asked = question(distribution=True)
        answer = teacher_of(trainer).answer(asked)
        whole = by_hand(server.model, asked)[1]
    live = asked.batch["completion_mask"] > 0
    ids, logps = answer.topk
    assert ids.shape == (*live.shape, 3)
    best = whole[live].topk(3)
    assert torch.equal(ids[live], best.indices)
    torch.testing.assert_close(logps[live], best.values, **CLOSE)
    student = torch.randn(int(live.sum()), whole.shape[-1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        divergence_topk(student, ids[live], logps[live], spec), divergence(student, whole[live], spec), **CLOSE
    )


def test_the_token_itself_is_not_one_of_the_top_entries_when_it_is_not():
    """k=2, the token 7 has rank 5: vLLM returns three entries, of which the last two are the top."""
    entries = {"7": (-4.0, 5), "1": (-0.5, 1), "2": (-1.5, 2)}
    place = {i: {"logprob": lp, "rank": r, "decoded_token": ""} for i, (lp, r) in entries.items()}
    own, ids, logps = read_prompt_logprobs({"choices": [{"prompt_logprobs": [None, place]}]}, [7], 2, 9, "u")
    assert own.tolist() == [-4.0] and ids.tolist() == [[1, 2]] and logps.tolist() == [[-0.5, -1.5]]


def test_padding_of_the_teachers_embeddings_is_no_entry():
    """Vocabulary 2: entry 5 is padding, so of k=2 one entry remains and the other is -1, which counts for nothing."""
    place = {str(i): {"logprob": lp} for i, lp in ((1, -0.1), (5, -3.0))}
    _, ids, logps = read_prompt_logprobs({"choices": [{"prompt_logprobs": [None, place]}]}, [1], 2, 2, "u")
    assert ids.tolist() == [[1, -1]]
    student = torch.tensor([[0.3, 0.7]], dtype=torch.float64, requires_grad=True)
    for spec in (Divergence("fkl", top_k=2), Divergence("rkl", top_k=2), Divergence("jsd", top_k=2)):
        alone = dataclasses.replace(spec, top_k=1)
        both = divergence_topk(student, ids, logps.double(), spec)
        one = divergence_topk(student, ids[:, :1], logps[:, :1].double(), alone)
        torch.testing.assert_close(both, one)
        (gradient,) = torch.autograd.grad(both.sum(), student, retain_graph=True)
        assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0


@pytest.mark.parametrize(
    "reply, why",
    [
        ({"choices": [{"text": "x"}]}, "without prompt_logprobs"),
        ({"choices": [{"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}]}, "other tokens"),
        ({"choices": [{"prompt_logprobs": [{"4": {"logprob": -1.0}}]}]}, "other tokens"),
        ({"choices": [{"prompt_logprobs": [None]}]}, "other tokens"),
        ({}, "without prompt_logprobs"),
    ],
)
def test_another_kind_of_reply_is_named(reply, why):
    with pytest.raises(VariantError, match=f"http://u .*{why}"):
        read_prompt_logprobs(reply, [4], 0, 9, "http://u")


def test_a_run_learns_from_it():
    seen: list[dict] = []
    with stub() as server:
        out = toy.train(
            variant="dapo", teacher={"server": {"url": server.url}}, max_steps=3, patch=keep_generations(seen)
        )
        local = toy.train(variant="dapo", teacher={"model": {"path": toy.model_path("llama")}}, max_steps=3)
    assert out.logged("teacher/kl") == pytest.approx(local.logged("teacher/kl"), abs=1e-5)
    assert seen[0]["teacher_mask"].sum() == seen[0]["completion_mask"].sum() > 0


# --- refusals before anything is generated ----------------------------------------------------------------------------


def test_another_temperature_is_refused():
    with stub() as server, pytest.raises(VariantError, match="ignore temperature and the run samples at 0.7"):
        toy.build(variant="grpo", teacher={"server": {"url": server.url}}, temperature=0.7)


def test_divergences_that_need_more_than_its_top_entries_are_refused():
    with stub() as server:
        teacher = teacher_of(built(server.url, top_k=5))
        teacher.require((Divergence("fkl", top_k=5),))
        for spec in (Divergence("rkl"), Divergence("fkl", top_k=6), Divergence("fkl", top_k=3, support="student")):
            with pytest.raises(VariantError, match="its own top 5: set server.top_k"):
                teacher.require((spec,))


def test_an_unknown_model_and_a_missing_key_are_named(monkeypatch):
    with stub(key="secret") as server:
        with pytest.raises(VariantError, match=r"HTTP 401: Unauthorized\): set server.api_key_env"):
            built(server.url)
        with pytest.raises(VariantError, match="TEACHER_KEY, which is not set"):
            built(server.url, api_key_env="TEACHER_KEY")
        monkeypatch.setenv("TEACHER_KEY", "secret")
        with pytest.raises(VariantError, match="no model 'big': set server.model to one of tiny"):
            built(server.url, api_key_env="TEACHER_KEY", model="big")
        built(server.url + "/v1/", api_key_env="TEACHER_KEY", model="tiny")


def test_more_entries_than_the_server_allows_is_its_own_words_and_what_to_do():
    with stub() as server:
        trainer = built(server.url, top_k=21)
        with pytest.raises(
            VariantError, match="greater than max allowed: 20.*larger --max-logprobs, or lower server.top_k"
        ):
            teacher_of(trainer).answer(question(distribution=True))


def test_rows_with_images_are_refused():
    with stub() as server:
        teacher, asked = teacher_of(built(server.url)), question()
        asked.batch["pixel_values"] = torch.zeros(4, 3, 2, 2)
        with pytest.raises(VariantError, match="token ids, which hold no images"):
            teacher.answer(asked)
        assert not server.bodies


def test_a_url_without_a_scheme_is_refused():
    with pytest.raises(VariantError, match="server.url must begin with http"):
        module.ServerTeacher(url="localhost:8000")


def test_another_tokenizer_is_found_out_by_asking():
    class Shifted:
        def encode(self, text, add_special_tokens):
            return [i + 1 for i in toy.tokenizer().encode(text, add_special_tokens=add_special_tokens)]

    with (
        Stub(toy.model("llama"), Shifted()) as server,
        pytest.raises(VariantError, match="must have the policy's tokenizer"),
    ):
        built(server.url)


def test_a_server_that_does_not_encode_is_used_with_a_note():
    with stub(tokenizes=False) as server, pytest.warns(UserWarning, match="were not compared: name server.tokenizer"):
        built(server.url)


def test_a_named_tokenizer_is_compared_and_must_be_there(tmp_path):
    with stub() as server:
        built(server.url, tokenizer=toy.model_path("llama"))
        with pytest.raises(VariantError, match="holds no tokenizer"):
            built(server.url, tokenizer=str(tmp_path))


# --- a network that is not perfect ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [503, 429, "drop", "half"])
def test_what_passes_is_tried_again(fault):
    """Every second request fails; the answers are as if none had."""
    faults = {"on": False}

    def every_second(number, path):
        return fault if faults["on"] and number % 2 else None

    with stub(fault=every_second) as server:
        trainer = built(server.url, retries=20)
        faults["on"] = True
        asked = question()
        answer = teacher_of(trainer).answer(asked)
        live = asked.batch["completion_mask"] > 0
        torch.testing.assert_close(answer.logps[live], by_hand(server.model, asked)[0][live], **CLOSE)
        assert len(server.bodies) >= len(ROWS)


def test_a_silent_server_times_out():
    slow = {"on": False}
    with stub(fault=lambda number, path: 1.0 if slow["on"] else None) as server:
        trainer = built(server.url, timeout=0.1, retries=1)
        slow["on"] = True
        with pytest.raises(VariantError, match=rf"teacher server {server.url} does not answer \(.*timed out; 2 tries"):
            teacher_of(trainer).answer(question())


def test_a_dead_server_is_one_error_that_names_the_url():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{s.getsockname()[1]}"
    with pytest.raises(VariantError, match=rf"teacher server {url} does not answer \(.*refused.*3 tries.*start it"):
        built(url, retries=2)


def test_a_refused_row_ends_the_others_tries():
    """Row one is refused for good while the others meet a busy server: nobody waits for their tries to run out."""

    def fault(number, path):
        return None if path != "/v1/completions" else 404 if number == first["number"] else 503

    first = {"number": -1}
    with stub(fault=fault) as server:
        trainer = built(server.url, retries=200)
        first["number"] = server.requests
        with pytest.raises(VariantError, match="HTTP 404"):
            teacher_of(trainer).answer(question())
        assert server.requests < first["number"] + 200


def test_no_more_requests_are_under_way_than_allowed():
    with stub(pause=0.02) as server:
        trainer = built(server.url, in_flight=3)
        asked = question([("a1", "23")] * 24)
        server.most = 0
        teacher_of(trainer).answer(asked)
        assert server.most <= 3 and len(server.bodies) == 24
        trainer = built(server.url, in_flight=12)
        server.most = 0
        teacher_of(trainer).answer(asked)
        assert server.most > 3


# --- a server that dies in the run ------------------------------------------------------------------------------------


def dying_run(rank: int = 0, url: str = "", stop_at: int = 1) -> dict:
    """Trains until the teacher fails; what the policy looks like then, and after the last whole step."""
    whole: list = []

    def patch(trainer):
        moved = trainer.policy_moved

        def note():
            moved()
            whole.append([p.detach().clone() for p in trainer.model.parameters()])

        trainer.policy_moved = note
        whole.append([p.detach().clone() for p in trainer.model.parameters()])
        kept.append(trainer)

    kept: list = []
    error = None
    try:
        toy.train(
            variant="dapo",
            teacher={"server": {"url": url, "retries": 1}},
            max_steps=6,
            num_iterations=1,
            gradient_accumulation_steps=2,
            steps_per_generation=2,
            patch=patch,
        )
    except VariantError as raised:
        error = str(raised)
    trainer = kept[0]
    same = all(torch.equal(a, b) for a, b in zip(whole[-1], trainer.model.parameters(), strict=True))
    clean = all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    moved = any(not torch.equal(a, b) for a, b in zip(whole[0], whole[-1], strict=True))
    return {"error": error, "steps": trainer.state.global_step, "same": same, "clean": clean, "moved": moved}


def dies_after(rows: int):
    """Completions are answered until so many rows were, then never again."""
    seen = {"rows": 0}

    def fault(number, path):
        if path == "/v1/completions":
            seen["rows"] += 1
        return "drop" if seen["rows"] > rows else None

    return fault


def test_the_step_is_not_half_applied():
    """8 rows a generation, one generation a step: the server dies inside the third, after two steps were made."""
    with stub(fault=dies_after(20)) as server:
        found = dying_run(url=server.url)
    assert "does not answer" in found["error"] and server.url in found["error"]
    assert found["steps"] == 2 and found["same"] and found["clean"] and found["moved"]


def test_all_processes_stop_together():
    with stub(fault=dies_after(40)) as server:
        url = server.url
        first, second = run_forked(lambda rank: dying_run(rank, url), ranks=2)
    for found in (first, second):
        assert "does not answer" in found["error"] and found["steps"] == 2
        assert found["same"] and found["clean"] and found["moved"]
