"""What methods say of themselves, where it can be checked on the scratchpad task, and the verdict over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from trl_variants import Variant, VariantError, variant

# comparisons the catalog has no entry for: name -> (entry, edits)
CONTROLS: dict[str, tuple[str, dict]] = {
    "grpo:no-kl": ("grpo", {"regularizers": []}),
    "clip-higher:symmetric": ("clip-higher", {"clip": {"ppo": {"eps_low": 0.2, "eps_high": 0.2}}}),
}

# measure -> where it stands in a result
MEASURES: dict[str, tuple[str, str]] = {
    "accuracy": ("end", "accuracy"),
    "sampled": ("end", "sampled"),
    "pass_n": ("end", "pass_n"),
    "entropy": ("end", "entropy"),
    "length": ("end", "length"),
    "wrong_length": ("end", "wrong_length"),
    "truncated": ("end", "truncated"),
    "drift": ("end", "drift"),
    "clipped": ("run", "clipped"),
    "no_right_signal": ("run", "no_right_signal"),
    # of teachers.py
    "steps_to": ("run", "steps_to"),
    "drop": ("run", "drop"),
}


@dataclass(frozen=True)
class Claim:
    """`method` has more (">") or less ("<") of `measure` than `against`, a catalog id or a name in CONTROLS."""

    method: str
    against: str
    measure: str
    direction: str
    says: str

    def __post_init__(self):
        if self.measure not in MEASURES or self.direction not in "<>":
            raise ValueError(f"claim on {self.method}: measure {self.measure!r}, direction {self.direction!r}")


CLAIMS = (
    Claim("grpo", "grpo:no-kl", "drift", "<", "the KL keeps the policy near its start"),
    Claim("dr-grpo", "grpo:no-kl", "wrong_length", "<", "without 1/|o| wrong answers stay shorter"),
    Claim("clip-higher", "clip-higher:symmetric", "entropy", ">", "clip-higher keeps entropy"),
    Claim("ngrpo", "clip-higher", "no_right_signal", ">", "groups without a right answer teach"),
    Claim("gspo", "grpo", "clipped", ">", "clips far more tokens than GRPO"),
    Claim("gspo", "grpo:no-kl", "accuracy", ">", "learns faster than GRPO"),
    Claim("luspo", "gspo", "length", ">", "answers get longer than GSPO's"),
    Claim("gmpo", "grpo:no-kl", "entropy", ">", "keeps more entropy than GRPO"),
    Claim("cispo", "clip-higher", "accuracy", ">", "learns faster than DAPO's objective"),
    Claim("sapo", "grpo:no-kl", "accuracy", ">", "learns more than the hard clip"),
    Claim("entropy-bonus", "clip-higher", "entropy", ">", "the bonus keeps entropy"),
    Claim("adaptive-entropy", "clip-higher", "entropy", ">", "holds entropy at its target"),
    Claim("clip-cov", "clip-higher:symmetric", "entropy", ">", "keeps entropy"),
    Claim("kl-cov", "clip-higher:symmetric", "entropy", ">", "keeps entropy"),
    Claim("bapo", "clip-higher:symmetric", "entropy", ">", "balanced bounds keep entropy"),
    Claim("highent", "clip-higher", "entropy", ">", "training the deciding tokens alone keeps entropy"),
    Claim("r1-zero-div", "grpo", "entropy", ">", "the diversity term keeps entropy"),
    Claim("opo", "grpo:no-kl", "drift", "<", "moves the policy less"),
    Claim("opo", "grpo:no-kl", "entropy", ">", "keeps more entropy"),
    Claim("dcpo", "clip-higher:symmetric", "clipped", "<", "clips far fewer tokens"),
    Claim(
        "dcpo", "clip-higher", "no_right_signal", ">", "groups without a right answer teach, by the prompt's history"
    ),
    Claim("passk-grpo", "grpo", "pass_n", ">", "more problems solved by any of the samples"),
    Claim("passk-analytic", "grpo", "pass_n", ">", "more problems solved by any of the samples"),
    Claim("f-grpo", "grpo", "pass_n", ">", "more problems solved by any of the samples"),
    Claim("dapo-overlong", "dapo", "truncated", "<", "fewer answers hit the limit"),
    Claim("kimi-k1-5-length", "grpo", "length", "<", "shorter answers"),
    Claim("laser", "grpo", "length", "<", "shorter answers"),
    Claim("laser-d", "grpo", "length", "<", "shorter answers"),
    Claim("thinkprune", "grpo", "length", "<", "shorter answers"),
)


def arm(name: str) -> Variant:
    """The variant of a catalog id or of a name in CONTROLS; raises VariantError for neither."""
    if name in CONTROLS:
        base, edits = CONTROLS[name]
        return variant(base, **edits)
    return variant(name)


def known(name: str) -> bool:
    try:
        arm(name)
    except VariantError:
        return False
    return True


def claims_of(method: str) -> list[Claim]:
    return [c for c in CLAIMS if c.method == method and known(c.against)]


def value(result: Mapping, measure: str) -> float | None:
    page, name = MEASURES[measure]
    found = result[page][name]
    return None if found is None or found != found else found


def judge(claim: Claim, results: Mapping[str, Mapping[int, Mapping]]) -> dict | None:
    """The verdict from results[name][seed]; None where the two have no seed in common.

    Seeds are compared in pairs, since both runs of a seed see the same problems in the same order. "yes": every
    pair has the claimed sign; "no": the mean has not; "unclear": the mean has it and some pair has not.
    """
    pairs = []
    for seed in sorted(set(results.get(claim.method, {})) & set(results.get(claim.against, {}))):
        ours, theirs = (value(results[name][seed], claim.measure) for name in (claim.method, claim.against))
        if ours is not None and theirs is not None:
            pairs.append(ours - theirs)
    if not pairs:
        return None
    sign = 1 if claim.direction == ">" else -1
    mean = statistics.fmean(pairs)
    agree = sum(sign * d > 0 for d in pairs)
    verdict = "yes" if agree == len(pairs) else "unclear" if sign * mean > 0 else "no"
    return {
        "claim": claim.says,
        "test": f"{claim.measure} {claim.direction} {claim.against}",
        "difference": mean,
        "low": min(pairs),
        "high": max(pairs),
        "agree": agree,
        "seeds": len(pairs),
        "verdict": verdict,
    }
