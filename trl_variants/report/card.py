"""The model card of a run: what was trained on what, by which rule, with which outcome, and how to load it.

`trl-variants card runs/NAME` renders it again from the run folder alone.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from ..composition import SEAMS, Variant, differing
from ..describe import math_of, objective_line
from .card_figures import figures, model_index
from .citations import bibtex, papers_of
from .curves import learning_curve_png, series, sparkline
from .plots import panels_png
from .record import HIDDEN, RunRecord, hub_id
from .run_folder import write_text

MARK = "<!-- card: written by trl_variants; delete this line to keep your own edits -->"
README, BESIDE = "README.md", "README.trl_variants.md"
PICTURES = ("curve.png", "curves.png")
KEPT = ("log.jsonl", "curve.png", "curves.png", "result.json")


def metadata(record: RunRecord) -> Any:
    """The YAML head as huggingface_hub.ModelCardData: library, base model, tags, data set, measured results.

    A base model or data set that is a local folder is left out: the Hub refuses a card that names one.
    """
    from huggingface_hub import ModelCardData

    result = record.result
    adapter, base = result.get("adapter"), hub_id(result.get("base_model"))
    tags = ["trl", "trl-variants", "grpo", *([str(result["variant"])] if result.get("variant") else [])]
    tags += ["lora" if str(adapter.get("kind", "")).upper() == "LORA" else "adapter"] if adapter else []
    tags += [f"base_model:{'adapter' if adapter else 'finetune'}:{base}"] if base else []
    results = model_index(record)
    return ModelCardData(
        base_model=base,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([*tags, *(result.get("tags") or [])])),
        datasets=[found] if (found := hub_id(result.get("dataset"))) else None,
        model_name=record.name if results else None,
        eval_results=results or None,
    )


def render(record: RunRecord, figures_at: str = "", pictures: Collection[str] = PICTURES) -> str:
    """The whole card as text.

    Args:
        figures_at: stands before the names of its pictures and files: "NAME." beside others. pictures: those there are.
    """
    parts = [
        f"# {record.name}",
        _summary(record),
        "## Results",
        figures(record),
        _curves(record, figures_at, pictures),
        *_method(record.composition, record.composition_text),
        "## How to load it",
        _loading(record),
        "## How to run it again",
        _recipe(record),
        "## Limits",
        _limits(record),
        "## Citations",
        "```bibtex\n" + bibtex(record.composition) + "\n```",
    ]
    head = metadata(record).to_yaml(line_break="\n")
    return f"---\n{head}\n---\n\n{MARK}\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _summary(record: RunRecord) -> str:
    result, adapter = record.result, record.result.get("adapter")
    base = hub_id(result.get("base_model"))
    model = (
        f"[{base}](https://huggingface.co/{base})" if base else f"`{result.get('model') or 'a model given in Python'}`"
    )
    if adapter:
        targets = adapter.get("targets")
        targets = ", ".join(targets) if isinstance(targets, list) else targets
        kind = {"LORA": "LoRA"}.get(adapter["kind"], adapter["kind"])
        quantized = f" ({result['quantization']} base)" if result.get("quantization") else ""
        model = f"A {kind} adapter (r {adapter['r']}, alpha {adapter['alpha']}, on {targets}) for {model}{quantized}"
    on = result.get("task") or result.get("dataset") or "a data set given in Python"
    how = f"the method **{result['variant']}**" if result.get("variant") else "TRL's own GRPO settings"
    return f"{model}, trained on {on} with {how} by trl_variants, which runs policy-optimization methods on TRL."


def _curves(record: RunRecord, at: str, pictures: Collection[str]) -> str:
    _, rewards = series(record.history, "reward")
    if not rewards:
        return ""
    lines = [f"    reward {sparkline(rewards)}"]
    for name, text in zip(PICTURES, ("learning curve", "more curves"), strict=True):
        lines += ["", f"![{text}]({at}{name})"] if name in pictures else []
    return "\n".join([*lines, "", f"Every logged line: [log.jsonl]({at}log.jsonl)."])


def _method(v: Variant | None, text: str) -> list[str]:
    from ..catalog import published

    if v is None:
        return ["## Method", f"```text\n{text}\n```" if text else "The run folder does not say what was composed."]
    about = v.about
    lines = []
    if about:
        where = f" ([{about.paper}]({about.paper_url}))" if about.paper else ""
        original = published(v.name)
        edits = differing(v, original) if original else ()
        edited = f" **Edited: {', '.join(edits)}**; the rest of this line is of {v.name} as published." if edits else ""
        lines += [f"{about.title}{where}.{edited} {about.idea}", ""]
    lines += ["```text", objective_line(v)]
    lines += [f"  with {math_of(h)}" for seam in SEAMS for h in v.at(seam) if _defines(seam) and math_of(h)]
    lines += ["```", "", "| seam | hook | parameters | papers |", "|---|---|---|---|"]
    for seam in SEAMS:
        for h in v.at(seam):
            cells = (seam, f"`{h.hook_name}`", _parameters(h), _links(papers_of(h)))
            lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    said = [f"* {d}" for d in about.deviations] + [f"* ours: {d}" for d in about.ours] if about else []
    return ["## Method", "\n".join(lines), *(["### Deviations from the paper", "\n".join(said)] if said else [])]


def _defines(seam: str) -> bool:
    return seam in ("ratio", "advantage", "credit", "learners", "teacher", "rollouts", "rewards", "select")


def _parameters(h: Any) -> str:
    if not is_dataclass(h):
        return ""
    return ", ".join(f"{f.name} {_short(getattr(h, f.name))}" for f in fields(h))


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return re.sub(r"\s+", " ", text)


def _links(papers: Sequence[str]) -> str:
    return ", ".join(f"[{p}](https://arxiv.org/abs/{p})" for p in papers)


def _loading(record: RunRecord) -> str:
    result, adapter = record.result, record.result.get("adapter")
    where = str(result.get("hub_model_id") or record.name)
    base = hub_id(result.get("base_model"))
    if not adapter:
        code = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{where}")',
            f'model = AutoModelForCausalLM.from_pretrained("{where}")',
        ]
        return _python(code)
    given = base or f"FOLDER OF {result.get('model')}"
    four, eight = str(result.get("quantization") or "").startswith("4"), result.get("quantization") == "8-bit"
    quantized = (
        [", quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')"] if four else []
    )
    quantized = [", quantization_config=BitsAndBytesConfig(load_in_8bit=True)"] if eight else quantized
    names = "AutoModelForCausalLM, AutoTokenizer" + (", BitsAndBytesConfig" if quantized else "")
    code = [
        "from peft import PeftModel",
        f"from transformers import {names}",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{given}"{"".join(quantized)})',
        f'tokenizer = AutoTokenizer.from_pretrained("{where}")',
        f'model = PeftModel.from_pretrained(base, "{where}")',
    ]
    said = []
    if base is None:
        said.append(
            f"This is an adapter. It was trained on a local folder ({result.get('model')}), not on a model of the Hub: "
            "load that base yourself; `adapter_config.json` names a folder of the training machine."
        )
    if quantized:
        said.append(
            f"It was trained on the {result['quantization']} base; on 16-bit weights of the same model its log-probs "
            "differ a little."
        )
    return "\n\n".join([*said, _python(code)])


def _python(code: Sequence[str]) -> str:
    return "\n".join(["```python", *code, "```"])


def _recipe(record: RunRecord) -> str:
    result = record.result
    settings = {k: v for k, v in (result.get("settings") or {}).items() if k not in HIDDEN}
    lines = []
    if result.get("command"):
        lines += ["```bash", str(result["command"]), "```", ""]
    if settings:
        kind = "recipe.yaml" if result.get("task") or result.get("command") else "VariantGRPOConfig: what differs"
        lines += ["```yaml", f"# {kind}", _yaml(settings), "```", ""]
        if _means_something_else(record, settings):
            whole = _yaml({"variant": record.composition.to_mapping()})  # type: ignore[union-attr]
            lines += ["Today's catalog has another composition under this name; the one of this run:", ""]
            lines += ["```yaml", whole, "```", ""]
    facts = []
    if result.get("steps") is not None:
        took = f" in {result['train_seconds']:.0f} s" if result.get("train_seconds") is not None else ""
        where = f" on {result['device']}" if result.get("device") else ""
        n = result.get("processes")
        facts.append(f"{result['steps']} optimizer steps{took}{where}" + (f", {n} process(es)" if n else ""))
    facts += [f"seed {result['seed']}"] if result.get("seed") is not None else []
    facts += [", ".join(f"{k} {v}" for k, v in (result.get("versions") or {}).items())]
    return "\n".join([*lines, "; ".join(f for f in facts if f) + "."])


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, width=110).strip()


def _means_something_else(record: RunRecord, settings: dict[str, Any]) -> bool:
    """Whether the recipe's bare method name composes something else by now than was trained."""
    from ..catalog import published

    ran, name = record.composition, settings.get("variant")
    now = published(name) if isinstance(name, str) else None
    if ran is None or now is None or settings.get("hooks") or settings.get("teacher"):
        return False
    return bool(differing(ran, now.with_(weight=ran.weight)))  # the engine adds its sampler correction there


