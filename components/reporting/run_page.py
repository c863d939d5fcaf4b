"""The report of a run: one page of tables, charts and answers, and its summary for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from components.charts import COLORS, curve_charts, domain_colors, interval_chart, line_chart, partition_chart
from components.data.data_report import ClientCounts
from components.data.records import answered_prompt
from components.evaluation.winrate import Verdict
from components.federation.outcome import load_outcome
from components.reporting.formats import (
    format_counts,
    format_equal_length,
    format_number,
    format_percent,
    format_rate,
)
from components.reporting.lines import MAX_DOMAINS, shown_domains
from components.reporting.metrics import RunResults, question_figures
from components.reporting.page import (
    Answers,
    Chart,
    Code,
    Notes,
    Page,
    PageSection,
    Part,
    Table,
    filled,
    text_table,
)
from components.results import (
    AccuracyReport,
    AccuracySummary,
    AlpacaEvalResult,
    ClientRecord,
    CurvePoint,
    FederationResult,
    QuestionResult,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SHOWN_PROMPTS = 12
"""Prompts whose answers are shown side by side, the first ones by id; nothing is selected."""

CONTESTS = {
    "aligned_vs_base": "aligned against base policy",
    "aligned_vs_human": "aligned against {answers_author}",
    "base_vs_human": "base against {answers_author}",
}
EQUAL_LENGTH = (
    "At equal length: what a logistic model of the length difference predicts for answers of equal length. A"
    " tie counts as half a win."
)
PARTITION_CAPTION = "Training, validation and test pairs of each client by domain (FedBiscuit figure 3)."
CLIENT_LABELS = {
    "mean": "clients' mean",
    "worst": "worst client",
    "best": "best client",
    "spread": "standard deviation over clients",
}
METRIC_LABELS = {
    "summed": "by log-likelihood, summed",
    "per_token": "by log-likelihood per token",
    "explicit": "by the reward head",
}
"""Labels of accuracies by other margins than the implicit reward's."""
MEASURE_LABELS = {"kl": "KL of these answers to the reference, nats per completion"}
CLIENTS_LINE = "clients' mean, from the worst to the best"
DOMAIN_LABELS = {"common": "common-taste pairs", "own": "own-taste pairs", "": "all pairs"}
REWARD_TITLES = {
    "reward": "Implicit reward of the chosen completions (beta x nats)",
    "margin": "Margin of the implicit reward (beta x nats)",
}
NUMBER_WORDS = {
    "loss_first": "training loss",
    "loss_last": "training loss",
    "loss": "training loss",
    "dpo": "loss of DPO",
    "value_loss": "loss of the values",
    "kl": "KL",
    "policy_kl": "KL",
    "kl_coefficient": "coefficient of the KL",
    "steps": "optimizer steps",
    "pairs": "pairs that were used",
    "excluded": "pairs that were left out",
    "finished": "share of finished completions",
    "stopped": "whether it stopped early",
    "scale": "scale of its reward",
    "decay": "decay of the learning rate",
    "lambda": "weights of the objectives",
    "score": "rewards of the objectives",
}
"""What a client's numbers are; the others are named by what they are."""
RATE_HEADINGS = (
    "Win rate: wins / (wins + ties + losses). Ties half: the same with a tie as half a win. " + EQUAL_LENGTH
)
ORDER_HEADINGS = (
    " Consistency: the share of pairs on which the judge's verdicts in both orders agree. Ours"
    " first: the win rate if the judge reads the answer of the policy named first before the other one, in"
    " this order alone."
)


def domain_label(domain: str) -> str:
    """The name of a domain in charts."""
    return DOMAIN_LABELS.get(domain, domain)


@dataclass(frozen=True)
class RunDescription:
    """What a report says about a run beside its results."""

    id: str
    clients: Mapping[str, ClientCounts]  # numbers of their pairs, by client
    answers_author: str  # of the human answers to the held-out prompts
    partition: Mapping[str, Mapping[str, int]]  # pairs by client and domain's label
    adapters: Mapping[str, str]  # folder of each exported adapter by name
    aligned: str  # folder of the aligned policy
    links: Mapping[str, str]  # address of the run in MLflow and in Prefect, by name
    phases: Mapping[str, float]  # wall time of each phase that ran here (seconds)
    environment: Mapping[str, str]  # versions and commits, by name
    recipe: str  # as YAML
    charts: Sequence[Figure] = ()  # of the methods' diagnostics


