"""The report of a run: one page of tables, charts and answers, and its summary for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import pstdev
from typing import TYPE_CHECKING

from components.charts import curve_charts, interval_chart, line_chart, partition_chart
from components.data.records import answered_prompt
from components.data.report import ClientCounts
from components.evaluation.winrate import Verdict
from components.reporting.formats import (
    format_counts,
    format_equal_length,
    format_number,
    format_percent,
    format_rate,
)
from components.reporting.metrics import RunResults, question_figures
from components.reporting.page import (
    Answers,
    Chart,
    Code,
    Notes,
    Page,
    Part,
    Section,
    Table,
    first_column_width,
    text_table,
)
from components.results import (
    AccuracyReport,
    AccuracySummary,
    ClientRecord,
    CurvePoint,
    FederationResult,
    Traffic,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_DOMAINS = 20
"""Number of domains beyond which the tables show none; metrics.json has all of them."""
SHOWN_PROMPTS = 12
"""Prompts whose answers are shown side by side, the first ones by id; nothing is selected."""

CONTESTS = {
    "aligned_vs_base": "aligned against base policy",
    "aligned_vs_human": "aligned against {references}",
    "base_vs_human": "base against {references}",
}
METRIC_LABELS = {
    "summed": "by log-likelihood, summed",
    "per_token": "by log-likelihood per token",
    "explicit": "by the reward head",
}
"""Labels of accuracies by other margins than the implicit reward's."""
DOMAIN_LABELS = {"common": "common-taste pairs", "own": "own-taste pairs", "": "all pairs"}
REWARD_TITLES = {
    "reward": "Implicit reward of the chosen completions",
    "margin": "Margin of the implicit reward",
}


@dataclass(frozen=True)
class RunDescription:
    """What a report says about a run beside its results.

    Attributes:
        id: the run.
        clients: numbers of their pairs, by client.
        references: author of the references of the held-out prompts.
        partition: training pairs by client and domain.
        adapters: folder of each exported adapter by name, and of the aligned policy as `aligned`.
        links: address of the run in MLflow and in Prefect, by name.
        phases: wall time of each phase that ran here (seconds).
        environment: versions and commits, by name.
        recipe: the recipe as YAML.
        charts: of the methods' diagnostics.
    """

    id: str
    clients: Mapping[str, ClientCounts]
    references: str
    partition: Mapping[str, Mapping[str, int]]
    adapters: Mapping[str, str]
    links: Mapping[str, str]
    phases: Mapping[str, float]
    environment: Mapping[str, str]
    recipe: str
    charts: Sequence[Figure] = field(default_factory=tuple)


def run_page(results: RunResults, run: RunDescription) -> Page:
    """The report of a finished run."""
    recipe = results.recipe
    return Page(
        f"{recipe.name}, seed {recipe.seed}",
        f"{recipe.federation.method}, {results.federation.rounds} rounds with"
        f" {len(run.clients)} clients · run {run.id}",
        [
            Section(
                "Result",
                "What the rounds and the alignment changed, on held-out pairs and prompts.",
                [*headline_tables(results, run.references), *_win_rate_charts(results, run.references)],
            ),
            Section(
                "Learning",
                "How accuracy and loss went over the rounds, and the policy over the steps of DPO.",
                [Chart(figure) for figure in _learning_charts(results)],
            ),
            Section(
                "Answers",
                "The same held-out prompts, answered by the policy before and after the alignment; the first"
                " ones by their ids, and nothing is selected.",
                list(_answers(results, run.references)),
            ),
            Section(
                "Clients",
                "Who has how many pairs, and what each client reached and sent.",
                [_partition_chart(run.partition), clients_table(results, run.clients)],
            ),
            Section(
                "Method",
                "What is specific to this method: groups, graphs or objectives.",
                [Chart(figure) for figure in run.charts],
            ),
            Section("What left the clients", _privacy_lead(results), [_sent_table(results)]),
            Section("Cost", "Time and traffic; seconds are of this machine.", [_cost_table(results, run)]),
            Section(
                "Use it", "The aligned policy is a PEFT folder and a registered model.", _usage(results, run)
            ),
            Section(
                "Recipe and environment",
                "What the run can be repeated from.",
                [
                    Table(
                        "Environment",
                        ["", "value"],
                        [[name, value] for name, value in run.environment.items()],
                    ),
                    Code("Recipe, with all defaults", run.recipe, is_folded=True),
                ],
            ),
        ],
    )


