"""The report of a run: tables, charts and answers; its summary, and the card of an exported model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from typing import TYPE_CHECKING

from components.config import BackboneConfig
from components.data.data_report import ClientCounts
from components.data.records import answered_prompt
from components.evaluation import charts
from components.evaluation.judge_errors import is_better_than_chance, judge_counts
from components.reporting.formats import (
    format_number,
    format_percent,
    format_rate,
    format_share_of_wins,
    is_undecided,
    rate_cells,
)
from components.reporting.lines import MAX_DOMAINS, accuracy_label, accuracy_note, policy_note, shown_domains
from components.reporting.metrics import RunResults, question_figures, verdict_words
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
    sections_markdown,
    text_table,
)
from components.results import (
    AccuracyReport,
    AccuracySummary,
    AlpacaEvalResult,
    CurvePoint,
    QuestionResult,
    StepRecord,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SHOWN_PROMPTS = 12
"""Prompts whose answers are shown side by side, the first ones by id; nothing is selected."""

EQUAL_LENGTH = (
    "Length-controlled: what a logistic model of the length difference predicts for answers of equal length."
    " A tie counts as half a win."
)
PARTITION_CAPTION = "Training, validation and test pairs of each client by domain (FedBiscuit figure 3)."
CLIENT_LABELS = {
    "mean": "clients' mean",
    "worst": "worst client",
    "best": "best client",
    "spread": "standard deviation over clients",
}
UNSEEN_LABELS = {
    "mean": CLIENT_LABELS["mean"],
    "worst_tenth": "worst 10% of clients",
    "spread": CLIENT_LABELS["spread"],
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
OF_CLIENTS = (
    (
        "Training loss of the clients",
        "loss of a minibatch (nats)",
        {"loss_first": "first local step", "loss_last": "last local step"},
    ),
    (
        "Log-likelihoods in the clients' training",
        "mean over the pairs of a job (nats)",
        {"logps_chosen": "chosen", "logps_rejected": "rejected"},
    ),
)
"""Title, unit and lines of the charts of what clients measure while they train."""
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
COSTS = (
    ("client steps", "cost/client_steps", "{:,.0f}"),
    ("training, sum over the clients", "cost/train_seconds", "{:,.1f} s"),
    ("aggregation, a round", "cost/aggregation_seconds", "{:.3f} s"),
    ("sent by all clients", "cost/sent_mb", "{:,.2f} MB"),
    ("kept by a client, mean", "cost/kept_mb", "{:,.2f} MB"),
)
"""Label, metric and format of the rows of costs."""
SENT = "What left the clients"
PRIVACY = "Differential privacy"
PROTECTED = {"label": "which completion of a pair is preferred", "client": "all pairs of a client"}
EPSILON_OF = {"label": " for a verdict; of a client with n pairs n times as much", "client": " for a client"}
MEASURED = {
    "label": "by noised verdicts, corrected for the noise, but for those that are not covered",
    "client": "on held-out pairs of owners outside the federation",
}
"""By the unit of federation.privacy, what is protected, what epsilon is of, and what accuracies are of."""
NOISED = {
    "label": "Verdicts are noised before a client's job reads them.",
    "client": "The server adds noise to the sum.",
}
"""By unit, what is done to what clients send."""
EFFECTS = (
    "Of the logistic model that predicts the length- and style-controlled rate, which has the standardized"
    " differences of the length and of the numbers of headings, list items and bold passages (Markdown)."
    " Above 0 the judge prefers more of it, the others being equal."
)
CORRECTED = (
    " Corrected: the rate with a tie as half a win that a judge without errors would give"
    " (components/evaluation/judge_errors.py), by the judge's accuracy on its own held-out pairs. These are"
    " easier than pairs of two policies' answers, so that the correction and its interval are too small."
)
RATE_HEADINGS = (
    "Win rate, ties as 1/2: (wins + ties / 2) / (wins + ties + losses). Share of wins: wins / (wins + ties +"
    " losses), as in FedBiscuit's table 1. " + EQUAL_LENGTH
)
ORDER_HEADINGS = (
    " Both orders agree: the share of pairs on which the judge's verdicts in both orders agree. Ours"
    " first: the share of wins if the judge reads the answer of the policy named first before the"
    " other one, in this order alone."
)


@dataclass(frozen=True)
class RunDescription:
    """What a report says about a run beside its results."""

    id: str
    clients: Mapping[str, ClientCounts]  # numbers of their pairs, by client
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
    recipe, federation = results.recipe, results.federation
    by_client = policy_note(federation.outcome)
    leads = {
        "Result": "What the rounds and the alignment changed, on held-out pairs and prompts.",
        "Learning": "How accuracy and loss went over the rounds, and the policy over the steps of DPO.",
        "Answers": "The same held-out prompts, answered by the base policy and by the aligned one"
        f"{' of a client' if by_client else ''}; the first ones by their ids, and nothing is selected.",
        "Clients": "Who has how many pairs, and what each client reached and sent.",
        "Method": "What is specific to this method: groups, graphs or objectives.",
        SENT: sent_lead(results),
        "Cost": "Time and traffic; seconds are of this machine.",
        "Use it": by_client or "The aligned policy is a PEFT folder and a registered model.",
        "Recipe and environment": "What the run can be repeated from.",
    }
    pairs = Chart(charts.partition_chart(run.partition), PARTITION_CAPTION)
    recipe_text = Code("Recipe, with all defaults", run.recipe, is_folded=True)
    parts: dict[str, Sequence[Part]] = {
        "Result": [*headline_tables(results), *_win_rate_charts(results)],
        "Learning": [Chart(figure) for figure in _learning_charts(results, run)],
        "Answers": [*_answers(results)],
        "Clients": [pairs, clients_table(results, run.clients)],
        "Method": [Chart(figure) for figure in run.charts],
        SENT: [sent_table(results)],
        "Cost": [_cost_table(results, run)],
        "Use it": _usage(results, run),
        "Recipe and environment": [Table.of_values("Environment", run.environment), recipe_text],
    }
    return Page(
        f"{recipe.name}, seed {recipe.seed}",
        f"{recipe.federation.method}, {federation.rounds} rounds with"
        f" {len(run.clients)} clients · run {run.id}",
        [PageSection(title, lead, parts[title]) for title, lead in leads.items()],
    )


def run_summary(results: RunResults, run: RunDescription) -> str:
    """The summary of a finished run for a terminal: the headline tables, and where to look next."""
    recipe, federation = results.recipe, results.federation
    lines = [f"{recipe.name}, seed {recipe.seed}: {recipe.federation.method}, {federation.rounds} rounds"]
    for table in headline_tables(results):
        lines += ["", *text_table(table), *(f"  {line}" for line in table.caption.splitlines())]
    lines += ["", "Adapters"]
    for name, adapter in federation.adapters.items():
        lines.append(f"  {name:<10}  {run.adapters[name]}  (sha256 {adapter.hash[:12]})")
    uri = results.alignment.model_uri
    lines.append(f"  {'aligned':<10}  {run.aligned}{f'  (registered as {uri})' if uri else ''}")
    lines += ["", "Open this run", *(f"  {name + ':':<10}{link}" for name, link in run.links.items())]
    return "\n".join(lines)


def training_card(
    results: RunResults, backbone: BackboneConfig, origin: Mapping[str, str], is_aligned: bool
) -> str:
    """How an exported model was trained, for its README: method, data, figures, and what left the clients.

    The origin is what else the run and its data can be recognized by, e.g. their hashes. A model that is not
    the aligned policy is an adapter of the rounds.
    """
    from components.models.backbone import EMBEDDED, TINY

    recipe, federation = results.recipe, results.federation
    licenses = {EMBEDDED: "Apache-2.0 (SmolLM2-135M-Instruct)", TINY: "Apache-2.0 (made by fed-rlhf)"}
    training = {
        "method": recipe.federation.method,
        "rounds": str(federation.rounds),
        "clients": str(len(federation.after.accuracy.clients)),
        "recipe": recipe.name,
        "seed": str(recipe.seed),
        "source of the data": recipe.data.source,
        **origin,
        "license of the backbone": licenses.get(backbone.name, f"that of {backbone.name}"),
        "license of the data": "not recorded; ask the owners of the data",
    }
    figures_of = "On held-out data of this run."
    if not is_aligned:
        figures_of += " They are of the run as a whole, of which this adapter is a part."
    sections = [
        PageSection("Training", "It was trained by this run.", [Table.of_values("Run", training)]),
        PageSection(SENT, sent_lead(results), [sent_table(results)]),
        PageSection("Figures", figures_of, headline_tables(results)),
    ]
    return sections_markdown(sections)


# --- tables


def headline_tables(results: RunResults) -> list[Table]:
    """Accuracy, win rates and what else the recipe measures."""
    federation, evaluation = results.federation, results.evaluation
    contests = evaluation.contests
    before, after = federation.before, federation.after
    tables = [accuracy_table(results)]
    if (assigned := after.accuracy.assigned) is not None:
        rows = _accuracy_rows([before.accuracy, assigned])
        tables.append(_moments_table("With the adapter that each client is assigned", rows))
    if federation.unseen is not None:
        accuracy = federation.unseen.accuracy
        of_clients = {label: getattr(accuracy, name) for name, label in UNSEEN_LABELS.items()}
        of_clients |= {f"client {name}": value for name, value in accuracy.clients.items()}
        label = accuracy_label(federation.outcome)
        title = f"{label} of {len(accuracy.clients)} clients that took part in no round"
        cells = [[name, format_number(value)] for name, value in of_clients.items()]
        note = f"{federation.unseen.note}; on {accuracy.pairs} held-out pairs"
        tables.append(Table(title, ["", "after"], cells, note))
    for name, measure in after.measures.items():
        ends = {key: [before.measures[name].scalars[key], value] for key, value in measure.scalars.items()}
        count = f"{ends.pop('prompts')[1]:.0f} " if "prompts" in ends else ""
        rows = {MEASURE_LABELS.get(key, key): values for key, values in ends.items()}
        tables.append(_moments_table(f"{name.capitalize()} on {count}held-out prompts", rows))
    effects = {label: contests[name].style_effects for name, label in results.contest_labels.items()}
    tables += [contests_table(results), style_table(effects), _policy_table(results)]
    if evaluation.questions:
        tables.append(questions_table(evaluation.questions))
    if evaluation.alpaca_eval is not None:
        tables += alpaca_tables(evaluation.alpaca_eval)
    return filled([*tables, privacy_table(results)])


def privacy_table(results: RunResults) -> Table:
    """What differential privacy protects, and what it costs; empty where nothing is protected."""
    spent = results.federation.privacy
    if spent is None:
        return Table.of_values(PRIVACY, {})
    epsilon = "none: the secrets follow from the recipe's seed"
    if spent.epsilon is not None:
        delta = f", with delta {spent.delta:g}" if spent.delta else ""
        epsilon = f"{spent.epsilon:.4g}{EPSILON_OF[spent.unit]}{delta}"
    values = {
        "protected": f"{PROTECTED[spent.unit]} (unit {spent.unit})",
        "epsilon": epsilon,
        "neighboring data": spent.relation,
        "sampling": spent.sampling,
        "accountant": spent.accountant,
        "accuracies": MEASURED[spent.unit],
        "not covered": spent.outside,
    }
    return Table.of_values(PRIVACY, values)


def accuracy_table(results: RunResults) -> Table:
    """Held-out accuracy before and after the rounds, and after the best one."""
    federation = results.federation
    reports = [measured.accuracy for measured in results.moments.values()]
    rows = _accuracy_rows(reports)
    for name in federation.after.accuracy.by_metric:
        summaries = [report.by_metric[name] for report in reports]
        rows |= _client_rows(summaries, f"{METRIC_LABELS.get(name, name)}: ")
    notes = []
    if note := accuracy_note(federation.outcome):
        beta = results.scale or 1.0
        by_client = [[beta * margin for margin in report.margins.values()] for report in reports]
        unit = "nats" if results.scale is None else "beta x nats"
        rows |= {
            f"reward margin, clients' mean ({unit})": [beta * report.margin for report in reports],
            "its worst client": list(map(min, by_client)),
            "its standard deviation over clients": list(map(pstdev, by_client)),
        }
        notes.append(note)
    if federation.best is not None:
        notes.append(f"best: after round {federation.best.rounds_done}, chosen by these pairs")
    for name, report in zip(results.moments, reports, strict=True):
        if report.missing:
            notes.append(f"{name}: {report.answered}, without {', '.join(sorted(report.missing))}")
    title = f"{accuracy_label(federation.outcome)} on {federation.after.accuracy.pairs} held-out pairs"
    return _moments_table(title, rows, "\n".join(notes))


def _moments_table(title: str, rows: Mapping[str, Sequence[float]], caption: str = "") -> Table:
    moments = ["before", "after", "best"][: max(map(len, rows.values()), default=0)]
    cells = [[name, *map(format_number, values)] for name, values in rows.items()]
    return Table(title, ["", *moments], cells, caption)


def _accuracy_rows(reports: Sequence[AccuracyReport]) -> dict[str, list[float]]:
    return _client_rows(reports) | {
        DOMAIN_LABELS.get(name, f"domain {name}"): [report.domains.get(name, math.nan) for report in reports]
        for name in shown_domains(reports[1])
    }


def _client_rows(summaries: Sequence[AccuracySummary], prefix: str = "") -> dict[str, list[float]]:
    return {
        prefix + label: [getattr(one, name) for one in summaries] for name, label in CLIENT_LABELS.items()
    }


def contests_table(results: RunResults) -> Table:
    """Counts, and rates with their intervals: ties as 1/2, controlled, corrected, of wins, by one order."""
    evaluation, labels = results.evaluation, results.contest_labels
    judge = evaluation.judge_figures
    rows = []
    for name, label in labels.items():
        one = evaluation.contests[name]
        rows.append(
            {"": label}
            | rate_cells(one, [judge], "corrected [95%]")
            | {"both orders agree": format_percent(one.consistency)}
            | {"ours first [95%]": format_share_of_wins(one.single_order)}
        )
    notes = [f"judge: {evaluation.judge}"]
    if (accuracy := judge.get("judge_accuracy")) is not None:
        count = f"{judge['judge_held_out_pairs']:.0f}" if "judge_held_out_pairs" in judge else "its"
        notes[0] += f"; its own accuracy {accuracy:.3f} on {count} held-out pairs"
    right, pairs = judge_counts([judge])
    undecided = [label for name, label in labels.items() if is_undecided(evaluation.contests[name])]
    if not pairs:
        notes.append("no rate corrected for the judge's errors: the judge has no held-out pairs")
    elif not is_better_than_chance(right, pairs):
        notes.append("the judge is not better than chance on them, so that its verdicts decide nothing")
    elif undecided:
        words = "undecided with the judge's errors, as the interval includes one half"
        notes.append(f"{words}: {'; '.join(undecided)}")
    prompts = len({answered_prompt(row["prompt_id"]) for row in results.answers})
    samples = results.recipe.evaluation.answers_per_prompt
    title = f"Win rate on {prompts} held-out prompts" + (f" x {samples} answers" if samples > 1 else "")
    return Table.of(title, rows, "\n".join(notes), RATE_HEADINGS + CORRECTED + ORDER_HEADINGS)


def style_table(effects: Mapping[str, Mapping[str, float]]) -> Table:
    """The coefficients of length and style by contest, of those that have some."""
    rows = [
        {"": label} | {name.replace("_", " "): format_number(value, 2) for name, value in own.items()}
        for label, own in effects.items()
        if own
    ]
    return Table.of("Coefficients of length and style", rows, headings=EFFECTS)


def _policy_table(results: RunResults) -> Table:
    """The KL to the reference, ROUGE, and the implicit reward of the aligned policy, where measured."""
    alignment, evaluation = results.alignment, results.evaluation
    policies = ("base", "aligned")
    rows = []
    if (kl := alignment.metrics.get("kl_sequence")) is not None:
        prompts = results.recipe.alignment.dpo.kl_prompts
        label = f"sequence-level KL to the reference policy ({alignment.reference}) in nats"
        rows.append([f"{label}, on up to {prompts} held-out prompts", "", f"{kl:z.2f}"])
    if evaluation.rouge["aligned"]:
        rows.append(["ROUGE-L", *(format_number(evaluation.rouge[name]["rougeLsum"]) for name in policies)])
    if (reward := evaluation.implicit_reward) is not None:
        answered = f" ({reward.answered})" if reward.missing else ""
        label = f"accuracy of its implicit reward, clients' mean{answered} on {reward.pairs} pairs"
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
            success = format_rate(one.success, one.success_low, one.success_high)
            rows.append(
                {
                    "": f"{label}{count}, {policy}",
                    "accuracy [95%]": format_rate(one.accuracy, one.low, one.high),
                    "chance": format_percent(one.chance),
                    "unparsable": format_percent(one.unparsable_share),
                    f"success at {first.samples} [95%]": success,
                    "its chance": format_percent(one.success_chance),
                }
            )
    cut = max(result.all.cut or 0 for result in questions.values())
    remedy = (
        f"{cut} questions did not fit policy.max_prompt_tokens and were cut: raise it, or set"
        " evaluation.questions.max_question_tokens"
    )
    return Table.of("Answers to questions", rows, remedy if cut else "")


def alpaca_tables(result: AlpacaEvalResult) -> list[Table]:
    """AlpacaEval's figures in the units of its leaderboard (percent), and its contests' coefficients."""

    def rate(rate: float | None, low: float | None, high: float | None) -> str:
        interval = "" if rate is None else f" [{format_number(low, 2)}, {format_number(high, 2)}]"
        return format_number(rate, 2) + interval

    figures = {
        f"{name.partition('_')[0]} against {contest.baseline}": contest.figures
        for name, contest in result.contests.items()
    }
    rows = []
    for label, one in figures.items():
        missing = f" ({one.n_missing} without a preference)" if one.n_missing else ""
        equal_length = rate(one.equal_length_win_rate, one.equal_length_low, one.equal_length_high)
        equal_style = rate(one.equal_style_win_rate, one.equal_style_low, one.equal_style_high)
        rows.append(
            {
                "": label,
                "win rate": format_number(one.win_rate, 2),
                "s.e.": format_number(one.standard_error, 2),
                "discrete": format_number(one.discrete_win_rate, 2),
                "length-controlled": format_number(one.length_controlled_winrate, 2),
                "length-controlled [95%]": equal_length,
                "length- and style-controlled [95%]": equal_style,
                "wins/draws/losses": f"{one.n_wins}/{one.n_draws}/{one.n_wins_base}{missing}",
                "characters": f"{one.avg_length:,}",
            }
        )
    caption = f"annotator: {result.annotator}" + (f"\n{result.note}" if result.note else "")
    effects = style_table({label: one.style_effects for label, one in figures.items()})
    return [Table.of("AlpacaEval (percent)", rows, caption), effects]


def clients_table(results: RunResults, clients: Mapping[str, ClientCounts]) -> Table:
    """A row for each client: pairs, accuracy, steps and bytes."""
    federation = results.federation
    is_known = all(record.total is None for record in federation.records)  # tracking.client_figures
    rows = []
    for name, counts in clients.items():
        updates = [record.clients[name] for record in federation.records if name in record.clients]
        ends = [record.clients[name] for record in federation.round_ends() if name in record.clients]
        kept = [update.traffic.kept for update in updates if update.traffic.kept]
        row = {
            "client": name,
            "group": counts.group or "",
            "pairs": f"{counts.train:,}",
            "before": format_number(federation.before.accuracy.clients.get(name)),
            "after": format_number(federation.after.accuracy.clients.get(name)),
        }
        if is_known:
            row |= {
                "steps": f"{sum(update.metrics.scalars.get('steps', 0.0) for update in ends):.0f}",
                "MB sent": f"{sum(update.traffic.sent for update in updates) / 1e6:.2f}",
                "MB received": f"{sum(update.traffic.received for update in updates) / 1e6:.2f}",
            }
        row["adapter"] = federation.outcome.assignment.get(name, "")
        if is_known:
            row["MB kept"] = f"{kept[-1] / 1e6:.2f}" if kept else ""
        rows.append(row)
    own = "" if by_sums(results) else ", and accuracy on the client's own held-out pairs"
    return Table.of("Clients", rows, f"Pairs to train on{own}.")


def by_sums(results: RunResults) -> bool:
    """Whether clients send contributions to sums with noise, and nothing else."""
    privacy = results.recipe.federation.privacy
    return privacy is not None and privacy.unit == "client"


def sent_lead(results: RunResults) -> str:
    """What the clients' jobs sent to the server, in words."""
    federation = results.federation
    updates = [one for record in federation.records for one in record.updates]
    kept = "; private modules stay at their client" if any(one.traffic.kept for one in updates) else ""
    answers = ""
    if federation.outcome.has_client_policies:
        answers = " After the rounds a client's own policy sends its completions of the server's prompts."
    changed = []
    if results.recipe.federation.privacy is not None:
        changed.append(NOISED[results.recipe.federation.privacy.unit])
    if processors := [section.kind for section in results.recipe.federation.postprocessors]:
        changed.append(f"The post-processors {', '.join(processors)} change an update before it is sent.")
    what = (
        "the clipped movement of its adapter alone"
        if by_sums(results)
        else "its adapter, and numbers about it"
    )
    return (
        f"Texts and pairs of a client are read in its own jobs only. What a job sends is {what}"
        f"{kept}.{answers} {' '.join(changed) or 'Nothing is encrypted or noised.'}"
    )


