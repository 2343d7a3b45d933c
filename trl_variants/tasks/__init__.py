"""Tasks: data, rewards, default model and held-out accuracy, by name."""

from trl_variants.tasks import arithmetic, gsm8k, gym, scratchpad
from trl_variants.tasks.arithmetic import tiny_model_path
from trl_variants.tasks.base import Task, load_task, register_task, task_names
from trl_variants.tasks.scratchpad import scratchpad_model_path, scratchpad_teacher_path
from trl_variants.tasks.smollm2 import smollm2_path

__all__ = [
    "Task",
    "arithmetic",
    "gsm8k",
    "gym",
    "load_task",
    "register_task",
    "scratchpad",
    "scratchpad_model_path",
    "scratchpad_teacher_path",
    "smollm2_path",
    "task_names",
    "tiny_model_path",
]
