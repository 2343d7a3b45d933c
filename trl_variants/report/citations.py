"""Which papers a composition stands on, and how to cite them."""

from __future__ import annotations

import re
from typing import Any

from ..composition import Variant

_ARXIV = re.compile(r"\b\d{2}(?:0[1-9]|1[0-2])\.\d{5}\b")
_TRL = """@software{trl,
  title  = {{TRL: Transformers Reinforcement Learning}},
  author = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and
            Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallou{\\'e}dec, Quentin},
  url    = {https://github.com/huggingface/trl},
  year   = {2020}
}"""


def papers_of(h: Any) -> list[str]:
    """The arXiv ids in a hook's docstring, in order: where its formula comes from."""
    return list(dict.fromkeys(_ARXIV.findall(type(h).__doc__ or "")))


def bibtex(v: Variant | None) -> str:
    """BibTeX of TRL, of the method's paper and of the papers its hooks name; titles as the catalog has them."""
    if v is None:
        return _TRL
    own = [v.about.paper] if v.about and v.about.paper else []
    ids = [*own, *(paper for _, h in v.hooks() for paper in papers_of(h))]
    return "\n\n".join([_TRL, *(_misc(paper) for paper in dict.fromkeys(ids))])


def _misc(paper: str) -> str:
    from ..catalog import variants

    about = next((v.about for v in variants if v.about and v.about.paper == paper), None)
    lines = [f"  title         = {{{{{about.title}}}}},"] if about else []
    lines += [
        f"  eprint        = {{{paper}}},",
        "  archivePrefix = {arXiv},",
        f"  url           = {{https://arxiv.org/abs/{paper}}},",
        f"  year          = {{20{paper[:2]}}}",
    ]
    return "\n".join([f"@misc{{arxiv{paper.replace('.', '_')},", *lines, "}"])
