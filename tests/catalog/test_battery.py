"""One battery for every variant: slow reference, invariance, extremes, needs, YAML, text.

`ALL` holds the catalog, TRL's own settings as variants, and compositions that bring in the hooks no entry
uses. Tests named `test_the_battery_sees_*` break a hook on purpose and demand that the battery notices.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace

import pytest
import torch
import yaml
from torch import Tensor

from tests import loops, references
from tests.batches import (
    NAN,
    assert_close,
    build,
    by_coefficients,
    by_parts,
    gradient,
    inputs,
    leaves_of,
    padded,
    permuted,
    random_parts,
    run,
    split,
    with_empty_rows,
)
from trl_variants import Schedule, Variant, VariantError, check, diff, variant, variants
from trl_variants.hooks import aggregate, clip, ratio, regularizers, weight
from trl_variants.hooks.base import SEAMS, SINGLE, hook_class, hook_names
from trl_variants.objective import call, evaluate, with_advantages

COMPOSED = {
    "dapo + window entropy bonus": variant("dapo", regularizers=[{"entropy_bonus": {"coef": 0.1}}]),
    "dapo + top-entropy tokens": variant(
        "dapo",
        weight=[{"entropy_quantile": {"keep": 0.4}}],
        regularizers=[{"entropy_bonus": {"coef": 0.1}}, {"kl": {"coef": 0.1}}],
    ),
    "gmpo + top-entropy tokens": variant("gmpo", weight=[{"entropy_quantile": {"keep": 0.6}}]),
    "grpo + adaptive entropy": variant("grpo", regularizers=[{"adaptive_entropy": {"coef": 0.1, "target": 2.0}}]),
    "grpo + nll of correct rows": variant("grpo", regularizers=[{"nll": {"coef": 0.1}}]),
    "grpo + discount": variant("grpo", credit=[{"discount": {"gamma": 0.9}}]),
    "grpo, unclipped, live rows": variant("grpo", clip="none", aggregate={"sequence_mean": {"rows": "live"}}),
    "grpo, rollout anchor": variant("grpo", ratio={"token": {"anchor": "rollout"}}),
    "gspo, rollout anchor": variant("gspo", ratio={"sequence": {"anchor": "rollout"}}),
    "reinforce": variant("rloo", ratio="on_policy", clip="none", aggregate="sequence_sum", rewards=[]),
    "dapo per prompt, whitened": variant(
        "dapo",
        aggregate="prompt_mean",
        advantage={"token_whitened": {"center": "group", "gamma": 0.9, "ddof": 1, "shift_mean": False}},
    ),
    "dapo, truncated rows out, bounded rewards": variant(
        "dapo", select=["mask_truncated"], rewards=[{"clip_reward": {"low": 0.0, "high": 0.9}}]
    ),
    "grpo + live k1": variant("grpo", regularizers=[{"kl": {"coef": 0.1, "estimator": "k1", "weight": "live"}}]),
    "gspo + detached k2": variant(
        "gspo", regularizers=[{"kl": {"coef": 0.1, "estimator": "k2", "weight": "detached"}}]
    ),
    "gdpo": variant("grpo", advantage="normalize_each"),
    "rloo, normalised": variant("rloo", advantage={"leave_one_out": {"normalize": True}}),
    "batch scale, raw singletons": variant("grpo", advantage={"grouped": {"std": "batch", "singleton": "raw"}}),
    "cispo with a floor": variant("cispo", clip={"cispo": {"cap": 1.1, "floor": 0.9}}),
    "vespo + folded sampler": variant("vespo", clip={"gamma_weight": {"sampler": "token_mask", "sampler_max": 1.2}}),
    "two corrections of different kinds": variant(
        "dapo",
        weight=[
            {"off_policy_mask": {"threshold": 0.05}},
            {"sampler_correction": {"mode": "token_truncate", "max": 1.1}},
        ],
    ),
    "sequence mask": variant("dapo", weight=[{"sampler_correction": {"mode": "sequence_mask", "max": 1.3}}]),
}

TRL_SETTINGS = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "luspo": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon": 2e-3,
        "epsilon_high": 2.5e-3,
    },
    "luspo at token level": {"loss_type": "luspo"},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "kl without correction": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
    "kl with correction, sequence": {
        "loss_type": "grpo",
        "beta": 0.1,
        "importance_sampling_level": "sequence",
    },
    "batch scale, delta": {"loss_type": "dapo", "scale_rewards": "batch", "delta": 1.5},
    "gdpo": {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"},
    "opsm, truncated": {
        "loss_type": "dapo",
        "off_policy_mask_threshold": 0.05,
        "mask_truncated_completions": True,
    },
    "vllm": {"loss_type": "dapo", "use_vllm": True, "vllm_importance_sampling_clip_max": 1.3},
    "vllm token truncate": {
        "loss_type": "grpo",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.1,
        "vllm_importance_sampling_clip_min": 0.9,
    },
    "vespo, vllm": {
        "loss_type": "vespo",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
    },
}
PER_MICRO_BATCH = {
    "bnpo": {"loss_type": "bnpo"},
    "entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.1},
    "top entropy": {"loss_type": "dapo", "top_entropy_quantile": 0.4},
    "top entropy + bonus": {"loss_type": "grpo", "top_entropy_quantile": 0.4, "entropy_coef": 0.1},
    "adaptive entropy": {"loss_type": "grpo", "use_adaptive_entropy": True, "entropy_coef": 0.1},
}


def from_trl(settings: dict) -> Variant:
    from trl import GRPOConfig

    return Variant.from_config(GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **settings))


def depends_on_the_split(v: Variant) -> bool:
    return any(h.span == "micro-batch" for _, h in v.hooks())


CASES = (
    {v.name: v for v in variants}
    | COMPOSED
    | loops.collected("COMPOSED")
    | {f"trl {k}": from_trl(s) for k, s in TRL_SETTINGS.items()}
)
SPLIT = {k: v for k, v in CASES.items() if depends_on_the_split(v)}
SPLIT |= {f"trl {k}": from_trl(s) for k, s in PER_MICRO_BATCH.items()}
EXACT = {k: v for k, v in CASES.items() if k not in SPLIT}
ALL = EXACT | SPLIT
SEED = 3
GIVEN = inputs(SEED)

every = pytest.mark.parametrize("v", ALL.values(), ids=ALL)
exact = pytest.mark.parametrize("v", EXACT.values(), ids=EXACT)
split_dependent = pytest.mark.parametrize("v", SPLIT.values(), ids=SPLIT)
catalog = pytest.mark.parametrize("v", variants, ids=[v.name for v in variants])


def states(v: Variant) -> dict:
    """Memory in the middle of a run: an adaptive bonus that is switched on."""
    known = {"adaptive_entropy": {"coef": 0.07, "last_entropy": 0.1}} | loops.collected("STATES")
    return {path: known.get(h.hook_name, h.init()) for path, h in v.stateful.items()}


def of_whole(v: Variant, given=GIVEN, **changes):
    batch = build(given, **changes)
    loss = v.loss(batch, states(v))
    return loss, gradient(loss.loss, leaves_of(batch))


def assert_not_zero(grads: dict[str, Tensor]) -> None:
    assert max(float(g.abs().max()) for g in grads.values()) > 1e-4, "a zero gradient would make this test empty"


# ---------------------------------------------------------------- the slow reference


def assert_equals_reference(v: Variant, given=GIVEN) -> None:
    loss, grads = of_whole(v, given)
    batch = build(given)
    slow = references.loss(v, batch, states(v))
    assert_close(loss.loss, slow, "loss")
    assert_close(grads, gradient(slow, leaves_of(batch)), "gradient", atol=1e-10)
    assert_not_zero(grads)


@every
@pytest.mark.parametrize("seed", [SEED, 11])
def test_loss_and_gradient_equal_the_slow_reference(v, seed):
    assert_equals_reference(v, inputs(seed))


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "gspo", "luspo", "sapo", "gmpo", "two-sided-clip", "dual-clip"])
def test_gradient_equals_finite_differences(name):
    # these have no detached factor, so the loss may be differenced: (L(x+h) - L(x-h)) / 2h, error h^2 = 1e-10
    v, h = variant(name), 1e-5
    _, grads = of_whole(v)
    assert_not_zero(grads)
    rows, columns = (GIVEN["mask"] > 0).nonzero(as_tuple=True)
    for i, t in list(zip(rows.tolist(), columns.tolist(), strict=True))[::5]:
        value = []
        for sign in (1, -1):
            moved = GIVEN["logps"].clone()
            moved[i, t] += sign * h
            value.append(float(of_whole(v, GIVEN, logps=moved)[0].loss))
        assert (value[0] - value[1]) / (2 * h) == pytest.approx(float(grads["logps"][i, t]), abs=1e-7)


# ---------------------------------------------------------------- invariance


def partitions(rows: int) -> list[list[list[int]]]:
    return [[[i] for i in range(rows)], random_parts(rows, 2, 1), random_parts(rows, 5, 2)]


def assert_split_invariant(v: Variant) -> None:
    """The step's gradient is the sum over micro-batches, for every split, or by the window path."""
    loss, grads = of_whole(v)
    assert_not_zero(grads)
    if v.scope == "window":
        total, c = by_coefficients(v, GIVEN, states(v))
        assert_close(total, loss.loss, "loss by coefficients")
        assert_close(c, grads, "gradient by coefficients")
        return
    for parts in partitions(len(GIVEN["mask"])):
        total, accumulated = by_parts(v, GIVEN, parts, states(v))
        assert_close(total, loss.loss, f"loss over {len(parts)} parts")
        assert_close(accumulated, grads, f"gradient over {len(parts)} parts")


