"""Chat templates that do not write a whole answer, which training would then not read."""

from pathlib import Path

import pytest

from components.data.records import DataError, Pair
from components.evaluation.pair_warnings import reading_warnings
from components.models.policy import PolicyTexts
from components.recipes import load_recipe
from components.recipes.data_preview import preview_data
from tasks import data as tasks
from tests.support.chat_templates import packaged, write_chat_policy
from tests.support.sources import write_jsonl

TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>{% endfor %}"
ANSWER = "(m.content if m.role == 'user' else m.content.CUT)"
DROPPING = {
    "all before </think>": (ANSWER.replace("CUT", "split('</think>')[-1]"), "<think>\nfour\n</think>\n\n4"),
    "another mark of thoughts": (ANSWER.replace("CUT", "split('[/THOUGHT]')[-1]"), "[THOUGHT]f[/THOUGHT]4"),
    "all outside two marks": (
        ANSWER.replace(
            "CUT",
            "split('<answer>')[-1] if '<answer>' in m.content and '</answer>' in m.content else m.content",
        ),
        "I think so. <answer>4</answer>",
    ),
    "all but the first line": (ANSWER.replace("CUT", "split('\n')[0]"), "It is\nfour."),
    "all beyond a length": ("(m.content if m.role == 'user' else m.content[:5])", "It is four."),
    "case": ("m.content | lower", "It is FOUR."),
}
SHOWING = {
    "an empty block of thoughts": ("m.content", "<think>\n\n</think>\n\n4"),
    "content as it is": ("m.content", "<think>\nfour\n</think>\n\n4"),
    "other white space": ("m.content | trim | replace('\n', ' ')", "It is\n\nfour."),
    "thoughts in a block of their own": (
        "m.content if '</think>' not in m.content else '<think>\n' + m.content.split('</think>')[0]"
        ".split('<think>')[-1].strip('\n') + '\n</think>\n\n' + m.content.split('</think>')[-1].lstrip('\n')",
        "<think>four</think>4",
    ),
}


def rows(answer, count=80, hidden=None):
    """Pairs whose answers hold `answer`, or only `hidden` of them."""
    return [
        {
            "prompt": f"What is 2 + 2, {n}?",
            "chosen": f"{answer} ({n})" if hidden is None or n < hidden else f"four {n}",
            "rejected": f"five {n}",
            "client_id": f"o{n % 8}",
        }
        for n in range(count)
    ]


def warnings_of(recipe, data):
    return reading_warnings(recipe, [Pair(**row) for row in data])


@pytest.fixture
def recipe(tmp_path):
    def make(content, data, method="feddpo"):
        config = write_chat_policy("qwen2", tmp_path)
        folder = Path(config.backbone.name)
        (folder / "chat_template.jinja").write_text(TURN.replace("CONTENT", content))
        own = [
            f"data.path={write_jsonl(tmp_path / 'p.jsonl', data)}",
            "data.source=jsonl",
            "data.clients=null",
        ]
        models = [f"policy.backbone.name={folder}", "policy.template=thoughts/policy", "data.options={}"]
        federation = [f"federation.method={method}", "federation.options={}"]
        models.append("policy.max_new_tokens=200")
        return load_recipe("debug", [*own, *models, *federation])

    return make


@pytest.mark.parametrize("case", DROPPING)
def test_a_template_that_drops_a_part_of_all_answers_is_refused(case, recipe):
    content, answer = DROPPING[case]
    data = [row | {"rejected": f"{answer}?"} for row in rows(answer)]
    with pytest.raises(DataError, match=r"^80 of 80 pairs have an answer that .* does not write in full"):
        warnings_of(recipe(content, data), data)


def test_the_template_of_the_distillations_of_r1_is_refused_by_check_and_by_a_run(recipe, tmp_path):
    data = rows("<think>\nfour\n</think>\n\n4")
    loaded = recipe("m.content", data)
    path = Path(loaded.policy.backbone.name) / "chat_template.jinja"
    for name, hides in (("deepseek_r1_distill", True), ("deepseek_r1_distill_training", False)):
        path.write_text(packaged(name))
        if hides:
            with pytest.raises(DataError, match="thoughts before '</think>'"):
                preview_data(loaded)
            with pytest.raises(DataError, match="thoughts before '</think>'"):
                tasks.prepare_data.fn(loaded, tmp_path / "prepared", tmp_path / "trees")
        else:
            assert warnings_of(loaded, data) == []


def test_an_answer_that_the_prompt_quotes_is_hidden_too(recipe):
    content, answer = DROPPING["all before </think>"]
    data = [
        row | {"chosen": answer, "rejected": answer, "prompt": f"{n}: what is wrong in {answer!s}?"}
        for n, row in enumerate(rows(answer))
    ]
    with pytest.raises(DataError, match="^80 of 80"):
        warnings_of(recipe(content, data), data)


@pytest.mark.parametrize("case", SHOWING)
def test_a_template_that_writes_answers_is_not(case, recipe):
    content, answer = SHOWING[case]
    assert warnings_of(recipe(content, rows(answer)), rows(answer)) == []


def test_an_answer_that_begins_as_the_template_begins_one_is_written_in_full(tmp_path):
    config = write_chat_policy("qwen3", tmp_path)
    texts = PolicyTexts(config)
    assert not texts.hides("What is 2 + 2?", "<think>\n\n</think>\n\n4", "<think>\nhm\n</think>\n\n5")


def test_some_of_such_answers_are_counted(recipe, tmp_path):
    content, answer = DROPPING["all before </think>"]
    data = rows(answer, hidden=30)
    loaded = recipe(content, data)
    (warning,) = warnings_of(loaded, data)
    assert warning.startswith("30 of 80 pairs have an answer")
    report = tasks.prepare_data.fn(loaded, tmp_path / "prepared", tmp_path / "trees")
    assert any("pairs have an answer" in text for text in report.warnings)


def test_answers_that_the_policy_does_not_train_on_may_be_hidden(recipe):
    content, answer = DROPPING["all before </think>"]
    assert warnings_of(recipe(content, rows(answer), "fedbis"), rows(answer)) == []


def test_what_is_trained_begins_with_a_beginning_of_what_is_sampled(recipe):
    content, answer = DROPPING["all before </think>"]
    texts = PolicyTexts(recipe(content + " }}{{ ''", rows(answer)).policy)
    sampled = texts.encode("What is 2 + 2?")
    trained, *_ = texts.encode_texts("What is 2 + 2?", "4", "5")
    assert sampled[: len(trained)] == trained
