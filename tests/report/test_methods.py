"""METHODS.md and the README's table are the catalog's own words."""

import re
from pathlib import Path

from trl_variants import variants
from trl_variants.report.methods import END, START, catalog_map, in_readme, methods_markdown

ROOT = Path(__file__).resolve().parents[2]
REWRITE = "run: python -m trl_variants.report.methods"


def test_methods_page_is_current():
    assert (ROOT / "METHODS.md").read_text() == methods_markdown(variants), REWRITE


def test_readme_map_is_current():
    readme = (ROOT / "README.md").read_text()
    assert START in readme and END in readme
    assert readme == in_readme(readme, variants), REWRITE


def test_every_method_is_on_both():
    table, page = catalog_map(variants), methods_markdown(variants)
    for v in variants:
        assert v.about.inert or re.search(rf"\b{v.name}\b", table), v.name
        assert f"### {v.name}\n" in page
