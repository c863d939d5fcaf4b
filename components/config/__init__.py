"""The configuration of a run: one file per section of a recipe.

Sections are checked strictly: unknown keys, wrong types and impossible values are refused with one
sentence each. Hyper-parameters are nowhere else. `components.recipes.load_recipe` reads a recipe.
"""

from components.config.alignment import AlignmentConfig, DpoConfig
from components.config.data import (
    PROMPT_SOURCES,
    SOURCES,
    DataConfig,
    PromptsConfig,
    PromptSourceOptions,
    SourceOptions,
)
from components.config.errors import RecipeError, UserError, unknown_name
from components.config.evaluation import (
    JUDGES,
    AlpacaEvalConfig,
    EvaluationConfig,
    JudgeConfig,
    QuestionAnswersConfig,
)
from components.config.federation import (
    AGGREGATORS,
    METHODS,
    POSTPROCESSORS,
    AggregatorConfig,
    FederationConfig,
    MethodOptions,
    PostProcessorConfig,
)
from components.config.files import InputFile, NamedModel, NameOrFolder, RecipeFile, TemplateFile
from components.config.models import BackboneConfig, LoraConfig, PolicyConfig, SelectorConfig
from components.config.modules import BottleneckConfig, PersonalModules, RewardHeadConfig
from components.config.name_checks import check_name, check_visible
from components.config.objectives import (
    CriticAdvantage,
    DpoObjective,
    ExclusionConfig,
    GaeEstimator,
    GrpoEstimator,
    LocalObjective,
    MultiObjective,
    OfflinePpoObjective,
    PairPpoObjective,
    PdpoObjective,
    PpoConfig,
    RlooEstimator,
    SelectorObjective,
    SequenceAdvantage,
    SftObjective,
    implicit_reward_scale,
)
from components.config.optimizer import Betas, OptimizerConfig, RateDecay, check_warmup
from components.config.recipe import Recipe, check_cohort
from components.config.registry import Registry, registered_section
from components.config.rewards import REWARDS, RewardConfig
from components.config.runtime import RuntimeConfig
from components.config.section import Section, check_section, describe_type, section_model
from components.config.thoughts import EndpointOptions, EvaluatorOptions, QuestionsConfig, ThoughtsConfig
from components.config.tracking import TrackingConfig
from components.config.unions import one_of

__all__ = [
    "AGGREGATORS",
    "JUDGES",
    "METHODS",
    "POSTPROCESSORS",
    "PROMPT_SOURCES",
    "REWARDS",
    "SOURCES",
    "AggregatorConfig",
    "AlignmentConfig",
    "AlpacaEvalConfig",
    "BackboneConfig",
    "Betas",
    "BottleneckConfig",
    "CriticAdvantage",
    "DataConfig",
    "DpoConfig",
    "DpoObjective",
    "EndpointOptions",
    "EvaluationConfig",
    "EvaluatorOptions",
    "ExclusionConfig",
    "FederationConfig",
    "GaeEstimator",
    "GrpoEstimator",
    "InputFile",
    "JudgeConfig",
    "LocalObjective",
    "LoraConfig",
    "MethodOptions",
    "MultiObjective",
    "NameOrFolder",
    "NamedModel",
    "OfflinePpoObjective",
    "OptimizerConfig",
    "PairPpoObjective",
    "PdpoObjective",
    "PersonalModules",
    "PolicyConfig",
    "PostProcessorConfig",
    "PpoConfig",
    "PromptSourceOptions",
    "PromptsConfig",
    "QuestionAnswersConfig",
    "QuestionsConfig",
    "RateDecay",
    "Recipe",
    "RecipeError",
    "RecipeFile",
    "Registry",
    "RewardConfig",
    "RewardHeadConfig",
    "RlooEstimator",
    "RuntimeConfig",
    "Section",
    "SelectorConfig",
    "SelectorObjective",
    "SequenceAdvantage",
    "SftObjective",
    "SourceOptions",
    "TemplateFile",
    "ThoughtsConfig",
    "TrackingConfig",
    "UserError",
    "check_cohort",
    "check_name",
    "check_section",
    "check_visible",
    "check_warmup",
    "describe_type",
    "implicit_reward_scale",
    "one_of",
    "registered_section",
    "section_model",
    "unknown_name",
]
