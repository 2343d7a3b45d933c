from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import yaml

from trl_variants import About, Schedule, Variant, VariantError, diff, variant, variants
from trl_variants.catalog import entry
from trl_variants.composition import with_hooks
from trl_variants.hooks.advantage import Grouped, LeaveOneOut
from trl_variants.hooks.aggregate import SequenceMean, TokenMean
from trl_variants.hooks.clip import PPOClip, SoftGate
from trl_variants.hooks.ratio import SequenceRatio, TokenRatio
from trl_variants.hooks.regularizers import KL
from trl_variants.hooks.weight import EntropyQuantile, OffPolicySequenceMask


def test_a_name_that_several_methods_bear_lists_them(monkeypatch):
    from dataclasses import replace

    from trl_variants import catalog

    assert variant("SAPO").name == "sapo"
    assert "not search-agent-po, which is called by the same name" in variant("sapo").describe()
    both = {n: replace(variant(n), about=replace(variant(n).about, also_called=("xpo",))) for n in ("grpo", "dapo")}
    monkeypatch.setattr(catalog, "_CATALOG", {**catalog._CATALOG, **both})
    with pytest.raises(VariantError, match="'XPO' is the name of several methods: dapo, grpo; use an id"):
        variant("XPO")


def test_a_variant_is_a_value():
    assert variant("dapo") == variant("DAPO") == variant(variant("dapo"))
    assert variant("dapo") != variant("dapo", clip=PPOClip()) and len({variant("dapo"), variant("dapo")}) == 1
    with pytest.raises(FrozenInstanceError):
        variant("dapo").clip = PPOClip()


def test_edit_a_seam_in_every_spelling():
    wanted = PPOClip(eps_high=0.3)
    for spec in (wanted, {"ppo": {"eps_high": 0.3}}):
        assert variant("dapo", clip=spec).clip == wanted
    assert variant("dapo", clip="sapo").clip == variant("dapo", clip=SoftGate).clip == SoftGate()
    assert variant("dapo", clip="sapo").ratio == variant("dapo").ratio, "other seams stay"
    assert variant("dapo").clip == PPOClip(0.2, 0.28), "the catalog's own value is not touched"


def test_seams_that_hold_several():
    v = variant("clip-higher", weight=["entropy_quantile", {"off_policy_mask": {"threshold": 0.1}}])
    assert v.weight == (EntropyQuantile(), OffPolicySequenceMask(0.1))
    assert variant("clip-higher", weight="entropy_quantile").weight == (EntropyQuantile(),)
    assert variant("grpo", regularizers=None).regularizers == variant("grpo", regularizers=[]).regularizers == ()
    assert variant("dapo", regularizer="kl").regularizers == (KL(),), "the singular names the same seam"
    assert [p for p, _ in v.hooks()] == ["advantage", "ratio", "clip", "weight.0", "weight.1", "aggregate"]


def test_combine_two():
    v = variant("dapo").with_(ratio=variant("gspo").ratio, name="mixed")
    assert (v.ratio, v.clip, v.name) == (SequenceRatio(), PPOClip(0.2, 0.28), "mixed")


def test_mapping_forms():
    assert variant({"name": "dapo"}) == variant("dapo")
    assert variant({"name": "dapo", "clip": "sapo"}) == variant("dapo", clip="sapo")
    assert variant({"name": "dapo", "clip": "sapo"}, ratio="sequence").ratio == SequenceRatio()
    full = {"advantage": "leave_one_out", "ratio": "token", "clip": "none", "aggregate": "token_mean"}
    own = variant(full)
    assert own.name == "custom" and own.about is None and own.advantage == LeaveOneOut() and own.regularizers == ()
    assert variant(full | {"name": "mine"}).name == "mine"
    assert "custom" in own.describe()


def test_a_full_composition_does_not_inherit():
    # grpo has a KL; a mapping that names all four single seams and no regularizer has none
    full = {
        "name": "grpo",
        "advantage": "grouped",
        "ratio": "token",
        "clip": "ppo",
        "aggregate": "sequence_mean",
    }
    assert variant(full).regularizers == () and variant(full).about is variant("grpo").about
    assert variant({"name": "grpo", "clip": "ppo"}).regularizers == variant("grpo").regularizers


def test_mapping_names_every_seam_that_holds_something():
    assert variant("grpo").to_mapping() == {
        "name": "grpo",
        "advantage": "grouped",
        "ratio": "token",
        "clip": "ppo",
        "aggregate": "sequence_mean",
        "regularizers": [{"kl": {"coef": 0.04}}],
    }


@pytest.mark.parametrize(
    "spec, edits, message",
    [
        ("dappo", {}, r"unknown variant 'dappo' \(did you mean .*dapo.*\); `trl-variants list` shows them all"),
        ("zzz", {}, r"unknown variant 'zzz'; "),
        (
            "dapo",
            {"clipp": "ppo"},
            r"a variant has no seam 'clipp' \(did you mean clip\?\); the seams are prompts",
        ),
        ("dapo", {"clip": "soft"}, "unknown clip hook 'soft'"),
        ("dapo", {"weight": ["ppo"]}, r"unknown weight hook 'ppo' \('ppo' is a clip hook\)"),
        ("dapo", {"clip": KL()}, "'kl' is a regularizers hook and cannot be used as clip"),
        ({"clip": "ppo"}, {}, "a composition without `name:` must say advantage, ratio, aggregate too"),
        ({"name": "dapo", "klip": "ppo"}, {}, "did you mean clip"),
        (3, {}, "a variant is a catalog name, a mapping or a Variant, got 3"),
        (["dapo"], {}, "a variant is a catalog name"),
    ],
)
def test_messages(spec, edits, message):
    with pytest.raises(VariantError, match=message):
        variant(spec, **edits)