def run_page(results: RunResults, run: RunDescription) -> Page:
    """The report of a finished run."""
    recipe = results.recipe
    return Page(
        f"{recipe.name}, seed {recipe.seed}",
        f"{recipe.federation.method}, {results.federation.rounds} rounds with"
        f" {len(run.clients)} clients · run {run.id}",
        [
            PageSection(
                "Result",
                "What the rounds and the alignment changed, on held-out pairs and prompts.",
                [
                    *headline_tables(results, run.answers_author),
                    *_win_rate_charts(results, run.answers_author),
                ],
            ),
            PageSection(
                "Learning",
                "How accuracy and loss went over the rounds, and the policy over the steps of DPO.",
                [Chart(figure) for figure in _learning_charts(results, run)],
            ),
            PageSection(
                "Answers",
                "The same held-out prompts, answered by the base policy and by the aligned one"
                + (" of a client" if load_outcome(results.federation.outcome).policy_note else "")
                + "; the first ones by their ids, and nothing is selected.",
                list(_answers(results, run.answers_author)),
            ),
            PageSection(
                "Clients",
                "Who has how many pairs, and what each client reached and sent.",
                [
                    Chart(partition_chart(run.partition), PARTITION_CAPTION),
                    clients_table(results, run.clients),
                ],
            ),
            PageSection(
                "Method",
                "What is specific to this method: groups, graphs or objectives.",
                [Chart(figure) for figure in run.charts],
            ),
            sent_section(results),
            PageSection(
                "Cost", "Time and traffic; seconds are of this machine.", [_cost_table(results, run)]
            ),
            PageSection(
                "Use it",
                load_outcome(results.federation.outcome).policy_note
                or "The aligned policy is a PEFT folder and a registered model.",
                _usage(results, run),
            ),
            PageSection(
                "Recipe and environment",
                "What the run can be repeated from.",
                [
                    Table.of_values("Environment", run.environment),
                    Code("Recipe, with all defaults", run.recipe, is_folded=True),
                ],
            ),
        ],
    )


def run_summary(results: RunResults, run: RunDescription) -> str:
    """The summary of a finished run for a terminal: the headline tables, and where to look next."""
    recipe = results.recipe
    lines = [
        f"{recipe.name}, seed {recipe.seed}: {recipe.federation.method}, {results.federation.rounds} rounds"
    ]
    for table in headline_tables(results, run.answers_author):
        lines += ["", *text_table(table)]
        lines += [f"  {line}" for line in table.caption.splitlines()]
    lines += ["", "Adapters"]
    for name, adapter in results.federation.adapters.items():
        lines.append(f"  {name:<10}  {run.adapters[name]}  (sha256 {adapter.hash[:12]})")
    uri = results.alignment.model_uri
    lines.append(f"  {'aligned':<10}  {run.aligned}{f'  (registered as {uri})' if uri else ''}")
    return "\n".join(
        [*lines, "", "Open this run", *(f"  {name + ':':<10}{link}" for name, link in run.links.items())]
    )


# --- tables


def headline_tables(results: RunResults, answers_author: str) -> list[Table]:
    """Accuracy, win rates and what else the recipe measures."""
    federation, evaluation = results.federation, results.evaluation
    tables = [accuracy_table(results)]
    if (assigned := federation.after.accuracy.assigned) is not None:
        title = "With the adapter that each client is assigned"
        tables.append(_moments_table(title, _accuracy_rows([federation.before.accuracy, assigned])))
    for name, measure in federation.after.measures.items():
        before = federation.before.measures[name].scalars
        rows = {
            MEASURE_LABELS.get(key, key): [before[key], value]
            for key, value in measure.scalars.items()
            if key != "prompts"
        }
        count = f"{measure.scalars['prompts']:.0f} " if "prompts" in measure.scalars else ""
        tables.append(_moments_table(f"{name.capitalize()} on {count}held-out prompts", rows))
    tables += [contests_table(results, answers_author), _policy_table(results)]
    if evaluation.questions:
        tables.append(questions_table(evaluation.questions))
    if evaluation.alpaca_eval is not None:
        tables.append(alpaca_table(evaluation.alpaca_eval))
    return filled(tables)


