"""The configuration of a run: one file per section of a recipe.

Sections are checked strictly: unknown keys, wrong types and impossible values are refused with one
sentence each. Hyper-parameters are nowhere else. `components.recipes.load_recipe` reads a recipe.
"""

from components.config.data import DataConfig, PromptsConfig
from components.config.errors import RecipeError, UserError, unknown_name
from components.config.evaluation import AlpacaEvalConfig
from components.config.federation import FederationConfig
from components.config.files import InputFile, NamedModel, NameOrFolder, TemplateFile
from components.config.models import BackboneConfig, LoraConfig, PolicyConfig, SelectorConfig
from components.config.modules import PersonalModules
from components.config.objectives import (
    DpoObjective,
    LocalObjective,
    MultiObjective,
    PairPpoObjective,
    PdpoObjective,
    PpoConfig,
)
from components.config.optimizer import OptimizerConfig
from components.config.recipe import Recipe
from components.config.registry import Registry, one_of
from components.config.rewards import RewardConfig
from components.config.section import Section, check_section
from components.config.thoughts import QuestionsConfig, ThoughtsConfig

__all__ = [
    "AlpacaEvalConfig",
    "BackboneConfig",
    "DataConfig",
    "DpoObjective",
    "FederationConfig",
    "InputFile",
    "LocalObjective",
    "LoraConfig",
    "MultiObjective",
    "NameOrFolder",
    "NamedModel",
    "OptimizerConfig",
    "PairPpoObjective",
    "PdpoObjective",
    "PersonalModules",
    "PolicyConfig",
    "PpoConfig",
    "PromptsConfig",
    "QuestionsConfig",
    "Recipe",
    "RecipeError",
    "Registry",
    "RewardConfig",
    "Section",
    "SelectorConfig",
    "TemplateFile",
    "ThoughtsConfig",
    "UserError",
    "check_section",
    "one_of",
    "unknown_name",
]
