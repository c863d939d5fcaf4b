"""What the phases of a run write for each other, and for reports: frozen models, stored as JSON.

Numbers that cannot be computed (an accuracy without pairs, say) are NaN. All paths are relative to
the folder of the phase that wrote the result, so that a run folder can be moved.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from components.config.errors import UserError
from components.io import write_atomically
from components.versions import RESULTS

AS_RUN = "as-run.json"
"""File beside a result with the whole of it: wall times, and the version in the registry.

A repetition of the same work writes the same result, and another such file. DVC ignores it.
"""


class ResultError(UserError, ValueError):
    """A result file that cannot be read."""


class Result(BaseModel):
    """A frozen result; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class _Version(BaseModel):
    """The version of a file of any layout; None where it has none."""

    schema_version: int | None = None


class StoredResult(Result):
    """A result with a file of its own."""

    schema_version: int = RESULTS  # layout of the file; files of another version are refused

    def reproducible(self) -> Self:
        """The result without what each run has otherwise, such as seconds: its file's content."""
        return self

    def write(self, path: Path) -> Self:
        """Write the result atomically, and return it.

        What is not reproducible is in a file beside it, see AS_RUN.
        """
        content = self.reproducible().to_bytes()
        if content != self.to_bytes():
            write_atomically(path.with_name(AS_RUN), self.to_bytes())
        write_atomically(path, content)
        return self

    def to_bytes(self) -> bytes:
        """The result as JSON."""
        return (self.model_dump_json(indent=1) + "\n").encode()

    @classmethod
    def stored(cls, path: Path, compute: Callable[[], Self]) -> Self:
        """Read a result, which is computed and written first where it is missing."""
        if not path.is_file():
            compute().write(path)
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a result; a ResultError says that another version wrote the file, or that it is damaged."""
        try:
            content = path.read_bytes()
            version = _Version.model_validate_json(content).schema_version
            if version != RESULTS:
                raise ValueError(f"it has schema_version {version}, expected {RESULTS}")
            return cls._as_run(path.with_name(AS_RUN), content) or cls.model_validate_json(content)
        except ValueError as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
            raise ResultError(
                f"{path} cannot be read as a result of this version of the project ({reason}): use the"
                " version that wrote it, or start a new run."
            ) from None

    @classmethod
    def _as_run(cls, path: Path, content: bytes) -> Self | None:
        """The whole of a result; None where the file is missing, or belongs to another result."""
        with suppress(OSError, ValueError):
            whole = cls.model_validate_json(path.read_bytes())
            if whole.reproducible().to_bytes() == content:
                return whole
        return None


class Metrics(Result):
    """Numbers under names of the component that computed them; all of them are logged."""

    scalars: dict[str, float] = Field(default_factory=dict)
    series: dict[str, list[float]] = Field(default_factory=dict)  # e.g. one number for each local step

    def merged(self, *others: Metrics) -> Metrics:
        """These and others' numbers; of equal names the last one counts."""
        scalars, series = dict(self.scalars), dict(self.series)
        for other in others:
            scalars |= other.scalars
            series |= other.series
        return Metrics(scalars=scalars, series=series)

    def without_seconds(self) -> Metrics:
        """The numbers without wall times."""
        scalars = {name: value for name, value in self.scalars.items() if name.split("/")[-1] != "seconds"}
        return self.model_copy(update={"scalars": scalars})


class Traffic(Result):
    """Bytes of a client in one step."""

    received: int = 0  # size of the adapter files that it was sent
    sent: int = 0  # size of the file that it sent back
    kept: int = 0  # size of the tensors that it keeps; above 0 exactly if it wrote a private state


