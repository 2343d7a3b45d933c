"""benchmarks/{methods,teachers}.py: their tables on made-up results, what they run and resume, and short runs."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import Future

import pytest
import torch

from benchmarks import learning, methods, teachers
from benchmarks.claims import CLAIMS, CONTROLS, Claim, arm, judge
from benchmarks.table import markdown, read, rows
from benchmarks.teachers_arms import Arm, Experiment
from trl_variants import VariantError, variant, variants

SETTINGS = learning.Settings()
FACTS = dataclasses.asdict(SETTINGS)
KEPT = ("clip-higher", "clip-higher:symmetric")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def result(accuracy=0.8, entropy=0.2, clipped: float | None = 0.02):
    page = dict(sampled=0.5, pass_n=0.9, length=25.0, wrong_length=24.0, truncated=0.0, drift=0.1)
    return {
        "start": {**page, "accuracy": 0.35, "entropy": 0.34},
        "end": {**page, "accuracy": accuracy, "entropy": entropy},
        "run": {"clipped": clipped, "ess": 0.9, "grad_norm": 0.3, "no_right_signal": 0.0},
        "seconds": 0.2,
        "scope": "local",
    }


def line(name, seed, settings=SETTINGS, **what):
    return {"key": settings.key(arm(name), seed), "method": name, "seed": seed, "wall": 1.0, **what}


def keys(names, seeds=3):
    return {job: SETTINGS.key(arm(job[0]), job[1]) for job in methods.jobs(list(names), seeds, True)}


def runs_of(ours, theirs):
    page = lambda values: {s: result(entropy=e) for s, e in enumerate(values)}  # noqa: E731
    return {"clip-higher": page(ours), "clip-higher:symmetric": page(theirs)}


# --- claims -----------------------------------------------------------------------------------------------------

ENTROPY = Claim("clip-higher", "clip-higher:symmetric", "entropy", ">", "keeps entropy")


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict", "agree"),
    [
        ((0.3, 0.3, 0.3), (0.2, 0.2, 0.2), "yes", 3),
        ((0.3, 0.3, 0.1), (0.2, 0.2, 0.2), "unclear", 2),
        ((0.1, 0.1, 0.25), (0.2, 0.2, 0.2), "no", 1),
        ((0.2, 0.2, 0.2), (0.2, 0.2, 0.2), "no", 0),
        # seeds are compared in pairs: the ranges overlap, every pair agrees
        ((0.21, 0.31, 0.41), (0.2, 0.3, 0.4), "yes", 3),
    ],
)
def test_verdicts(ours, theirs, verdict, agree):
    found = judge(ENTROPY, runs_of(ours, theirs))
    assert (found["verdict"], found["agree"], found["seeds"]) == (verdict, agree, 3)
    assert found["difference"] == pytest.approx(sum(ours) / 3 - sum(theirs) / 3)
    fewer = judge(dataclasses.replace(ENTROPY, direction="<"), runs_of(theirs, ours))
    assert fewer["agree"] == agree


def test_a_claim_needs_a_common_seed_and_a_value():
    assert judge(ENTROPY, {"clip-higher": {0: result()}}) is None
    assert judge(ENTROPY, {"clip-higher": {0: result()}, "clip-higher:symmetric": {1: result()}}) is None
    clips = dataclasses.replace(ENTROPY, measure="clipped")
    assert judge(clips, {"clip-higher": {0: result(clipped=None)}, "clip-higher:symmetric": {0: result()}}) is None
    nan = {"clip-higher": {0: result(entropy=float("nan"))}, "clip-higher:symmetric": {0: result()}}
    assert judge(ENTROPY, nan) is None


def test_claims_can_be_checked():
    for name in {c.method for c in CLAIMS} | {c.against for c in CLAIMS if c.against not in CONTROLS}:
        assert variant(name).name == name
    for name in CONTROLS:
        assert arm(name) != variant(CONTROLS[name][0])
    for bad in ({"measure": "speed"}, {"direction": "="}):
        with pytest.raises(ValueError, match="claim on clip-higher"):
            dataclasses.replace(ENTROPY, **bad)


# --- the table --------------------------------------------------------------------------------------------------


def test_table_of_a_results_file(tmp_path):
    path = tmp_path / "results.jsonl"
    lines = [line("clip-higher", s, result=result(entropy=0.3 + s / 100)) for s in range(3)]
    lines += [line("clip-higher:symmetric", s, result=result(accuracy=0.3 + s / 10, entropy=0.2)) for s in range(3)]
    lines += [line("clip-higher", "cost", result={"ratio": 1.08, "low": 1.06, "high": 1.1})]
    path.write_text("".join(json.dumps(x) + "\n" for x in lines) + '{"key": "cut off')
    table = rows(KEPT, keys(KEPT), read(path))
    dapo, control = table
    assert (dapo["seeds"], dapo["kind"], dapo["learns"], control["kind"]) == (3, "part", "yes", "control")
    assert control["learns"] == "some seeds"  # starts at 0.35 and ends at 0.3, 0.4, 0.5
    assert dapo["end"]["entropy"] == pytest.approx({"mean": 0.31, "low": 0.3, "high": 0.32})
    assert [c["verdict"] for c in dapo["claims"]] == ["yes"]
    text = markdown(table, FACTS, missing=4)
    cells = next(x for x in text.splitlines() if x.startswith("| clip-higher |")).split(" | ")
    assert cells[2:5] == ["0.35 → 0.80", "0.50 → 0.50", "0.340 → 0.310 ± 0.010"]
    assert "1.080 (1.060 to 1.100)" in cells
    assert "**yes**: entropy > clip-higher:symmetric, +0.11 [+0.1, +0.12], 3/3 seeds" in cells[-1]
    assert "Above the bound on cost: clip-higher." in text
    assert "Does not learn in every seed: clip-higher:symmetric." in text
    assert "4 runs are still to do" in text
    assert all(x.count("|") == text.splitlines()[4].count("|") for x in text.splitlines() if x.startswith("|"))


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"key": "cut off\n' + json.dumps(line("clip-higher", 0, result=result())) + "\n")
    with pytest.raises(json.JSONDecodeError):
        read(path)
    assert read(tmp_path / "none.jsonl") == []


def test_results_of_another_budget_do_not_count():
    other = dataclasses.replace(SETTINGS, steps=SETTINGS.steps + 1)
    [row] = rows(["clip-higher"], keys(["clip-higher"]), [line("clip-higher", 0, other, result=result())])
    assert row["seeds"] == 0 and row["learns"] is None
    assert SETTINGS.key(arm("clip-higher"), 0) != SETTINGS.key(arm("clip-higher:symmetric"), 0)
    assert len(set(keys(KEPT).values())) == len(keys(KEPT))


def test_a_failure_is_shown_until_the_run_succeeds():
    failed = line("clip-higher", 0, error="ValueError: no")
    [row] = rows(["clip-higher"], keys(["clip-higher"]), [failed])
    assert row["errors"] == ["ValueError: no"] and "`clip-higher` did not run: ValueError: no" in markdown([row], FACTS)
    [row] = rows(["clip-higher"], keys(["clip-higher"]), [failed, line("clip-higher", 0, result=result())])
    assert row["errors"] == [] and row["seeds"] == 1


# --- what is run ------------------------------------------------------------------------------------------------


def test_the_methods_come_from_the_catalog():
    names = methods.chosen(None)
    alone = {v.name for v in variants if v.about.kind in ("method", "part") and methods.alone(v)}
    assert alone <= set(names) and {"dapo", "cispo", "gtpo", "laser-d"} <= alone
    assert not {"kdrl", "luffy", "ppo", "sdpo", "rlsd"} & set(names), "they have benchmarks of their own"
    assert not {v.name for v in variants if v.about.kind in ("recipe", "note")} & set(names)
    assert methods.chosen("clip-higher,cispo") == [
        "clip-higher",
        "cispo",
        "clip-higher:symmetric",
    ]  # with what their claims need
    with pytest.raises(VariantError, match="unknown variant"):
        methods.chosen("dapoo")


def test_every_method_runs_once_before_any_runs_twice():
    order = list(methods.jobs(["a", "grpo:no-kl"], 2, with_cost=True))
    assert order == [("a", 0), ("grpo:no-kl", 0), ("a", "cost"), ("a", 1), ("grpo:no-kl", 1)]


class Inline:
    """A pool that works at once, here."""

    def __init__(self, *_):
        pass

    __enter__ = lambda self: self  # noqa: E731
    __exit__ = lambda self, *_: None  # noqa: E731

    def submit(self, function, *arguments):
        future: Future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """main() with made-up runs; returns (call, the jobs done so far, the folder)."""
    did: list = []

    def work(job, settings):
        did.append(job)
        if job == ("cispo", 1) and did.count(job) == 1:
            return line(*job, settings, error="RuntimeError: unlucky")
        cost = {"ratio": 1.0, "low": 0.9, "high": 1.1}
        return line(*job, settings, result=cost if job[1] == "cost" else result())

    monkeypatch.setattr(methods, "work", work)
    monkeypatch.setattr(methods, "ProcessPoolExecutor", Inline)
    return (lambda *more: methods.main(["--methods", "cispo", "--seeds", "2", "--out", str(tmp_path), *more])), did


def test_finished_runs_are_not_done_again(fake, tmp_path, capsys):
    call, did = fake
    assert call() == 0
    # cispo claims to learn faster than clip-higher
    assert sorted(did, key=str) == sorted([(n, s) for n in ("cispo", "clip-higher") for s in (0, 1, "cost")], key=str)
    did.clear()
    did.append(("cispo", 1))
    call()
    assert did == [("cispo", 1)] * 2  # only what failed
    did.clear()
    call()
    assert did == []
    call("--steps", "7")
    assert len(did) == 6  # another budget
    written = json.loads((tmp_path / "table.json").read_text())
    assert written["settings"]["steps"] == 7 and [r["method"] for r in written["rows"]] == ["cispo", "clip-higher"]
    assert (tmp_path / "table.md").read_text() in capsys.readouterr().out


def test_no_run_starts_when_the_time_is_up(fake, tmp_path):
    call, did = fake
    call("--minutes", "0")
    assert did == []
    assert json.loads((tmp_path / "table.json").read_text())["missing"] == 6


# --- the runs themselves ----------------------------------------------------------------------------------------

SHORT = dataclasses.replace(SETTINGS, steps=2, rows=16, greedy_problems=16, sampled_problems=4, cost_pairs=2)


def test_two_steps_of_a_method():
    done = methods.work(("ngrpo", 0), SHORT)
    assert "error" not in done, done
    assert done["key"] == SHORT.key(variant("ngrpo"), 0)
    found = done["result"]
    assert found["start"]["drift"] == pytest.approx(0.0, abs=1e-6)
    assert abs(found["end"]["drift"]) > 1e-6  # it moved
    for page in (found["start"], found["end"]):
        assert 0.0 <= page["accuracy"] <= 1.0 and 0.0 < page["entropy"] < 2.0 and 1.0 <= page["length"] <= 48.0
    assert found["run"]["no_right_signal"] > 0.1  # its point; GRPO's is 0
    assert found["seconds"] > 0 and found["scope"] == "local"
    json.dumps(done)
    [row] = rows(["ngrpo"], {("ngrpo", 0): done["key"]}, [done])
    assert row["seeds"] == 1 and "| ngrpo |" in markdown([row], dataclasses.asdict(SHORT))


def test_what_fails_is_a_result(monkeypatch):
    def train(*_):
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr(methods, "train", train)
    assert methods.work(("dapo", 0), SHORT)["error"] == "RuntimeError: first"


@pytest.mark.parametrize("name", ["dapo", "highent"])
def test_cost(name):
    found = methods.work((name, "cost"), SHORT)["result"]
    assert 0.1 < found["low"] <= found["ratio"] <= found["high"] < 10.0
    assert ("with_pass" in found) == (name == "highent")


@pytest.mark.parametrize("name", ["dapo", "grpo", "highent", "rloo"])
def test_the_plain_loss_has_equal_needs_and_scope(name):
    from trl_variants.trainer.scoring import scoring_needs

    like, beside = variant(name), learning.plain(variant(name))
    assert (beside.needs, beside.scope, scoring_needs(beside)) == (like.needs, like.scope, scoring_needs(like))
    assert learning.plain(like, scope="local").scope == "local"


# --- teachers.py --------------------------------------------------------------------------------------------------

FEW = dict(steps=4, rows=16, greedy_problems=8, sampled_problems=2, every=2)


def some_arm(*entries):
    """An experiment of these entries, two of which claim something of each other."""
    arms = tuple(Arm(e, e, {"rollouts": {"traces": {"column": "solution"}}} if e == "luffy" else {}) for e in entries)
    claim = Claim(entries[0], entries[-1], "steps_to", "<", "is sooner there")
    return Experiment("made up", arms, {**FEW, "split": "standard"}, (claim,))


def test_every_arm_is_a_variant_that_could_train():
    from trl_variants import check

    for name, experiment in teachers.EXPERIMENTS.items():
        labels = [arm.label for arm in experiment.arms]
        assert len(set(labels)) == len(labels)
        for one in experiment.arms:
            made = teachers.composed(one)
            assert not [f for f in check(made) if f.level == "error"], (name, one.label)
            assert teachers.budget(experiment, one).warm_up < teachers.budget(experiment, one).steps
        for claim in experiment.claims:
            assert {claim.method, claim.against} <= set(labels) and claim.method != claim.against
        # nothing but what the arms are about differs: the same problems, learning rate and length
        shared = [dataclasses.replace(teachers.budget(experiment, a), warm_up=0) for a in experiment.arms]
        assert all(s == shared[0] for s in shared)


@pytest.mark.parametrize(
    ("curve", "steps_to", "drop"),
    [
        ([[0, 0.3], [4, 0.5], [8, 0.7]], 8, 0.0),
        ([[0, 0.3], [4, 0.7], [8, 0.4]], 4, 0.3),
        ([[0, 0.5], [4, 0.2], [8, 0.4]], 60, 0.3),  # 56 steps and one reading more: not reached
        ([[0, 0.6]], 0, 0.0),
    ],
)
def test_facts_of_a_curve(curve, steps_to, drop):
    assert teachers.facts(curve, teachers.Budget()) == {"steps_to": steps_to, "drop": pytest.approx(drop)}


@pytest.mark.parametrize("entry", ["grpo", "kdrl", "luffy"])
def test_a_short_run_with_a_teacher(entry, monkeypatch):
    monkeypatch.setitem(teachers.EXPERIMENTS, "made up", some_arm(entry, "dapo"))
    line = teachers.work(("made up", entry, 0))
    assert "error" not in line, line
    found = line["result"]
    assert [step for step, _ in found["curve"]] == [0, 2, 4]
    assert (found["run"].get("teacher/kl") is not None) == (entry == "kdrl")
    assert (found["run"].get("traces/wrong") == 0.0) == (entry == "luffy")
    json.dumps(line)


def test_a_warm_up_comes_off_the_steps(monkeypatch):
    experiment = some_arm("dr-grpo", "dapo")
    arm = dataclasses.replace(experiment.arms[0], settings={"warm_up": 2})
    settings = teachers.budget(experiment, arm)
    moved = teachers.warmed_model(settings, 0).state_dict()
    shipped = learning.fresh_model().state_dict()
    assert moved.keys() == shipped.keys() and any((moved[k] != shipped[k]).any() for k in moved)
    found = teachers.one_run(teachers.composed(arm), 0, settings)
    assert [step for step, _ in found["curve"]] == [0, 2, 4]


def test_table_of_teachers(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(teachers.EXPERIMENTS, "made up", some_arm("kdrl", "dapo"))
    did = []

    def work(job, steps=None):
        did.append(job)
        found = result(accuracy=0.8 if job[1] == "kdrl" else 0.5)
        found["run"] |= {"steps_to": 2 if job[1] == "kdrl" else 6, "drop": 0.1, "teacher/kl": 0.2}
        return {"key": teachers.key_of(job, steps), "method": job[1], "seed": job[2], "wall": 1.0, "result": found}

    monkeypatch.setattr(teachers, "work", work)
    monkeypatch.setattr(methods, "ProcessPoolExecutor", Inline)
    call = lambda: teachers.main(["--experiments", "made up", "--seeds", "2", "--out", str(tmp_path)])  # noqa: E731
    assert call() == 0 and sorted(did) == [("made up", a, s) for a in ("dapo", "kdrl") for s in (0, 1)]
    text = (tmp_path / "table.md").read_text()
    assert "| kdrl | 2 | 0.35 | 0.80 |" in text and "6 (2 not)" in text
    assert "**yes**: kdrl: is sooner there (steps_to < dapo: -4 [-4, -4], 2/2 seeds)" in text
    did.clear()
    assert call() == 0 and did == []  # nothing is done twice
    with pytest.raises(SystemExit):
        teachers.main(["--experiments", "no-such"])


def test_equal_arms_of_two_experiments_are_one_run(tmp_path, monkeypatch):
    for name in ("one", "two"):
        monkeypatch.setitem(teachers.EXPERIMENTS, name, some_arm("dapo", "kdrl"))
    did = []

    def work(job, steps=None):
        did.append(job)
        found = result()
        found["run"] |= {"steps_to": 2, "drop": 0.0}
        return {"key": teachers.key_of(job, steps), "method": job[1], "seed": job[2], "wall": 1.0, "result": found}

    monkeypatch.setattr(teachers, "work", work)
    monkeypatch.setattr(methods, "ProcessPoolExecutor", Inline)
    teachers.main(["--experiments", "one,two", "--seeds", "1", "--out", str(tmp_path)])
    assert [job[1] for job in did] == ["dapo", "kdrl"]
    tables = json.loads((tmp_path / "table.json").read_text())["experiments"]
    assert [row["seeds"] for name in ("one", "two") for row in tables[name]] == [1, 1, 1, 1]


def test_the_shipped_model_never_solves_the_unsolved_split():
    found = teachers.never_solved(problems=4, samples=64)
    assert (found["right"], found["pass"]) == (0.0, 0.0)
    assert teachers.never_solved(problems=4, samples=64, split="standard")["right"] > 0


# ---------------------------------------------------------------- ppo.py and memory.py


def _run(task="arithmetic", arm="ppo", seed=0, **changes):
    facts = {"before": 0.4, "after": 0.9, "explained": 0.5, "explainable": 0.6, "seconds": 3.0}
    return {(task, arm, seed): {"task": task, "arm": arm, "seed": seed, **facts, **changes}}


def test_ppo_claims_are_judged_run_by_run():
    from benchmarks import ppo

    assert ppo.broken(_run() | _run(arm="grpo", explained=None, after=0.1) | _run(task="scratchpad", after=0.2)) == []
    assert ppo.broken(_run(after=0.79)) == ["ppo, seed 0: accuracy 0.40 -> 0.79"]
    assert ppo.broken(_run(before=0.51)) == ["ppo, seed 0: accuracy 0.51 -> 0.90"]
    assert ppo.broken(_run(explained=0.3)) == ["ppo, seed 0: explained variance 0.3"]


def test_ppo_table_shows_means_over_seeds():
    from benchmarks import ppo

    done = _run() | _run(seed=1, after=0.8, explained=0.3)
    table = ppo.markdown(done, ["arithmetic"], ["ppo", "vapo"], 2)
    samples = ppo.BUDGETS["arithmetic"].generations * ppo.BUDGETS["arithmetic"].rows
    assert table.splitlines()[-1] == f"| arithmetic | ppo | {samples} | 0.40 -> 0.85 ± 0.05 | 0.40 | 0.60 | 3 |"


class _Coin:
    """Model, tokenizer and task in one: answers of three tokens, one of them a coin that decides the reward."""

    eos_token_id, max_new_tokens = 9, 3

    def __init__(self, place: int):
        self.place, self.eval_dataset, self.reward_funcs = place, self, [self.reward]

    def eval(self):
        return self

    def select(self, _):
        return {"prompt": ["?"], "answer": ["1"]}

    def __call__(self, prompt, return_tensors):
        return {"input_ids": torch.zeros(1, 1, dtype=torch.long)}

    def generate(self, input_ids, num_return_sequences, **_):
        ids = torch.zeros(num_return_sequences, 4, dtype=torch.long)
        ids[::2, 1 + self.place] = 1
        return ids

    def batch_decode(self, ids, skip_special_tokens):
        return [str(row[self.place]) for row in ids.tolist()]

    def reward(self, prompts, completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]


@pytest.mark.parametrize("place,known", [(0, 2 / 3), (1, 1 / 3), (2, 0.0)])
def test_what_a_critic_could_explain(place, known):
    """Of the three states before a token, those after the coin tell the reward."""
    from benchmarks import ppo

    coin = _Coin(place)
    assert ppo.explainable(coin, coin, coin, problems=1, samples=512) == pytest.approx(known, abs=0.005)


def test_memory_counts_tied_weights_once_and_what_a_critic_adds():
    from benchmarks import memory
    from tests.trainer import toy
    from trl_variants import VariantGRPOTrainer

    layer = torch.nn.Linear(3, 2)
    tied = torch.nn.ModuleList([layer, layer])
    assert memory.weights_of(tied) == 4 * (3 * 2 + 2)
    alone = memory.bytes_of(toy.train(VariantGRPOTrainer, variant="dapo", max_steps=1).trainer)
    hooks = {"advantage": "gae", "learners": [{"critic": {"body": "trunk"}}]}
    head = memory.bytes_of(toy.train(VariantGRPOTrainer, variant="dapo", hooks=hooks, max_steps=1).trainer)
    added = {kind: head[kind] - alone[kind] for kind in alone}
    # 32 weights and a bias in float32, as large a gradient, two moments each and Adam's two step counts
    assert added == {"weights": 4 * 33, "gradients": 4 * 33, "optimizer": 8 * 33 + 2 * 4}
