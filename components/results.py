"""What the phases of a run write for each other, and for reports: frozen models, stored as JSON.

Numbers that cannot be computed (an accuracy without pairs, say) are NaN. All paths are relative to
the folder of the phase that wrote the result, so that a run folder can be moved.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from components.config.errors import UserError
from components.io import write_atomically
from components.versions import RESULTS

AS_RUN = "as-run.json"
"""File beside a result with the whole of it: wall times, and the version in the registry.

A repetition of the same work writes the same result, and another such file. DVC ignores it.
"""


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
        """Read a result; a UserError says that another version wrote the file, or that it is damaged."""
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
            raise UserError(
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

    @classmethod
    def mean(cls, measured: Sequence[Metrics]) -> Metrics:
        """The means of the scalars that all of several measurements have; a single one as it is."""
        if len(measured) == 1:
            return measured[0]
        names = set.intersection(*(set(one.scalars) for one in measured))
        return cls(scalars={n: statistics.fmean(one.scalars[n] for one in measured) for n in sorted(names)})

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

    adapter_name: str = ""  # of the server's adapter that it trained; empty where it trained none
    rows: int  # number of its rows that the job could use
    # Mean validation losses by adapter of a job that measures them; NaN without validation pairs.
    losses: list[float] = Field(default_factory=list)
    metrics: Metrics = Metrics()  # of its training
    traffic: Traffic = Traffic()


class ClientTotal(ClientRecord):
    """What the clients did in a step, without single ones: sums of rows and bytes, and means of scalars."""

    clients: int

    @classmethod
    def of(cls, records: Sequence[ClientRecord]) -> Self:
        """The total of records, of at least one client."""
        traffic = {
            name: sum(getattr(record.traffic, name) for record in records) for name in Traffic.model_fields
        }
        return cls(
            clients=len(records),
            rows=sum(record.rows for record in records),
            metrics=Metrics(scalars=mean_scalars(record.metrics for record in records)),
            traffic=Traffic(**traffic),
        )


class PrivacySpent(Result):
    """What a federation has spent of its clients' privacy, see components.privacy.ledger."""

    unit: str  # what is protected
    epsilon: float | None  # of one unit; None where secrets are simulated, so that there is none
    delta: float  # probability with which the guarantee may fail
    relation: str  # how two data sets differ that cannot be told apart
    sampling: str  # how units were drawn for a release
    accountant: str  # what computes epsilon
    outside: str = ""  # what is not covered, in words


class StepRecord(Result):
    """A committed step of the federation."""

    step: int  # number of the commit, from 1
    round: int  # index of the round that the step belongs to, from 0
    phase: str  # name of the step within its round; 'train' ends the round
    rounds_done: int  # complete ones after the step
    logged_at: int  # round at which the server's metrics of the step are logged
    # What each client with an accepted update did; empty where single figures are not permitted.
    clients: dict[str, ClientRecord]
    total: ClientTotal | None = Field(None, exclude_if=lambda total: total is None)  # in place of `clients`
    failed: dict[str, str]  # reasons of clients without an update
    refused: dict[str, str]  # reasons of refused updates, by client
    adapters: dict[str, str]  # hashes of the server's adapters after the step, by name
    memory: dict[str, JsonValue]  # the method's memory after the step
    server: Metrics
    privacy: PrivacySpent | None = Field(None, exclude_if=lambda spent: spent is None)  # so far
    aggregation_seconds: float | None = None  # wall time; None where it is unknown

    def without_seconds(self) -> StepRecord:
        """The record without wall times."""
        clients = {
            name: client.model_copy(update={"metrics": client.metrics.without_seconds()})
            for name, client in self.clients.items()
        }
        total = self.total and self.total.model_copy(update={"metrics": self.total.metrics.without_seconds()})
        return self.model_copy(update={"clients": clients, "total": total, "aggregation_seconds": None})

    @property
    def updates(self) -> list[ClientRecord]:
        """What the clients did: each, or the total."""
        return list(self.clients.values()) if self.total is None else [self.total]

    def scalar_sum(self, name: str) -> float:
        """Sum over the clients of one of their scalars; of a total, its mean times the number of clients."""
        values = [record.metrics.scalars.get(name, 0.0) for record in self.updates]
        return sum(values, 0.0) * (1 if self.total is None else self.total.clients)

    @property
    def participants(self) -> int:
        """Clients with an accepted update."""
        return len(self.clients) if self.total is None else self.total.clients

    @property
    def ends_round(self) -> bool:
        """Whether the step completed its round."""
        return self.rounds_done > self.round

    def client_means(self) -> dict[str, float]:
        """Mean over the clients of each of their scalars, over those that have it."""
        return mean_scalars(record.metrics for record in self.updates)