class ClientRecord(Result):
    """What a client did in a step."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    # Name of the server's adapter that it trained, `slot` in files; empty where it trained none.
    adapter_name: str = Field("", alias="slot")
    rows: int  # number of its rows that the job could use
    # Mean validation losses by adapter of a score job; NaN without validation pairs.
    losses: list[float] = Field(default_factory=list)
    metrics: Metrics = Metrics()  # of its training
    traffic: Traffic = Traffic()


class StepRecord(Result):
    """A committed step of the federation."""

    step: int  # number of the commit, from 1
    round: int  # index of the round that the step belongs to, from 0
    phase: str  # name of the step within its round; 'train' ends the round
    rounds_done: int  # complete ones after the step
    logged_at: int  # round at which the server's metrics of the step are logged
    clients: dict[str, ClientRecord]  # the accepted updates, by client
    failed: dict[str, str]  # reasons of clients without an update
    refused: dict[str, str]  # reasons of refused updates, by client
    adapters: dict[str, str]  # hashes of the server's adapters after the step, by name
    memory: dict[str, JsonValue]  # the method's memory after the step
    server: Metrics
    aggregation_seconds: float | None = None  # wall time; None where it is unknown

    def without_seconds(self) -> StepRecord:
        """The record without wall times."""
        clients = {
            name: client.model_copy(update={"metrics": client.metrics.without_seconds()})
            for name, client in self.clients.items()
        }
        return self.model_copy(update={"clients": clients, "aggregation_seconds": None})

    @property
    def ends_round(self) -> bool:
        """Whether the step completed its round."""
        return self.rounds_done > self.round

    def client_means(self) -> dict[str, float]:
        """Mean over the clients of each of their scalars, over those that have it."""
        values: dict[str, list[float]] = {}
        for client in self.clients.values():
            for name, value in client.metrics.scalars.items():
                values.setdefault(name, []).append(value)
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


class AccuracySummary(Result):
    """Accuracy over clients; each client counts once."""

    mean: float  # over clients, in [0, 1]
    worst: float
    best: float
    clients: dict[str, float]

    @property
    def spread(self) -> float:
        """Standard deviation over the clients."""
        return statistics.pstdev(self.clients.values()) if self.clients else math.nan


class AccuracyReport(AccuracySummary):
    """Accuracy on held-out pairs, see components.evaluation.accuracy."""

    domains: dict[str, float]  # accuracy over the pairs of a domain
    pairs: int
    # Mean over clients of their mean margins (log-odds of a selector; log-ratio margins of a
    # policy, nats).
    margin: float
    margins: dict[str, float]  # mean margin by client
    # Mean over clients of the chosen completions' mean log-ratio to the reference (nats); None for
    # selectors.
    reward: float | None = None
    rewards: dict[str, float] | None = None  # the same by client
    by_metric: dict[str, AccuracySummary] = Field(default_factory=dict)  # by other margins
    # The same report with the one adapter that each client uses; None where all use the same.
    assigned: AccuracyReport | None = None


class RoundEvaluation(StoredResult):
    """What was measured between two rounds."""

    rounds_done: int  # complete ones at that time
    accuracy: AccuracyReport  # on held-out pairs
    measures: dict[str, Metrics] = Field(default_factory=dict)  # what the method measures besides


class OutcomeRecord(Result):
    """Whose model answers after the rounds, or after the alignment, see components.federation.outcome."""

    kind: str  # name of the outcome's class
    # Hashes of adapters in the federation's store, by name; empty of a policy that the server aligned.
    adapters: dict[str, str] = Field(default_factory=dict)
    # By client, the name of the adapter that it uses; empty where all use the same.
    assignment: dict[str, str] = Field(default_factory=dict)
    # By client, the key of its last accepted job, after which its private state is stored; empty
    # before its first one. Only for clients with private state.
    job_keys: dict[str, str] = Field(default_factory=dict)
    # Of an aligned policy: its PEFT folder, or the folder of one for each client, relative to the
    # alignment's folder.
    folder: str = ""

    @field_validator("kind")
    @classmethod
    def _rename(cls, kind: str) -> str:
        return "shared-policy" if kind == "single" else kind  # the name in files of earlier versions


class ExportedAdapter(Result):
    """An adapter as a PEFT folder."""

    hash: str  # sha256 of the adapter in the federation's store
    folder: str  # the PEFT folder, relative to the federation's folder


class FederationResult(StoredResult):
    """Result of the phase federate."""

    outcome: OutcomeRecord  # what the rounds ended with
    accuracy_label: str  # what the accuracies are accuracies of
    accuracy_note: str  # how clients are measured that do not all use the same adapter; else empty
    rounds: int
    records: list[StepRecord]  # all committed steps
    # What was measured, in the order of the rounds: before the first one, at the recipe's cadence,
    # and after the last one.
    evaluations: list[RoundEvaluation]
    adapters: dict[str, ExportedAdapter]  # the exported final adapters by name
    diagnostics: list[str]  # names of the method's diagnostics (components/evaluation/diagnostics)

    def reproducible(self) -> Self:
        """The result without wall times."""
        return self.model_copy(update={"records": [record.without_seconds() for record in self.records]})

    @property
    def before(self) -> RoundEvaluation:
        """The measurement before the first round."""
        return self.evaluations[0]

    @property
    def after(self) -> RoundEvaluation:
        """The measurement after the last round."""
        return self.evaluations[-1]

    @property
    def best(self) -> RoundEvaluation | None:
        """The measurement with the highest mean accuracy of clients, the first of several.

        It is chosen by the pairs that it is measured on, and so is optimistic. The one before the
        first round is left out; None where none was measured between the rounds.
        """
        if len(self.evaluations) < 3:
            return None
        return max(self.evaluations[1:], key=lambda evaluation: evaluation.accuracy.mean)

    def round_ends(self) -> list[StepRecord]:
        """The steps that completed a round."""
        return [record for record in self.records if record.ends_round]


class SamplingResult(Result):
    """Sampled completions."""

    prompts: int
    finished_share: float  # share of completions that ended by themselves


class LabellingResult(Result):
    """Labeled pairs of completions."""

    completions: int  # sampled
    dropped_identical: int  # completions that equal an earlier one of their prompt
    dropped_empty: int  # completions without text
    prompts_without_pair: int  # prompts with fewer than two distinct completions
    pairs: int
    label_1_share: float  # share of pairs in which the second completion was preferred
    chosen_longer_share: float  # share of pairs whose chosen completion has more tokens
    # Share of chosen completions that ended by themselves, less that of rejected ones.
    chosen_finished_more: float


class AlignmentResult(StoredResult):
    """Result of the phase align."""

    policy: OutcomeRecord  # with its folder
    reference: str  # policy that the KL is measured to: base, sft or round_start
    metrics: dict[str, float]  # numbers of the alignment, e.g. kl_sequence (nats per completion)
    # Metrics of each optimizer step, under TRL's names; empty without DPO on the server.
    history: list[dict[str, float]] = Field(default_factory=list)
    # Step of DPO by PEFT folder, relative to the alignment's folder.
    checkpoints: dict[str, int] = Field(default_factory=dict)
    # sha256 of the policy's files, and of those of the checkpoints, by path in the alignment's folder.
    files: dict[str, str] = Field(default_factory=dict)
    sampling: SamplingResult | None = None  # None without DPO on the server, as labelling
    labelling: LabellingResult | None = None
    model_uri: str = ""  # of the registered model; empty where there is none, or it was not pulled
    model_version: str = ""

    def reproducible(self) -> Self:
        """The result without its version in the registry."""
        return self.model_copy(update={"model_uri": "", "model_version": ""})


class WinRate(Result):
    """How often our answer was preferred, see components.evaluation.winrate; NaN without a parsed verdict.

    Ties count in the denominator, as in FedBiscuit (table 1); unparsable verdicts count in neither part.
    """

    win_rate: float  # wins / (wins + ties + losses)
    low: float  # 95% bootstrap interval over prompts
    high: float
    wins: int
    ties: int
    losses: int
    unparsable: int


class ContestFigures(WinRate):
    """The figures of a contest by the verdicts of both orders, see components.evaluation.contests."""

    consistency: float  # share of the judged pairs on which the verdicts in both orders agree
    ties_half: float  # rate with a tie as half a win
    length_controlled: float  # that rate at equal length
    length_controlled_low: float
    length_controlled_high: float
    length_effect: float  # coefficient of the length difference
    single_order: WinRate  # our answer shown first alone; a judge that favours the first favours ours


class CurvePoint(Result):
    """A point of the reward-hacking curve."""

    step: int  # step of DPO
    prompts: int
    # Share of prompts on which the selectors' majority prefers the policy's to the base policy's answer.
    proxy: float
    judge: float  # the same of the judge; a tie is half a win in both


class AlpacaEvalFigures(Result):
    """Figures of a model against a baseline, in the units of AlpacaEval's leaderboard."""

    win_rate: float  # percent
    standard_error: float  # percent
    n_wins: int  # of the model
    n_wins_base: int  # of the baseline
    n_draws: int
    n_total: int  # rows with a preference
    discrete_win_rate: float  # percent
    avg_length: int  # mean length of the model's outputs over all rows (characters)
    n_missing: int  # rows without a preference
    equal_length_win_rate: float  # percent, see components/evaluation/length_control.py
    equal_length_low: float  # 95% interval, percent
    equal_length_high: float
    # AlpacaEval's own length-controlled rate (percent); None if it was not computed.
    length_controlled_winrate: float | None = None


