"""Ready reward functions with TRL's signature: f(prompts, completions, completion_ids=None, **columns).

Each returns one float a completion, or None where it does not apply; completions are text or messages. Functions with
settings are classes, so that they can be pickled: make an instance and pass that.
"""

from .asking import LocalJudge, ServerJudge
from .embeddings import encoder
from .gui import ActionReward, GroundingReward, ThinkingLengthReward
from .judge import YesNoReward
from .judged import JudgePreferenceReward, JudgeScoreReward
from .matching import AnswerMatchReward, EditSimilarityReward, accuracy_reward
from .numbers import final_number_reward
from .patches import PatchSimilarityReward
from .perspectives import PerspectiveCoverage, PerspectiveUniqueness, tag_layout_reward
from .preference import Preference, PrefixPreferenceReward, fit_preference
from .process_model import ProcessRewardModel
from .reasoning import LanguageConsistencyReward, ReflectionReward, think_answer_reward
from .routing import DomainReward, DuringSteps
from .verification import SelfVerificationReward

__all__ = [
    "ActionReward",
    "AnswerMatchReward",
    "DomainReward",
    "DuringSteps",
    "EditSimilarityReward",
    "GroundingReward",
    "JudgePreferenceReward",
    "JudgeScoreReward",
    "LanguageConsistencyReward",
    "LocalJudge",
    "PatchSimilarityReward",
    "PerspectiveCoverage",
    "PerspectiveUniqueness",
    "Preference",
    "PrefixPreferenceReward",
    "ProcessRewardModel",
    "ReflectionReward",
    "SelfVerificationReward",
    "ServerJudge",
    "ThinkingLengthReward",
    "YesNoReward",
    "accuracy_reward",
    "final_number_reward",
    "encoder",
    "fit_preference",
    "tag_layout_reward",
    "think_answer_reward",
]