@exact
def test_gradient_does_not_depend_on_the_split(v):
    assert_split_invariant(v)


@split_dependent
def test_a_rule_of_the_micro_batch_does_depend_on_the_split(v):
    _, grads = of_whole(v)
    parts = random_parts(len(GIVEN["mask"]), 3, 4)
    total, accumulated = by_parts(v, GIVEN, parts, states(v))
    assert torch.isfinite(total) and all(torch.isfinite(g).all() for g in accumulated.values())
    difference = max(float((accumulated[n] - grads[n]).abs().max()) for n in grads)
    assert difference > 1e-4
    assert v.scope == "local"


@split_dependent
def test_a_rule_of_the_micro_batch_is_the_mean_over_micro_batches(v):
    # the slow reference on each part alone is the local rule; TRL divides it by the number of parts. Equal
    # parts, so that means over rows agree; a policy term over the window's tokens would not, and becomes a
    # row mean
    if not (v.aggregate.hook_name == "sequence_mean" or v.aggregate.span == "micro-batch"):
        v = v.with_(aggregate="sequence_mean")
    rows = len(GIVEN["mask"]) // 2 * 2
    order = torch.arange(rows)
    given = permuted(GIVEN, order)
    whole = build(given)
    filled = with_advantages(v, whole, states(v))
    parts = [[i for i in range(rows) if i % 2 == k] for k in range(2)]
    pieces = split(filled, parts)
    got = torch.stack([evaluate(v, p, states(v)).loss for p in pieces]).sum()
    slow = 0.0
    for piece, part in zip(pieces, parts, strict=True):
        # advantages are of the whole generation: hand them in, loop the rest
        table = filled.advantage.expand_as(filled.mask)[part].tolist()
        slow = slow + references.loss(v, piece, states(v), table) / 2
    assert_close(got, slow, "loss")
    assert_close(gradient(got, leaves_of(whole)), gradient(slow, leaves_of(whole)), "gradient")


