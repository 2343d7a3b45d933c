"""The trainer's model card and pushes: private repositories, whole commits, and a failed push that ends no run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import PushInProgress

from ..errors import VariantError
from ..hub import CARD_FILES, README, Repository, checkpoint_files, failed, model_files, reason
from ..report.card import render, write_card
from ..report.record import RunRecord, hub_id


class Publishing:
    """A part of the trainer. `facts` is what the caller knows of the run beside it, keys of `result.json`."""

    args: Any
    model: Any
    hub_model_id: Any
    callback_handler: Any
    state: Any
    control: Any
    push_in_progress: Any
    processing_class: Any
    repository: Repository | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        self.facts: dict[str, Any] = {}
        self.push_failures: list[str] = []
        refuse_foreign_completions(kwargs.get("args"))
        super().__init__(*args, **kwargs)

    # --- the card -----------------------------------------------------------------------------------------------

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None, **_: Any
    ) -> None:
        """Writes the card, `run.json` and `log.jsonl` into the run folder; a README of somebody else's is kept."""
        if not self.is_world_process_zero():  # type: ignore[attr-defined]
            return
        folder = Path(self.args.output_dir)
        record = self.run_record(dataset_name, tags)
        record.save(folder)
        ended = bool(self.state.max_steps) and self.state.global_step >= self.state.max_steps
        pictures = ended or self.repository is not None
        write_card(record, folder, beside=self._readme_is_taken, pictures=pictures)

    def run_record(self, dataset_name: str | None = None, tags: Any = None) -> RunRecord:
        record = RunRecord.of(self)
        given = [tags] if isinstance(tags, str) else list(tags or [])
        extra = {"dataset": dataset_name, "hub_model_id": self.hub_model_id, "tags": given}
        record.result |= {key: value for key, value in extra.items() if value}
        return record

    @property
    def _readme_is_taken(self) -> bool:
        return self.repository is not None and self.repository.has_own_readme

    def check_card(self) -> None:
        """Renders the card once and, before a push, lets the Hub validate its head.

        Raises VariantError on every process for a head that the Hub would refuse.
        """
        error = None
        base = getattr(self.args, "hub_base_model", None)
        if base is not None and hub_id(base) is None:
            error = f"hub_base_model must be a Hub id such as Qwen/Qwen3-0.6B, got {base!r}"
        if error is None and self.args.push_to_hub and self.is_world_process_zero():  # type: ignore[attr-defined]
            error = _refused(render(self.run_record()))
        self.fail_together(error)  # type: ignore[attr-defined]
        if base is not None:
            for config in getattr(self.model, "peft_config", {}).values():
                config.base_model_name_or_path = base

    # --- pushes -------------------------------------------------------------------------------------------------

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository, private unless `hub_private_repo` is false, and says what its owner should know.

        Raises VariantError on every process where it cannot be made.
        """
        error, private = None, self.args.hub_private_repo if private is None else private
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            name = self.args.hub_model_id or os.path.basename(os.path.abspath(self.args.output_dir))
            token = token or self.args.hub_token
            try:
                self.repository = Repository(name, token=token, private=private, revision=self.args.hub_revision)
            except VariantError as failure:
                error = str(failure)
        self.fail_together(error)  # type: ignore[attr-defined]
        mine = [] if self.repository is None else [self.repository.repo_id]
        self.hub_model_id = self.gather_objects(mine)[0]  # type: ignore[attr-defined]
        self.push_in_progress = None
        for note in self.repository.notes(private) if self.repository else ():
            print(note, flush=True)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Saves the model and pushes the top of the run folder in one commit.

        Returns:
            huggingface_hub's CommitInfo (a Future with `blocking=False`); None where the push failed. A failure is
            printed, kept in `push_failures`, and raises nothing: the model lies in the run folder.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)  # type: ignore[attr-defined]
        try:
            if self.hub_model_id is None:
                self.init_hf_repo(token=token, private=private)
        except VariantError as error:
            return self.say_failed(str(error))
        self.create_model_card(**card)
        if self.repository is None:
            return None
        self._finish_pushes()
        try:
            if revision is not None and revision != self.repository.revision:
                self.repository = Repository(self.repository.repo_id, token=token, revision=revision)
            sent = self.repository.commit(
                model_files(self.args.output_dir), commit_message or "End of training", background=not blocking
            )
        except Exception as error:
            return self.say_failed(reason(error))
        if not blocking:
            self._watch(sent)
        return sent

    def push_checkpoint(self, folder: str) -> None:
        """Starts the push that `hub_strategy` asks for after a checkpoint, in the background and in one commit."""
        strategy = str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy))
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if self.repository is None or strategy == "end" or (busy and not self.args.hub_always_push):
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        try:
            top = Path(self.args.output_dir)
            files = {name: top / name for name in CARD_FILES if (top / name).is_file()}
            files |= {name: path for name, path in model_files(folder).items() if name != README}
            if strategy in ("checkpoint", "all_checkpoints"):
                where = "last-checkpoint" if strategy == "checkpoint" else os.path.basename(folder)
                files |= {f"{where}/{name}": path for name, path in checkpoint_files(folder).items()}
            message = f"Training in progress, step {self.state.global_step}"
            job = self.repository.commit(files, message, background=True)
        except Exception as error:
            self.say_failed(reason(error))
            return
        self._watch(job)

    def _watch(self, job: Any) -> None:
        def report(done: Any) -> None:
            if (error := failed(done)) is not None:
                self.say_failed(reason(error))

        job.add_done_callback(report)
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress = PushInProgress([job])
        else:
            self.push_in_progress.jobs.append(job)

    def _finish_pushes(self) -> None:
        if self.push_in_progress is not None:
            self.push_in_progress.wait_until_done()

    def say_failed(self, why: str) -> None:
        """One line about a push that did not go through; training goes on."""
        self.push_failures.append(why)
        print(
            f"a push to the Hub failed and the run goes on without it ({why}). The files are in "
            f"{self.args.output_dir}; after the run `trl-variants push {self.args.output_dir}` pushes them again",
            flush=True,
        )


def _refused(card: str) -> str | None:
    from huggingface_hub import ModelCard

    try:
        ModelCard(card, ignore_metadata_errors=False).validate(repo_type="model")
    except ValueError as error:
        return f"the Hub would refuse this run's model card: {error}"
    except Exception as error:
        return f"the Hub did not answer when asked to validate the model card ({reason(error)})"
    return None


@contextlib.contextmanager
def readme_kept(folder: str) -> Iterator[None]:
    """PEFT writes and edits README.md beside every adapter it saves; afterwards it is what it was."""
    path = Path(folder) / README
    before = path.read_bytes() if path.is_file() else None
    try:
        yield
    finally:
        if before is not None:
            path.write_bytes(before)
        else:
            path.unlink(missing_ok=True)


def refuse_foreign_completions(args: Any) -> None:
    """TRL replaces the README of the completions repository: raises VariantError where that is somebody else's."""
    name = getattr(args, "log_completions_hub_repo", None)
    if not (name and args.log_completions):
        return
    from huggingface_hub import HfApi

    api = HfApi(token=args.hub_token)
    try:
        foreign = api.file_exists(name, README, repo_type="dataset") and not _is_a_log(
            api.hf_hub_download(name, README, repo_type="dataset")
        )
    except Exception as error:
        raise VariantError(f"cannot reach the completions repository {name!r} ({reason(error)})") from error
    if foreign:
        raise VariantError(
            f"log_completions_hub_repo {name!r} has a README that TRL would replace: name another repository"
        )


def _is_a_log(path: str) -> bool:
    return "trl-logs" in Path(path).read_text(encoding="utf-8", errors="replace")  # a tag of TRL's own card