def sent_table(results: RunResults) -> Table:
    """What a client's jobs send, by the phase of a round."""
    by_phase: dict[str, list[StepRecord]] = {}
    for record in results.federation.records:
        by_phase.setdefault(record.phase, []).append(record)
    rows = []
    for phase, records in by_phase.items():
        updates = [one for record in records for one in record.updates]
        count = sum(record.participants for record in records)
        words = ["none"] if by_sums(results) else ["number of rows"]
        for one in updates:
            for name in (*one.metrics.scalars, *one.metrics.series):
                # Of a step of the round, or of an objective, without its name.
                kind, _, last = name.rpartition("/")
                key = kind if kind in NUMBER_WORDS else last
                words.append(NUMBER_WORDS.get(key, key.replace("_", " ")))
        words += ["validation losses"] if any(one.losses for one in updates) else []
        sent = sum(one.traffic.sent for one in updates)
        rows.append(
            {
                "phase": phase,
                "updates": str(count),
                "MB of an adapter, mean": f"{sent / count / 1e6:.3f}" if count else "0",
                "numbers": ", ".join(dict.fromkeys(words)),
            }
        )
    return Table.of("Updates", rows)


def _cost_table(results: RunResults, run: RunDescription) -> Table:
    metrics = results.metrics
    values = {f"phase {name}": f"{seconds:,.1f} s" for name, seconds in run.phases.items()}
    for label, name, form in COSTS:
        if name in metrics:
            values[label] = form.format(metrics[name])
    workers = results.recipe.runtime.workers
    at_once = f"{workers} at a time" if workers > 1 else "one at a time on each device"
    caption = f"Clients train {at_once}, so that their sum can be more than the time of the phase federate."
    return Table.of_values("Cost", values, caption)


