"""`trl-variants push RUN`: a run folder to the Hub, after the run."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import VariantError
from .parser import Parser


def run(words: list[str]) -> int:
    """Pushes the top of a run folder in one commit and prints where it is.

    Raises:
        VariantError: no run folder, nothing in it to load, a repository that cannot be made, a card the Hub refuses.
    """
    parser = Parser(prog="trl-variants push", description="Push a run folder (model or adapter, card, figures).")
    parser.add_argument("run", metavar="RUN", help="the run folder")
    parser.add_argument("--hub_model_id", metavar="NAME", help="repository; default: the run's own, else its folder")
    parser.add_argument("--public", action="store_true", help="make a new repository public instead of private")
    parser.add_argument("--hub_revision", metavar="BRANCH", help="branch to write to")
    options = parser.parse_args(words)
    from ..hub import Repository, default_name, model_files, reason
    from ..report.card import write_card
    from ..report.record import RunRecord

    record = RunRecord.load(options.run)
    if not any(name.endswith((".safetensors", ".bin")) for name in model_files(options.run)):
        raise VariantError(f"{options.run} holds no model: training writes it there when it ends")
    name = options.hub_model_id or record.result.get("hub_model_id") or default_name(options.run)
    repository = Repository(
        name, token=os.environ.get("HF_TOKEN"), private=not options.public, revision=options.hub_revision
    )
    for note in repository.notes(asked_private=not options.public):
        print(note)
    record.result["hub_model_id"] = repository.repo_id
    record.save(Path(options.run))
    write_card(record, options.run, beside=repository.has_own_readme)
    try:
        sent = repository.commit(model_files(options.run), "Push of a finished run")
    except Exception as error:
        raise VariantError(
            f"the push to {repository.repo_id} failed ({reason(error)}); run this command again"
        ) from error
    print(f"pushed: {sent.commit_url}")
    return 0
