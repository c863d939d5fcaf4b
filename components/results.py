"""What the phases of a run write for each other, and for reports: frozen models, stored as JSON.

Numbers that cannot be computed (an accuracy without pairs, say) are NaN. All paths are relative to
the folder of the phase that wrote the result, so that a run folder can be moved.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from components.config.errors import UserError
from components.io import write_atomically
from components.versions import RESULTS


class ResultError(UserError, ValueError):
    """A result file that cannot be read."""


class Result(BaseModel):
    """A frozen result; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class _Version(BaseModel):
    """The version of a file of any layout; None where it has none."""

    schema_version: int | None = None


class StoredResult(Result):
    """A result with a file of its own.

    Attributes:
        schema_version: layout of the file; files of another version are refused.
    """

    schema_version: int = RESULTS

    def write(self, path: Path) -> Self:
        """Write the result atomically, and return it."""
        write_atomically(path, (self.model_dump_json(indent=1) + "\n").encode())
        return self

    @classmethod
    def stored(cls, path: Path, compute: Callable[[], Self]) -> Self:
        """Read a result, which is computed and written first where it is missing."""
        if not path.is_file():
            compute().write(path)
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a result.

        Raises:
            ResultError: the file was written by another version of the project, or is damaged.
        """
        try:
            content = path.read_bytes()
            version = _Version.model_validate_json(content).schema_version
            if version != RESULTS:
                raise ValueError(f"it has schema_version {version}, expected {RESULTS}")
            return cls.model_validate_json(content)
        except ValueError as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                reason = f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()
            raise ResultError(
                f"{path} cannot be read as a result of this version of the project ({reason}): use the"
                " version that wrote it, or start a new run."
            ) from None


class Metrics(Result):
    """Numbers under names of the component that computed them; all of them are logged.

    Attributes:
        scalars: one number each.
        series: several numbers each, e.g. one for each local step.
    """

    scalars: dict[str, float] = Field(default_factory=dict)
    series: dict[str, list[float]] = Field(default_factory=dict)

    def merged(self, *others: Metrics) -> Metrics:
        """These and others' numbers; of equal names the last one counts."""
        scalars = dict(self.scalars)
        series = dict(self.series)
        for other in others:
            scalars |= other.scalars
            series |= other.series
        return Metrics(scalars=scalars, series=series)


class Traffic(Result):
    """Bytes of a client in one step.

    Attributes:
        received: size of the adapter files that it was sent.
        sent: size of the file that it sent back.
        kept: size of its private modules after the step.
    """

    received: int = 0
    sent: int = 0
    kept: int = 0


class ClientRecord(Result):
    """What a client did in a step.

    Attributes:
        slot: name of the server's adapter that it trained; empty where it trained none.
        rows: number of its rows that the job could use.
        losses: mean validation losses, one for each adapter of a score job (NaN without validation
            pairs).
        metrics: numbers of its training.
        traffic: bytes received, sent and kept.
    """

    slot: str = ""
    rows: int
    losses: list[float] = Field(default_factory=list)
    metrics: Metrics = Field(default_factory=Metrics)
    traffic: Traffic = Field(default_factory=Traffic)


class StepRecord(Result):
    """A committed step of the federation.

    Attributes:
        step: number of the commit, from 1.
        round: index of the round that the step belongs to, from 0.
        phase: name of the step within its round; 'train' ends the round.
        rounds_done: complete rounds after the step.
        logged_at: round at which the server's metrics of the step are logged.
        clients: the accepted updates, by client.
        failed: reasons of clients without an update.
        refused: reasons of refused updates, by client.
        adapters: hashes of the server's adapters after the step, by name.
        memory: the method's memory after the step.
        server: the server's metrics.
        aggregation_seconds: wall time of the aggregation.
    """

    step: int
    round: int
    phase: str
    rounds_done: int
    logged_at: int
    clients: dict[str, ClientRecord]
    failed: dict[str, str]
    refused: dict[str, str]
    adapters: dict[str, str]
    memory: dict[str, JsonValue]
    server: Metrics
    aggregation_seconds: float

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
    """Accuracy over clients; each client counts once.

    Attributes:
        mean, worst, best: over clients, in [0, 1].
        clients: by client.
    """

    mean: float
    worst: float
    best: float
    clients: dict[str, float]

    @property
    def spread(self) -> float:
        """Standard deviation over the clients."""
        return statistics.pstdev(self.clients.values()) if self.clients else math.nan