def accuracy_table(results: RunResults) -> Table:
    """Held-out accuracy before and after the rounds, and after the best one."""
    federation = results.federation
    reports = [measured.accuracy for measured in results.moments.values()]
    rows = _accuracy_rows(reports)
    for name in federation.after.accuracy.by_metric:
        summaries = [report.by_metric[name] for report in reports]
        rows |= _client_rows(summaries, f"{METRIC_LABELS.get(name, name)}: ")
    notes = []
    if federation.accuracy_note:
        beta = results.scale or 1.0
        by_client = [[beta * margin for margin in report.margins.values()] for report in reports]
        unit = "nats" if results.scale is None else "beta x nats"
        rows |= {
            f"reward margin, clients' mean ({unit})": [beta * report.margin for report in reports],
            "its worst client": list(map(min, by_client)),
            "its standard deviation over clients": list(map(pstdev, by_client)),
        }
        notes.append(federation.accuracy_note)
    if federation.best is not None:
        notes.append(f"best: after round {federation.best.rounds_done}, chosen by these pairs")
    title = f"{federation.accuracy_label} on {federation.after.accuracy.pairs} held-out pairs"
    return _moments_table(title, rows, "\n".join(notes))


def _moments_table(title: str, rows: Mapping[str, Sequence[float]], caption: str = "") -> Table:
    moments = ["before", "after", "best"][: max(map(len, rows.values()), default=0)]
    cells = [[name, *map(format_number, values)] for name, values in rows.items()]
    return Table(title, ["", *moments], cells, caption)


def _accuracy_rows(reports: Sequence[AccuracyReport]) -> dict[str, list[float]]:
    return _client_rows(reports) | {
        DOMAIN_LABELS.get(name, f"domain {name}"): [report.domains[name] for report in reports]
        for name in shown_domains(reports[1])
    }


def _client_rows(summaries: Sequence[AccuracySummary], prefix: str = "") -> dict[str, list[float]]:
    return {
        prefix + label: [getattr(one, name) for one in summaries] for name, label in CLIENT_LABELS.items()
    }


def contests_table(results: RunResults, answers_author: str) -> Table:
    """Win rates with their intervals, as they are, at equal length, and by one order of presentation."""
    evaluation = results.evaluation
    rows = []
    for name, label in contest_labels(results, answers_author).items():
        one = evaluation.contests[name]
        rows.append(
            {
                "": label,
                "win rate [95%]": format_rate(one.win_rate, one.low, one.high),
                "wins/ties/losses": format_counts(one),
                "at equal length [95%]": format_equal_length(one),
                "ties half": format_percent(one.ties_half),
                "consistency": format_percent(one.consistency),
                "ours first [95%]": format_rate(
                    one.single_order.win_rate, one.single_order.low, one.single_order.high
                ),
            }
        )
    caption = f"judge: {evaluation.judge}"
    if (accuracy := evaluation.judge_figures.get("judge_accuracy")) is not None:
        pairs = evaluation.judge_figures.get("judge_held_out_pairs")
        count = "its" if pairs is None else f"{pairs:.0f}"
        caption += f"; its own accuracy {accuracy:.3f} on {count} held-out pairs"
    prompts = len({answered_prompt(row["prompt_id"]) for row in results.answers})
    samples = results.recipe.evaluation.answers_per_prompt
    title = f"Win rate on {prompts} held-out prompts" + (f" x {samples} answers" if samples > 1 else "")
    return Table.of(title, rows, caption, RATE_HEADINGS + ORDER_HEADINGS)


def contest_labels(results: RunResults, answers_author: str) -> dict[str, str]:
    """Labels of the run's contests, by name."""
    return {
        name: label.format(answers_author=answers_author)
        for name, label in CONTESTS.items()
        if name in results.evaluation.contests
    }