def mean_scalars(measured: Iterable[Metrics]) -> dict[str, float]:
    """The mean of each scalar, over the measurements that have it."""
    values: dict[str, list[float]] = {}
    for metrics in measured:
        for name, value in metrics.scalars.items():
            values.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def worst_tenth(values: Sequence[float]) -> float:
    """Mean of the tenth of the values that is the smallest, rounded up to whole values; NaN without any."""
    count = math.ceil(len(values) / 10)
    return statistics.fmean(sorted(values)[:count]) if count else math.nan


def jain_index(values: Sequence[float]) -> float:
    """Jain's fairness index (sum x)^2 / (n sum x^2): 1 where all values are equal, 1/n where one has all.

    Jain, Chiu and Hawe 1984. NaN without values, with one below 0, or where all are 0.
    """
    squares = sum(value**2 for value in values)
    if not squares or min(values) < 0:
        return math.nan
    return sum(values) ** 2 / (len(values) * squares)


class AccuracySummary(Result):
    """Accuracy over clients; each client counts once."""

    mean: float  # over clients, in [0, 1]; of noised verdicts it is an estimate that may lie outside
    worst: float
    best: float
    clients: dict[str, float]

    @property
    def spread(self) -> float:
        """Standard deviation over the clients."""
        return statistics.pstdev(self.clients.values()) if self.clients else math.nan

    @property
    def worst_tenth(self) -> float:
        """See worst_tenth."""
        return worst_tenth(list(self.clients.values()))

    @property
    def jain(self) -> float:
        """See jain_index."""
        return jain_index(list(self.clients.values()))


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
    # Reasons of clients that were asked and gave no figures.
    missing: dict[str, str] = Field(default_factory=dict, exclude_if=lambda missing: not missing)

    @property
    def answered(self) -> str:
        """How many of the clients were measured, in words; empty where all were."""
        count = len(self.clients)
        return f"{count} of {count + len(self.missing)} clients" if self.missing else ""


class RoundEvaluation(StoredResult):
    """What was measured between two rounds."""

    rounds_done: int  # complete ones at that time
    accuracy: AccuracyReport  # on held-out pairs
    measures: dict[str, Metrics] = Field(default_factory=dict)  # what the method measures besides


class UnseenResult(StoredResult):
    """Accuracy of clients that took part in no round, on their held-out pairs."""

    accuracy: AccuracyReport
    note: str  # what their models are
    own_pairs: dict[str, int]  # training pairs that each may use, by client


