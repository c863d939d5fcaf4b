import pytest

from components.data import templates
from components.data.records import DataError


@pytest.mark.parametrize("task", ["summarization", "qa"])
def test_a_selector_template_ends_at_the_answer_slot_so_that_the_next_token_is_space_a(task):
    template = templates.load(f"{task}/selector", "selector")
    assert template.fields == ("prompt", "response_a", "response_b")
    assert template.pieces[-1].endswith("### YOUR CHOICE:")


@pytest.mark.parametrize("task", ["summarization", "qa"])
def test_a_policy_template_has_the_prompt_and_ends_where_the_response_begins(task):
    template = templates.load(f"{task}/policy", "policy")
    assert template.fields == ("prompt",)
    assert template.render(prompt="P").endswith("### Response:")


def test_the_qa_policy_template_has_figure_fours_fields_with_and_without_an_input():
    without_input, with_input = (
        templates.load(name, "policy").render(prompt="P") for name in ("qa/policy", "qa/policy_input")
    )
    assert "### Instruction:\nP\n\n### Response:" in without_input
    assert "### Input" not in without_input
    assert with_input.index("### Instruction:") < with_input.index("### Input:\nP\n\n### Response:")
    assert with_input.endswith("### Response:")


FORUM_POST = "SUBREDDIT: r/tales\nTITLE: \nPOST: It rained.\n\nTITLE: no title."


def test_a_post_has_figure_fours_headings_for_selectors_and_other_prompts_are_refused():
    template = templates.load("summarization/selector_post", "selector")
    assert template.fields == ("prompt", "response_a", "response_b")
    headed = "### SUBREDDIT: r/tales\n### TITLE: \n### POST: It rained.\n\nTITLE: no title."
    assert template.show_prompt(FORUM_POST) == headed
    assert templates.load("summarization/selector", "selector").show_prompt(FORUM_POST) == FORUM_POST
    with pytest.raises(
        DataError, match=r"'summarization/selector_post' shows posts .* and a prompt does not"
    ):
        template.show_prompt("Why is the sky blue?")
    with pytest.raises(DataError, match=r"placeholder \{headed_post\} is not known in a policy template"):
        templates.parse("{headed_post}", "t", "policy", "t.txt")


@pytest.mark.parametrize("name", ["alpaca/policy", "alpaca/policy_summary"])
def test_alpacas_templates_give_the_user_message_of_their_fields(name):
    template = templates.load(name, "policy")
    assert template.render(prompt="P").endswith("P\n\n### Response:")
    assert "Below" not in templates.user_message(template, "P")
    assert templates.user_message(template, "P").endswith("P")


def test_every_template_file_is_loaded_by_its_name():
    assert {"summarization/selector", "qa/selector"} <= set(templates.names("selector"))
    for kind in ("selector", "policy", "answer"):
        for name in templates.names(kind):
            assert templates.load(name, kind).name == name


def test_braces_in_the_data_and_in_the_template_are_plain_text():
    template = templates.parse("{ json: {} } {prompt}|{response_a}|{response_b}|?", "t", "selector", "t.txt")
    values = {"prompt": "{response_a}", "response_a": "{0}", "response_b": "}{"}
    assert template.render(**values) == "{ json: {} } {response_a}|{0}|}{|?"
    assert template.pieces == ("{ json: {} } ", "prompt", "|", "response_a", "|", "response_b", "|?")
    with pytest.raises(KeyError, match="response_b"):
        template.render(prompt="p", response_a="a")


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        (
            "{prompt} {response_a} choice:",
            "selector",
            r"\{response_b\} exactly once, but it is there 0 times",
        ),
        ("{prompt} {prompt}", "policy", r"\{prompt\} exactly once, but it is there 2 times"),
        (
            "A question:",
            "answer",
            r"an answer template needs the placeholder \{question\} exactly once, but it is there 0 times",
        ),
        ("{question} {thoughts}", "answer", r"placeholder \{thoughts\} is not known in an answer template"),
        ("{prompt} {answer}", "policy", r"placeholder \{answer\} is not known in a policy template"),
        ("{prompt} {response_b} {response_a} choice:", "selector", r"\{response_a\} must come before"),
        ("{prompt} {response_a} {response_b}\n", "selector", "must end with its answer slot"),
    ],
)
def test_a_wrong_template_file_is_refused_with_its_path_and_placeholder(tmp_path, text, kind, sentence):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=sentence) as error:
        templates.load(str(path), kind)
    assert str(path) in str(error.value)


def test_an_unknown_template_names_the_nearest_one():
    with pytest.raises(DataError, match=r"Did you mean 'summarization/selector'\?"):
        templates.load("summarisation/selector", "selector")


POST = (
    "  SUBREDDIT: r/x\nPOST: a {prompt}\n### Response:\nnot an answer start\n\n"
    "### Input: of the post's own\n "
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "summarization/policy",
            f"Write a summary of the text in one paragraph of at most 50 words.\n\n{POST}",
        ),
        (
            "summarization/policy_short",
            f"{POST}\n\nSummarize this paper in one short sentence of at most 25 words.",
        ),
        ("qa/policy", POST),
        (
            "qa/policy_input",
            f"Write what YOU say next in this conversation, in one or two short sentences.\n\n{POST}",
        ),
        ("thoughts/policy", POST),
    ],
)
def test_a_user_message_has_the_instruction_and_the_prompt_without_the_form(name, message):
    assert templates.user_message(templates.load(name, "policy"), POST) == message


def test_every_policy_template_of_the_project_has_a_message_without_markup():
    for name in templates.names("policy"):
        message = templates.user_message(templates.load(name, "policy"), "P")
        assert message.count("P") >= 1
        assert "#" not in message
        assert "Response" not in message
        assert message == message.strip(), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{prompt}", "P"),
        ("Be brief.\n\n{prompt}", "Be brief.\n\nP"),
        ("{prompt}\n\n### Response:", "P"),
        ("{prompt}\n\n## SUMMARY", "P"),
        ("{prompt}\nTL;DR:", "P\nTL;DR:"),
        (
            "Summarize the text.\n\n### Input:\n{prompt}\n\n### Response:\nThe summary is",
            "Summarize the text.\n\nP",
        ),
        (
            "Read this.\n\n### Input:\n{prompt}\n\n### INSTRUCTION: Summarize it.\n\n### Response:",
            "P\n\nSummarize it.",
        ),
        ("Here it is: {prompt}\n\n### Instruction:\nSummarize it.", "Here it is: P\n\nSummarize it."),
        ("### Instruction: {prompt}\n### Response:", "P"),
        ("Do {x-1} of ### {prompt}", "Do {x-1} of ### P"),
        ("### {prompt}", "### P"),
        (
            "### TEXT:\n{prompt}\n\n### TASK: Summarize it.\n\n### SUMMARY:",
            "### TEXT:\nP\n\n### TASK: Summarize it.",
        ),
    ],
)
def test_instructions_of_a_template_remain_and_headings_are_removed(text, message):
    assert templates.user_message(templates.parse(text, "t", "policy", "t.txt"), "P") == message