class AlpacaEvalContest(Result):
    """A contest of AlpacaEval: the name of the baseline, and the figures against it."""

    baseline: str
    figures: AlpacaEvalFigures


class AlpacaEvalResult(Result):
    """Figures of AlpacaEval."""

    annotator: str
    contests: dict[str, AlpacaEvalContest]
    note: str | None  # why the package's length-controlled rate is missing; None where it is not


class QuestionFigures(Result):
    """A policy's answers to multiple-choice questions (DRIFT section 7.1).

    A mean over sets has shares only.
    """

    accuracy: float  # share of right greedy answers
    chance: float  # expected accuracy of guessing
    unparsable_share: float  # share of greedy answers that could not be parsed
    low: float | None = None  # 95% percentile-bootstrap interval of the accuracy
    high: float | None = None
    questions: int | None = None  # number of questions
    right: int | None = None  # of right greedy answers
    unparsable: int | None = None  # of greedy answers that could not be parsed
    cut: int | None = None  # number of questions whose prompt was truncated
    # Number of questions with a right answer among the samples. This and the following are None if
    # no answers were sampled.
    succeeded: int | None = None
    success: float | None = None  # share of those questions
    success_chance: float | None = None  # expected success rate of guessing
    success_low: float | None = None  # 95% percentile-bootstrap interval of the success rate
    success_high: float | None = None