@every
def test_direct_path_and_window_objective_give_the_same_gradient(v):
    loss, grads = of_whole(v)
    total, c = by_coefficients(v, GIVEN, states(v))
    assert_close(total, loss.loss, "loss")
    assert_close(c, grads, "gradient")
    assert_not_zero(grads)


@every
def test_order_of_rows_does_not_matter(v):
    loss, grads = of_whole(v)
    order = torch.randperm(len(GIVEN["mask"]), generator=torch.Generator().manual_seed(9))
    if {h.hook_name for _, h in v.hooks()} & loops.collected("BY_POSITION").keys():  # rows of a group keep their order
        for label in GIVEN["group"].unique():
            places = GIVEN["group"][order] == label
            order[places] = order[places].sort().values
    other, permuted_grads = of_whole(v, permuted(GIVEN, order))
    assert_close(other.loss, loss.loss, "loss")
    assert_close(permuted_grads, {n: g[order] for n, g in grads.items()}, "gradient")
    assert_not_zero(grads)


@every
@pytest.mark.parametrize("value", [0.0, -1e4])
def test_padding_on_both_sides_does_not_matter(v, value):
    loss, grads = of_whole(v)
    wide, g = of_whole(v, padded(GIVEN, 2, 3, value))
    assert_close(wide.loss, loss.loss, "loss")
    for name in grads:
        assert_close(g[name][:, 2:-3], grads[name], name)
        assert not g[name][:, :2].any() and not g[name][:, -3:].any(), "a masked column has no gradient"


