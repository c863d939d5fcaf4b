"""Tasks of evaluation: the judge, the answers, and the win rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from prefect import get_run_logger

from components.config import Recipe
from components.models.adapters import AdapterStore
from components.seeding import derive, generator
from tasks.alignment import choose_prompts
from tasks.devices import POOL
from tasks.policies import Homes, open_policies
from tasks.runs import read_json, write_json
from tasks.uncached import task


@task(task_run_name="answer prompts: {name}")
def answer_prompts(
    recipe: Recipe, prepared: Path, name: str, adapter: Path | None, path: Path, most: int | None = None, homes: Homes | None = None,
) -> dict[str, float]:
    """Let a policy answer the held-out prompts greedily; stored as JSON, and read where it is there already.

    Args:
        recipe, prepared: what is asked.
        name: of the policy, for the log.
        adapter: PEFT folder, or one of personal policies, which the prompts are dealt to in turn; None is the raw policy.
        path: written.
        most: at most so many of the recipe's prompts (a seeded sample); None takes all of them.
        homes: of clients with parts of their own, by whom the prompts are answered, in turn too.
    """
    from components.models.policy import PersonalPolicies, deal

    log = get_run_logger()
    if not path.is_file():
        prompts = choose_prompts(prepared, "test", recipe.evaluation.prompts, recipe.seed)
        if most is not None and most < len(prompts):
            prompts = [prompts[i] for i in sorted(generator(recipe.seed, "fewer prompts").permutation(len(prompts))[:most])]
        texts, seed = [row["prompt"] for row in prompts], derive(recipe.seed, "answers")

        def progress(done: int, total: int) -> None:
            log.info("%s policy: %d of %d answers", name, done, total)

        with POOL.borrow(recipe) as device:
            policies = open_policies(recipe, device, adapter, homes)
            if isinstance(policies, PersonalPolicies):
                dealt = deal(len(texts), policies.clients)
                generated = policies.generate(texts, dealt, seed, progress)
                prompts = [row | {"client_id": client} for row, client in zip(prompts, dealt, strict=True)]
            else:
                generated = policies.generate(texts, seed, progress=progress)
        write_json(path, [row | {"text": given.text, "finished": given.finished, "tokens": len(given.ids)} for row, (given,) in zip(prompts, generated, strict=True)])
    given = read_json(path)
    return {f"{name}_finished_share": sum(row["finished"] for row in given) / len(given), f"{name}_tokens": sum(row["tokens"] for row in given) / len(given)}


@task()
def join_answers(answers: dict[str, Path], path: Path) -> None:
    """Put the answers of several policies to the same prompts side by side."""
    tables = {name: {row["prompt_id"]: row for row in read_json(file)} for name, file in answers.items()}
    (first, *_) = tables.values()
    if any(set(table) != set(first) for table in tables.values()):
        raise ValueError(f"{', '.join(map(str, answers.values()))}: expected answers to the same prompts; delete them and resume the run")
    write_json(path, [
        {key: row[key] for key in ("prompt_id", "prompt", "references", "split")} | {
            name: {key: table[prompt][key] for key in ("text", "finished", "tokens", "client_id") if key in table[prompt]} for name, table in tables.items()}
        for prompt, row in first.items()])


@task()
def measure_policy(recipe: Recipe, prepared: Path, adapter: Path, record: Path, homes: Homes | None = None) -> dict[str, Any]:
    """Accuracy of the aligned policy's implicit reward on a seeded sample of the clients' held-out pairs (Rafailov et al. 2023, section 4).

    Of personal policies each client's pairs are measured by its own.
    """
    from components.data.records import read_rows
    from components.evaluation.accuracy import client_accuracy
    from components.federation.private import home_of
    from components.learning.policy import ResidentPolicy, implicit_margins, pair_logprobs
    from components.models.adapters import read_adapter
    from components.models.policy import is_personal, personal_folders

    if record.is_file():
        return read_json(record)
    pairs = read_rows(prepared / "pairs.parquet", split="test").to_list()
    folders = {name: adapter / sub for name, sub in personal_folders(adapter).items()} if is_personal(adapter) else {}
    pairs = [pair for pair in pairs if pair["client_id"] in folders] if folders else pairs
    pairs = [pair for pair in pairs if pair["client_id"] in homes.last] if homes else pairs
    most = recipe.evaluation.preference_pairs
    if most < len(pairs):
        pairs = [pairs[i] for i in sorted(generator(recipe.seed, "preference pairs").choice(len(pairs), most, replace=False))]
    if homes:
        margins = np.zeros(len(pairs))
        with POOL.borrow_learner(recipe, homes.trains) as learner:
            for name in sorted({pair["client_id"] for pair in pairs}):
                rows = [n for n, pair in enumerate(pairs) if pair["client_id"] == name]
                margins[rows] = learner.compare([pairs[n] for n in rows], [read_adapter(adapter)[0]], home_of(name, AdapterStore(homes.adapters), homes.pairs, homes.last[name])).margins[0]
        measured = client_accuracy(margins[None, :], pairs)
        write_json(record, measured)
        return measured
    if folders:
        parts = [(folders[name], [n for n, pair in enumerate(pairs) if pair["client_id"] == name]) for name in sorted({pair["client_id"] for pair in pairs})]
    else:
        parts = [(adapter, list(range(len(pairs))))]
    margins = np.zeros(len(pairs))
    with POOL.borrow(recipe) as device:
        resident = ResidentPolicy(recipe.policy.model_copy(update={"lora": read_adapter(parts[0][0])[1]}), device) if parts else None
        for folder, rows in parts:
            chosen = [pairs[n] for n in rows]
            reference = pair_logprobs(resident, chosen, recipe.evaluation.score_batch_size, reference=True)
            resident.slot.load(read_adapter(folder)[0])
            margins[rows] = implicit_margins(pair_logprobs(resident, chosen, recipe.evaluation.score_batch_size), reference)
    measured = client_accuracy(margins[None, :], pairs)
    write_json(record, measured)
    return measured


@task(task_run_name="answer questions: {name}")
def answer_questions(recipe: Recipe, name: str, adapter: Path | None, folder: Path, trees: Path, homes: Homes | None = None) -> dict[str, Any]:
    """Let a policy answer the recipe's questions, greedily and in N samples; gives its accuracy and success rate (DRIFT section 7.1).

    Of personal policies a set that has a client's name is answered by that client's; the questions of another set belong
    to nobody, and are dealt to the clients in turn.

    Args:
        recipe: what is asked, and how.
        name: of the policy.
        adapter: PEFT folder, or one of personal policies; None is the raw policy.
        folder: a JSON file a set is written into it, <name>-<set>.json, and read where it is there already.
        trees: those that the run grew.
        homes: of clients with parts of their own, whose policies are personal too.

    Raises:
        DataError: a question is asked that a tree was grown for.
    """
    from components.alignment.thoughts import shorten
    from components.evaluation.answers import answer_figures, ask, grown_questions, load_asked
    from components.models.policy import PersonalPolicies, deal

    log, config = get_run_logger(), recipe.evaluation.questions
    files = {section.set: folder / f"{name}-{section.set}.json" for section in config.questions}
    missing = {of: path for of, path in files.items() if not path.is_file()}
    if missing:
        asked = load_asked(config.questions, recipe.seed, grown_questions(recipe, trees))
        with POOL.borrow(recipe) as device:
            opened = open_policies(recipe, device, adapter, homes)
            policies = opened if isinstance(opened, PersonalPolicies) else None
            policy = policies.policy if policies else opened
            for of, path in missing.items():
                questions = asked[of]
                if config.max_question_tokens is not None:
                    questions = [shorten(question, policy.tokenizer, config.max_question_tokens) for question in questions]
                owners = [""] * len(questions) if policies is None else [of] * len(questions) if of in policies.clients else deal(len(questions), policies.clients)
                rows: dict[int, dict[str, Any]] = {}
                for owner in sorted(set(owners)):
                    own = [n for n, client in enumerate(owners) if client == owner]
                    answered = ask(policies.of(owner) if policies else policy, [questions[n] for n in own], config, derive(recipe.seed, "questions", of, owner))
                    rows |= {n: row | ({"client_id": owner} if policies else {}) for n, row in zip(own, answered, strict=True)}
                    log.info("%s policy: %d of %d questions of %s answered", name, len(rows), len(questions), of)
                write_json(path, [rows[n] for n in range(len(questions))])
    return answer_figures([row for path in files.values() for row in read_json(path)], recipe.evaluation.bootstrap, derive(recipe.seed, "bootstrap", "questions"))


@task()
def reward_hacking_curve(recipe: Recipe, prepared: Path, judges: Path, store: Path, digests: dict[str, str], folder: Path, answers: dict[int, Path], raw: Path) -> list[dict[str, float]]:
    """Proxy score and judge score of a policy over DPO's steps, both against the raw policy (FedBiscuit section 1, reward hacking).

    The proxy is what DPO was trained on: the share of prompts on which the selectors' majority prefers the policy's
    answer to the raw one's, an answer that is the same counted half. The judge's score counts a tie half, too.
    """
    from components.data.templates import load as load_template
    from components.evaluation.judges import build_judge, judge_pairs
    from components.evaluation.plots import hacking_picture
    from components.models.selector import Comparison

    given = {step: {row["prompt_id"]: row["text"] for row in read_json(path)} for step, path in sorted(answers.items())}
    rows = [row for row in read_json(raw) if all(row["prompt_id"] in texts for texts in given.values())]
    prompts, theirs = [row["prompt"] for row in rows], [row["text"] for row in rows]
    adapters, curve = AdapterStore(store), []
    with POOL.borrow_learner(recipe, "selector") as learner:
        tensors = [adapters.get(adapters.ref(digests[name])) for name in sorted(digests)]
        for step, texts in given.items():
            comparisons = [Comparison(row["prompt"], texts[row["prompt_id"]], row["text"]) for row in rows]
            votes = []
            for tensor in tensors:
                learner.selector.slot.load(tensor)
                votes.append(learner.selector.margins(comparisons) > 0)
            won = np.mean(votes, axis=0) > 0.5
            same = np.array([c.first.strip() == c.second.strip() for c in comparisons])
            curve.append({"step": step, "prompts": len(rows), "proxy": float(np.where(same, 0.5, won).mean())})
    POOL.release()
    with POOL.borrow(recipe) as device:
        judge = build_judge(recipe.evaluation.judge, prepared, judges, recipe.seed, device, policy=load_template(recipe.policy.template, "policy"))
        for point, texts in zip(curve, given.values(), strict=True):
            judged = judge_pairs(judge, prompts, [texts[row["prompt_id"]] for row in rows], theirs, recipe.evaluation.bootstrap, derive(recipe.seed, "bootstrap", "curve"))
            parsed = judged.rate.wins + judged.rate.ties + judged.rate.losses
            point["judge"] = (judged.rate.wins + judged.rate.ties / 2) / parsed if parsed else float("nan")
    hacking_picture(curve, folder / "reward-hacking.png")
    return curve


@task()
def judge_answers(recipe: Recipe, prepared: Path, judges: Path, answers: Path) -> dict[str, Any]:
    """Judge the aligned policy's answers against the raw policy's and against the human ones, in both orders.

    What a judge was asked and wrote, if it writes, is kept beside the answers as judgements.json.
    """
    from components.data.templates import load as load_template
    from components.evaluation.judges import build_judge, judge_pairs
    from components.evaluation.length_control import control_length
    from components.evaluation.overlap import rouge

    log = get_run_logger()
    rows = read_json(answers)
    with POOL.borrow(recipe) as device:
        judge = build_judge(
            recipe.evaluation.judge, prepared, judges, recipe.seed, device, policy=load_template(recipe.policy.template, "policy"),
            progress=lambda step, loss: log.info("judge: training step %d, loss %.3f", step + 1, loss) if step % 10 == 9 else None)
        human = [row for row in rows if row["references"]]
        contests = {
            "aligned_vs_raw": (rows, "aligned", lambda row: row["raw"]["text"]),
            "aligned_vs_human": (human, "aligned", lambda row: row["references"][0]),
            "raw_vs_human": (human, "raw", lambda row: row["references"][0])}
        result: dict[str, Any] = {"judge": judge.description, "contests": {}, "verdicts": {}}
        for name, (asked, ours, theirs) in contests.items():
            if not asked:
                continue
            texts, drawn = ([row[ours]["text"] for row in asked], [theirs(row) for row in asked]), (recipe.evaluation.bootstrap, derive(recipe.seed, "bootstrap", name))
            judged = judge_pairs(judge, [row["prompt"] for row in asked], *texts, *drawn)
            rate, even = judged.rate, control_length(judged.verdicts, *texts, *drawn)
            result["contests"][name] = {
                "win_rate": rate.rate, "low": rate.low, "high": rate.high, "wins": rate.wins, "ties": rate.ties, "losses": rate.losses,
                "unparsable": rate.unparsable, "consistency": judged.consistency, "ties_half": even.uncontrolled,
                "length_controlled": even.rate, "length_controlled_low": even.low, "length_controlled_high": even.high, "length_effect": even.effect}
            result["verdicts"][name] = {row["prompt_id"]: verdict.value for row, verdict in zip(asked, judged.verdicts, strict=True)}
        result["judge_figures"] = getattr(judge, "figures", {})
        texts = getattr(judge, "texts", [])
    if texts:
        write_json(answers.with_name("judgements.json"), texts)
    references = [row["references"] for row in rows]
    result["rouge"] = {name: rouge([row[name]["text"] for row in rows], references) for name in ("raw", "aligned")}
    return result


@task()
def annotate_answers(recipe: Recipe, answers: Path, folder: Path) -> dict[str, Any]:
    """Let AlpacaEval's annotator compare the answers with the reference's outputs, or with the raw policy's where there are none.

    The folder gets the outputs and the annotations in AlpacaEval's schema, and what was paid for already is not asked again.
    """
    from components.evaluation import alpaca

    log, config, rows = get_run_logger(), recipe.evaluation.alpaca_eval, read_json(answers)
    alpaca.check_alpaca_eval(config)
    prompts = [row["prompt"] for row in rows]
    asked = alpaca.instructions_of(recipe, prompts)
    alpaca.check_prompts(config, prompts, asked)
    written = {name: alpaca.model_outputs(asked, [row[name]["text"] for row in rows], f"{recipe.name} {name}", recipe.data.source) for name in ("aligned", "raw")}
    for name, outputs in written.items():
        write_json(folder / f"{name}.model_outputs.json", outputs)
    if config.reference_outputs is None:
        instructions, contests = asked, {"aligned_vs_raw": ("aligned", written["raw"])}
    else:
        reference = alpaca.read_outputs(Path(config.reference_outputs))
        instructions = [row["instruction"] for row in reference]
        theirs = [row | {"instruction": instruction} for row, instruction in zip(alpaca.answered_by(reference, prompts, asked), asked, strict=True)]
        contests = {f"{name}_vs_reference": (name, theirs) for name in written}
    result: dict[str, Any] = {"annotator": config.annotators_config, "contests": {}, "missing": None if config.calibration else alpaca.without_calibration(instructions)}
    for name, (ours, theirs) in contests.items():
        annotations = alpaca.annotate(config, theirs, written[ours], folder / "annotated.json", recipe.seed)
        write_json(folder / f"{name}.annotations.json", annotations)
        measured = alpaca.figures(annotations, recipe.evaluation.bootstrap, derive(recipe.seed, "alpaca_eval", name))
        if config.calibration:
            measured["length_controlled_winrate"] = alpaca.length_controlled_winrate(annotations, instructions, Path(config.calibration))
        result["contests"][name] = measured | {"baseline": theirs[0]["generator"]}
        log.info("AlpacaEval, %s: win rate %.2f%% (standard error %.2f) on %d prompts", name, measured["win_rate"], measured["standard_error"], measured["n_total"])
    return result
