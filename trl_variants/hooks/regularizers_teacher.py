"""Terms towards a teacher, inside the rollout expectation or beside it: divergence x estimator x gates x coefficient.

On the policy's own samples inside and outside are the same tokens (T_C and T_D of the four-operator view); what tells
them apart is the clip, the gates and the denominator, each a parameter here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..divergence import Divergence
from ..errors import VariantError
from ..records import TokenBatch, bounded_exp
from .aggregate import TokenMean
from .base import hook, param
from .metrics import Mean
from .regularizers import Term, kl_estimate
from .regularizers_teacher_gates import CLIP, ROWS, TOKENS, WRITTEN_BY, clip_gate, row_gate, rows_asked, token_gate
from .regularizers_teacher_gates import written as written_gate

# estimator -> the divergences whose gradient it has
ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "detached": ("rkl", "fkl", "jsd"),
    "ratio": ("rkl", "fkl", "jsd"),
    "k1": ("rkl",),
    "k2": ("rkl",),
    "k3": ("fkl",),
    "ratio_k3": ("rkl",),
    "exact": ("rkl", "fkl", "jsd"),
}
_NAMES = {"rkl": "reverse KL(pi || {0})", "fkl": "forward KL({0} || pi)", "jsd": "JSD(pi, {0})"}


def reward_of(divergence: str, gap: Tensor, beta: float = 0.5, x_max: float | None = None) -> Tensor:
    """(B, T) h(x) with x = exp(gap) = pi_T / pi, for which E_pi[-h grad lp] is the divergence's gradient.

    RKL log x; FKL min(x, x_max) - 1; JSD_beta (1 - beta) log(beta x + 1 - beta), which is bounded below.
    """
    if divergence == "rkl":
        return gap
    if divergence == "fkl":
        x = bounded_exp(gap)
        return (x if x_max is None else x.clamp(max=x_max)) - 1
    mixture = torch.logaddexp(gap + math.log(beta), torch.full_like(gap, math.log(1 - beta)))
    return (1 - beta) * mixture


@hook("regularizers", "teacher_kl")
@dataclass(frozen=True)
class TeacherKL:
    """coef * a divergence between policy and teacher, per token (B, T): KDRL (2506.02208), dGRPO (2605.12227), SDAR
    (2605.15155), SDPO (2601.20802), OPSD (2601.18734).

    With d = lp - lp_T and x = exp(-d), the loss is, on samples of the policy (`descends` says what that descends):

        detached  - sg[h(x)] exp(lp - sg[lp])   h of the divergence, see `reward_of`
        ratio     - sg[h(x)] rho                the same on samples of the old policy, rho = pi / pi_old
        k2        d^2 / 2                       RKL       k3  x - 1 + d   FKL (its value estimates RKL)
        ratio_k3  rho (x - 1 + d)               RKL       exact           the divergence over the vocabulary
        k1        - d sg[gate]                  gradient through -lp alone, needs the sigmoid gate (SDAR)

    An ungated k1 has expected gradient zero, whoever the teacher is, and is refused.

    Args:
        coef: weight in the loss, a number or a schedule; every optimizer step takes `decay` off it, down to `floor`.
        divergence, estimator: see above; a pair whose gradient is another divergence's is refused.
        beta: teacher's share of the mixture in "jsd". x_max: bound on x in sampled "fkl", whose tail explodes.
        row_gate: "all", "wrong", "right" rows, "all_fail" groups, "difficulty": (1 - share right in the group)^power.
        token_gate: "none"; "sigmoid": sigmoid(sharpness * (lp_T - lp)), per nat; "low_confidence", "high_entropy": the
            `share` of the window's tokens; "band": |lp_T - lp| <= band, nats. A gate on sampled tokens weights the
            estimate token by token, so that what then descends is no longer exactly the divergence.
        clip_interaction: "additive" never clipped; "unclipped" only where the surrogate keeps its gradient;
            "clipped_only" only where the clip took it.
        normaliser: "all" tokens of the loss, or the "gated" ones (counted over the window).
        own_token_mean: mean over tokens whatever the policy term does.
        written_by: tokens of the "policy", of an"other" (traces, hinted rollouts) or of "anyone"; the sampled
            estimators hold on the policy's own tokens alone.
        ratio_cap: multiplies by sg[min(rho, ratio_cap)], for rows of an older policy.
        anchor: "teacher", or "ref" for the reference policy.
        top_k, support, rest, entry_cap: of the exact form, see `Divergence`.

    Raises:
        VariantError: an estimator that does not descend the divergence, or parameters that do not go together.
    """

    coef: float = param(0.002, low=0.0)
    divergence: str = param("rkl", choices=("rkl", "fkl", "jsd"))
    estimator: str = param("k2", choices=tuple(ESTIMATORS))
    anchor: str = param("teacher", choices=("teacher", "ref"))
    row_gate: str = param("all", choices=ROWS)
    power: float = param(1.0, low=0.0)
    token_gate: str = param("none", choices=TOKENS)
    sharpness: float = param(5.0)
    share: float = param(0.2, above=0.0, high=1.0, ours=True)
    band: float = param(1.0, above=0.0, ours=True)
    clip_interaction: str = param("additive", choices=CLIP)
    normaliser: str = param("all", choices=("all", "gated"))
    own_token_mean: bool = False
    written_by: str = param("policy", choices=WRITTEN_BY)
    ratio_cap: float | None = param(None, above=0.0)
    decay: float = param(0.0, low=0.0)
    floor: float = param(0.0, low=0.0)
    x_max: float | None = param(10.0, above=0.0)
    beta: float = param(0.5, above=0.0)
    top_k: int | None = param(None, low=1)
    support: str = param("teacher", choices=("teacher", "student"))
    rest: str = param("tail", choices=("tail", "renormalize", "student"))
    entry_cap: float | None = param(None, above=0.0)

    hook_name: ClassVar[str]  # by registration

    def __post_init__(self):
        if self.divergence not in ESTIMATORS[self.estimator]:
            found, wanted = ESTIMATORS[self.estimator][0], self.divergence
            raise VariantError(
                f"{self.hook_name}: the gradient of {self.estimator} is that of {found}, not of {wanted}: "
                f"set divergence: {found}, or one of the estimators {', '.join(_that_descend(wanted))}"
            )
        if self.estimator == "k1" and (self.token_gate != "sigmoid" or self.sharpness == 0):
            raise VariantError(
                f"{self.hook_name}: k1 back-propagated on samples of the policy has expected gradient zero, whatever "
                "the teacher says: use estimator detached, ratio, k2 or exact, or token_gate: sigmoid with a sharpness"
            )
        if self.ratio_cap is not None and self.estimator.startswith("ratio"):
            raise VariantError(f"{self.hook_name}: {self.estimator} multiplies by the ratio already: drop ratio_cap")
        if self.estimator != "exact" and self.written_by != "policy":
            raise VariantError(
                f"{self.hook_name}: {self.estimator} is an expectation over the policy's own tokens: "
                "use estimator: exact on tokens that someone else wrote"
            )
        if self.estimator != "exact" and (self.top_k is not None or self.entry_cap is not None):
            raise VariantError(f"{self.hook_name}: top_k and entry_cap belong to estimator: exact")
        self._spec()

    def _spec(self) -> Divergence:
        return Divergence(self.divergence, self.anchor, self.beta, self.top_k, self.support, self.rest, self.entry_cap)

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        return (self._spec(),) if self.estimator == "exact" else ()

    @property
    def needs(self) -> frozenset[str]:
        wanted = {f"{self.anchor}_logps"}
        if self.estimator == "exact":
            wanted.add("distribution")
        if self.estimator.startswith("ratio") or self.ratio_cap is not None:
            wanted.add("old_logps")
        if self.token_gate == "high_entropy":
            wanted.add("entropy")
        return frozenset(wanted)

    @property
    def scope(self) -> str:
        window = self.normaliser == "gated" or self.token_gate in ("low_confidence", "high_entropy")
        return "window" if window else "local"

    @property
    def descends(self) -> str:
        """The divergence whose gradient this has in expectation, before any gate but k1's own."""
        if self.estimator == "k1":
            return (
                f"the f-divergence with x f''(x) = d/dx sigmoid({self.sharpness:g} log x), zero where pi = {self._who}"
            )
        name = _NAMES[self.divergence].format(self._who)
        return f"{name} with beta {self.beta:g}" if self.divergence == "jsd" and self.beta != 0.5 else name

    @property
    def _who(self) -> str:
        return "pi_T" if self.anchor == "teacher" else "ref"

    @property
    def math(self) -> str:
        gates = [self.row_gate.replace("_", "-")] if self.row_gate != "all" else []
        gates += [self.token_gate.replace("_", "-")] if self.token_gate != "none" else []
        gates += [self.clip_interaction.replace("_", "-")] if self.clip_interaction != "additive" else []
        where = f" [{', '.join(gates)}]" if gates else ""
        return f"+ {self.coef} {self.divergence.upper()}(pi, {self._who}; {self.estimator}){where}"

    def teacher_rows(self, scored: Any) -> Tensor:
        """(N,) bool, rows that the row gate lets through; the teacher is asked about no other."""
        if self.anchor == "ref":
            return torch.zeros_like(scored.keep)
        return rows_asked(self.row_gate, self.power, self.written_by, scored)

    def __call__(self, batch: TokenBatch) -> Term:
        return self.term(batch, max(self.coef - self.decay * batch.step, self.floor) if self.decay else self.coef)

    def term(self, batch: TokenBatch, coef: float) -> Term:
        """The term with this coefficient."""
        known = batch.need(f"{self.anchor}_logps")
        says = batch.teacher_says if self.anchor == "teacher" else batch.mask > 0
        d = torch.where(says, batch.logps - known, torch.zeros_like(known))
        gate = self._gate(batch, -d.detach(), says)
        open_ = (gate != 0).to(batch.mask) * batch.mask
        tokens, name = batch.mask.sum(), self.hook_name
        return Term(
            self._value(batch, d) * gate,
            coef,
            TokenMean() if self.own_token_mean else None,
            open_ if self.normaliser == "gated" else None,
            metrics={
                f"{name}/open": Mean(open_.sum(), tokens),
                f"{name}/open_kl": Mean((d.detach() * open_).sum(), open_.sum()),
                f"{name}/coef": Mean(tokens * coef, tokens),
            },
        )

    def _value(self, batch: TokenBatch, d: Tensor) -> Tensor:
        if self.estimator == "exact":
            return batch.divergence(self._spec())
        if self.estimator in ("k2", "k3"):
            return kl_estimate(d, self.estimator)
        if self.estimator == "k1":
            return -d
        log_ratio = batch.logps - (batch.logps.detach() if self.estimator == "detached" else batch.anchor)
        ratio = bounded_exp(log_ratio)
        if self.estimator == "ratio_k3":
            return ratio * kl_estimate(d, "k3")
        return -reward_of(self.divergence, -d.detach(), self.beta, self.x_max) * ratio

    @torch.no_grad()
    def _gate(self, batch: TokenBatch, gap: Tensor, says: Tensor) -> Tensor:
        rows = row_gate(self.row_gate, self.power, batch.need)
        gate = says.to(batch.mask) * written_gate(self.written_by, batch) * clip_gate(self.clip_interaction, batch)
        gate = gate * (rows.to(batch.mask).unsqueeze(1) if isinstance(rows, Tensor) else rows)
        gate = gate * token_gate(self.token_gate, gap, batch, self.sharpness, self.share, self.band)
        if self.ratio_cap is not None:
            gate = gate * bounded_exp(batch.logps - batch.anchor).clamp(max=self.ratio_cap)
        return gate