def run_summary(results: RunResults, run: RunDescription) -> str:
    """The summary of a finished run for a terminal: the headline tables, and where to look next."""
    recipe = results.recipe
    tables = headline_tables(results, run.references)
    width = first_column_width(tables)
    lines = [
        f"{recipe.name}, seed {recipe.seed}: {recipe.federation.method}, {results.federation.rounds} rounds"
    ]
    for table in tables:
        lines += ["", *text_table(table, width)]
        lines += [f"  {line}" for line in table.caption.splitlines()]
    lines += ["", "Adapters"]
    for name, adapter in results.federation.adapters.items():
        lines.append(f"  {name:<10}  {run.adapters[name]}  (sha256 {adapter.hash[:12]})")
    lines.append(
        f"  {'aligned':<10}  {run.adapters['aligned']}  (registered as {results.alignment.model_uri})"
    )
    return "\n".join(
        [*lines, "", "Open this run", *(f"  {name + ':':<10}{link}" for name, link in run.links.items())]
    )


# --- tables


def headline_tables(results: RunResults, references: str) -> list[Table]:
    """Accuracy, win rates and what else the recipe measures."""
    tables = [accuracy_table(results)]
    if (assigned := results.federation.after.accuracy.assigned) is not None:
        before = results.federation.before.accuracy
        tables.append(
            _moments_table(
                "With the adapter that each client is assigned", _accuracy_rows([before, assigned])
            )
        )
    for name, measure in results.federation.after.measures.items():
        first = results.federation.before.measures[name].scalars
        rows = [(key, [first[key], value]) for key, value in measure.scalars.items()]
        tables.append(_moments_table(f"{name.capitalize()}, on held-out prompts", rows))
    tables += [contests_table(results, references), *_alignment_tables(results)]
    if results.evaluation.questions:
        tables.append(questions_table(results))
    if results.evaluation.alpaca_eval is not None:
        tables.append(alpaca_table(results))
    return [table for table in tables if table.rows]


def accuracy_table(results: RunResults) -> Table:
    """Held-out accuracy before and after the rounds, and after the best one."""
    federation = results.federation
    reports = [measured.accuracy for measured in results.moments.values()]
    rows = _accuracy_rows(reports)
    for name in federation.after.accuracy.by_metric:
        summaries: list[AccuracySummary] = [report.by_metric[name] for report in reports]
        label = METRIC_LABELS.get(name, name)
        rows += [(f"{label}: {row}", values) for row, values in _client_rows(summaries)]
    notes = []
    if federation.accuracy_note:
        rows.append(("reward margin over beta, mean (nats)", [report.margin for report in reports]))
        by_client = [report.margins.values() for report in reports]
        rows.append(("its worst client", list(map(min, by_client))))
        rows.append(("its standard deviation over clients", list(map(pstdev, by_client))))
        notes.append(federation.accuracy_note)
    if federation.best is not None:
        notes.append(f"best: after round {federation.best.rounds_done}, chosen by these pairs")
    title = f"{federation.accuracy_label} on {federation.after.accuracy.pairs} held-out pairs"
    return _moments_table(title, rows, "\n".join(notes))


def _moments_table(title: str, rows: Sequence[tuple[str, Sequence[float]]], caption: str = "") -> Table:
    moments = ["before", "after", "best"][: len(rows[0][1])] if rows else []
    return Table(
        title, ["", *moments], [[name, *map(format_number, values)] for name, values in rows], caption
    )