@every
def test_values_at_masked_positions_do_not_matter(v):
    loss, grads = of_whole(v)
    outside = GIVEN["mask"] == 0
    dirty = dict(GIVEN)
    for k, name in enumerate(["logps", "old_logps", "ref_logps", "rollout_logps", "entropy", "teacher_logps"]):
        dirty[name] = GIVEN[name].masked_fill(outside, [-1e6, 3e5, -2e7, 1e9, 5e8, -4e7][k])
    dirty["divergences"] = {key: x.masked_fill(outside, 7e6) for key, x in GIVEN["divergences"].items()}
    other, g = of_whole(v, dirty)
    assert_close(other.loss, loss.loss, "loss")
    assert_close(g, grads, "gradient")
    for name in grads:
        assert not grads[name][outside].any(), "no gradient outside the mask"


@every
def test_the_sampler_s_nan_never_reaches_the_loss(v):
    # an engine reports NaN for tokens it could not score, anywhere: here for all of them
    silent = GIVEN | {"rollout_logps": torch.full_like(GIVEN["logps"], NAN)}
    loss, grads = of_whole(v, silent)
    assert torch.isfinite(loss.loss) and all(torch.isfinite(g).all() for g in grads.values())
    if "rollout_logps" not in v.needs and not any(h.hook_name == "off_policy_mask" for h in v.weight):
        assert_close(grads, of_whole(v)[1], "gradient")


# rows without tokens: a mean over rows counts them where its hook says so, nothing else may notice
@every
def test_empty_rows_count_only_where_rows_are_counted(v):
    loss, grads = of_whole(v)
    rows, extra = len(GIVEN["mask"]), 5
    other, g = of_whole(v, with_empty_rows(GIVEN, extra))
    share = {n: rows / (rows + extra) if _counts_rows(_aggregate_of(v, n)) else 1.0 for n in loss.terms}
    terms = {name: share[name] * float(x) for name, x in loss.terms.items()}
    assert {n: float(x) for n, x in other.terms.items()} == pytest.approx(terms, rel=1e-9, abs=1e-12)
    for name in grads:
        assert not g[name][rows:].any()
    if len(loss.terms) == 1:
        assert_close(g["logps"][:rows], grads["logps"] * share["policy"], "gradient")


