"""The sum of squared probabilities that the optimal token baseline asks for, against the model's own logits."""

from __future__ import annotations

import torch

from trl_variants import VariantGRPOTrainer

from . import toy


def test_equals_the_full_softmax_and_leaves_the_model_as_it_was():
    seen = {}

    def patch(trainer):
        stock = trainer.logps_and_sum_sq_probs

        def watched(batch):
            before = trainer.model.forward
            logps, squares = stock(batch)
            assert trainer.model.forward == before and not trainer.model._forward_hooks
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            width = batch["completion_ids"].shape[1]
            with torch.no_grad():
                logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, -width - 1 : -1]
            probabilities = (logits / trainer.temperature).softmax(-1)
            chosen = probabilities.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
            real = batch["completion_mask"] > 0
            torch.testing.assert_close(squares[real], (probabilities**2).sum(-1)[real])
            torch.testing.assert_close(logps[real].exp(), chosen[real])
            seen["tokens"] = seen.get("tokens", 0) + int(real.sum())
            return logps, squares

        trainer.logps_and_sum_sq_probs = watched

    run = toy.train(VariantGRPOTrainer, variant="otb", max_steps=4, num_iterations=2, temperature=0.8, patch=patch)
    assert seen["tokens"] > 40 and float(run.change.abs().max()) > 0


def test_nothing_is_computed_where_no_hook_asks_for_it():
    def patch(trainer):
        trainer.logps_and_sum_sq_probs = None  # calling it would fail

    assert float(toy.train(VariantGRPOTrainer, variant="dapo", max_steps=2, patch=patch).change.abs().max()) > 0
