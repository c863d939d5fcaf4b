"""The configuration of a run: one file per section of a recipe.

Sections are checked strictly: unknown keys, wrong types and impossible values are refused with one
sentence each. Hyper-parameters are nowhere else. `components.recipes.load_recipe` reads a recipe.
"""

from components.config.data import DataConfig as DataConfig
from components.config.data import PromptsConfig as PromptsConfig
from components.config.errors import RecipeError as RecipeError
from components.config.errors import UserError as UserError
from components.config.errors import unknown_name as unknown_name
from components.config.evaluation import AlpacaEvalConfig as AlpacaEvalConfig
from components.config.federation import FederationConfig as FederationConfig
from components.config.local_objectives import DpoObjective as DpoObjective
from components.config.local_objectives import LocalObjective as LocalObjective
from components.config.local_objectives import MultiObjective as MultiObjective
from components.config.local_objectives import PairPpoObjective as PairPpoObjective
from components.config.local_objectives import PdpoObjective as PdpoObjective
from components.config.local_objectives import PpoConfig as PpoConfig
from components.config.models import BackboneConfig as BackboneConfig
from components.config.models import FrozenModel as FrozenModel
from components.config.models import LoraConfig as LoraConfig
from components.config.models import PolicyConfig as PolicyConfig
from components.config.models import SelectorConfig as SelectorConfig
from components.config.modules import PersonalModules as PersonalModules
from components.config.optimizer import OptimizerConfig as OptimizerConfig
from components.config.recipe import Recipe as Recipe
from components.config.recipe_files import InputFile as InputFile
from components.config.recipe_files import NamedModel as NamedModel
from components.config.recipe_files import NameOrFolder as NameOrFolder
from components.config.recipe_files import TemplateFile as TemplateFile
from components.config.registry import Registry as Registry
from components.config.registry import one_of as one_of
from components.config.section import Section as Section
from components.config.section import check_section as check_section
from components.config.thoughts import QuestionsConfig as QuestionsConfig
from components.config.thoughts import ThoughtsConfig as ThoughtsConfig