def _counts_rows(h) -> bool:
    every_row = h.hook_name == "sequence_mean" and h.rows == "all"
    return every_row or h.hook_name in ("sequence_sum", "constant", "sequence_constant")


def _aggregate_of(v: Variant, term: str):
    if term == "policy":
        return v.aggregate
    path, h = next((p, h) for p, h in v.hooks() if p.startswith("regularizers.") and term in (p, h.hook_name))
    batch = with_advantages(v, build(GIVEN), states(v))
    batch = replace(batch, log_ratio=v.ratio(batch), clipped=batch.mask > 0)
    return call(h, batch, path=path, states=states(v)).aggregate or v.aggregate


# ---------------------------------------------------------------- extremes


@every
def test_equal_rewards_give_no_policy_gradient(v):
    equal = torch.full_like(GIVEN["rewards"], 0.5)
    plain = v.with_(regularizers=[], rewards=[], credit=[])
    loss, grads = of_whole(plain, GIVEN, rewards=equal, correct=torch.zeros_like(GIVEN["correct"]))
    if plain.advantage.hook_name == "token_whitened" and plain.advantage.gamma == 1.0:
        assert_close(loss.advantage, torch.zeros_like(loss.advantage), "advantage", atol=1e-7)
    elif plain.advantage.hook_name == "grouped" and plain.advantage.singleton == "raw":
        return  # a row alone keeps its reward by definition
    elif plain.advantage.hook_name in loops.collected("ABSOLUTE"):
        return  # compares with something else than the group's rewards
    else:
        assert not loss.advantage.any()
    assert_close(grads["logps"], torch.zeros_like(grads["logps"]), "gradient", atol=1e-7)


def of_rewards_alone(v: Variant) -> Variant:
    """Without what needs no reward: regularizers, and credit hooks that add a teacher's word to an advantage."""
    return v.with_(regularizers=[], credit=[h for h in v.credit if not h.adds])


@every
def test_a_group_of_one_and_an_unscorable_row_carry_no_signal(v):
    alone = permuted(GIVEN, torch.tensor([0]))
    for rewards in ([[1.0, 0.3]], [[NAN, NAN]]):
        given = alone | {
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "truncated": torch.tensor([False]),
        }
        loss, grads = of_whole(of_rewards_alone(v), given)
        assert torch.isfinite(loss.loss) and torch.isfinite(grads["logps"]).all()
        gives_signal = v.advantage.hook_name == "token_whitened" and v.advantage.center == "none"
        gives_signal |= v.advantage.hook_name == "token_whitened" and any(
            h.hook_name == "kl_in_reward" for h in v.rewards
        )
        gives_signal |= getattr(v.advantage, "singleton", "") == "raw"
        gives_signal |= v.advantage.hook_name in loops.collected("ABSOLUTE")
        if rewards[0][0] != rewards[0][0] or not gives_signal:
            assert_close(loss.advantage, torch.zeros_like(loss.advantage), "advantage", atol=1e-6)


@every
def test_all_rewards_missing_or_all_tokens_masked(v):
    loss, grads = of_whole(of_rewards_alone(v), GIVEN, rewards=torch.full_like(GIVEN["rewards"], NAN))
    assert float(loss.loss) == 0.0 and not grads["logps"].any()
    loss, grads = of_whole(v, GIVEN, mask=torch.zeros_like(GIVEN["mask"]))
    assert float(loss.loss) == 0.0 and not any(g.any() for g in grads.values())
    assert all(math.isfinite(x) for k, x in loss.metrics.items() if not k.endswith(("low_min", "high_max")))


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [50.0, -50.0, 1e4])
def test_enormous_log_ratios_stay_finite(v, size, dtype):
    far = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in GIVEN.items()}
    moved = far["mask"].clone()
    moved[:, 1::2] = 0  # half of the tokens, so that both kinds share a row
    far["divergences"] = {k: x.to(dtype) for k, x in GIVEN["divergences"].items()}
    for name in ("old_logps", "ref_logps", "rollout_logps", "teacher_logps"):
        loss, grads = of_whole(v, far | {name: far["logps"] - size * moved})
        assert torch.isfinite(loss.loss), name
        assert all(torch.isfinite(g).all() for g in grads.values()), name


