"""A Variant as text a reader of the paper recognises."""

from __future__ import annotations

import string
from dataclasses import fields, is_dataclass
from typing import Any

from .composition import SEAMS, Variant, differing

_COST = {
    "ref_logps": "one more forward per generation (reference)",
    "teacher_logps": "one teacher forward per generation",
    "values": "a critic",
    "process_rewards": "a reward model that is trained too",
    "sum_sq_probs": "one more forward without gradient per generation",
    "distribution": "full distributions, in chunks",
    "extra_rollouts": "more rollouts",
    "embeddings": "each completion through a sentence encoder once",
}


def math_of(h: Any) -> str:
    """The hook's one-line formula with its parameters filled in; empty for a hook without one."""
    names = [n for _, n, _, _ in string.Formatter().parse(h.math) if n]
    return h.math.format(**{n: getattr(h, n) for n in names}) if names else h.math


def objective_line(v: Variant) -> str:
    """The objective in one line, to be maximised; regularizers carry the sign they have in the loss."""
    weights = " ".join(math_of(w) for w in v.weight)
    terms = " ".join(math_of(r) for r in v.regularizers)
    body = f"{math_of(v.aggregate)} [ {math_of(v.clip) or v.clip.hook_name} ]" + (f" {weights}" if weights else "")
    return f"loss = -{body}" + (f" {terms}" if terms else "")


def _parameters(h: Any) -> str:
    if not is_dataclass(h):
        return ""
    return ", ".join(f"{f.name}={getattr(h, f.name)!r}" for f in fields(h))


def describe(v: Variant) -> str:
    """Composition, objective, definitions, papers, side, needs, cost and deviations, one fact a line."""
    from .catalog import namesakes, published

    about = v.about
    original = published(v.name)
    edited = differing(v, original) if original else ()
    note = f", edited ({', '.join(edited)}); what follows describes {v.name} as published" if edited else ""
    lines = [v.name + (f": {about.title}" if about else "") + note]
    if about:
        where = f"{about.paper_url}" if about.paper else "no paper"
        others = [o.name for name in about.also_called for o in namesakes(name) if o.name != v.name]
        lines += [f"  not {other}, which is called by the same name" for other in others]
        lines += [
            f"  {about.idea}",
            f"  kind {about.kind}, side {about.side}, family {about.family}; {where}",
        ]
    lines += [
        "",
        f"  {objective_line(v)}",
        f"  with {math_of(v.ratio)}",
        f"       {math_of(v.advantage)}",
        *(f"       {math_of(h)}" for h in (*v.credit, *v.learners) if h.math),
        *(f"       {math_of(h)}" for seam in ("teacher", "rollouts") for h in v.at(seam)),
        "",
    ]
    for seam in SEAMS:
        for h in v.at(seam):
            lines.append(f"  {seam:<13}{h.hook_name}({_parameters(h)})")
    needs = sorted(v.needs - {"old_logps"})
    lines += ["", f"  needs {', '.join(needs) or 'nothing beyond rewards and log-probs'}; scope {v.scope}"]
    cost = [_COST[n] for n in needs if n in _COST]
    if v.scope == "window":
        cost.append("one more forward without gradient per optimizer step, unless old log-probs are computed anyway")
    if cost:
        lines.append(f"  cost: {'; '.join(cost)}")
    if about:
        lines += [f"  deviation: {d}" for d in about.deviations] + [f"  ours: {d}" for d in about.ours]
    return "\n".join(lines)