class AccuracyReport(AccuracySummary):
    """Accuracy on held-out pairs, see components.evaluation.accuracy.

    Attributes:
        domains: accuracy over the pairs of a domain.
        pairs: number of pairs.
        margin: mean over clients of their mean margins (log-odds of a selector; log-ratio margins
            of a policy, nats).
        margins: mean margin by client.
        reward: mean over clients of the chosen completions' mean log-ratio to the reference (nats);
            None for selectors.
        rewards: the same by client.
        by_metric: accuracy by other margins, e.g. of log-likelihoods.
        assigned: the same report with the one adapter that each client uses; None where all use the
            same.
    """

    domains: dict[str, float]
    pairs: int
    margin: float
    margins: dict[str, float]
    reward: float | None = None
    rewards: dict[str, float] | None = None
    by_metric: dict[str, AccuracySummary] = Field(default_factory=dict)
    assigned: AccuracyReport | None = None


class RoundEvaluation(StoredResult):
    """What was measured between two rounds.

    Attributes:
        rounds_done: complete rounds at that time.
        accuracy: accuracy on held-out pairs.
        measures: what the method measures besides, by name.
    """

    rounds_done: int
    accuracy: AccuracyReport
    measures: dict[str, Metrics] = Field(default_factory=dict)


class OutcomeRecord(Result):
    """What a federation ended with, see components.federation.outcome.

    Attributes:
        kind: name of the outcome's class.
        adapters: hashes of adapters in the federation's store, by name.
        assignment: by client, the name of the adapter that it uses; empty where all use the same.
        job_keys: by client, the key of its last accepted job, after which its private state is
            stored; empty before its first one. Only for clients with private state.
    """

    kind: str
    adapters: dict[str, str]
    assignment: dict[str, str] = Field(default_factory=dict)
    job_keys: dict[str, str] = Field(default_factory=dict)


class ExportedAdapter(Result):
    """An adapter as a PEFT folder.

    Attributes:
        hash: sha256 of the adapter in the federation's store.
        folder: the PEFT folder, relative to the federation's folder.
    """

    hash: str
    folder: str


class FederationResult(StoredResult):
    """Result of the phase federate.

    Attributes:
        outcome: what the rounds ended with.
        accuracy_label: what the accuracies are accuracies of.
        accuracy_note: how clients are measured, where they do not all use the same adapter; else
            empty.
        rounds: number of rounds.
        records: all committed steps.
        evaluations: what was measured, in the order of the rounds: before the first one, at the
            recipe's cadence, and after the last one.
        adapters: the exported final adapters by name.
        diagnostics: names of the method's diagnostics (components/evaluation/diagnostics).
    """

    outcome: OutcomeRecord
    accuracy_label: str
    accuracy_note: str
    rounds: int
    records: list[StepRecord]
    evaluations: list[RoundEvaluation]
    adapters: dict[str, ExportedAdapter]
    diagnostics: list[str]

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


class PolicyRecord(Result):
    """A policy, or one for each client, see components.federation.outcome.

    Attributes:
        kind: name of the class that opens it.
        folder: PEFT folder, or the folder of one for each client, relative to the alignment's
            folder.
        job_keys: as of OutcomeRecord.
    """

    kind: str
    folder: str
    job_keys: dict[str, str] = Field(default_factory=dict)


class SamplingResult(Result):
    """Sampled completions: the prompts, and the share of completions that ended by themselves."""

    prompts: int
    finished_share: float


class LabellingResult(Result):
    """Labeled pairs of completions.

    Attributes:
        completions: sampled completions.
        dropped_identical: completions that equal an earlier one of their prompt.
        dropped_empty: completions without text.
        prompts_without_pair: prompts with fewer than two distinct completions.
        pairs: labeled pairs.
        label_1_share: share of pairs in which the second completion was preferred.
        chosen_longer_share: share of pairs whose chosen completion has more tokens.
        chosen_finished_more: share of chosen completions that ended by themselves, less that of
            rejected ones.
    """

    completions: int
    dropped_identical: int
    dropped_empty: int
    prompts_without_pair: int
    pairs: int
    label_1_share: float
    chosen_longer_share: float
    chosen_finished_more: float


class AlignmentResult(StoredResult):
    """Result of the phase align.

    Attributes:
        policy: the aligned policy.
        reference: policy that the KL is measured to: base, sft or round_start.
        metrics: numbers of the alignment, e.g. kl_sequence (nats per completion).
        history: metrics of each optimizer step, under TRL's names; empty without DPO on the server.
        checkpoints: step of DPO by PEFT folder, relative to the alignment's folder.
        sampling, labelling: None without DPO on the server.
        model_uri, model_version: the registered model.
    """

    policy: PolicyRecord
    reference: str
    metrics: dict[str, float]
    history: list[dict[str, float]] = Field(default_factory=list)
    checkpoints: dict[str, int] = Field(default_factory=dict)
    sampling: SamplingResult | None = None
    labelling: LabellingResult | None = None
    model_uri: str = ""
    model_version: str = ""


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
    """A point of the reward-hacking curve.

    Attributes:
        step: step of DPO.
        prompts: number of prompts.
        proxy: share of prompts on which the selectors' majority prefers the policy's answer to the
            base policy's.
        judge: the same of the judge; a tie is half a win in both.
    """

    step: int
    prompts: int
    proxy: float
    judge: float


