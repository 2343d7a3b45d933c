"""Rows are counted on the way into a model, so these tests keep one row a line."""

import pytest

from tests.trainer import toy


@pytest.fixture
def one_row_a_line(monkeypatch):
    """TRL's own passes: the planner puts several rows on a line and probes the model first."""
    stock = toy.settings
    monkeypatch.setattr(toy, "settings", lambda **changes: stock(**{"plan_updates": False, **changes}))