# ---------------------------------------------------------------- what a variant says of itself


@every
def test_on_policy_is_old_logps_equal_to_the_current_ones(v):
    batch = GIVEN | {"old_logps": None}
    loss, grads = of_whole(v, batch)
    other, g = of_whole(v, GIVEN | {"old_logps": GIVEN["logps"].clone()})
    assert_close(loss.loss, other.loss, "loss")
    assert_close(grads, g, "gradient")
    if getattr(v.ratio, "anchor", "old") == "old" and v.ratio.hook_name not in loops.collected("NOT_ONE"):
        assert not loss.log_ratio.any() and not loss.clipped.any()
    assert_not_zero(grads)


TOLERATED = {
    "old_logps",
    "rollout_logps",
    "tokens",
    "extra_rollouts",
    "embeddings",
}  # on-policy, nothing to correct, the mask always exists, rows come sampled, and texts can be encoded on the spot


@every
def test_each_missing_need_is_a_named_error(v):
    beside = ("teacher", "learners")  # read by what they build, not by the loss
    asked = frozenset().union(*(h.needs for path, h in v.hooks() if not path.startswith(beside))) - TOLERATED
    if "distribution" in asked:
        with pytest.raises(VariantError, match="divergence"):
            of_whole(v, GIVEN | {"divergences": {}})
    for name in asked - {"distribution"}:
        with pytest.raises(VariantError, match=f"`{name}`"):
            of_whole(v, GIVEN | {name: None})
    known = ("ref_logps", "entropy", "truncated", "rollout_logps", "teacher_logps")
    needed = GIVEN | {n: None for n in known if n not in v.needs}
    needed |= {} if "distribution" in v.needs else {"divergences": {}}
    if not any(h.hook_name == "off_policy_mask" for h in v.weight):  # uses the sampler's where there are some
        assert_close(of_whole(v, needed)[0].loss, of_whole(v)[0].loss, "what no hook needs changes nothing")
    rollout_is_the_anchor = getattr(v.ratio, "anchor", "old") == "rollout"
    if rollout_is_the_anchor:
        with pytest.raises(VariantError, match="`rollout_logps`"):
            of_whole(v, GIVEN | {"rollout_logps": None})
    elif "rollout_logps" in v.needs:
        without = v.with_(weight=[w for w in v.weight if w.hook_name != "sampler_correction"])
        if v.clip.hook_name == "gamma_weight":
            without = without.with_(clip=clip.GammaWeight())
        bare = GIVEN | {"rollout_logps": None}
        assert_close(of_whole(v, bare)[0].loss, of_whole(without, bare)[0].loss, "no sampler, no correction")
        assert abs(float(of_whole(v)[0].loss - of_whole(v, bare)[0].loss)) > 1e-6, "with one there is a correction"


@every
def test_yaml_round_trip(v):
    text = yaml.safe_dump(v.to_mapping())
    back = variant(yaml.safe_load(text))
    assert back == v and diff(back, v) == []
    assert variant(json.loads(json.dumps(v.to_mapping()))) == v
    assert_close(of_whole(back)[0].loss, of_whole(v)[0].loss, "loss")