def _accuracy_rows(reports: Sequence[AccuracyReport]) -> list[tuple[str, list[float]]]:
    rows = _client_rows(reports)
    domains = reports[1].domains
    if len(domains) <= MAX_DOMAINS:
        for name in domains:
            label = DOMAIN_LABELS.get(name, f"domain {name}")
            rows.append((label, [report.domains[name] for report in reports]))
    return rows


def _client_rows(summaries: Sequence[AccuracySummary]) -> list[tuple[str, list[float]]]:
    return [
        ("clients' mean", [one.mean for one in summaries]),
        ("worst client", [one.worst for one in summaries]),
        ("best client", [one.best for one in summaries]),
        ("standard deviation over clients", [one.spread for one in summaries]),
    ]


def contests_table(results: RunResults, references: str) -> Table:
    """Win rates with their intervals, as they are, at equal length, and by one order of presentation."""
    contests = results.evaluation.contests
    rows = []
    for name, label in contest_labels(results, references).items():
        one = contests[name]
        single = one.single_order
        rows.append(
            [
                label,
                format_rate(one.win_rate, one.low, one.high),
                format_counts(one),
                format_equal_length(one),
                format_percent(one.ties_half),
                format_percent(one.consistency),
                format_rate(single.win_rate, single.low, single.high),
            ]
        )
    prompts = len({answered_prompt(row["prompt_id"]) for row in results.answers})
    samples = results.recipe.evaluation.answers_per_prompt
    figures = results.evaluation.judge_figures
    accuracy = ""
    if "judge_accuracy" in figures:
        pairs = figures.get("judge_held_out_pairs")
        count = "its" if pairs is None else f"{pairs:.0f}"
        accuracy = f"; its own accuracy {figures['judge_accuracy']:.3f} on {count} held-out pairs"
    header = [
        "",
        "win rate [95%]",
        "wins/ties/losses",
        "at equal length [95%]",
        "a tie half",
        "consistency",
        "ours first [95%]",
    ]
    return Table(
        f"Win rate on {prompts} held-out prompts" + (f" x {samples} answers" if samples > 1 else ""),
        header,
        rows,
        f"judge: {results.evaluation.judge}{accuracy}",
    )


def contest_labels(results: RunResults, references: str) -> dict[str, str]:
    """Labels of the run's contests, by name."""
    return {
        name: label.format(references=references)
        for name, label in CONTESTS.items()
        if name in results.evaluation.contests
    }


def _alignment_tables(results: RunResults) -> list[Table]:
    """The KL to the reference, ROUGE, and the implicit reward of the aligned policy, where measured."""
    rows = []
    if (kl := results.alignment.metrics.get("kl_sequence")) is not None:
        rows.append(
            [f"KL to the reference ({results.alignment.reference}), nats per completion", "", f"{kl:.2f}"]
        )
    rouge = results.evaluation.rouge
    if rouge["aligned"]:
        values = [format_number(rouge[policy]["rougeLsum"]) for policy in ("base", "aligned")]
        rows.append(["ROUGE-L", *values])
    if (reward := results.evaluation.implicit_reward) is not None:
        rows.append(
            [f"accuracy of its implicit reward on {reward.pairs} pairs", "", format_number(reward.mean)]
        )
        rows.append(["its worst client", "", format_number(reward.worst)])
    lengths = [
        results.metrics.get(f"answers/{policy}_characters", math.nan) for policy in ("base", "aligned")
    ]
    rows.append(["characters per answer", *(f"{length:.0f}" for length in lengths)])
    for point in results.evaluation.curve:
        rows.append(
            [
                f"step {point.step}: preferred to base by selectors / judge",
                "",
                f"{point.proxy:.2f} / {point.judge:.2f}",
            ]
        )
    return [Table("Policy", ["", "base", "aligned"], rows)]