def _usage(results: RunResults, run: RunDescription) -> list[Part]:
    parts: list[Part] = []
    if uri := results.alignment.model_uri:
        client = json.dumps(next(iter(run.clients)), ensure_ascii=False)
        column = f', "client_id": [{client}]' if results.federation.outcome.has_client_policies else ""
        code = (
            "import mlflow, pandas\n"
            f'policy = mlflow.pyfunc.load_model("{uri}")\n'
            f'print(policy.predict(pandas.DataFrame({{"prompt": ["..."]{column}}})))'
        )
        parts.append(Code("In Python, where MLFLOW_TRACKING_URI is that of the run", code))
    folders = [*map(list, run.adapters.items()), ["aligned", run.aligned]]
    links = Notes([f"{name}: {link}" for name, link in run.links.items()])
    return [*parts, Table("Adapters (PEFT folders)", ["adapter", "folder"], folders), links]


# --- charts


def _win_rate_charts(results: RunResults) -> list[Chart]:
    intervals = {}
    for name, label in results.contest_labels.items():
        one = results.evaluation.contests[name]
        if math.isfinite(one.length_controlled):
            intervals[label] = (one.length_controlled, one.length_controlled_low, one.length_controlled_high)
    title = "Length-controlled win rates, 95% intervals"
    chart = charts.interval_chart(title, "win rate", intervals, 0.5) if intervals else None
    return [Chart(chart, EQUAL_LENGTH)] if chart else []