@every
def test_a_schedule_survives_yaml_and_moves_the_number(v):
    def first_number():  # a float parameter that the loss certainly depends on
        for path, h in v.hooks():
            for f in fields(h):
                x = getattr(h, f.name)
                if (
                    f.name in ("eps_low", "eps_high", "coef", "cap", "tau_pos", "k_pos", "eps")
                    and isinstance(x, float)
                    and x > 0
                ):
                    return path, f.name, x
        return None

    found = first_number()
    if found is None:
        pytest.skip("no number to schedule")
    path, name, x = found
    seam, _, index = path.partition(".")

    def having(number):
        here = getattr(v, seam)
        h = here[int(index)] if index else here
        new = type(h)(**{f.name: getattr(h, f.name) for f in fields(h)} | {name: number})
        return v.with_(**{seam: [*here[: int(index)], new, *here[int(index) + 1 :]] if index else new})

    # 0 -> x doubles at progress 0.25 of a linear climb from x to 2x over the first half
    moving = having(Schedule(x, 2 * x, until=0.5))
    assert variant(yaml.safe_load(yaml.safe_dump(moving.to_mapping()))) == moving
    at_quarter, _ = of_whole(moving, GIVEN, progress=0.25)
    assert_close(at_quarter.loss, of_whole(having(1.5 * x), GIVEN, progress=0.25)[0].loss, "loss at a quarter")


@every
def test_describe_names_every_hook_and_deviation(v):
    text = v.describe()
    assert v.name in text.splitlines()[0]
    for _, h in v.hooks():
        assert h.hook_name + "(" in text
        for f in fields(h):
            assert f"{f.name}={getattr(h, f.name)!r}" in text
    for line in (*(v.about.deviations if v.about else ()), *(v.about.ours if v.about else ())):
        assert line in text
    assert "{" not in v.describe().split("needs")[0].split("with")[0].replace("{'", ""), "an unfilled formula"


@every
def test_check_has_no_errors(v):
    assert [f for f in check(v) if f.level == "error"] == []


@catalog
def test_catalog_entry_is_complete(v):
    about = v.about
    assert about is not None and about.id == v.name == v.name.lower()
    assert about.title and about.family and about.idea.endswith(".") and about.side and about.kind
    assert about.paper or about.deviations, "an entry without a paper says why"
    assert not about.paper or len(about.paper) == 10 and about.paper[4] == ".", "an arXiv id"
    assert about.year or not about.paper
    for label in (about.id, about.id.upper(), *about.aliases):
        assert variant(label) is v


@catalog
def test_catalog_entry_warns_of_nothing_it_does_itself(v):
    assert check(v) == []


def test_ids_and_aliases_are_unique():
    labels = [label for v in variants for label in (v.about.id, *v.about.aliases)]
    assert len(labels) == len(set(labels)) and all(label == label.lower() for label in labels)


EVERY = [(s, n) for s in SEAMS for n in hook_names(s) if hook_class(s, n).__module__.startswith("trl_variants.")]
HOOKS = [(s, n) for s, n in EVERY if s != "teacher"]  # a source computes nothing of its own: see tests/teachers


@pytest.mark.parametrize("seam, name", HOOKS, ids=[f"{s}.{n}" for s, n in HOOKS])
def test_hook_documents_itself(seam, name):
    cls = hook_class(seam, name)
    assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "("), "a dataclass' own docstring says nothing"
    assert re.search(r"\d{4}\.\d{5}|TRL|OpenRLHF|DeepSeek|REINFORCE", cls.__doc__), "a paper or the code it follows"
    assert re.search(r"\([NB],\)|\([NB], ?[T1F]\)", cls.__doc__), "the shape of what it returns"
    assert cls.math, "one line for describe()"


@pytest.mark.parametrize("name", [n for s, n in EVERY if s == "teacher"])
def test_teacher_documents_itself(name):
    cls = hook_class("teacher", name)
    assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "(") and cls.math


def test_every_hook_is_in_the_battery():
    used = {(path.partition(".")[0], h.hook_name) for v in ALL.values() for path, h in v.hooks()}
    assert set(HOOKS) <= used


# ---------------------------------------------------------------- the battery can fail