def questions_table(results: RunResults) -> Table:
    """The answers to questions, by set and policy (DRIFT section 7.1)."""
    questions = results.evaluation.questions
    first = next(iter(questions.values()))
    totals = {"all": "all questions", "mean": "mean over the sets"}
    rows = []
    for name in question_figures(first):
        if name in totals and len(first.sets) == 1:
            continue
        for policy, result in questions.items():
            one = question_figures(result)[name]
            count = f" ({one.questions})" if one.questions is not None else ""
            rows.append(
                [
                    f"{totals.get(name, name)}{count}, {policy}",
                    format_rate(one.accuracy, one.low, one.high),
                    format_percent(one.chance),
                    format_percent(one.unparsable_share),
                    format_rate(one.success, one.success_low, one.success_high),
                    format_percent(one.success_chance),
                ]
            )
    cut = max(result.all.cut or 0 for result in questions.values())
    caption = (
        f"{cut} questions did not fit policy.max_prompt_tokens and were cut: raise it, or set"
        " evaluation.questions.max_question_tokens"
        if cut
        else ""
    )
    header = ["", "accuracy [95%]", "chance", "unparsable", f"success at {first.samples} [95%]", "its chance"]
    return Table("Answers to questions", header, rows, caption)


def alpaca_table(results: RunResults) -> Table:
    """AlpacaEval's figures, in the units of its leaderboard (percent)."""
    result = results.evaluation.alpaca_eval
    assert result is not None
    rows = []
    for name, contest in result.contests.items():
        one = contest.figures
        counts = f"{one.n_wins}/{one.n_draws}/{one.n_wins_base}"
        if one.n_missing:
            counts += f" ({one.n_missing} without a preference)"
        low, high = (format_number(bound, 2) for bound in (one.equal_length_low, one.equal_length_high))
        rows.append(
            [
                f"{name.partition('_')[0]} against {contest.baseline}",
                format_number(one.win_rate, 2),
                format_number(one.standard_error, 2),
                format_number(one.discrete_win_rate, 2),
                format_number(one.length_controlled_winrate, 2),
                f"{format_number(one.equal_length_win_rate, 2)} [{low}, {high}]",
                counts,
                f"{one.avg_length:,}",
            ]
        )
    header = [
        "",
        "win rate",
        "s.e.",
        "discrete",
        "length-controlled",
        "at equal length [95%]",
        "wins/draws/losses",
        "characters",
    ]
    notes = [f"annotator: {result.annotator}", *([result.note] if result.note else [])]
    return Table("AlpacaEval (percent)", header, rows, "\n".join(notes))


def clients_table(results: RunResults, clients: Mapping[str, ClientCounts]) -> Table:
    """A row for each client: pairs, accuracy, steps and bytes."""
    before, after = results.federation.before.accuracy, results.federation.after.accuracy
    assignment = results.federation.outcome.assignment
    traffic = total_traffic(results)
    rows = []
    for name, counts in clients.items():
        own = traffic.get(name, Traffic())
        rows.append(
            [
                name,
                counts.group or "",
                f"{counts.train:,}",
                format_number(before.clients.get(name, math.nan)),
                format_number(after.clients.get(name, math.nan)),
                f"{steps_of(results, name):.0f}",
                f"{own.sent / 1e6:.2f}",
                f"{own.received / 1e6:.2f}",
                assignment.get(name, ""),
                f"{own.kept / 1e6:.2f}" if own.kept else "",
            ]
        )
    header = [
        "client",
        "group",
        "pairs",
        "before",
        "after",
        "steps",
        "MB sent",
        "MB received",
        "adapter",
        "MB kept",
    ]
    return Table(
        "Clients", header, rows, "Pairs to train on, and accuracy on the client's own held-out pairs."
    )


def total_traffic(results: RunResults) -> dict[str, Traffic]:
    """Bytes of each client over all rounds; `kept` is of the last one."""
    totals: dict[str, Traffic] = {}
    for record in results.federation.records:
        for name, client in record.clients.items():
            own = totals.get(name, Traffic())
            totals[name] = Traffic(
                received=own.received + client.traffic.received,
                sent=own.sent + client.traffic.sent,
                kept=client.traffic.kept or own.kept,
            )
    return totals


