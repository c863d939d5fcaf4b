"""A federation that is killed at any atomic write or deletion is resumed to the same bytes.

The bare loop runs once without interruption, with every method. Then it is resumed from what a kill
leaves on disk in the middle of each write and right after it: of a client's adapter, its update,
its private modules and its state, those after a personal stage, the server's adapter, a commit; and
right after each deletion of an update, its adapter, or an old adapter of the server. At its next
commit all files must be those of the uninterrupted run, timings apart (tests/support/crashes.py
says why this is enough).
"""

import math

import pytest

from components.config.federation import METHODS
from components.federation.clients.worker import build_trainer
from components.recipes import load_recipe
from tests.support.bare_loop import run_bare_loop
from tests.support.crashes import (
    DiskImage,
    content_at_commits,
    distinct_images,
    folder_content,
    observed_writes,
    restore,
    stopped_after_commit,
)
from tests.support.long_tier import with_examples

pytestmark = pytest.mark.pipeline

SMALL = [
    "federation.rounds=2",
    "federation.clients_per_round=2",
    "federation.local_steps=1",
    "federation.batch_size=2",
    "policy.max_new_tokens=6",
    "seed=4",  # the rounds sample ada and dan, ada and bea, cyd and dan
]
OBJECTIVES = [
    "rewards={long: {kind: function, name: 'tests.support.reward_functions:score_length'},"
    " vowels: {kind: function, name: 'tests.support.reward_functions:score_vowels'}}",
    "federation.options={objectives: {long: [long], vowels: [vowels]}, ppo: {minibatch: 2, epochs: 1}}",
]
GROUPED = ["federation.method=fedbiscuit", "federation.rounds=4", "federation.keep_every=3"]
PRIVATE = "federation.options={bottleneck: {width: 4}, reward_head: {width: 3}}"
TWO_STEPS = "federation.local_steps=2"
"""For methods that divide a round's steps."""
SGD = "federation.optimizer={name: sgd, lr: 0.1, clip: null}"
VARIANTS = {
    "fedavg": ["federation.method=fedavg"],
    "fedbis": ["federation.method=fedbis"],
    "fedbiscuit": [*GROUPED, "federation.options={selectors: 3, warmup_rounds: 1, regroup_every: 1}"],
    "fedbiscuit-paper": [
        *GROUPED,
        "federation.options={selectors: 3, warmup_rounds: 1, regroup_every: 1, grouping: paper, aggregator:"
        " paper}",
    ],
    "feddpo": ["federation.method=feddpo"],
    "ffa_lora": ["federation.method=ffa_lora"],
    "fedprox": ["federation.method=fedprox", "federation.options={proximal: 0.1}"],
    "fedopt": ["federation.method=fedopt"],
    "fedamp": ["federation.method=fedamp"],
    "fedcda": ["federation.method=fedcda", "federation.rounds=3", "federation.keep_every=2"],
    "fedper": ["federation.method=fedper", "federation.options={shared_layers: 1}"],
    "fedrep": ["federation.method=fedrep", TWO_STEPS],
    "fedpdpo": ["federation.method=fedpdpo", PRIVATE, TWO_STEPS],
    "perfedavg": ["federation.method=perfedavg", "federation.options={inner_steps: 1}", TWO_STEPS],
    "drift-mst": [
        "federation.method=drift",
        "federation.options={variant: mst}",
        "federation.rounds=3",
        "federation.keep_every=3",
    ],
    "drift-sp": ["federation.method=drift", "federation.options={variant: sp, delta: 0.3}"],
    "firm": ["federation.method=firm", *OBJECTIVES],
    "firm-weights": [
        "federation.method=firm",
        *OBJECTIVES,
        "federation.options.weights={long: 3, vowels: 1}",
    ],
    "fedcmoo": ["federation.method=fedcmoo", *OBJECTIVES],
    "fednova": ["federation.method=fednova", SGD],
    "scaffold": ["federation.method=scaffold", SGD],
}


class KilledRun:
    """A federation that was run once without interruption, and is resumed after kills.

    Attributes:
        images: disk images of all of its atomic writes.
        final: content of its folder at the end.
    """

    def __init__(self, variant, prepared, folder):
        self.recipe = load_recipe("debug", [*SMALL, *VARIANTS[variant]])
        self.prepared = prepared
        self.folder = folder / "run"
        self.trainer = build_trainer(self.recipe, "cpu")
        with observed_writes(self.folder, folder / "images") as self.images:
            self._run()
        self.final = folder_content(self.folder)
        self._at_commits = content_at_commits(self.images)

    def resume_to_next_commit(self, image: DiskImage):
        """Content of the folder of a run that a process without memory resumes from a disk image."""
        restore(image, self.folder)
        with stopped_after_commit():
            self._run()
        return folder_content(self.folder)

    def resume_to_end(self):
        """Content of the folder after a process without memory has resumed the run to its end."""
        self._run()
        return folder_content(self.folder)

    def expected_at_next_commit(self, image: DiskImage):
        """The same content of the uninterrupted run."""
        following = [write for write in self._at_commits if write >= image.write + (not image.torn)]
        return self._at_commits[min(following)] if following else self.final

    def _run(self):
        for parameter in self.trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data.fill_(math.nan)
        run_bare_loop(self.recipe, self.prepared, self.folder, self.trainer)


EXAMPLES = ("fedavg", "fedbiscuit", "drift-mst", "fedpdpo", "scaffold", "firm")
"""One adapter, clusters, an adapter per client, private modules, private states, and several objectives."""


@pytest.mark.parametrize("variant", with_examples(VARIANTS, EXAMPLES))
def test_a_federation_that_is_killed_at_any_write_is_resumed_to_the_same_bytes(variant, prepared, tmp_path):
    run = KilledRun(variant, prepared, tmp_path)
    images = distinct_images(run.images)
    assert {str(image.file) for image in run.images} >= set(run.final), "all writes are atomic"
    assert any(image.file.parent.name == "updates" and image.deleted for image in run.images)
    assert not any("/updates/" in name for name in run.final)
    for image in images:
        assert run.resume_to_next_commit(image) == run.expected_at_next_commit(image), str(image)


@pytest.mark.parametrize("variant", ["fedbiscuit", "fedpdpo", "fedcmoo"])
def test_a_federation_that_is_killed_twice_ends_with_the_same_bytes(variant, prepared, tmp_path):
    run = KilledRun(variant, prepared, tmp_path)
    images = distinct_images(run.images)
    run.resume_to_next_commit(images[len(images) // 4])
    assert run.resume_to_end() == run.final


def test_every_method_is_killed():
    methods = {load_recipe("debug", overrides).federation.method for overrides in VARIANTS.values()}
    assert methods == set(METHODS.builtin)
    assert len(methods) == 18
