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
from tests.support.registries import TRAINED_METHODS
from tests.support.variants import SMALL, VARIANTS

pytestmark = pytest.mark.pipeline


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


EXAMPLES = ("fedpdpo", "firm")
"""Private modules, and objectives."""


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
    assert methods == set(TRAINED_METHODS)
    assert len(methods) == 18