class Outcome(Result):
    """Whose model answers after the rounds, or after the alignment.

    components/federation/outcome.py plans the jobs that measure it, and exports it.
    """

    trained_model: Literal["selector", "policy"] = "policy"  # section of the recipe that the adapters are of
    # Hashes of adapters in the federation's store, by name; empty of a policy that the server aligned.
    adapters: dict[str, str] = Field(default_factory=dict)
    # By client, the name of the adapter that it uses; empty where all use the same.
    assignment: dict[str, str] = Field(default_factory=dict)
    votes: bool = False  # whether all adapters, of selectors, vote on a client's pairs too
    # What belongs to a client's model beside an adapter, and stays with it: private modules or steps on
    # its pairs, examples in its prompts, or nothing.
    own: Literal["", "modules", "examples"] = ""
    # By client, the key of its last accepted job, after which its private state is stored; empty
    # before its first one. Only for clients with models of their own beside an adapter.
    job_keys: dict[str, str] = Field(default_factory=dict)
    is_aligned: bool = False  # whether the server has aligned it, a policy, by DPO on labeled pairs
    # Of an aligned policy: its PEFT folder, or the folder of one for each client, relative to the
    # alignment's folder.
    folder: str = ""

    @property
    def clients(self) -> list[str]:
        """The clients with models of their own, sorted; empty where all clients use the same."""
        return sorted(self.job_keys) if self.own else [] if self.votes else sorted(self.assignment)

    @property
    def labels_pairs(self) -> bool:
        """Whether the adapters are of selectors, which label the pairs that a policy is aligned with."""
        return self.trained_model == "selector"

    @property
    def has_client_policies(self) -> bool:
        """Whether the policy is an adapter for each client."""
        return not self.labels_pairs and bool(self.assignment)

    def adapters_of(self, client: str) -> tuple[str, ...]:
        """The adapters of a client's model: one, or those of all selectors; of the empty name, all."""
        if client in self.assignment and not self.votes:
            return (self.adapters[self.assignment[client]],)
        return tuple(self.adapters[name] for name in sorted(self.adapters))


class ExportedAdapter(Result):
    """An adapter as a PEFT folder."""

    hash: str  # sha256 of the adapter in the federation's store
    folder: str  # the PEFT folder, relative to the federation's folder


class FederationResult(StoredResult):
    """Result of the phase federate."""

    outcome: Outcome  # what the rounds ended with
    rounds: int
    records: list[StepRecord]  # all committed steps
    # What was measured, in the order of the rounds: before the first one, at the recipe's cadence,
    # and after the last one.
    evaluations: list[RoundEvaluation]
    adapters: dict[str, ExportedAdapter]  # the exported final adapters by name
    diagnostics: list[str]  # names of the method's diagnostics (components/evaluation/diagnostics)
    # None, and not in the file, where no clients are left out of the rounds (data.unseen_clients).
    unseen: UnseenResult | None = Field(None, exclude_if=lambda unseen: unseen is None)
    privacy: PrivacySpent | None = Field(None, exclude_if=lambda spent: spent is None)

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
        return max(self.comparable[1:], key=lambda evaluation: evaluation.accuracy.mean)

    @property
    def comparable(self) -> list[RoundEvaluation]:
        """The measurement before the rounds, and those after it of the same clients as the last one."""
        clients = self.after.accuracy.clients.keys()
        later = [one for one in self.evaluations[1:] if one.accuracy.clients.keys() == clients]
        return [self.before, *later]

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

    policy: Outcome  # with its folder
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

    @property
    def ties_as_half(self) -> float:
        """(wins + ties / 2) / (wins + ties + losses); NaN without a parsed verdict."""
        parsed = self.wins + self.ties + self.losses
        return (self.wins + self.ties / 2) / parsed if parsed else math.nan


class ContestFigures(WinRate):
    """The figures of a contest by the verdicts of both orders, see components.evaluation.contests."""

    consistency: float  # share of the judged pairs on which the verdicts in both orders agree
    ties_half: float  # rate with a tie as half a win
    # Its 95% interval; None in earlier results, with fewer than two prompts, and where it has no width.
    ties_half_low: float | None = None
    ties_half_high: float | None = None
    length_controlled: float  # that rate at equal length
    length_controlled_low: float
    length_controlled_high: float
    length_effect: float  # coefficient of the length difference
    # That rate at equal length and style, and the coefficients of all differences in the same model; None
    # and empty without evaluation.style_control.
    style_controlled: float | None = None
    style_controlled_low: float | None = None
    style_controlled_high: float | None = None
    style_effects: dict[str, float] = Field(default_factory=dict)
    # That rate without the judge's errors, see components/evaluation/judge_errors.py; None where the judge
    # has no held-out pairs, or is not better than chance.
    corrected: float | None = None
    corrected_low: float | None = None
    corrected_high: float | None = None
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
    # The same at equal length and style (percent); None without evaluation.style_control.
    equal_style_win_rate: float | None = None
    equal_style_low: float | None = None
    equal_style_high: float | None = None
    style_effects: dict[str, float] = Field(default_factory=dict)  # coefficients, of the length too
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
