"""avg@k: mean over problems of the share of k samples that are right."""

import datasets
import evaluate

from trl_variants.evaluation.estimators import bootstrap


class AvgAtK(evaluate.Metric):
    """`compute(predictions=[[True, False, ...], ...], seed=0)`, k samples a problem."""

    def _info(self):
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: for each problem, for each of its k samples, whether it is right",
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("bool"))}),
        )

    def _compute(self, predictions, seed=0):
        k = len(predictions[0])
        return {f"avg@{k}": bootstrap([sum(map(bool, row)) / k for row in predictions], k, seed).to_mapping()}
