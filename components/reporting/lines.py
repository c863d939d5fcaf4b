"""Lines of a run's log, and whose model answers, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from components.data.data_report import PreparationReport, RowCounts
from components.progress import format_loss
from components.results import AccuracyReport, Metrics, Outcome, PrivacySpent, QuestionResult, StepRecord

MAX_DOMAINS = 6
"""Number of domains beyond which a line or a table shows none.

metrics.json has all of them. SHP has 18 domains (FedBiscuit section 6)."""

MANY_STEPS = 4
"""Adapters of which a line has each step; of more it has the smallest and the largest."""
SERVER_STEP = "server_step"
"""Last part of the names of the server's metrics that give the distance of an adapter's step."""


def accuracy_line(accuracy: AccuracyReport) -> str:
    """Held-out accuracy as a line."""
    assigned = accuracy.assigned
    line = f"held-out accuracy {_accuracy_part(accuracy)}"
    return line + (f" | with the assigned adapter {_accuracy_part(assigned)}" if assigned else "")


def _accuracy_part(accuracy: AccuracyReport) -> str:
    clients = f"worst client {accuracy.worst:.3f}, best {accuracy.best:.3f}, sd {accuracy.spread:.3f}"
    domains = [f"{name or 'all pairs'} {value:.3f}" for name, value in shown_domains(accuracy).items()]
    answered = f"{accuracy.answered}, " if accuracy.missing else ""
    return f"{accuracy.mean:.3f} ({answered}{clients})" + (f"; {', '.join(domains)}" if domains else "")


def shown_domains(accuracy: AccuracyReport) -> dict[str, float]:
    """Accuracy by domain; empty with more than MAX_DOMAINS domains."""
    return accuracy.domains if len(accuracy.domains) <= MAX_DOMAINS else {}


def partition_line(report: PreparationReport) -> str:
    """The partition as a line: the columns of FedBiscuit's table 5, over all and training pairs."""
    every, train = (
        f"(max {one.max:,}, min {one.min:,}, std {one.std:,.2f})"
        for one in (report.partition, report.partition_train)
    )
    return (
        f"{report.partition.samples:,} pairs of {report.partition.clients:,} clients {every};"
        f" {report.partition_train.samples:,} to train on {train}"
    )


KEPT_BY = {
    "owner not among the clients": "data.clients",
    "value of data.column not among the clients": "data.column_clients",
    "over max_pairs": "data.max_pairs",
    "owner takes part in no round": "data.unseen_clients",
    "pair over max_characters": "data.max_characters",
    "prompt over max_characters": "data.max_characters",
    "prompt given to the server": "data.options.align_share",
}
"""By the reason why pairs are left out, the key of a recipe that keeps them."""
SHOWN_REASONS = 4


def left_out_line(rows: RowCounts) -> str:
    """How many pairs and raw rows are left out, by reason, and the keys that keep them; empty for none."""
    counts = Counter(rows.left_out) + Counter(rows.dropped)
    shown = [
        f"{count:,} ({reason}" + (f", see {KEPT_BY[reason]})" if reason in KEPT_BY else ")")
        for reason, count in counts.most_common(SHOWN_REASONS)
    ]
    if others := counts.total() - sum(count for _, count in counts.most_common(SHOWN_REASONS)):
        shown.append(f"{others:,} (other reasons)")
    return f"left out: {', '.join(shown)}" if shown else ""


def margins_line(report: PreparationReport) -> str:
    """Margins of the pairs of thoughts, and the number of tied siblings; empty without such pairs."""
    margins = report.margins
    if margins is None:
        return ""
    return (
        f"{margins.pairs:,} pairs (margin min {margins.min:.3g}, median {margins.median:.3g},"
        f" max {margins.max:.3g}); {report.tied_siblings():,} tied siblings without a pair"
    )


def measure_line(name: str, measured: Metrics) -> str:
    """A measure of a method as a line."""
    return f"{name}: " + ", ".join(f"{key} {value:z.3f}" for key, value in measured.scalars.items())


def round_line(record: StepRecord) -> str:
    """A step of the federation as a line."""
    parts = [f"{record.participants} clients"]
    means = record.client_means()
    if "loss" in means:
        parts.append(f"training loss {format_loss(means['loss'])}")
    if not record.ends_round:
        parts += [f"{name} {value:.4g}" for name, value in record.server.scalars.items()]
    scalars = record.server.scalars.items()
    if steps := [value for name, value in scalars if name.rpartition("/")[2] == SERVER_STEP]:
        ends = sorted({min(steps), max(steps)}) if len(steps) > MANY_STEPS else steps
        separator = " to " if len(steps) > MANY_STEPS else ", "
        parts.append(f"update norm {separator.join(f'{value:.3f}' for value in ends)}")
    for name, reasons in (("failed", record.failed), ("refused", record.refused)):
        clients = [f"{client} ({reason})" for client, reason in reasons.items()]
        parts += [f"{name}: {'; '.join(clients)}"] if clients else []
    line = ", ".join(parts)
    return line if record.ends_round else f"{record.phase}: {line}"


def questions_line(answers: Mapping[str, QuestionResult]) -> str:
    """The answers to questions as a line: means over the sets, by policy."""
    parts = []
    for policy, result in answers.items():
        mean = result.mean
        success = ""
        if mean.success is not None and mean.success_chance is not None:
            success = f", success at {result.samples} {mean.success:.3f} ({mean.success_chance:.3f})"
        parts.append(
            f"{policy} accuracy {mean.accuracy:.3f} (by chance {mean.chance:.3f}){success}, unparsable"
            f" {mean.unparsable_share:.3f}"
        )
    return " | ".join(parts)


def accuracy_label(outcome: Outcome) -> str:
    """What accuracies on pairs are accuracies of."""
    return "Selector accuracy" if outcome.labels_pairs else "Implicit reward"


def accuracy_note(outcome: Outcome) -> str:
    """How clients are measured that do not all use the same model; else empty."""
    if not outcome.clients:
        return ""
    if outcome.own == "examples":
        return "with each client's own examples, on its own pairs"
    if outcome.assignment:
        model = "selector" if outcome.labels_pairs else "adapter"
        return f"each client's own {model}, on its own pairs"
    return "each client's own model from the server's adapter, on its own pairs"


def privacy_line(spent: PrivacySpent) -> str:
    """What differential privacy protects, and its epsilon, as a line."""
    if spent.epsilon is None:
        return f"privacy, unit {spent.unit}: no epsilon, since the secrets follow from the recipe's seed"
    delta = f", delta {spent.delta:g}" if spent.delta else ""
    outside = f"; not covered: {spent.outside}" if spent.outside else ""
    return f"privacy, unit {spent.unit}: epsilon {spent.epsilon:.4g}{delta} ({spent.accountant}){outside}"


def policy_note(outcome: Outcome) -> str:
    """How the policies can be used, where clients have policies of their own; else empty."""
    if not outcome.clients or outcome.labels_pairs:
        return ""
    if outcome.own == "examples":
        return (
            "Each client's policy is the base policy with some of its own pairs in the prompt, which stay"
            " with the client. The PEFT folder and the registered model are the base policy."
        )
    if not outcome.assignment:
        return (
            "Each client's policy is the shared adapter with private modules, which stay with the client. The"
            " PEFT folder and the registered model are the shared adapter."
        )
    if outcome.own:
        return (
            "Each client's policy is its own adapter with private modules, which stay with the client. The"
            " PEFT folders and the registered model are the adapters."
        )
    return (
        "Each client has an aligned policy of its own, a PEFT folder within the folder `aligned`. The"
        " registered model has all of them: its column client_id says whose policy answers."
    )