class AlpacaEvalFigures(Result):
    """Figures of a model against a baseline, in the units of AlpacaEval's leaderboard.

    Attributes:
        win_rate, standard_error, discrete_win_rate: percent.
        n_wins, n_wins_base, n_draws: number of wins of the model, of wins of the baseline, and of
            draws.
        n_total, n_missing: number of rows with and without a preference.
        avg_length: mean length of the model's outputs over all rows (characters).
        equal_length_win_rate, equal_length_low, equal_length_high: win rate at equal length and its
            95% interval (percent), see components/evaluation/length_control.py.
        length_controlled_winrate: AlpacaEval's own length-controlled rate (percent); None if it was
            not computed.
    """

    win_rate: float
    standard_error: float
    n_wins: int
    n_wins_base: int
    n_draws: int
    n_total: int
    discrete_win_rate: float
    avg_length: int
    n_missing: int
    equal_length_win_rate: float
    equal_length_low: float
    equal_length_high: float
    length_controlled_winrate: float | None = None


class AlpacaEvalContest(Result):
    """A contest of AlpacaEval: the name of the baseline, and the figures against it."""

    baseline: str
    figures: AlpacaEvalFigures


class AlpacaEvalResult(Result):
    """Figures of AlpacaEval.

    Attributes:
        annotator: name of the annotator.
        contests: contests by name.
        note: why the package's length-controlled rate is missing; None where it is not.
    """

    annotator: str
    contests: dict[str, AlpacaEvalContest]
    note: str | None


class EvaluationResult(StoredResult):
    """Result of the phase evaluate.

    Attributes:
        answers: figures of the answers themselves, e.g. aligned_tokens.
        judge: description of the judge.
        judge_figures: numbers about the judge itself, e.g. its accuracy on held-out pairs.
        contests: by name: aligned_vs_base, aligned_vs_human, base_vs_human; their verdicts are in
            files of their own (components/evaluation/contests.py).
        rouge: ROUGE by policy and kind.
        alpaca_eval, implicit_reward, questions, curve: None, or empty, where the recipe does not
            ask for them.
    """

    answers: dict[str, float]
    judge: str
    judge_figures: dict[str, float]
    contests: dict[str, ContestFigures]
    rouge: dict[str, dict[str, float]]
    alpaca_eval: AlpacaEvalResult | None = None
    implicit_reward: AccuracyReport | None = None
    questions: dict[str, QuestionResult] = Field(default_factory=dict)
    curve: list[CurvePoint] = Field(default_factory=list)


class QuestionFigures(Result):
    """A policy's answers to multiple-choice questions (DRIFT section 7.1).

    A mean over sets has shares only.

    Attributes:
        accuracy: share of right greedy answers.
        chance: expected accuracy of guessing.
        unparsable_share: share of greedy answers that could not be parsed.
        low, high: 95% percentile-bootstrap interval of the accuracy.
        questions, right, unparsable: number of questions, of right greedy answers, and of greedy
            answers that could not be parsed.
        cut: number of questions whose prompt was truncated.
        succeeded: number of questions with a right answer among the samples. This and the following
            are None if no answers were sampled.
        success: share of those questions.
        success_chance: expected success rate of guessing.
        success_low, success_high: 95% percentile-bootstrap interval of the success rate.
    """

    accuracy: float
    chance: float
    unparsable_share: float
    low: float | None = None
    high: float | None = None
    questions: int | None = None
    right: int | None = None
    unparsable: int | None = None
    cut: int | None = None
    succeeded: int | None = None
    success: float | None = None
    success_chance: float | None = None
    success_low: float | None = None
    success_high: float | None = None


class QuestionResult(Result):
    """A policy's answers to the recipe's questions.

    Attributes:
        samples: number of sampled answers per question, beside the greedy one.
        sets: figures by question set, sorted by name.
        all: figures over all questions.
        mean: unweighted mean over the sets.
    """

    samples: int
    sets: dict[str, QuestionFigures]
    all: QuestionFigures
    mean: QuestionFigures


EvaluationResult.model_rebuild()


def finite_or_none(value: Any) -> Any:
    """The same tree of values with None for numbers that are not finite, as strict JSON needs it."""
    if isinstance(value, Mapping):
        return {key: finite_or_none(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite_or_none(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