def _policy_table(results: RunResults) -> Table:
    """The KL to the reference, ROUGE, and the implicit reward of the aligned policy, where measured."""
    alignment, evaluation = results.alignment, results.evaluation
    policies = ("base", "aligned")
    rows = []
    if (kl := alignment.metrics.get("kl_sequence")) is not None:
        prompts = results.recipe.alignment.dpo.kl_prompts
        label = f"KL to the reference ({alignment.reference}) on up to {prompts} held-out prompts"
        rows.append([f"{label}, nats per completion", "", f"{kl:z.2f}"])
    if evaluation.rouge["aligned"]:
        rows.append(["ROUGE-L", *(format_number(evaluation.rouge[name]["rougeLsum"]) for name in policies)])
    if (reward := evaluation.implicit_reward) is not None:
        label = f"accuracy of its implicit reward, clients' mean on {reward.pairs} pairs"
        rows.append([label, "", format_number(reward.mean)])
        rows.append(["its worst client", "", format_number(reward.worst)])
    lengths = [results.metrics.get(f"answers/{name}_characters", math.nan) for name in policies]
    rows.append(["characters per answer", *(f"{length:.0f}" for length in lengths)])
    for point in evaluation.curve:
        label = f"step {point.step}: preferred to base by selectors / judge"
        rows.append([label, "", f"{point.proxy:.2f} / {point.judge:.2f}"])
    return Table("Policy", ["", *policies], rows)


def questions_table(questions: Mapping[str, QuestionResult]) -> Table:
    """The answers to questions, by set and policy (DRIFT section 7.1)."""
    first = next(iter(questions.values()))
    totals = {"all": "all questions", "mean": "mean over the sets"} if len(first.sets) > 1 else {}
    rows = []
    for name, label in ({name: name for name in first.sets} | totals).items():
        for policy, result in questions.items():
            one = question_figures(result)[name]
            count = f" ({one.questions})" if one.questions is not None else ""
            rows.append(
                {
                    "": f"{label}{count}, {policy}",
                    "accuracy [95%]": format_rate(one.accuracy, one.low, one.high),
                    "chance": format_percent(one.chance),
                    "unparsable": format_percent(one.unparsable_share),
                    f"success at {first.samples} [95%]": format_rate(
                        one.success, one.success_low, one.success_high
                    ),
                    "its chance": format_percent(one.success_chance),
                }
            )
    cut = max(result.all.cut or 0 for result in questions.values())
    remedy = (
        f"{cut} questions did not fit policy.max_prompt_tokens and were cut: raise it, or set"
        " evaluation.questions.max_question_tokens"
    )
    return Table.of("Answers to questions", rows, remedy if cut else "")


def alpaca_table(result: AlpacaEvalResult) -> Table:
    """AlpacaEval's figures, in the units of its leaderboard (percent)."""
    rows = []
    for name, contest in result.contests.items():
        one = contest.figures
        missing = f" ({one.n_missing} without a preference)" if one.n_missing else ""
        equal, low, high = (
            format_number(value, 2)
            for value in (one.equal_length_win_rate, one.equal_length_low, one.equal_length_high)
        )
        rows.append(
            {
                "": f"{name.partition('_')[0]} against {contest.baseline}",
                "win rate": format_number(one.win_rate, 2),
                "s.e.": format_number(one.standard_error, 2),
                "discrete": format_number(one.discrete_win_rate, 2),
                "length-controlled": format_number(one.length_controlled_winrate, 2),
                "at equal length [95%]": f"{equal} [{low}, {high}]",
                "wins/draws/losses": f"{one.n_wins}/{one.n_draws}/{one.n_wins_base}{missing}",
                "characters": f"{one.avg_length:,}",
            }
        )
    notes = [f"annotator: {result.annotator}", *([result.note] if result.note else [])]
    return Table.of("AlpacaEval (percent)", rows, "\n".join(notes))