def steps_of(results: RunResults, client: str) -> float:
    """Optimizer steps of a client over all rounds."""
    updates = [
        record.clients[client] for record in results.federation.round_ends() if client in record.clients
    ]
    return sum(update.metrics.scalars.get("steps", 0.0) for update in updates)


def _privacy_lead(results: RunResults) -> str:
    kept = (
        "; private modules stay at their client"
        if any(one.kept for one in total_traffic(results).values())
        else ""
    )
    return (
        "Texts and pairs of a client are read in its own jobs only. What a job sends is its adapter, and"
        f" numbers about it{kept}. Nothing is encrypted or noised."
    )


def _sent_table(results: RunResults) -> Table:
    """What a client's jobs send, by the phase of a round."""
    rows = []
    by_phase: dict[str, list[ClientRecord]] = {}
    for record in results.federation.records:
        by_phase.setdefault(record.phase, []).extend(record.clients.values())
    for phase, updates in by_phase.items():
        numbers = dict.fromkeys(
            name for one in updates for name in (*one.metrics.scalars, *one.metrics.series)
        )
        if any(one.losses for one in updates):
            numbers |= {"validation losses": None}
        sent = [one.traffic.sent for one in updates]
        rows.append(
            [
                phase,
                str(len(updates)),
                f"{sum(sent) / len(sent) / 1e6:.3f}" if sent else "0",
                ", ".join(["number of rows", *numbers]),
            ]
        )
    return Table("Updates", ["phase", "updates", "MB of an adapter, mean", "numbers"], rows)


def _cost_table(results: RunResults, run: RunDescription) -> Table:
    metrics = results.metrics
    rows = [[f"phase {name}", f"{seconds:,.1f} s"] for name, seconds in run.phases.items()]
    rows += [
        ["client steps", f"{metrics['cost/client_steps']:,.0f}"],
        ["training of all clients", f"{metrics['cost/train_seconds']:,.1f} s"],
        ["aggregation, a round", f"{metrics['cost/aggregation_seconds']:.3f} s"],
        ["sent by all clients", f"{metrics['cost/sent_mb']:,.2f} MB"],
    ]
    if "cost/kept_mb" in metrics:
        rows.append(["kept by a client, mean", f"{metrics['cost/kept_mb']:,.2f} MB"])
    return Table("Cost", ["", "value"], rows)


def _usage(results: RunResults, run: RunDescription) -> list[Part]:
    parts: list[Part] = [
        Code(
            "In Python, where MLFLOW_TRACKING_URI is that of the run",
            "import mlflow, pandas\n"
            f'policy = mlflow.pyfunc.load_model("{results.alignment.model_uri}")\n'
            'print(policy.predict(pandas.DataFrame({"prompt": ["..."]})))',
        )
    ]
    rows = [[name, folder] for name, folder in run.adapters.items()]
    parts.append(Table("Adapters (PEFT folders)", ["adapter", "folder"], rows))
    return [*parts, Notes([f"{name}: {link}" for name, link in run.links.items()])]


# --- charts


def _win_rate_charts(results: RunResults, references: str) -> list[Chart]:
    intervals = {}
    for name, label in contest_labels(results, references).items():
        one = results.evaluation.contests[name]
        if math.isfinite(one.length_controlled):
            bounds = one.length_controlled_low, one.length_controlled_high
            intervals[label] = one.length_controlled, *bounds
    if not intervals:
        return []
    caption = "A tie is half a win; what a model of the length difference predicts for equal lengths."
    title = "Win rates at equal length, 95% intervals"
    return [Chart(interval_chart(title, "win rate", intervals, 0.5), caption)]