def _limits(record: RunRecord) -> str:
    result = record.result
    lines = [
        "* One run with one seed: the difference to another run of the same recipe is not known from it."
        if not result.get("seeds")
        else "",
        "* Measured only on what the table says; nothing was measured on safety, other tasks or other languages.",
        "* The reward functions decide what was learned: a policy may satisfy them without doing what was meant.",
        f"* Trained with completions of at most {result['max_new_tokens']} tokens; longer ones were cut."
        if result.get("max_new_tokens")
        else "",
        "* Licence and limits of the base model apply.",
    ]
    return "\n".join(line for line in lines if line)


# --- on disk ------------------------------------------------------------------------------------------------------


def is_ours(text: str) -> bool:
    """Whether a README was written here and may be written again."""
    return MARK in text


def write_card(record: RunRecord, folder: str | Path, *, beside: bool = False, pictures: bool = True) -> Path:
    """Writes the card into `folder` and returns its path: README.md, or README.trl_variants.md.

    A README.md that somebody else wrote is never touched: the card then lies beside it, as it does where `beside`
    says that the place the folder will be pushed to has a README of its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / README
    if beside or (page.is_file() and not is_ours(page.read_text(encoding="utf-8", errors="replace"))):
        page = folder / BESIDE
    if pictures:
        draw(record, folder)
    write_text(page, render(record, pictures=[name for name in PICTURES if (folder / name).is_file()]))
    return page


def draw(record: RunRecord, folder: Path, at: str = "") -> None:
    """curve.png and curves.png, where there is something to draw and matplotlib is here."""
    result = record.result
    if series(record.history, "reward")[0]:
        learning_curve_png(
            record.history,
            folder / f"{at}curve.png",
            title=str(result.get("variant") or "trl"),
            before=result.get("accuracy_before"),
            after=result.get("accuracy_after"),
        )
        panels_png(record.history, folder / f"{at}curves.png")


def keep(folder: str | Path, target: str | Path) -> Path:
    """Writes the card of a run folder to `target`/NAME.md with log, curves and result beside it; returns its path."""
    folder, target = Path(folder), Path(target)
    record = RunRecord.load(folder)
    target.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        if (folder / file).is_file():
            shutil.copy(folder / file, target / f"{record.name}.{file}")
    draw(record, target, f"{record.name}.")
    page = target / f"{record.name}.md"
    there = [name for name in PICTURES if (target / f"{record.name}.{name}").is_file()]
    write_text(page, render(record, f"{record.name}.", there))
    return page