class QuestionResult(Result):
    """A policy's answers to the recipe's questions."""

    samples: int  # number of sampled answers per question, beside the greedy one
    sets: dict[str, QuestionFigures]  # figures by question set, sorted by name
    all: QuestionFigures  # figures over all questions
    mean: QuestionFigures  # unweighted mean over the sets


class EvaluationResult(StoredResult):
    """Result of the phase evaluate."""

    answers: dict[str, float]  # figures of the answers themselves, e.g. aligned_tokens
    judge: str  # description of the judge
    judge_figures: dict[str, float]  # about the judge itself, e.g. its accuracy on held-out pairs
    # By name: aligned_vs_base, aligned_vs_human, base_vs_human; their verdicts are in files of
    # their own (components/evaluation/contests.py).
    contests: dict[str, ContestFigures]
    rouge: dict[str, dict[str, float]]  # ROUGE by policy and kind
    # The following are None, or empty, where the recipe does not ask for them.
    alpaca_eval: AlpacaEvalResult | None = None
    implicit_reward: AccuracyReport | None = None
    questions: dict[str, QuestionResult] = Field(default_factory=dict)
    curve: list[CurvePoint] = Field(default_factory=list)

    def reproducible(self) -> Self:
        """The result without the wall time of the judge's training."""
        figures = {name: value for name, value in self.judge_figures.items() if name != "judge_seconds"}
        return self.model_copy(update={"judge_figures": figures})


def finite_or_none(value: Any) -> Any:
    """The same tree of values with None for numbers that are not finite, as strict JSON needs it."""
    if isinstance(value, Mapping):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite_or_none(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