def _learning_charts(results: RunResults) -> Iterator[Figure]:
    federation = results.federation
    yield line_chart(
        f"Held-out accuracy: {federation.accuracy_label}",
        "rounds done",
        "accuracy",
        _accuracy_points(federation),
        reference=(0.5, "chance"),
        y_range=(0, 1),
    )
    if losses := [*_loss_points(federation)]:
        yield line_chart("Training loss of the clients", "round", "loss of a minibatch (nats)", losses)
    yield from curve_charts({results.recipe.federation.method: {0: results.curve}}, REWARD_TITLES)
    history = results.alignment.history
    if history:
        yield line_chart(
            "DPO: loss", "step", "loss", [("loss", entry["step"], entry["loss"]) for entry in history]
        )
        if all("rewards/margins" in entry for entry in history):
            margins = [("margin", entry["step"], entry["rewards/margins"]) for entry in history]
            yield line_chart("DPO: reward margin", "step", "beta x nats", margins)
    if results.evaluation.curve:
        yield hacking_chart("Selectors and judge over the alignment", results.evaluation.curve)


def _accuracy_points(federation: FederationResult) -> list[tuple[str, float, float]]:
    """Accuracy by client, of which the chart shows the mean and the range, and by domain."""
    clients: list[tuple[str, float, float]] = []
    domains: list[tuple[str, float, float]] = []
    for one in federation.evaluations:
        name = "clients' mean, from the worst to the best"
        clients += [(name, one.rounds_done, value) for value in one.accuracy.clients.values()]
        for domain, value in one.accuracy.domains.items():
            domains.append((DOMAIN_LABELS.get(domain, domain), one.rounds_done, value))
    return clients + (domains if 1 < len(federation.after.accuracy.domains) <= MAX_DOMAINS else [])


def _loss_points(federation: FederationResult) -> Iterator[tuple[str, float, float]]:
    """Losses of the first and of the last local step by client."""
    for key, name in (("loss_first", "first local step"), ("loss_last", "last local step")):
        for record in federation.records:
            for one in record.clients.values():
                if key in one.metrics.scalars:
                    label = f"{name}, mean and range over clients"
                    yield label, record.rounds_done, one.metrics.scalars[key]


def hacking_chart(title: str, curve: Sequence[CurvePoint]) -> Figure:
    """Selectors and judge over DPO's steps; the reward is hacked if the judge's share falls."""
    points = [(name, 0.0, 0.5) for name in ("selectors (proxy)", "judge (gold)")]
    for point in curve:
        points += [("selectors (proxy)", point.step, point.proxy), ("judge (gold)", point.step, point.judge)]
    y_title = "preferred to base (ties half)"
    return line_chart(title, "step of DPO", y_title, points, reference=(0.5, "base policy"), y_range=(0, 1))


def _partition_chart(partition: Mapping[str, Mapping[str, int]]) -> Chart:
    return Chart(
        partition_chart(partition), "As FedBiscuit's figure 3; of many clients some are shown, by size."
    )


# --- answers


def _answers(results: RunResults, references: str) -> Iterator[Answers]:
    labels = contest_labels(results, references)
    verdicts = {
        label: dict(zip(results.contests[name].prompts, results.contests[name].verdicts, strict=True))
        for name, label in labels.items()
    }
    first = {answered_prompt(row["prompt_id"]): row for row in reversed(results.answers)}
    for prompt in sorted(first)[:SHOWN_PROMPTS]:
        row = first[prompt]
        texts = {"base": row["base"]["text"], "aligned": row["aligned"]["text"]}
        if row["references"]:
            texts[references] = row["references"][0]
        words = {
            label: verdict_words(by_answer[row["prompt_id"]], label)
            for label, by_answer in verdicts.items()
            if row["prompt_id"] in by_answer
        }
        yield Answers(row["prompt"], texts, words)


def verdict_words(verdict: Verdict, contest: str) -> str:
    """A judge's verdict by name: who wrote the better answer.

    Args:
        verdict: of the contest.
        contest: its label, 'ours against theirs'.
    """
    ours, _, theirs = contest.partition(" against ")
    return {Verdict.FIRST: ours, Verdict.SECOND: theirs}.get(verdict, verdict.value)