def test_the_battery_sees_a_local_denominator(monkeypatch):
    monkeypatch.setattr(
        aggregate.TokenMean, "__call__", lambda self, x, b: (x * b.mask).sum() / b.mask.sum().clamp(min=1)
    )
    with pytest.raises(AssertionError, match="over"):
        assert_split_invariant(variant("dapo"))
    monkeypatch.setattr(
        aggregate.SequenceMean,
        "__call__",
        lambda self, x, b: ((x * b.mask).sum(-1) / b.mask.sum(-1).clamp(min=1)).mean(),
    )
    with pytest.raises(AssertionError, match="over"):
        assert_split_invariant(variant("sapo"))
    monkeypatch.setattr(
        aggregate.ConstantLength,
        "__call__",
        lambda self, x, b: (x * b.mask).sum() / (len(b.mask) * x.shape[1]),
    )
    with pytest.raises(AssertionError, match="over"):
        assert_split_invariant(variant("dr-grpo"))


def _without_mask(self, batch):
    return self.token_log_ratio(batch).mean(-1, keepdim=True)


MUTANTS = [
    (
        "grpo",
        clip.PPOClip,
        "__call__",
        lambda self, lr, a, b: lr.exp().clamp(1 - self.eps_low, 1 + self.eps_high) * a,
    ),
    (
        "dapo",
        clip.PPOClip,
        "__call__",
        lambda self, lr, a, b: torch.min(lr.exp() * a, lr.exp().clamp(0.8, 1.2) * a),
    ),
    ("gspo", ratio.SequenceRatio, "__call__", _without_mask),
    ("cispo", clip.CISPO, "__call__", lambda self, lr, a, b: lr.exp().clamp(max=self.cap) * a * b.logps),
    ("sapo", clip.SoftGate, "__call__", lambda self, lr, a, b: torch.sigmoid(lr.exp() - 1) * 4 * a),
    (
        "gmpo",
        clip.GeometricMean,
        "__call__",
        lambda self, lr, a, b: (
            (lr.clamp(-0.4, 0.4) * b.mask).sum(-1, keepdim=True).div(b.mask.sum(-1, keepdim=True).clamp(min=1)).exp()
            * a
        ),
    ),
    ("luspo", aggregate.SequenceSum, "__call__", lambda self, x, b: (x * b.mask).sum() / b.window.tokens),
    ("reinforce-pp-baseline", regularizers, "kl_estimate", lambda d, estimator: d),
]


@pytest.mark.parametrize("name, where, what, broken", MUTANTS, ids=[m[0] for m in MUTANTS])
def test_the_battery_sees_a_wrong_formula(monkeypatch, name, where, what, broken):
    monkeypatch.setattr(where, what, broken)
    with pytest.raises(AssertionError, match="loss|gradient"):
        assert_equals_reference(variant(name))


def test_the_battery_sees_a_weight_that_is_not_applied(monkeypatch):
    v = CASES["sequence mask"]
    monkeypatch.setattr(weight.SamplerCorrection, "__call__", lambda self, b: torch.ones_like(b.mask))
    with pytest.raises(AssertionError, match="loss"):
        assert_equals_reference(v)


def test_the_helpers_cut_what_they_say():
    whole = with_advantages(variant("dapo"), build(GIVEN))
    pieces = split(whole, [[2, 0], list(range(3, len(whole.mask))), [1]])
    assert [len(p.mask) for p in pieces] == [2, len(whole.mask) - 3, 1]
    assert all(not p.whole and p.window.rows == len(whole.mask) and p.window.micro_batches == 3 for p in pieces)
    assert float(pieces[0].micro_tokens[0]) == float(whole.mask[[2, 0]].sum())
    assert torch.equal(pieces[0].prompt_tokens, whole.prompt_tokens[[2, 0]])
    leaves = {"logps", "entropy", *GIVEN["divergences"]}
    assert set(SINGLE) < set(SEAMS) and run(variant("dapo"), GIVEN)[1].keys() == leaves
