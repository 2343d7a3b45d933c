"""What a recipe may say beside the fields of VariantGRPOConfig: task, model, data, rewards."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import ModelConfig


@dataclass
class RecipeArguments:
    """Fields of a recipe that no trainer config has: top-level YAML keys and command-line options."""

    imports: list[str] | None = field(
        default=None,
        metadata={"help": "Modules to import first, from here or the path: they register hooks of your own."},
    )
    task: dict | str | None = field(
        default=None,
        metadata={"help": "Built-in task: a name, or a mapping with `name` and the task's parameters."},
    )
    model: str | None = field(
        default=None,
        metadata={"help": "Model folder, Hub id or `smollm2`. Default: the task's own model."},
    )
    adapter: str | None = field(
        default=None,
        metadata={
            "help": "LoRA adapter to train further, a run folder or Hub id, instead of a new one. `model` defaults to "
            "its base."
        },
    )
    merge_adapter: str | None = field(
        default=None,
        metadata={
            "help": "After training also save the adapter merged into its base in this dtype (bfloat16, float16, "
            "float32), to `merged` in the run folder."
        },
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Hub id, folder, or a .json/.jsonl/.csv/.parquet file with a `prompt` column."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration name of the dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split for evaluation, where it exists."})
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={"help": "Reward functions: names of TRL's own or dotted import paths. Default: the task's."},
    )
    warm_up: dict | None = field(
        default=None,
        metadata={
            "help": "Supervised phase before the run: a mapping with `steps`, and `column` (solution), `learning_rate` "
            "(2e-5), `batch_size` (8)."
        },
    )
    accuracy_every: int | None = field(
        default=None,
        metadata={
            "help": "Log greedy accuracy on held-out problems every so many optimizer steps, before the first too."
        },
    )
    accuracy_problems: int = field(default=64, metadata={"help": "How many held-out problems `accuracy_every` takes."})
    num_threads: int | None = field(
        default=None,
        metadata={"help": "Torch CPU threads. A tiny model is often fastest with 1. Default: torch's choice."},
    )


@dataclass
class ModelArguments(ModelConfig):
    """TRL's ModelConfig, except that LoRA dropout is off: with dropout the on-policy ratio is not 1."""

    lora_dropout: float = field(
        default=0.0,
        metadata={"help": "LoRA dropout. 0 unlike TRL's 0.05: with dropout the on-policy ratio is not 1."},
    )
