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