def _learning_charts(results: RunResults, run: RunDescription) -> Iterator[Figure]:
    federation = results.federation
    by_noised_verdicts = federation.privacy is not None and federation.privacy.unit == "label"
    clients: list[tuple[str, float, float]] = []  # of which the chart shows the mean and the range
    domains: list[tuple[str, float, float]] = []
    for one in federation.evaluations:
        done, accuracy = one.rounds_done, one.accuracy
        clients += [(CLIENTS_LINE, done, value) for value in accuracy.clients.values()]
        domains += [(DOMAIN_LABELS.get(name, name), done, value) for name, value in accuracy.domains.items()]
    if len(federation.evaluations) > 2:  # the first and the last one are in a table
        yield charts.line_chart(
            f"Held-out accuracy: {accuracy_label(federation.outcome)}",
            "rounds done",
            "accuracy",
            clients + (domains if 1 < len(federation.after.accuracy.domains) <= MAX_DOMAINS else []),
            reference_line=(0.5, "chance"),
            y_range=None if by_noised_verdicts else (0, 1),  # corrected accuracies may lie outside
            colors=charts.domain_colors(run.partition) | {CLIENTS_LINE: charts.COLORS[0]},
        )
    points: list[tuple[str, float, float]]
    for title, unit, names in OF_CLIENTS:
        points = [
            (f"{name}, mean and range over clients", record.rounds_done, update.metrics.scalars[key])
            for key, name in names.items()
            for record in federation.records
            for update in record.updates
            if key in update.metrics.scalars
        ]
        if points:
            yield charts.line_chart(title, "round", unit, points)
    yield from charts.curve_charts({results.recipe.federation.method: {0: results.curve}}, REWARD_TITLES)
    history = results.alignment.history
    for title, unit, key in (("loss", "loss", "loss"), ("reward margin", "beta x nats", "rewards/margins")):
        if history and all(key in entry for entry in history):
            points = [(title, entry["step"], entry[key]) for entry in history]
            yield charts.line_chart(f"DPO: {title}", "step", unit, points)
    if results.evaluation.curve:
        yield hacking_chart("Selectors and judge over the alignment", results.evaluation.curve)


