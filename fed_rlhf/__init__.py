"""The Python API of fed-rlhf: functions for runs and recipes, and the base classes of plug-ins.

    from fed_rlhf import Method, load_recipe, run

A name is imported from its module when it is first used, so that `import fed_rlhf` loads neither torch nor
Prefect. The names here are kept from version to version; their modules may change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from components.config import DataConfig as DataConfig
    from components.config import DpoObjective as DpoObjective
    from components.config import FederationConfig as FederationConfig
    from components.config import LocalObjective as LocalObjective
    from components.config import PromptsConfig as PromptsConfig
    from components.config import Recipe as Recipe
    from components.config import RecipeError as RecipeError
    from components.config import UserError as UserError
    from components.config.local_objectives import OfflinePpoObjective as OfflinePpoObjective
    from components.config.local_objectives import SftObjective as SftObjective
    from components.data.records import DataError as DataError
    from components.data.records import Pair as Pair
    from components.data.records import Prompt as Prompt
    from components.data.records import PromptData as PromptData
    from components.data.records import SourceData as SourceData
    from components.data.sources import PairSource as PairSource
    from components.data.sources import PromptSource as PromptSource
    from components.data.sources import Source as Source
    from components.data.splits import assign_splits as assign_splits
    from components.data.splits import hold_out as hold_out
    from components.evaluation.diagnostics.diagnostic import Diagnostic as Diagnostic
    from components.evaluation.judges.judge import Judge as Judge
    from components.evaluation.judges.judge import JudgeResources as JudgeResources
    from components.evaluation.judges.judge import JudgeSection as JudgeSection
    from components.evaluation.winrate import Verdict as Verdict
    from components.federation.aggregation import step_metrics as step_metrics
    from components.federation.aggregators import Aggregator as Aggregator
    from components.federation.aggregators import AnyAggregator as AnyAggregator
    from components.federation.aggregators import Contributions as Contributions
    from components.federation.aggregators import Sum as Sum
    from components.federation.aggregators import SumAggregator as SumAggregator
    from components.federation.clients.trainer import Trainer as Trainer
    from components.federation.local import Local as Local
    from components.federation.method import AveragingMethod as AveragingMethod
    from components.federation.method import Method as Method
    from components.federation.postprocessing import Context as Context
    from components.federation.postprocessing import PostProcessor as PostProcessor
    from components.federation.postprocessing import Processed as Processed
    from components.federation.protocol import Client as Client
    from components.federation.protocol import ClientResult as ClientResult
    from components.federation.protocol import Federation as Federation
    from components.federation.protocol import Job as Job
    from components.federation.protocol import Memory as Memory
    from components.federation.protocol import Update as Update
    from components.federation.server import Server as Server
    from components.federation.server import State as State
    from components.federation.step_answers import StepAnswers as StepAnswers
    from components.federation.step_answers import Weights as Weights
    from components.federation.transport import Transport as Transport
    from components.models.rewards.reward_section import PreparedReward as PreparedReward
    from components.models.rewards.reward_section import ResponseReward as ResponseReward
    from components.models.rewards.reward_section import RewardFunction as RewardFunction
    from components.models.rewards.reward_section import RewardResources as RewardResources
    from components.models.rewards.reward_section import RewardSection as RewardSection
    from components.models.selector import Comparison as Comparison
    from components.models.store import Adapter as Adapter
    from components.models.store import AdapterStore as AdapterStore
    from components.recipes import check_recipe as check_recipe
    from components.recipes import load_recipe as load_recipe
    from components.results import Outcome as Outcome
    from components.seeding import derive as derive
    from components.seeding import generator as generator
    from flows.benchmark import benchmark as benchmark
    from flows.fed_rlhf import fed_rlhf as run  # noqa: F401
    from tasks.export import export_run as export_run
    from tasks.runs import Run as Run
    from tasks.runs import find_run as find_run
    from tasks.runs import list_runs as list_runs

PLACES = {
    "Adapter": "components.models.store:Adapter",
    "AdapterStore": "components.models.store:AdapterStore",
    "Aggregator": "components.federation.aggregators:Aggregator",
    "AnyAggregator": "components.federation.aggregators:AnyAggregator",
    "assign_splits": "components.data.splits:assign_splits",
    "AveragingMethod": "components.federation.method:AveragingMethod",
    "benchmark": "flows.benchmark:benchmark",
    "check_recipe": "components.recipes:check_recipe",
    "Client": "components.federation.protocol:Client",
    "ClientResult": "components.federation.protocol:ClientResult",
    "Comparison": "components.models.selector:Comparison",
    "Context": "components.federation.postprocessing:Context",
    "Contributions": "components.federation.aggregators:Contributions",
    "DataConfig": "components.config:DataConfig",
    "DataError": "components.data.records:DataError",
    "derive": "components.seeding:derive",
    "Diagnostic": "components.evaluation.diagnostics.diagnostic:Diagnostic",
    "DpoObjective": "components.config:DpoObjective",
    "export_run": "tasks.export:export_run",
    "Federation": "components.federation.protocol:Federation",
    "FederationConfig": "components.config:FederationConfig",
    "find_run": "tasks.runs:find_run",
    "generator": "components.seeding:generator",
    "hold_out": "components.data.splits:hold_out",
    "Job": "components.federation.protocol:Job",
    "Judge": "components.evaluation.judges.judge:Judge",
    "JudgeResources": "components.evaluation.judges.judge:JudgeResources",
    "JudgeSection": "components.evaluation.judges.judge:JudgeSection",
    "list_runs": "tasks.runs:list_runs",
    "load_recipe": "components.recipes:load_recipe",
    "Local": "components.federation.local:Local",
    "LocalObjective": "components.config:LocalObjective",
    "Memory": "components.federation.protocol:Memory",
    "Method": "components.federation.method:Method",
    "OfflinePpoObjective": "components.config.local_objectives:OfflinePpoObjective",
    "Outcome": "components.results:Outcome",
    "Pair": "components.data.records:Pair",
    "PairSource": "components.data.sources:PairSource",
    "PostProcessor": "components.federation.postprocessing:PostProcessor",
    "PreparedReward": "components.models.rewards.reward_section:PreparedReward",
    "Processed": "components.federation.postprocessing:Processed",
    "Prompt": "components.data.records:Prompt",
    "PromptData": "components.data.records:PromptData",
    "PromptsConfig": "components.config:PromptsConfig",
    "PromptSource": "components.data.sources:PromptSource",
    "Recipe": "components.config:Recipe",
    "RecipeError": "components.config:RecipeError",
    "ResponseReward": "components.models.rewards.reward_section:ResponseReward",
    "RewardFunction": "components.models.rewards.reward_section:RewardFunction",
    "RewardResources": "components.models.rewards.reward_section:RewardResources",
    "RewardSection": "components.models.rewards.reward_section:RewardSection",
    "run": "flows.fed_rlhf:fed_rlhf",
    "Run": "tasks.runs:Run",
    "Server": "components.federation.server:Server",
    "SftObjective": "components.config.local_objectives:SftObjective",
    "Source": "components.data.sources:Source",
    "SourceData": "components.data.records:SourceData",
    "State": "components.federation.server:State",
    "step_metrics": "components.federation.aggregation:step_metrics",
    "StepAnswers": "components.federation.step_answers:StepAnswers",
    "Sum": "components.federation.aggregators:Sum",
    "SumAggregator": "components.federation.aggregators:SumAggregator",
    "Trainer": "components.federation.clients.trainer:Trainer",
    "Transport": "components.federation.transport:Transport",
    "Update": "components.federation.protocol:Update",
    "UserError": "components.config:UserError",
    "Verdict": "components.evaluation.winrate:Verdict",
    "Weights": "components.federation.step_answers:Weights",
}
"""The module and the name in it of each name, for mypy and editors those above."""

__all__ = ["__version__", *PLACES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fed-rlhf")
    if name not in PLACES:
        raise AttributeError(f"module 'fed_rlhf' has no attribute '{name}'")
    module, _, attribute = PLACES[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
