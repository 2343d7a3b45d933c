"""Advantages that remember earlier generations: a killed run goes on exactly where it was."""

from __future__ import annotations

import pytest

from tests.trainer.test_resume import kill_and_resume


@pytest.mark.parametrize("name", ["p-grpo-personalized", "riskpo", "constrained-grpo"])
def test_killed_and_resumed(name):
    kill_and_resume({"variant": name}, at=5)  # step 5 of 12 is inside the second generation


def test_killed_and_resumed_with_two_processes():
    kill_and_resume({"variant": "p-grpo-personalized"}, at=6, ranks=2)
