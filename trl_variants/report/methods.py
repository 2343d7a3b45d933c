"""METHODS.md and the README's map: `python -m trl_variants.report.methods` rewrites both from the catalog."""

from __future__ import annotations

import re
from pathlib import Path

from ..composition import SEAMS, SIDES, Variant
from ..describe import math_of, objective_line

START, END = "<!-- catalog: written by trl_variants.report.methods -->", "<!-- end of catalog -->"


def catalog_map(variants: list[Variant]) -> str:
    """The map: a row per seam, a column per side, in each cell the methods that change that seam of their host."""
    lines = ["| seam | " + " | ".join(SIDES) + " |", "|---" * (len(SIDES) + 1) + "|"]
    for seam in SEAMS:
        cells = []
        for side in SIDES:
            here = [v.name for v in variants if v.about and v.about.side == side and seam in v.changed_seams]
            cells.append(", ".join(here))
        if any(cells):
            lines.append(f"| **{seam}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def methods_table(variants: list[Variant]) -> str:
    """One line a method: what it changes, side, seams, paper, deviations."""
    lines = ["| method | idea | side | seams | paper | deviations |", "|---|---|---|---|---|---|"]
    for v in variants:
        assert v.about is not None
        paper = f"[{v.about.paper}]({v.about.paper_url})" if v.about.paper else "none"
        kind = "" if v.about.kind == "method" else f" ({v.about.kind})"
        said = "; ".join([*v.about.deviations, *(f"ours: {o}" for o in v.about.ours)])
        cells = (f"[{v.name}](#{v.name}){kind}", v.about.idea, v.about.side, ", ".join(v.changed_seams), paper, said)
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(lines)


def methods_markdown(variants: list[Variant]) -> str:
    """METHODS.md: every entry with its objective, composition, deviations and defaults of our own."""
    out = [
        "# Methods",
        "",
        "Written from the catalog by `python -m trl_variants.report.methods`. Symbols: r, s, W importance ratios, A",
        "advantage, R reward, lp log-prob, H entropy, sg stop-gradient; the loss is minimised.",
        "",
        methods_table(variants),
        "",
    ]
    for family in dict.fromkeys(v.about.family for v in variants if v.about):
        out += [f"## {family}", ""]
        for v in variants:
            if v.about and v.about.family == family:
                out += [*_section(v), ""]
    return "\n".join(out).rstrip() + "\n"


def _section(v: Variant) -> list[str]:
    about = v.about
    assert about is not None
    where = f"[{about.paper}]({about.paper_url}), {about.year}" if about.paper else "no paper"
    lines = [f"### {v.name}", "", f"{about.title} ({where}). {about.idea}", "", f"    {objective_line(v)}"]
    lines += [f"    {math_of(h)}" for h in (v.ratio, v.advantage) if h.math]
    hooks = []
    for seam in SEAMS:
        hooks += [f"`{seam}: {h.hook_name}`" for h in v.at(seam)]
    lines += ["", f"{about.kind}, side {about.side}; {', '.join(hooks)}."]
    lines += ["", *(f"* {d}" for d in about.deviations), *(f"* ours: {d}" for d in about.ours)]
    return lines


def in_readme(readme: str, variants: list[Variant]) -> str:
    """The README with the map between its two markers replaced."""
    block = f"{START}\n{catalog_map(variants)}\n{END}"
    return re.sub(re.escape(START) + ".*?" + re.escape(END), lambda _: block, readme, flags=re.S)


def main() -> None:
    from ..catalog import variants

    root = Path(__file__).resolve().parents[2]
    (root / "METHODS.md").write_text(methods_markdown(variants))
    readme = root / "README.md"
    readme.write_text(in_readme(readme.read_text(), variants))


if __name__ == "__main__":
    main()
