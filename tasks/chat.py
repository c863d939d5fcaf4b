"""Answers of a run's aligned and base policy to prompts of a user."""

from __future__ import annotations

from components.models.backbone import choose_devices
from components.models.samples import Completion
from components.recipes.inputs import verify_inputs
from components.seeding import derive
from tasks.evaluation.answers import ALIGNED, BASE
from tasks.export import single_policy
from tasks.policies import EvaluatedPolicy
from tasks.runs import Run


class Chat:
    """The two policies of a run, of which each is loaded once."""

    def __init__(self, run: Run) -> None:
        """Load the policies.

        Raises:
            RecipeError: the run has no aligned policy yet, or its clients have policies of their own.
        """
        folders = {ALIGNED: single_policy(run), BASE: None}
        recipe = run.recipe()
        verify_inputs(recipe.policy)
        device = choose_devices()[0]  # of this machine, which need not be that of the run
        self._seed = recipe.seed
        self._policies = {
            name: EvaluatedPolicy(name, folders[name]).open(recipe, device) for name in (BASE, ALIGNED)
        }
        self.template = recipe.policy.template
        self.max_prompt_tokens = recipe.policy.max_prompt_tokens
        self.max_new_tokens = recipe.policy.max_new_tokens

    def surplus(self, prompt: str) -> int:
        """Tokens by which a prompt in its template is too long, and which are cut off."""
        return next(iter(self._policies.values())).surplus(prompt)

    def answer(self, prompt: str, number: int, temperature: float = 0.0) -> dict[str, Completion]:
        """The answer of each policy by its name, `base` and `aligned`.

        Args:
            prompt: what the template of the recipe takes.
            number: of the prompt; with a temperature above 0 samples are a function of it, and both policies
                sample from the same random numbers.
            temperature: 0 is greedy.
        """
        seed = derive(self._seed, "chat", number)
        answers = {}
        for name, policy in self._policies.items():
            ((answers[name],),) = policy.generate([prompt], seed, temperature)
        return answers
