"""Trees of all questions of a run: their settings, and the file that they are stored in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from components.alignment.thoughts.growth import ThoughtTemplates, TreeSettings, grow_trees
from components.alignment.thoughts.tree_models import TreeModels
from components.config import PolicyConfig, ThoughtsConfig
from components.data.questions import Question, render
from components.data.templates import Template
from components.data.templates import load as load_template
from components.data.trees import Tree, append_trees, read_trees, thought_template
from components.versions import THOUGHT_TREES

PACE_OPTIONS = {"base_url", "api_key_env", "timeout", "retries", "backoff", "concurrency"}
"""Options of an evaluator that do not change a tree: address and pace of its endpoint."""


def load_thought_templates(name: str) -> ThoughtTemplates:
    """Load the templates of a question set."""
    return ThoughtTemplates(thought_template(name), load_template("thoughts/value", "value"))


def settings_key(
    config: ThoughtsConfig, policy: PolicyConfig, templates: Iterable[Template], seed: int
) -> str:
    """Hash what a tree depends on besides its question, its device and the number of threads.

    Not hashed are the number of questions at a time, how the models are loaded, an endpoint's address
    and pace, and the LoRA of the policy that writes the thoughts.
    """
    content = {
        "config": config.model_dump(
            mode="json",
            exclude={
                "questions": True,
                "question_batch_size": True,
                "loading": True,
                "evaluator": PACE_OPTIONS,
            },
        ),
        "writer": policy.model_dump(mode="json", exclude={"lora"}),
        "templates": ["\x1f".join(template.pieces) for template in templates],
        "seed": seed,
        "version": THOUGHT_TREES[config.evaluator.read],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def grow_missing_trees(
    questions: Sequence[Question],
    path: Path,
    load_models: Callable[[], TreeModels],
    settings: Mapping[str, TreeSettings],
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Tree]:
    """Grow the trees that a file (JSON lines) does not have yet, for a batch of questions at a time.

    The trees of a batch are added to the file together, or none of them is. A stopped run thus
    resumes with the batches that it would have gone on with, and its trees are the same bytes.
    Trees of other settings or questions stay in the file and are not returned. Questions of any sets have
    distinct names (set/id), and the settings are by set. `progress` is called with (number of trees in the
    file, number of questions) after each batch.
    """
    trees: dict[tuple[str, str, str], Tree] = {}
    for tree in read_trees(path):
        # Two runs at the same time may have grown the same tree; the first one counts.
        trees.setdefault((tree.id, tree.key, tree.question), tree)
    keys = [
        (f"{question.set}/{question.id}", settings[question.set].key, render(question))
        for question in questions
    ]
    missing = [(key, question) for key, question in zip(keys, questions, strict=True) if key not in trees]
    if missing:
        models = load_models()
        for start in range(0, len(missing), batch_size):
            batch = missing[start : start + batch_size]
            grown = grow_trees([question for _, question in batch], models, settings)
            append_trees(path, grown)
            trees |= {key: tree for (key, _), tree in zip(batch, grown, strict=True)}
            if progress is not None:
                progress(sum(known in trees for known in keys), len(keys))
    return [trees[key] for key in keys]