def clients_table(results: RunResults, clients: Mapping[str, ClientCounts]) -> Table:
    """A row for each client: pairs, accuracy, steps and bytes."""
    federation = results.federation
    rows = []
    for name, counts in clients.items():
        updates = [record.clients[name] for record in federation.records if name in record.clients]
        ends = [record.clients[name] for record in federation.round_ends() if name in record.clients]
        kept = [update.traffic.kept for update in updates if update.traffic.kept]
        rows.append(
            {
                "client": name,
                "group": counts.group or "",
                "pairs": f"{counts.train:,}",
                "before": format_number(federation.before.accuracy.clients.get(name)),
                "after": format_number(federation.after.accuracy.clients.get(name)),
                "steps": f"{sum(update.metrics.scalars.get('steps', 0.0) for update in ends):.0f}",
                "MB sent": f"{sum(update.traffic.sent for update in updates) / 1e6:.2f}",
                "MB received": f"{sum(update.traffic.received for update in updates) / 1e6:.2f}",
                "adapter": federation.outcome.assignment.get(name, ""),
                "MB kept": f"{kept[-1] / 1e6:.2f}" if kept else "",
            }
        )
    caption = "Pairs to train on, and accuracy on the client's own held-out pairs."
    return Table.of("Clients", rows, caption)


def sent_section(results: RunResults) -> PageSection:
    """What the clients' jobs sent to the server."""
    federation = results.federation
    updates = [one for record in federation.records for one in record.clients.values()]
    kept = "; private modules stay at their client" if any(one.traffic.kept for one in updates) else ""
    answers = ""
    if load_outcome(federation.outcome).exports_clients:
        answers = " After the rounds a client's own policy sends its completions of the server's prompts."
    processors = [section.kind for section in results.recipe.federation.postprocessors]
    changed = "Nothing is encrypted or noised."
    if processors:
        changed = f"The post-processors {', '.join(processors)} change an update before it is sent."
    lead = (
        "Texts and pairs of a client are read in its own jobs only. What a job sends is its adapter, and"
        f" numbers about it{kept}.{answers} {changed}"
    )
    return PageSection("What left the clients", lead, [_sent_table(results)])


def _sent_table(results: RunResults) -> Table:
    """What a client's jobs send, by the phase of a round."""
    by_phase: dict[str, list[ClientRecord]] = {}
    for record in results.federation.records:
        by_phase.setdefault(record.phase, []).extend(record.clients.values())
    rows = []
    for phase, updates in by_phase.items():
        numbers = dict.fromkeys(
            name for one in updates for name in (*one.metrics.scalars, *one.metrics.series)
        )
        if any(one.losses for one in updates):
            numbers |= {"validation losses": None}
        rows.append(
            {
                "phase": phase,
                "updates": str(len(updates)),
                "MB of an adapter, mean": f"{fmean(one.traffic.sent for one in updates) / 1e6:.3f}"
                if updates
                else "0",
                "numbers": ", ".join(dict.fromkeys(["number of rows", *map(_number_words, numbers)])),
            }
        )
    return Table.of("Updates", rows)


def _number_words(name: str) -> str:
    """What a number of a client is; of a step of the round, or of an objective, without its name."""
    kind, _, last = name.rpartition("/")
    key = kind if kind in NUMBER_WORDS else last
    return NUMBER_WORDS.get(key, key.replace("_", " "))


def _cost_table(results: RunResults, run: RunDescription) -> Table:
    metrics = results.metrics
    values = {f"phase {name}": f"{seconds:,.1f} s" for name, seconds in run.phases.items()} | {
        "client steps": f"{metrics['cost/client_steps']:,.0f}",
    }
    if "cost/train_seconds" in metrics:
        values["training, sum over the clients"] = f"{metrics['cost/train_seconds']:,.1f} s"
        values["aggregation, a round"] = f"{metrics['cost/aggregation_seconds']:.3f} s"
    values["sent by all clients"] = f"{metrics['cost/sent_mb']:,.2f} MB"
    if "cost/kept_mb" in metrics:
        values["kept by a client, mean"] = f"{metrics['cost/kept_mb']:,.2f} MB"
    workers = results.recipe.runtime.workers
    at_once = f"{workers} at a time" if workers > 1 else "one at a time on each device"
    caption = f"Clients train {at_once}, so that their sum can be more than the time of the phase federate."
    return Table.of_values("Cost", values, caption)


