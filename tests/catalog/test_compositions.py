"""Random compositions of every registered hook: any ratio with any clip, any advantage with any credit.

A composition that `check` has no error about must give a finite loss with a finite, non-zero gradient that does not
depend on the split, and must survive YAML; one that it refuses must be refused in words. Nothing is skipped otherwise.
Hooks registered later join by themselves.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import yaml

from tests.batches import (
    assert_close,
    build,
    by_coefficients,
    by_parts,
    gradient,
    inputs,
    leaves_of,
    random_parts,
)
from tests.catalog import test_battery as battery
from trl_variants import Variant, VariantError, check, variant
from trl_variants.hooks import base
from trl_variants.hooks.base import NEEDS, hook_class, hook_names, instantiate, to_spec

SEED, COUNT = 7, 200
LOSS_SEAMS = ("rewards", "select", "advantage", "credit", "ratio", "clip", "weight", "aggregate", "regularizers")
MOST = {"rewards": 1, "select": 1, "credit": 2, "weight": 2, "regularizers": 2}  # hooks at once, where a seam has many


def mirrored(given: dict) -> dict:
    """The same window with good and bad exchanged: where one has a negative loss, the other's is likely positive."""
    return given | {"rewards": 1 - given["rewards"], "correct": ~given["correct"]}


# some rules have no gradient on some windows (a floored loss, a filter that leaves one kind of answer): on all is a bug
_SEEDED = [inputs(seed, groups=(4, 3, 1, 3, 2, 4)) for seed in range(SEED, SEED + 6)]
WINDOWS = [w for given in _SEEDED for w in (given, mirrored(given))]
# needs of which `check` says, with a configuration, that the trainer has no such thing; a window of tensors has none
ABSENT = frozenset({"extra_rollouts"})


def examples(seam: str) -> dict[str, list]:
    """Hooks of a seam by name: with default parameters where it has them, and as entries and cases set them."""
    out: dict[str, list] = {}
    for name in hook_names(seam):
        cls = hook_class(seam, name)
        if not cls.__module__.startswith("trl_variants."):
            continue
        try:
            out[name] = [instantiate(seam, name)]
        except VariantError:
            out[name] = []
    for v in battery.CASES.values():
        for path, h in v.hooks():
            if path.partition(".")[0] == seam and h.hook_name in out:
                if to_spec(h) not in [to_spec(other) for other in out[h.hook_name]]:
                    out[h.hook_name].append(h)
    return out


POOLS = {seam: examples(seam) for seam in LOSS_SEAMS}


def within_reach(h) -> bool:
    return not set(h.needs) & ABSENT


class Deck:
    """Names of a seam in random order, dealt again and again, so that every hook is drawn equally often."""

    def __init__(self, seam: str, rng: random.Random):
        self.hooks = {n: [h for h in hs if within_reach(h)] for n, hs in POOLS[seam].items()}
        self.hooks = {n: hs for n, hs in self.hooks.items() if hs}
        self.rng, self.left = rng, []

    def draw(self):
        if not self.left:
            self.left = sorted(self.hooks)
            self.rng.shuffle(self.left)
        return self.rng.choice(self.hooks[self.left.pop()])


def compositions(seed: int = SEED, count: int = COUNT) -> list[Variant]:
    rng = random.Random(seed)
    decks = {seam: Deck(seam, rng) for seam in LOSS_SEAMS}
    out = []
    for i in range(count):
        seams = {}
        for seam, deck in decks.items():
            if seam in MOST:
                several = [deck.draw() for _ in range(rng.randint(0, MOST[seam])) if deck.hooks]
                seams[seam] = list({h.hook_name: h for h in several}.values())
            else:
                seams[seam] = deck.draw()
        out.append(Variant(name=f"composition {i}", **seams))
    return out


def with_all_hooks(drawn: list[Variant]) -> list[Variant]:
    """More compositions for hooks that only refused ones have, such as a clip for token ratios alone."""
    rng, out = random.Random(SEED), list(drawn)
    for seam, pool in POOLS.items():
        for name, hooks in pool.items():
            mine = [h for h in hooks if within_reach(h)]
            tries = [rng.choice(drawn) for _ in range(30 if mine else 0)]
            for like in tries:
                if any(h.hook_name == name for v in out if not errors(v) for h in _at(v, seam)):
                    break
                h = rng.choice(mine)
                out.append(like.with_(**{seam: [h] if seam in MOST else h}, name=f"composition {len(out)}"))
    return out


def _at(v: Variant, seam: str) -> tuple:
    here = getattr(v, seam)
    return here if seam in MOST else (here,)


def label(v: Variant) -> str:
    return " ".join(h.hook_name for _, h in v.hooks())


def errors(v: Variant) -> list:
    return [f for f in check(v) if f.level == "error"]


COMPOSED = with_all_hooks(compositions())
REFUSED = [v for v in COMPOSED if errors(v)]
ACCEPTED = [v for v in COMPOSED if not errors(v)]