def test_diff():
    assert diff(variant("dapo"), variant("dapo")) == []
    assert diff(variant("dapo"), variant("dapo", clip="sapo")) == ["clip: {'ppo': {'eps_high': 0.28}} -> 'sapo'"]
    assert diff(variant("clip-higher"), variant("grpo")) == [
        "clip: {'ppo': {'eps_high': 0.28}} -> 'ppo'",
        "aggregate: 'token_mean' -> 'sequence_mean'",
        "regularizers: None -> [{'kl': {'coef': 0.04}}]",
    ]
    assert diff(variant("dapo"), variant("dapo").with_(name="other")) == [], "names compute nothing"


def test_with_hooks_merges_into_the_hook_that_is_there():
    base = variant("dapo", clip=PPOClip(0.1, 0.28, delta=3.0))
    assert with_hooks(base, None) is base and with_hooks(base, {}) is base
    assert with_hooks(base, {"clip": {"ppo": {"eps_high": 0.4}}}).clip == PPOClip(0.1, 0.4, delta=3.0)
    assert with_hooks(base, {"clip": "ppo"}).clip == PPOClip(), "a bare name is the hook's own default"
    assert with_hooks(base, {"clip": {"sapo": {"tau_neg": 2.0}}}).clip == SoftGate(tau_neg=2.0), (
        "another hook starts anew"
    )
    moved = with_hooks(base, {"clip": {"ppo": {"eps_low": {"schedule": {"start": 0.1, "end": 0.2}}}}})
    assert moved.clip == PPOClip(Schedule(0.1, 0.2), 0.28, delta=3.0)
    again = with_hooks(moved, {"clip": {"ppo": {"eps_high": 0.3}}})
    assert again.clip.eps_low == Schedule(0.1, 0.2), "a schedule that is there survives a merge"
    assert with_hooks(variant("grpo"), {"regularizers": []}).regularizers == ()
    with pytest.raises(VariantError, match="ppo has no parameter 'eps_hihg'.*eps_high"):
        with_hooks(base, {"clip": {"ppo": {"eps_hihg": 0.3}}})
    with pytest.raises(VariantError, match="did you mean clip"):
        with_hooks(base, {"klip": "ppo"})


def test_needs_and_scope_come_from_the_hooks():
    assert variant("clip-higher").needs == {"old_logps"} and variant("grpo").needs == {"old_logps", "ref_logps"}
    assert variant("rloo").needs == {"old_logps", "ref_logps", "tokens"}
    assert variant("clip-higher", weight="entropy_quantile").needs == {"old_logps", "entropy"}
    assert variant("clip-higher", ratio="on_policy", clip="none").needs == frozenset()
    assert variant("clip-higher").scope == "local" and variant("dapo", regularizers=["nll"]).scope == "window"


def test_describe_reads_like_the_paper():
    text = variant("gspo").describe()
    assert text.startswith("gspo: Group Sequence Policy Optimization")
    assert "https://arxiv.org/abs/2507.18071" in text and "side trajectory" in text
    assert "loss = -1/N_rows sum_i 1/|y_i| sum_t [ min(r A, clip(r, 1-0.0003, 1+0.0004) A) ]" in text
    assert "with s = exp(1/|y| sum_t lp_t - lp_old,t)" in text and "A = (R - mean_group) / (std_group + 0.0001)" in text
    assert "deviation: with one update per rollout" in text
    assert str(variant("gspo")) == text
    grpo = variant("grpo").describe()
    assert (
        "+ 0.04 k3(pi || pi_ref)" in grpo
        and "needs ref_logps; scope local" in grpo
        and "one more forward per generation (reference)" in grpo
    )
    window = variant("dapo", weight="entropy_quantile").describe()
    assert "scope window" in window and "one more forward without gradient" in window
    assert "no paper" in variant("bnpo").describe() and "ours: cap 5.0" in variant("cispo").describe()


def test_catalog_refuses_a_taken_name_and_a_wrong_kind():
    seams = {"advantage": Grouped(), "ratio": TokenRatio(), "clip": PPOClip(), "aggregate": TokenMean()}
    about = {"title": "t", "family": "f", "paper": "", "idea": "i."}
    for taken in ({"id": "dapo"}, {"id": "dapo-2", "aliases": ("gspo",)}):
        with pytest.raises(VariantError, match="has an entry named '(dapo|gspo)' already"):
            entry(About(**taken, **about), **seams)
    with pytest.raises(VariantError, match="kind is one of"):
        About(id="x", kind="recipee", **about)
    with pytest.raises(VariantError, match="side one of"):
        About(id="x", side="left", **about)
    assert "dapo-2" not in {v.name for v in variants}


def test_aliases_and_underscores_find_the_same_method():
    assert variant("dr_grpo") is variant("Dr-GRPO") is variant("dr.grpo") is variant("drgrpo")
    assert variant("reinforce++") is variant("reinforce-pp")


def test_a_variant_of_hook_classes_and_names_equals_one_of_hooks():
    a = Variant("x", "grouped", TokenRatio, {"ppo": {}}, SequenceMean())
    assert a == Variant("x", Grouped(), TokenRatio(), PPOClip(), SequenceMean())
    assert variant(yaml.safe_load(yaml.safe_dump(a.to_mapping()))) == a


def test_an_edited_method_says_so_when_printed():
    assert "edited" not in variant("dapo").describe().splitlines()[0]
    first = variant("dapo", clip="sapo").describe().splitlines()[0]
    assert first.endswith("edited (clip); what follows describes dapo as published")