def hacking_chart(title: str, curve: Sequence[CurvePoint]) -> Figure:
    """Selectors and judge over DPO's steps; the reward is hacked if the judge's share falls."""
    names = ("selectors (proxy)", "judge (gold)")
    points = [(name, 0.0, 0.5) for name in names]
    for point in curve:
        points += zip(names, [point.step] * 2, (point.proxy, point.judge), strict=True)
    y_title = "preferred to base (ties as 1/2)"
    base = (0.5, "base policy")
    return charts.line_chart(title, "step of DPO", y_title, points, reference_line=base, y_range=(0, 1))


# --- answers


def _answers(results: RunResults) -> Iterator[Answers]:
    first = {answered_prompt(row["prompt_id"]): row for row in reversed(results.answers)}
    for prompt in sorted(first)[:SHOWN_PROMPTS]:
        row = first[prompt]
        texts = {"base": row["base"]["text"], "aligned": row["aligned"]["text"]}
        if row["references"]:
            texts[results.answers_author] = row["references"][0]
        words = {}
        for name, label in results.contest_labels.items():
            contest = results.contests[name]
            if row["prompt_id"] in contest.prompts:
                verdict = contest.verdicts[contest.prompts.index(row["prompt_id"])]
                words[label] = verdict_words(verdict, label)
        yield Answers(row["prompt"], texts, words)