def _usage(results: RunResults, run: RunDescription) -> list[Part]:
    is_by_client = load_outcome(results.federation.outcome).exports_clients
    client = (
        f', "client_id": [{json.dumps(next(iter(run.clients)), ensure_ascii=False)}]' if is_by_client else ""
    )
    code = (
        "import mlflow, pandas\n"
        f'policy = mlflow.pyfunc.load_model("{results.alignment.model_uri}")\n'
        f'print(policy.predict(pandas.DataFrame({{"prompt": ["..."]{client}}})))'
    )
    is_registered = results.alignment.model_uri
    return [
        *([Code("In Python, where MLFLOW_TRACKING_URI is that of the run", code)] if is_registered else []),
        Table(
            "Adapters (PEFT folders)",
            ["adapter", "folder"],
            [*map(list, run.adapters.items()), ["aligned", run.aligned]],
        ),
        Notes([f"{name}: {link}" for name, link in run.links.items()]),
    ]


# --- charts


def _win_rate_charts(results: RunResults, answers_author: str) -> list[Chart]:
    intervals = {}
    for name, label in contest_labels(results, answers_author).items():
        one = results.evaluation.contests[name]
        rate = one.length_controlled, one.length_controlled_low, one.length_controlled_high
        if math.isfinite(rate[0]):
            intervals[label] = rate
    title = "Win rates at equal length, 95% intervals"
    return [Chart(interval_chart(title, "win rate", intervals, 0.5), EQUAL_LENGTH)] if intervals else []


def _learning_charts(results: RunResults, run: RunDescription) -> Iterator[Figure]:
    federation = results.federation
    if len(federation.evaluations) > 2:  # the first and the last one are in a table
        yield line_chart(
            f"Held-out accuracy: {federation.accuracy_label}",
            "rounds done",
            "accuracy",
            _accuracy_points(federation),
            reference_line=(0.5, "chance"),
            y_range=(0, 1),
            colors=domain_colors(run.partition) | {CLIENTS_LINE: COLORS[0]},
        )
    if losses := [*_loss_points(federation)]:
        yield line_chart("Training loss of the clients", "round", "loss of a minibatch (nats)", losses)
    yield from curve_charts({results.recipe.federation.method: {0: results.curve}}, REWARD_TITLES)
    history = results.alignment.history
    for title, unit, key in (("loss", "loss", "loss"), ("reward margin", "beta x nats", "rewards/margins")):
        if history and all(key in entry for entry in history):
            points = [(title, entry["step"], entry[key]) for entry in history]
            yield line_chart(f"DPO: {title}", "step", unit, points)
    if results.evaluation.curve:
        yield hacking_chart("Selectors and judge over the alignment", results.evaluation.curve)


def _accuracy_points(federation: FederationResult) -> list[tuple[str, float, float]]:
    """Accuracy by client, of which the chart shows the mean and the range, and by domain."""
    clients: list[tuple[str, float, float]] = []
    domains: list[tuple[str, float, float]] = []
    for one in federation.evaluations:
        clients += [(CLIENTS_LINE, one.rounds_done, value) for value in one.accuracy.clients.values()]
        for domain, value in one.accuracy.domains.items():
            domains.append((domain_label(domain), one.rounds_done, value))
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
    return line_chart(
        title, "step of DPO", y_title, points, reference_line=(0.5, "base policy"), y_range=(0, 1)
    )


# --- answers


def _answers(results: RunResults, answers_author: str) -> Iterator[Answers]:
    labels = contest_labels(results, answers_author)
    first = {answered_prompt(row["prompt_id"]): row for row in reversed(results.answers)}
    for prompt in sorted(first)[:SHOWN_PROMPTS]:
        row = first[prompt]
        texts = {"base": row["base"]["text"], "aligned": row["aligned"]["text"]}
        if row["references"]:
            texts[answers_author] = row["references"][0]
        words = {}
        for name, label in labels.items():
            contest = results.contests[name]
            if row["prompt_id"] in contest.prompts:
                verdict = contest.verdicts[contest.prompts.index(row["prompt_id"])]
                words[label] = verdict_words(verdict, label)
        yield Answers(row["prompt"], texts, words)


def verdict_words(verdict: Verdict, contest: str) -> str:
    """Who wrote the better answer by a verdict on a contest with the label 'ours against theirs'."""
    ours, _, theirs = contest.partition(" against ")
    return {Verdict.FIRST: ours, Verdict.SECOND: theirs}.get(verdict, verdict.value)
