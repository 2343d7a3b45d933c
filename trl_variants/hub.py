"""Run folders as commits to a Hub repository, through huggingface_hub."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from .errors import VariantError
from .report.card import BESIDE, README, is_ours

# never sent: learners' weights and caches (_*), a pickle that holds the whole configuration, token included
NEVER = ("_*", ".*", "*.tmp", "training_args.bin")
# what only a resume needs
STATE = (
    "optimizer.*",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
    "trainer_state.json",
    "variant.json",
    "variant.safetensors",
    "variant_*",
    "entropy_ctrl_state.json",
    "optimizer",
    "pytorch_model_fsdp*",
)
# a tokenizer with several chat templates keeps them here
FOLDERS = ("additional_chat_templates",)
CARD_FILES = (README, BESIDE, "curve.png", "curves.png", "log.jsonl", "run.json")


def model_files(folder: str | Path) -> dict[str, Path]:
    """Path in the repository -> file, of what a user of the model needs: weights or adapter, tokenizer, card, figures.

    Only the top of a run folder: checkpoints, warm-up weights, merged models, completions and learners stay here.
    """
    folder = Path(folder)
    found = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    for name in FOLDERS:
        found |= {f"{name}/{path.name}": path for path in sorted((folder / name).glob("*")) if path.is_file()}
    return {name: path for name, path in found.items() if not _matches(name, (*NEVER, *STATE))}


def checkpoint_files(folder: str | Path) -> dict[str, Path]:
    """Path below the checkpoint -> file, of all that a resume needs."""
    folder = Path(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: path for name, path in named.items() if not _matches(name, NEVER)}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


class Repository:
    """A model repository: made once, written in whole commits, its README never replaced unless it is ours.

    Args:
        repo_id: "name" or "owner/name". token: None takes the one of `hf auth login`. revision: branch to write to.
        private: of a repository that is made here; an existing one keeps what it is.

    Raises:
        VariantError: it cannot be reached or made; the message says what to set.
    """

    def __init__(self, repo_id: str, *, token: str | None = None, private: bool | None = True, revision: Any = None):
        from huggingface_hub import HfApi

        self.api: Any = HfApi(token=token)
        self.revision = revision
        try:
            self.repo_id = self.api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision:
                self.api.create_branch(self.repo_id, branch=revision, exist_ok=True)
            self.public = not self.api.model_info(self.repo_id).private
            self.has_own_readme = has_foreign_readme(self.api, self.repo_id, revision=revision)
        except Exception as error:
            raise VariantError(
                f"cannot make or reach the Hub repository {repo_id!r} ({reason(error)}): log in with `hf auth login` "
                "or set HF_TOKEN, or train with push_to_hub: false and push later with `trl-variants push RUN`"
            ) from error

    def commit(self, files: dict[str, Path], message: str, background: bool = False) -> Any:
        """Writes these files in one commit; returns huggingface_hub's CommitInfo, or a Future of it.

        A README is left out where the repository has one of its own by now.
        """
        from huggingface_hub import CommitOperationAdd

        self.has_own_readme = has_foreign_readme(self.api, self.repo_id, revision=self.revision)
        added = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path))
            for name, path in files.items()
            if not (name == README and self.has_own_readme)
        ]
        return self.api.create_commit(
            repo_id=self.repo_id,
            operations=added,
            commit_message=message,
            revision=self.revision,
            run_as_future=background,
        )

    def notes(self, asked_private: bool | None) -> Iterator[str]:
        """What its owner should know before anything is written, a sentence each."""
        if self.public and asked_private:
            yield f"{self.repo_id} exists already and is public: what is pushed can be read by everyone"
        if self.has_own_readme:
            yield f"{self.repo_id} has a README of its own, which is kept: the card goes to {BESIDE} beside it"


def has_foreign_readme(api: Any, repo_id: str, **where: Any) -> bool:
    """Whether a repository has a README that was not written here; no repository has none. Network errors are raised:
    a README that cannot be read must not count as absent."""
    if not api.file_exists(repo_id, README, **where):
        return False
    path = api.hf_hub_download(repo_id, README, **where)
    with open(path, encoding="utf-8", errors="replace") as file:
        return not is_ours(file.read())


def reason(error: BaseException) -> str:
    """One line of an error from the Hub or the network, with what the server said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = getattr(error, "server_message", None)
    text = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {text}{f': {said}' if said and said not in text else ''}"[:400]


def failed(job: Future) -> BaseException | None:
    """What a background push died of; None where it went through or was not started."""
    return None if job.cancelled() else job.exception()


def default_name(folder: str | Path) -> str:
    """What the repository of a run folder is called when nothing else is said."""
    return os.path.basename(os.path.abspath(str(folder)))
