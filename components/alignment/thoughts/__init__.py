"""Trees of thoughts (DRIFT section 2.2, appendices B and D.1; Yao et al. 2023).

For each question a writer proposes `children` thoughts after each prefix, an evaluator scores them
from 1 to 10, and the `beam` best prefixes are extended, down to `depth`. A score that cannot be
parsed is requested again; then the thought is left out, and nothing is grown from it. Preference
pairs are made of the trees in components/data/trees.py.

The trees of several questions are grown level by level at the same time, so that their prompts fill
common batches. A tree depends on its question and on the settings only, not on the trees that are
grown before it or with it, except for the last bits of expected scores. The trees of a batch of
questions are stored as soon as they are complete, so that a stopped stage resumes with the
remaining questions.
"""

from components.alignment.thoughts.files import grow_missing_trees, load_thought_templates, settings_key
from components.alignment.thoughts.growth import (
    ThoughtTemplates,
    TreeSettings,
    grow_trees,
    truncate_context,
)
from components.alignment.thoughts.models import (
    EndpointEvaluator,
    ModelEvaluator,
    PolicyWriter,
    TreeModels,
    build_models,
)
from components.alignment.thoughts.requests import Request
from components.alignment.thoughts.scores import Score, ThoughtsError, parse_score, score_with_retries

__all__ = [
    "EndpointEvaluator",
    "ModelEvaluator",
    "PolicyWriter",
    "Request",
    "Score",
    "ThoughtTemplates",
    "ThoughtsError",
    "TreeModels",
    "TreeSettings",
    "build_models",
    "grow_missing_trees",
    "grow_trees",
    "load_thought_templates",
    "parse_score",
    "score_with_retries",
    "settings_key",
    "truncate_context",
]