def _that_descend(divergence: str) -> list[str]:
    return [name for name, known in ESTIMATORS.items() if divergence in known and name != "k1"]


@hook("regularizers", "teacher_kl_dual")
@dataclass(frozen=True)
class DualTeacherKL(TeacherKL):
    """`teacher_kl`, (B, T), whose coefficient holds the measured KL at `target`. Survey of GRPO-OPD hybrids, 8.5; the
    multiplicative rule is that of PPO's adaptive KL (1707.06347, section 4).

    After every optimizer step b <- clip(b exp(eta (K - target)), low, high), K the mean of lp - lp_T over the window's
    tokens that the gates let through, in nats; a step without any leaves b alone. `coef` is the first b.
    """

    eta: float = param(0.5, low=0.0)
    target: float = param(0.1, low=0.0, ours=True)
    low: float = param(1e-4, low=0.0, ours=True)
    high: float = param(0.1, above=0.0, ours=True)

    update_every = "step"

    def __post_init__(self):
        super().__post_init__()
        if self.decay:
            raise VariantError(f"{self.hook_name} moves its coefficient by itself: leave decay at 0")

    @property
    def math(self) -> str:
        return super().math.replace(f"+ {self.coef} ", f"+ b({self.coef}, KL -> {self.target}) ", 1)

    def init(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def __call__(self, batch: TokenBatch, state: Mapping[str, Any]) -> Term:  # type: ignore[override]
        term = self.term(batch, state["coef"])
        return replace(term, stats={of: term.metrics[f"{self.hook_name}/{of}"] for of in ("open_kl", "open")})  # type: ignore[misc]

    def update(self, state: Mapping[str, Any], seen: Mapping[str, float]) -> dict[str, Any]:
        if seen["open"] == 0:
            return dict(state)
        moved = state["coef"] * math.exp(min(self.eta * (seen["open_kl"] - self.target), 20.0))
        return {"coef": min(max(moved, self.low), self.high)}

    def report(self, state: Mapping[str, Any]) -> dict[str, float]:
        return {f"{self.hook_name}/next_coef": state["coef"]}
