"""pass@k: mean over problems of the unbiased estimate that one of k samples is right (2107.03374, eq. 1)."""

import datasets
import evaluate

from trl_variants.evaluation.estimators import bootstrap, pass_at_k, powers_up_to


class PassAtK(evaluate.Metric):
    """`compute(predictions=[[True, False, ...], ...], seed=0)`, n samples a problem; k = 2, 4, ... and n."""

    def _info(self):
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: for each problem, for each of its n samples, whether it is right",
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("bool"))}),
        )

    def _compute(self, predictions, seed=0):
        n = len(predictions[0])
        found = {}
        for k in powers_up_to(n):
            if k > 1:  # pass@1 is avg@n
                values = [pass_at_k(n, sum(map(bool, row)), k) for row in predictions]
                found[f"pass@{k}"] = bootstrap(values, n, seed).to_mapping()
        return found
