"""Share of problems whose one greedy completion is right."""

import datasets
import evaluate

from trl_variants.evaluation.estimators import wilson


class GreedyAccuracy(evaluate.Metric):
    """`compute(predictions=[True, False, ...])`, one a problem."""

    def _info(self):
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: for each problem whether its completion is right",
            features=datasets.Features({"predictions": datasets.Value("bool")}),
        )

    def _compute(self, predictions):
        return {"greedy accuracy": wilson(sum(map(bool, predictions)), len(predictions)).to_mapping()}
