"""huggingface_hub talking to the stub: its endpoint and its offline switch are read at import."""

from __future__ import annotations

import pytest

from .stub import HubStub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub import constants

    with HubStub() as stub:
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_tests")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", stub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", stub.url)
        yield stub
