"""Adapters sent to a real vLLM server over HTTP: `make test-vllm`."""

from __future__ import annotations

import importlib.util
import json
import urllib.request

import pytest

from tests.vllm.serving import serving
from tests.vllm.test_colocate import LORA, logged, trained
from trl_variants import VariantError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="TRL's client needs vLLM beside it"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    command = ["--enable-lora", "--max-lora-rank", "8", "--logprobs-mode", "processed_logprobs"]
    with serving(tmp_path_factory.mktemp("server"), command, switches) as address:
        yield address


def served(url):
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return [model["id"] for model in json.load(answer)["data"]]


def test_a_run_against_a_server_sends_each_version_under_a_name_of_its_own(url, tmp_path):
    names = []
    trainer = trained(tmp_path, vllm_mode="server", vllm_server_base_url=url, watch=lambda _: names.append(served(url)))
    assert [len(n) for n in names] == [2, 2, 2] and len({n[1] for n in names}) == 3  # the base, and one adapter
    assert served(url) == ["tiny"]  # closed: nothing is left there
    assert logged(trainer, "engine/base_gap")[0] < 1e-3  # both in fp32
    assert max(logged(trainer, "engine/adapter_gap")) < 1e-3 < max(logged(trainer, "engine/adapter_effect"))
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-2


def test_a_rank_that_the_server_was_not_started_for_is_refused(url, tmp_path):
    with pytest.raises(VariantError, match="serves rank 8 at most and the adapter has 16.*--max-lora-rank 16"):
        trained(tmp_path, dict(LORA, r=16), vllm_mode="server", vllm_server_base_url=url)
