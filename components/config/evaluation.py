"""What is measured on held-out data, the judge that compares answers, and reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from components.config.recipe_files import InputFile, NameOrFolder, TemplateFile
from components.config.registry import Registry, registered_section
from components.config.section import KindSection, Section
from components.config.thoughts import QuestionsConfig

if TYPE_CHECKING:
    from components.evaluation.judges.judge import JudgeSection
    from components.models.rewards.reward_section import RewardSection
else:  # plain sections, which the registered classes replace when a recipe names them
    JudgeSection = RewardSection = KindSection


JUDGES: Registry[type[JudgeSection]] = Registry(
    "evaluation.judge.kind",
    "fed_rlhf.judges",
    {
        "autoj": "components.evaluation.judges.autoj:AutoJSection",
        "reward": "components.evaluation.judges.reward:RewardJudgeSection",
        "selector": "components.evaluation.judges.selector_judge:SelectorJudgeSection",
    },
    "components.evaluation.judges.judge:JudgeSection",
)
REWARDS: Registry[type[RewardSection]] = Registry(
    "rewards.kind",
    "fed_rlhf.rewards",
    {
        "classifier": "components.models.rewards.classifier:ClassifierReward",
        "function": "components.models.rewards.function:FunctionReward",
        "judge": "components.evaluation.judges.pair_reward:JudgeReward",
        "trained": "components.learning.reward_model:TrainedReward",
    },
    "components.models.rewards.reward_section:RewardSection",
)
AnyReward = Annotated[SerializeAsAny[RewardSection], registered_section(REWARDS, "classifier")]
"""Type of a key that takes any registered reward."""


class AlpacaEvalConfig(Section):
    """AlpacaEval 2.0 (Li et al. 2023; Dubois et al. 2024) by the package alpaca_eval."""

    annotators_config: NameOrFolder = NameOrFolder("weighted_alpaca_eval_gpt4_turbo_new")
    """Name of an annotator of the package, or a local folder with configs.yaml. API keys are read
    from the environment (OPENAI_API_KEY for the default annotator)."""
    reference_outputs: InputFile | None = None
    """JSON file of the baseline's outputs in AlpacaEval's schema; for its own instructions those of
    gpt4_1106_preview. null: the answers of the base policy are the baseline."""
    calibration: InputFile | None = None
    """df_gamed.csv of the hub's data set tatsu-lab/alpaca_eval, needed for the package's
    length-controlled win rate; null: that rate is not computed."""


class QuestionAnswersConfig(Section):
    """Multiple-choice questions that the base and the aligned policy answer (DRIFT section 7.1)."""

    questions: list[QuestionsConfig] = Field(min_length=1)
    """Question sets. Of a set from which trees are grown, a part or a file without questions of
    those trees."""
    template: TemplateFile = TemplateFile("thoughts/answer")
    """Name of a template under components/data/prompt_templates, or the path of a file."""
    max_question_tokens: int | None = Field(None, ge=16)
    """Maximum length of a question with its context (tokens of the policy); the context is cut at
    its end. null does not cut; the policy still cuts a prompt that does not fit."""
    max_new_tokens: int = Field(128, ge=1)
    """Maximum answer length, with its reasoning steps (tokens)."""
    samples: int = Field(0, ge=0, le=10_000)
    """Answers sampled beside the greedy one (N). The success rate is the share of questions with a
    right answer among the N. 0 leaves it out."""
    temperature: float = Field(0.8, gt=0)
    """Sampling temperature of these answers; the paper names none."""


ContestName = Literal["aligned_vs_base", "aligned_vs_human", "base_vs_human"]
"""A contest between the aligned policy, the base policy, and the references."""


class EvaluationConfig(Section):
    """What is measured on held-out prompts, pairs and questions."""

    prompts: int | None = Field(None, ge=1)
    """Held-out prompts that the base and the aligned policy answer; null uses all. FedBiscuit
    section 7.1: 6,553."""
    answers_per_prompt: int = Field(1, ge=1, le=10_000)
    """Answers of each policy to a prompt. One is greedy; several are sampled, and each is compared
    with the other side's answer of the same number. Intervals then draw whole prompts."""
    answer_temperature: float = Field(0.7, gt=0)
    """Sampling temperature of several answers per prompt."""
    judge: Annotated[SerializeAsAny[JudgeSection], registered_section(JUDGES, "selector")] = Field(
        default_factory=lambda: JUDGES.load("selector").model_validate({})
    )
    """The judge."""
    contests: Annotated[list[ContestName], Field(min_length=1)] | None = None
    """Contests that are judged; null judges all for which there are texts. FedBiscuit's table 1:
    [aligned_vs_human], the aligned policy against the references."""
    preference_pairs: int = Field(0, ge=0)
    """Held-out pairs (a seeded sample) on which the accuracy of the aligned policy's implicit
    reward is measured; 0 leaves it out."""
    score_batch_size: int = Field(16, ge=1)
    """Pairs per batch of that measurement."""
    curve_prompts: int = Field(0, ge=0)
    """Held-out prompts that the policy answers at each DPO checkpoint, for the curve of the judge's
    against the selectors' preference (reward hacking); 0 leaves it out. Without DPO on the server
    there are no checkpoints, and no curve."""
    bootstrap: int = Field(2000, ge=100, le=1_000_000)
    """Resamples of the bootstrap intervals of win rates and accuracies."""
    style_control: bool = False
    """Whether win rates are also controlled for length and style: with the differences of headings, list
    items and bold passages (Markdown) in the logistic model of the length difference, as in LMArena's style
    control."""
    alpaca_eval: AlpacaEvalConfig | None = None
    """AlpacaEval on the answers to the held-out prompts; null leaves it out."""
    questions: QuestionAnswersConfig | None = None
    """Questions with a right answer, for the policies' accuracy; null leaves them out."""

    @model_validator(mode="after")
    def _check_answers(self) -> Self:
        if self.alpaca_eval is not None and self.answers_per_prompt > 1:
            raise ValueError(
                f"alpaca_eval compares one answer to each prompt, but answers_per_prompt is"
                f" {self.answers_per_prompt}: set it to 1, or leave alpaca_eval out"
            )
        return self
