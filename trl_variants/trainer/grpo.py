"""VariantGRPOTrainer: trl.GRPOTrainer running a Variant.

TRL generates, parses, rewards, logs and saves. Everything between rewards and loss is the variant's:
`scored_generation`
turns rewards into advantages, `window_batches` counts an optimizer step before its first backward, `micro_batch_loss`
evaluates the objective on one micro-batch or back-propagates its share of the one window objective.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check
from ..composition import Variant
from ..errors import VariantError
from ..hooks.base import to_spec
from ..hooks.metrics import Mean, Metric
from ..learners import Team
from ..objective import Loss, advantages, attachments, coefficients, evaluate, score
from ..parity import sampler_correction
from ..records import Run, TokenBatch, Window, column
from ..schedule import at
from .checkpoint import load_rank, load_shared, save_rank, save_shared
from .config import VariantGRPOConfig, variant_of
from .embedding import Embedding
from .engine import refuse_unservable
from .forward import Tally
from .memory import HookMemory
from .metrics import MetricBook
from .planning import Plan, blank, describe_plan, plan_update, together, unclipped
from .resampling import Resampling
from .rollouts import RolloutSeam
from .scoring import build_scored, dead_groups
from .seam import SeamTrainer
from .selftest import self_test
from .services import Services
from .statistics import Statistics, loss_divergences, statistics
from .teaching import Teaching
from .token_rewards import with_token_rewards
from .window import count_window, join, loss_mask, shuffle_groups, token_batch

_ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class VariantGRPOTrainer(SeamTrainer):
    """Every argument of `trl.GRPOTrainer` keeps its meaning; `variant` names the method.

    Args:
        variant: a catalog name, a mapping or a `Variant`. May stand in `args.variant` instead. With neither, and no
            `args.hooks`, the trainer computes what TRL's computes, step for step.
        teacher: what answers where the variant asks a teacher: a model's name, folder or instance, or a teacher as in
            `args.teacher`, which it replaces.

    Raises:
        VariantError: a composition that cannot run here (the findings of `check` that are errors), a data set without
            `prompt`, or a checkpoint of another composition.
    """

    _tag_names = ["trl", "grpo", "trl-variants"]
    learner_trains_policy = False

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list | None = None,
        optimizers: tuple = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        variant: Any = None,
        teacher: Any = None,
    ):
        if args is None:
            args = VariantGRPOConfig(f"{_model_name(model)}-GRPO")
        if teacher is not None:
            args, self.given_teacher = _with_teacher(args, teacher)
        chosen = variant_of(args, variant)
        self.named = chosen is not None
        self.variant: Variant = Variant.from_config(args) if chosen is None else chosen
        if self.named:
            args = copy.copy(args)
            if variant is not None:
                args.variant = self.variant.to_mapping()
            self._refuse_errors(args, rollout_func)
            self._derive_switches(args)
        for data in (train_dataset, *(eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset])):
            _require_prompt(data, environment_factory)
        _require_writable(self.variant)
        refuse_unservable(args, model, peft_config, quantization_config)
        self.memory = HookMemory(self.variant, args.seed)
        self.book = MetricBook(per_micro_batch=not self.named)
        self.window: Window = None  # type: ignore[assignment]
        self.plan = Plan([], 1)
        self.warned_of_budget = False
        self._generations = 0
        self.generation_rows: list[dict] = []  # of this process, as the data set has them
        self._stats: list[dict] = []
        self._completion_ids: list = []
        self.given_models: dict[str, nn.Module] = getattr(self, "given_models", {})  # by role, for learners
        self._tested = not (self.named and getattr(args, "self_test", False))
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        self.services = Services(self)
        self.rollouts = RolloutSeam(self)
        self.resampling = Resampling(self)
        self.run_facts = Run(
            max_completion_length=args.max_completion_length or 0,
            group_size=args.num_generations,
            temperature=args.temperature,
            iterations=args.num_iterations,
            vocabulary=getattr(self.model.config.get_text_config(), "vocab_size", 0),
        )
        self.embedding = Embedding(self)
        self.teaching = Teaching(self)
        self.team = Team(self)
        self.learner_trains_policy = self.team.trains_policy
        self.check_card()

    # --- what the run and the variant ask of each other ---------------------------------------------------------

    def _refuse_errors(self, args: Any, rollout_func: Any) -> None:
        errors = [f for f in check(self.variant, args, rollout_func=rollout_func) if f.level == "error"]
        if errors:
            raise VariantError("; ".join(f"{f.message} ({f.hint})" if f.hint else f.message for f in errors))

    def _derive_switches(self, args: Any) -> None:
        """TRL's switches that a hook implies; the user sets only the hook."""
        if "ref_logps" in self.variant.needs and args.beta == 0.0:
            coefs = [getattr(h, "coef", None) for _, h in self.variant.hooks() if "ref_logps" in h.needs]
            # TRL reads beta only to decide whether a reference is needed
            args.beta = next((c for c in coefs if isinstance(c, (int, float)) and c), 1.0)
        args.disable_dropout = True  # with dropout the on-policy ratio is not 1
        correction = sampler_correction(args)
        has_own = any(getattr(w, "corrects_sampler", False) for w in self.variant.weight)
        has_own |= getattr(self.variant.ratio, "anchor", "old") != "old"  # its ratio is against the sampler already
        if correction and not has_own and not getattr(self.variant.clip, "folds_sampler", False):
            self.variant = self.variant.with_(weight=[*self.variant.weight, correction])

    @property
    def progress(self) -> float:
        """Share of the planned optimizer steps that are done, in [0, 1]."""
        return self.state.global_step / self.state.max_steps if self.state.max_steps else 0.0

    # --- generation ---------------------------------------------------------------------------------------------

    def scored_generation(self, rows: list, generate: Callable[[list], dict]) -> dict:
        """One generation with this variant's advantages instead of TRL's, and per-row facts for the hooks."""
        training = self.training
        if training:
            rows = self._training_rows(rows)
        self.generation_rows = rows
        output = generate(rows)
        if self.empty_rows:
            output["completion_mask"][self.empty_rows] = 0
        group_size = self.num_generations if training else self.num_generations_eval
        scored = build_scored(self, rows, output, self._reward_matrix, self._completion_ids, group_size)
        mine = slice(self.accelerator.process_index * len(rows), (self.accelerator.process_index + 1) * len(rows))
        self._log_generation(scored)
        if training:
            scored = self.rollouts.mark(scored, output)
        output["solved"] = scored.solved[mine]
        seen = dict(output)  # before rows are taken out of the policy's loss
        scored = with_token_rewards(self, scored, output)
        frozen = self.team.freezes_policy  # asked before any learner moves on
        scored = self.team.before(scored, seen, training)
        states, rngs = self.memory.states, self.memory.generators(training)
        scored = self.teaching.teach(rows, output, scored)
        scored = score(self.variant, scored, states, rngs, selecting=training or not self.named)
        advantage = advantages(self.variant, scored, states, rngs)
        if training:
            self.memory.update("generation", scored)
            for h in (*self.variant.prompts, *self.variant.rollouts):
                if hasattr(h, "observe"):
                    h.observe(scored)
        self._replace_logged_advantages(advantage)
        width = output["completion_ids"].shape[1]
        output["advantages"] = advantage[mine] if advantage.dim() == 1 else advantage[mine][:, :width]
        output["completion_mask"] = output["completion_mask"] * scored.keep[mine].unsqueeze(1)
        output["num_items_in_batch"] = self.accelerator.reduce(loss_mask(output).sum(), reduction="sum")
        output["reward"] = scored.reward[mine]
        output["correct"], output["truncated"] = scored.correct[mine], scored.truncated[mine]  # type: ignore[index]
        output["group"] = scored.group[mine] + self._generations * len(scored.group)
        output.update({f"extra/{name}": x[mine] for name, x in attachments(self.variant, scored).items()})
        self._generations += 1
        self.teaching.forget(output)
        if training:
            output["policy_frozen"] = torch.tensor(float(frozen))
            output.update(self.team.after(scored, seen, advantage))
        return output

    @property
    def generation(self) -> int:
        """How many generations came before."""
        return self._generations

    def _training_rows(self, rows: list) -> list:
        """The data set rows to generate for: what the prompts hooks choose, kept groups where a rollouts hook asks."""

        def choose(drawn: list) -> list:
            for h in self.variant.prompts:
                drawn = h(drawn, self.services)
            return drawn

        for path, h in self.variant.hooks():
            if path.startswith("rollouts.") and h.draws_prompts:
                return self.resampling.rows(len(rows), path, at(h, self.progress), choose)
        rows = choose(rows)
        self.rollouts.begin(rows)
        return rows

    def sampled(self, prompts: list, generate: Callable[[list], tuple]) -> tuple:
        return self.rollouts.sampled(prompts, generate) if self.training else generate(prompts)

    def first_turn(self, generate: Callable, *given: Any) -> tuple:
        return self.rollouts.first_turn(generate, *given) if self.training else generate(*given)

    def replaced(self, output: dict) -> dict:
        return self.rollouts.replaced(output) if self.training else output

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, completion_ids_list: list) -> Tensor:
        self._completion_ids = completion_ids_list
        given = inputs, prompts, completions, completion_ids_list
        matrix = self.rollouts.rewards(self.stock_rewards, *given) if self.training else self.stock_rewards(*given)
        self._reward_matrix = matrix
        return matrix

    def stock_rewards(self, *given: Any) -> Tensor:
        """(N, F) what the reward functions say of these rows, every process having equally many."""
        return super()._calculate_rewards(*given)

    def _log_generation(self, scored: Any) -> None:
        metrics = self._metrics["train" if self.training else "eval"]
        for name, value in dead_groups(scored).items():
            metrics[name].append(value)
        empty = self.accelerator.reduce(
            torch.tensor(float(len(self.empty_rows)), device=scored.rewards.device), reduction="sum"
        )
        metrics["completions/empty"].append(float(empty) / len(scored.rewards))

    def _replace_logged_advantages(self, advantage: Tensor) -> None:
        shown = (column(advantage).sum(1) / (column(advantage) != 0).sum(1).clamp(min=1)).tolist()
        for _ in range(min(len(shown), len(self._logs["advantages"]))):
            self._logs["advantages"].pop()
        self._logs["advantages"].extend(shown)

    # --- the window ---------------------------------------------------------------------------------------------

    def window_batches(self, raw: list) -> list[dict]:
        batches = self.buffered_steps(raw)
        self.window = count_window(batches, self.gather_rows, self.world, len(raw) / self.args.steps_per_generation)
        if any(float(b.pop("policy_frozen", 0.0)) for b in batches):  # its optimizer then skips every weight
            return [{"frozen": True, "last": b is batches[-1]} for b in batches]
        if not self._tested:
            self._tested = True
            if self.accelerator.is_main_process and (result := self_test(self, batches)):
                print(result, flush=True)
                print(describe_plan(self, batches), flush=True)
        whole = self._evaluate_window(batches) if self.variant.scope == "window" else None
        self.plan = plan_update(self, batches)
        planned = [{} if batch is None else batch for batch in self.plan.batches]
        planned[-1].update(last=True, window_loss=whole)
        return planned

    def takes(self, batch: Mapping) -> bool:
        return super().takes(batch) and not self.learner_trains_policy  # such a term reads TRL's own rows

    def mixed(self, generation: dict) -> dict:
        if not self.variant.whole_groups:
            return super().mixed(generation)
        return shuffle_groups(generation, self.num_generations)

    def eval_batch(self, rows: list) -> dict:
        batch = dict(self._generate_and_score_completions(rows), iteration=0, last=True)
        self.window = count_window([batch], self.gather_rows, self.world, 1.0)
        self.plan = Plan([batch], 1)
        return batch

    def _record(self, batch: dict, seen: Statistics) -> TokenBatch:
        return token_batch(
            batch,
            seen,
            self.window,
            self.run_facts,
            lambda x: self.gather_rows(x, 0.0),
            step=self.state.global_step,
            progress=self.progress,
        )

    def _whole_window(self, batches: list[dict]) -> TokenBatch:
        """The statistics of every micro-batch of every process, without gradient."""
        with self.scoring():
            if all(self.takes(b) for b in batches) and not loss_divergences(self.variant):
                rows = together([{k: b[k] for k in _ROWS} for b in batches], self.pad_id)
                scores = self.forward(self.model, rows, batch_size=self.args.per_device_train_batch_size)
                sizes = [b["completion_ids"].shape for b in batches]
                split = zip(*(x.split([n for n, _ in sizes]) for x in (scores.logps, scores.entropy)), strict=True)
                seen = [Statistics(x[:, :w], y[:, :w]) for (x, y), (_, w) in zip(split, sizes, strict=True)]
            else:  # hidden states of a whole window may be too many to keep
                seen = [statistics(self, self.model, batch) for batch in batches]
        return join([self._record(b, s) for b, s in zip(batches, seen, strict=True)], self.gather_rows)

    def _evaluate_window(self, batches: list[dict]) -> Loss:
        """The one window objective: evaluated once, its coefficients are handed to the micro-batches."""
        whole = self._whole_window(batches)
        loss, c = coefficients(self.variant, whole, self.memory.states, self.memory.rngs)
        live = [name for name, g in c.items() if name == "logps" or bool(g.any())]  # the same on every process
        rows = [len(b["completion_mask"]) for b in batches]
        sizes = self.accelerator.gather(torch.tensor([sum(rows)], device=whole.mask.device))
        start = int(sizes[: self.accelerator.process_index].sum())
        for batch, count in zip(batches, rows, strict=True):
            width = batch["completion_mask"].shape[1]
            batch["coefficients"] = {name: c[name][start : start + count, :width] for name in live}
            batch["window_value"] = loss.loss.detach()
            start += count
        return loss

    # --- the loss -----------------------------------------------------------------------------------------------

    def micro_batch_loss(self, model: nn.Module, batch: dict) -> Tensor:
        """The micro-batch's share of the window's loss, times the processes over which gradients are averaged."""
        if not batch:  # the other micro-steps hold every row with gradient
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        if "frozen" in batch:
            if batch["last"]:
                self.forward.tally = Tally()
                self._end_of_window()
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        hidden: list[Tensor] = []
        with self.team.watching(model, hidden):
            seen = statistics(self, model, batch, aux=self.aux_loss_enabled)
        record = self._record(batch, seen)
        share = 1.0 / (self.plan.real * self.world)  # of the window's metrics that is this micro-batch's to report
        result: Loss | None
        if "coefficients" in batch:  # the window is evaluated already; its value is reported in equal shares
            surrogate = seen.surrogate(batch["coefficients"])
            value = surrogate - surrogate.detach() + batch["window_value"] * share
            result, share = batch.get("window_loss"), 1.0
        elif self.variant.scope == "window":  # evaluation: one window over all processes
            rngs = self.memory.generators(training=False)
            result = evaluate(self.variant, join([record], self.gather_rows), self.memory.states, rngs)
            value, share = result.loss / self.world, 1.0
        else:
            result = evaluate(self.variant, record, self.memory.states, self.memory.generators(self.training))
            value = result.loss
        parts: dict[str, Metric] = {"entropy": Mean.over(seen.entropy, record.mask), **_teacher_parts(record)}
        if result is not None:
            parts.update(result.parts)
        parts.update(self.own_parts(record))
        if batch.get("weightless"):
            value, parts = value.detach() + 0.0 * seen.logps.sum(), blank(parts)
        if result is not None:
            parts.update(self._term_parts(result.terms, share))
            self._stats.append(result.stats)
        for name, term in self.team.policy_terms(hidden, batch).items():
            value = value + term
            parts[f"terms/{name}"] = Mean(term.detach(), torch.full_like(term, 1.0 / self.window.micro_batches))
        if seen.aux is not None:
            value = value + self.router_aux_loss_coef * seen.aux / self.window.micro_batches
            parts["aux_loss"] = Mean(seen.aux.detach(), torch.ones_like(seen.aux))
        self.book.add(parts)
        if batch.get("last"):
            if self.named and self.training:
                self._report_plan(result)
            self._end_of_window()
        return value * self.world

    def own_parts(self, record: TokenBatch) -> dict[str, Metric]:
        """Further metrics of a micro-batch, for a subclass."""
        return {}

    def _report_plan(self, result: Loss | None) -> None:
        """What the plan processed; and the rows it left out, where a metric counts them by definition."""
        if self.variant.scope != "window" and result is not None:
            self.book.add(unclipped(self.plan, result.parts, per_row=result.log_ratio.shape[1] == 1))
        tally, self.forward.tally = self.forward.tally, Tally()
        number = lambda total, count: Mean(*torch.tensor([float(total), float(count)]))  # noqa: E731
        one = 1.0 / self.world
        self.book.add(
            {
                "plan/tokens_generated": number(self.plan.tokens, one),
                "plan/tokens_with_gradient": number(self.plan.tokens - self.plan.dropped_tokens, one),
                "plan/tokens_processed": number(tally.processed, one),
                "plan/useful_share": number(tally.useful, tally.processed),
                "plan/forwards_per_row": number(tally.rows, self.window.rows / self.world),
            }
        )

    def _term_parts(self, terms: dict[str, Tensor], share: float) -> dict[str, Mean]:
        # a term of the window is the sum of its shares: counts that add up to 1 make the merged mean that sum
        count = torch.tensor(share, device=self.accelerator.device)
        out = {f"terms/{name}": Mean(value.detach(), count) for name, value in terms.items()}
        policy = terms["policy"].detach()
        if not self.named and getattr(self.variant.aggregate, "span", "") != "generation":
            # TRL logs the local mean before it divides by the accumulation steps
            policy = policy * self.window.micro_batches / self.world
        out["policy_loss"] = Mean(policy, torch.full_like(count, 1.0 / self.world) if not self.named else count)
        return out

    def _end_of_window(self) -> None:
        """Reduces metrics and hook statistics once, logs them and lets the hooks with memory move on."""
        mode = "train" if self.training else "eval"
        pending, self._stats = self._stats, []
        for page in pending:
            self.book.add({f"\0{path}/{name}": part for path, seen in page.items() for name, part in seen.items()})
        logged, window = self.book.close(lambda x: self.gather_rows(x, 0.0), self.accelerator.device)
        seen: dict[str, dict[str, float]] = {}
        for name in [n for n in window if n.startswith("\0")]:
            path, stat = name[1:].rsplit("/", 1)
            seen.setdefault(path, {})[stat] = window[name]
            logged.pop(name)
        if "ratio/second_moment" in window:
            logged.pop("ratio/second_moment")
            logged["ratio/ess"] = [window["ratio/mean"] ** 2 / max(window["ratio/second_moment"], 1e-30)]
        if mode == "train":
            self._refuse_nan(window)
            self.memory.update("step", seen, self.progress)
            logged.update({name: [value] for name, value in self.memory.report(self.progress).items()})
        for name, values in logged.items():
            self._metrics[mode][name].extend(values)

    def _refuse_nan(self, window: dict[str, float]) -> None:
        """Stops before a NaN reaches the weights; transformers would log it as 0."""
        bad = [name.removeprefix("terms/") for name, x in window.items() if name.startswith("terms/") and x != x]
        if self.named and bad and self.accelerator.scaler is None:  # a loss scaler skips such a step by itself
            raise VariantError(
                f"the {' and '.join(bad)} term of the loss is NaN at step {self.state.global_step}: check what the "
                "hooks of your own return, then the model's precision and the learning rate"
            )

    # --- checkpoints --------------------------------------------------------------------------------------------

    def policy_moved(self) -> None:
        if self.teaching.teacher is not None:
            self.teaching.teacher.after_step()

    def save_state(self, folder: str) -> None:
        if self.accelerator.is_main_process:
            plain_states, tensors = self.memory.state_dict()
            taught = {f"teacher/{name}": value.cpu().contiguous() for name, value in self.teaching.state_dict().items()}
            save_shared(folder, self.variant, plain_states, {**tensors, **taught})
            self.team.save_state(folder)
        plain = {
            "counters": self.progress_counters(),
            "generations": self._generations,
            "processes": self.world,
            "logs": self._printable_logs(),
        }
        save_rank(
            folder,
            self.accelerator.process_index,
            plain,
            self._buffered_inputs if self.inside_generation else None,
        )

    def policy_alone(self) -> AbstractContextManager:
        return self.team.left_out_of_the_policy()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The policy alone, as TRL saves it; what learners trained lies in `_learners/`, which no push takes along."""
        super().save_model(output_dir, _internal_call)
        if not _internal_call:
            self.save_learners(output_dir)

    def save_learners(self, output_dir: str | None = None) -> None:
        """What learners trained, to `_learners/`."""
        if self.accelerator.is_main_process:
            self.team.save_weights(output_dir or self.args.output_dir)

    def load_state(self, folder: str) -> dict | None:
        shared = load_shared(folder, self.variant)
        if shared is None:
            return None
        plain, batches = load_rank(folder, self.accelerator.process_index, self.accelerator.device, self.world)
        return {"shared": shared, "learners": self.team.load_state(folder), "batches": batches, **plain}

    def apply_state(self, loaded: dict | None) -> None:
        self._generations, self._stats, self.book = 0, [], MetricBook(per_micro_batch=not self.named)
        if loaded is None:
            if self.state.global_step == 0:
                self.memory = HookMemory(self.variant, self.args.seed)
                self.team.restart()
            else:
                warnings.warn(
                    "the checkpoint holds weights only (save_only_model, or another trainer wrote it): hooks with "
                    "memory begin anew, and the run is not the one that was stopped",
                    stacklevel=2,
                )
            return
        self._tested = True
        states, tensors = loaded["shared"]
        self.memory.load_state_dict(states, tensors)
        self.teaching.load_state_dict(
            {k.removeprefix("teacher/"): v for k, v in tensors.items() if k.startswith("teacher/")}
        )
        if loaded["learners"] is not None:
            self.team.apply_state(loaded["learners"])
        self.restore_counters(loaded["counters"])
        self._generations, self._buffered_inputs = loaded["generations"], loaded["batches"]
        self._restore_logs(loaded["logs"])

    def _printable_logs(self) -> dict | None:
        if not self.log_completions:
            return None
        logs = self._logs
        plain = {k: list(logs[k]) for k in ("prompt", "completion", "advantages")}
        return {
            **plain,
            "rewards": {k: list(v) for k, v in logs["rewards"].items()},
            "extra": {k: list(v) for k, v in logs["extra"].items()},
        }

    def _restore_logs(self, saved: dict | None) -> None:
        for name, values in (saved or {}).items():
            if isinstance(values, dict):
                for column_name, column_values in values.items():
                    self._logs[name][column_name].extend(column_values)
            else:
                self._logs[name].extend(values)


def _teacher_parts(record: TokenBatch) -> dict[str, Metric]:
    """How far the policy is from its teacher on its own tokens, whatever the loss does with it."""
    if record.teacher_logps is None:
        return {}
    gap, says = -record.teacher_gap(of="current"), record.teacher_says.to(record.mask)
    where = lambda key: record.mask if "/ref" in key else says  # noqa: E731
    return {
        "teacher/kl": Mean.over(gap, says),
        "teacher/tokens": Mean.over(says, record.mask),
        **{f"divergence/{key}": Mean.over(value, where(key)) for key, value in record.divergences.items()},
    }


def _require_writable(variant: Variant) -> None:
    for path, h in variant.hooks():
        try:
            json.dumps(to_spec(h))
        except TypeError as error:
            raise VariantError(
                f"{path} {h.hook_name} has a parameter that no checkpoint or YAML file can hold ({error}): hook "
                "parameters are numbers, text, lists and schedules"
            ) from None


def _with_teacher(args: Any, teacher: Any) -> tuple[Any, nn.Module | None]:
    """The arguments naming the teacher, and the model itself where that was given."""
    given = teacher if isinstance(teacher, nn.Module) else None
    if given is not None:
        teacher = {"model": {"path": _path_of(given) or "given"}}
    args = copy.copy(args)
    args.teacher = to_spec(teacher) if hasattr(teacher, "hook_name") else teacher
    return args, given


def _path_of(model: Any) -> str:
    return model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")


def _model_name(model: Any) -> str:
    return _path_of(model).rstrip("/").split("/")[-1] or "model"


def _require_prompt(dataset: Any, environment: Any) -> None:
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and environment is None and "prompt" not in columns:
        raise VariantError(
            f"the data set has no column `prompt` (it has {', '.join(columns)}): rename the one that holds the prompts"
        )