def names(vs: list[Variant]) -> list[str]:
    return [f"{v.name.split()[1]}: {label(v)}" for v in vs]


@pytest.mark.parametrize("v", ACCEPTED, ids=names(ACCEPTED))
def test_an_accepted_composition_trains(v):
    states, explained = battery.states(v), True
    for given in WINDOWS:
        batch = build(given)
        loss = v.loss(batch, states)
        grads = gradient(loss.loss, leaves_of(batch))
        assert torch.isfinite(loss.loss) and all(torch.isfinite(g).all() for g in grads.values())
        moves = bool(grads["logps"].abs().max() > 1e-9)
        # a floored loss that a bonus keeps below zero has no gradient by its definition
        floored = hasattr(v.aggregate, "bound") and float(sum(loss.terms.values()).detach()) < 0
        # neither has a loss whose advantages are 0 and whose only terms are silent, such as an entropy controller
        unrewarded = v.advantage.hook_name == "none" and not any(h.adds for h in v.credit)
        explained = explained and (floored or unrewarded)
        if moves:
            break
    assert moves or explained, "no gradient on any window, and check says nothing"
    total, c = by_coefficients(v, given, states)
    assert_close(total, loss.loss, "loss by coefficients")
    assert_close(c, grads, "gradient by coefficients")
    if v.scope == "local":
        for count in (2, 5):
            total, parts = by_parts(v, given, random_parts(len(given["mask"]), count, count), states)
            if battery.depends_on_the_split(v):
                assert torch.isfinite(total)
            else:
                assert_close(total, loss.loss, f"loss over {count} parts")
                assert_close(parts, grads, f"gradient over {count} parts", atol=1e-10)
    text = yaml.safe_dump(v.to_mapping())
    assert variant(yaml.safe_load(text)) == v


@pytest.mark.parametrize("v", REFUSED, ids=names(REFUSED))
def test_a_refused_composition_is_refused_in_words(v):
    for finding in errors(v):
        assert finding.hint, f"says what is wrong and not what to do: {finding}"
        named = {h.hook_name for _, h in v.hooks()} | {"weight hook", "span"}
        assert any(word in finding.message for word in named), finding
    many = dict.fromkeys(MOST, ()) | {"regularizers": ["kl"]}  # advantage none learns from a term alone
    assert not errors(v.with_(**many, ratio="token", clip="ppo", aggregate="token_mean")), "no single hook is refused"


def test_most_compositions_are_accepted_and_every_hook_is_in_one():
    assert len(COMPOSED) >= COUNT and len(REFUSED) < 0.4 * len(COMPOSED)
    drawn = {(path.partition(".")[0], h.hook_name) for v in ACCEPTED for path, h in v.hooks()}
    missing = [
        f"{seam} {name}"
        for seam, pool in POOLS.items()
        for name, hooks in pool.items()
        if (seam, name) not in drawn and any(within_reach(h) for h in hooks)
    ]
    assert not missing, "no accepted composition has them: a pair that check refuses too broadly, or too few draws"
    assert not [f"{seam} {n}" for seam, pool in POOLS.items() for n, hs in pool.items() if not hs], "no example of it"


def test_every_ratio_meets_every_kind_of_clip_somewhere():
    pairs = {(v.ratio.hook_name, v.clip.hook_name) for v in COMPOSED}
    assert len(pairs) > min(COUNT, len(POOLS["ratio"]) * len(POOLS["clip"])) / 2


def asks_a_teacher(h) -> bool:
    return "teacher_logps" in h.needs or any(d.anchor == "teacher" for d in h.divergences)


def test_hooks_that_lack_a_critic_or_a_teacher_are_refused_by_check():
    config = SimpleNamespace(
        use_vllm=False,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=4,
        generation_batch_size=4,
        per_device_train_batch_size=4,
        router_aux_loss_coef=0.0,
    )
    assert ABSENT <= NEEDS
    base, asked = variant("grpo"), []
    for seam, pool in POOLS.items():
        for h in [h for hooks in pool.values() for h in hooks if asks_a_teacher(h) or not within_reach(h)]:
            one = base.with_(**{seam: [h] if seam in MOST else h})
            found = lambda v: [f for f in check(v, config) if f.level == "error" and base.name in f.message]  # noqa: E731
            assert found(one), h
            if asks_a_teacher(h):
                asked.append(h.hook_name)
                assert not [f for f in found(one.with_(teacher="base")) if "teacher" in f.message], h
    assert {"teacher_kl", "teacher_mixture", "teacher_advantage", "self_conditioned"} <= set(asked)


def test_the_same_seed_gives_the_same_compositions():
    assert compositions(count=5) == compositions(count=5) == COMPOSED[:5]


def test_a_hook_that_is_registered_later_joins(monkeypatch):
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))

    def newcomer(log_ratio, advantage, batch):
        return log_ratio.exp() * advantage

    newcomer.__module__ = "trl_variants.hooks.newcomer"
    base.hook("clip", "newcomer")(newcomer)
    assert [h.hook_name for h in examples("clip")["newcomer"]] == ["newcomer"]
