"""The Auto-J judge: parsing of verdicts, its instruction, a local model, and an endpoint."""

import json
import logging
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.config import RecipeError, UserError
from components.data.templates import load as load_template
from components.data.templates import user_message
from components.evaluation.contests import judge_contest
from components.evaluation.judges import parse_autoj
from components.evaluation.judges.autoj import AutoJSection
from components.evaluation.judges.judge import JudgeResources
from components.evaluation.winrate import Verdict
from components.models import chat
from components.models.policy import Policy
from components.models.samples import Reply
from components.models.selector import Comparison
from components.recipes import load_recipe
from components.recipes.load import dump_recipe

FIRST, SECOND, TIE, UNPARSABLE = Verdict
KEY = "sk-very-secret-0123"
VARIABLE = "FED_RLHF_TEST_KEY"
COMPARISONS = [Comparison(f"query {i}", f"one {i}", f"two {i}") for i in range(12)]
SUMMARY_INSTRUCTION = "Write a summary of the text in one paragraph of at most 50 words."
PAIRWISE = load_template("autoj/pairwise", "pairwise")


# --- Parsing


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("1. Facts.\nSo, the final decision is Response 1.", FIRST),
        ("So, the final decision is Response 2", SECOND),
        ("So, the final decision is Tie.", TIE),
        ("SO, THE FINAL DECISION IS RESPONSE 2!", SECOND),
        ("the final decision is: **Response 1**", FIRST),
        ('the final decision is "Tie"', TIE),
        ("the **final  decision\nis**:\n\n> _Response 2_\n", SECOND),
        ("the final decision is [[Response-1]]", FIRST),
        ("the final decision is that it is a tie", TIE),
        ("the final decision is that Response 2 is better than Response 1.", SECOND),
        ("the final decision is Response 1, because Response 2 invents its facts.", FIRST),
        ("the final decision is Response 2. Response 1 is a near tie.", SECOND),
        ("the final decision is Response 1, and response 2 is worse", FIRST),
        ("the final decision is Response 2, Response 1 being the weaker one.", SECOND),
        ("the final decision is **Response 1** (Response 2 invents its facts)", FIRST),
        ("the final decision is Response 1 - Response 2, although a tie is near, is too short.", FIRST),
        ("the final decision is Response 2\nResponse 1 says less.", SECOND),
        ("the final decision is Tie, and Response 1 is as long as Response 2.", TIE),
        ("the final decision is Response 1, tie-breaker: its facts", FIRST),
        ("the final decision is Response 1, 2 being too short", FIRST),
        ("the final decision is Response 1.\n2. More could be said.", FIRST),
        (
            "At first the final decision is Response 1. On reflection, the final decision is Response 2.",
            SECOND,
        ),
    ],
)
def test_the_verdict_is_the_name_after_the_last_final_decision(text, verdict):
    assert parse_autoj(text) is verdict


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\ud800",
        "Response 1 is better.",
        "the final decision is",
        "the final decision is clear",
        "the final decision is Response 3",
        "the final decision is Response 10",
        "the final decision is Response 1.5",
        "the final decision is not Response 1",
        "the final decision is Response 1 / Response 2 / Tie",
        "the final decision is Response 1 or 2",
        "the final decision is **Response 1** or a **Tie**",
        "the final decision is Response 1, Response 2",
        "the final decision is Response 1, Response 2. I cannot choose.",
        "the final decision is Response 1 / tie",
        "the final decision is Response 1, Response 2, Tie",
        "the final decision is Response 1, 2",
        "the final decision is Response 1, and Response 2.",
        "the final decision is Response 1, Response 2 or Tie, as you like",
        "the final decision is Response 1 or Response 2, depending on taste",
        "the final decision is that Response 1 and Response 2 are tied",
        "the final decision is Response 1/Response 2 are equal",
        "the final decision is Response 1 (Response 2)\nBoth are good.",
        "the final decision is both Response 1 and Response 2",
        "the final decision is Response 2\nTie",
        "the final decision is Response 1. I mean, the final decision is",
        "the final decision is tiers of Response 1",
        "So, the final decision is <name>",
    ],
)
def test_no_name_and_a_choice_of_names_are_unparsable(text):
    assert parse_autoj(text) is UNPARSABLE


PIECES = [
    "final decision is ",
    "Final Decision Is:",
    "final decision issues",
    "Response 1",
    "response 2",
    "Tie",
    "tied",
    "1",
    "2",
    "10",
    " ",
    "\n",
    "*",
    "_",
    "/",
    ".",
    ",",
    ":",
    "or",
    "and",
    "that",
    "a",
    "\0",
    "é",
    "\ud83d",
    "９",
    "²",
]
"""Parts of random judgments."""


def random_judgments():
    numbers = random.Random(0)
    for _ in range(4000):
        pieces = [numbers.choice(PIECES) + numbers.choice(["", " "]) for _ in range(numbers.randrange(14))]
        yield "".join(pieces)


def test_every_text_has_a_verdict_that_the_text_before_the_last_decision_does_not_change():
    assert {parse_autoj(text) for text in random_judgments()} == set(Verdict)
    for text in random_judgments():
        last = max(text.lower().rfind(mark) for mark in ("final decision is ", "final decision is:"))
        expected = parse_autoj(text[last:]) if last >= 0 else UNPARSABLE
        assert parse_autoj(text) is expected, text


@pytest.mark.parametrize(
    "text",
    [
        "final decision is " + "-_ " * 100_000,
        "final decision is Response 1" + "*_" * 100_000 + "x",
        "final decision is " * 20_000,
        "final decision is " + "that " * 100_000,
        "final decision is Response 1 or" + " _" * 100_000,
        "final decision is Response 1" + ", Response 2" * 100_000 + " x",
        "final decision is Response 1" + ", 2" * 100_000 + " x",
        "final decision is Response 1" + (", Response 2" + " _" * 200) * 500 + " x",
    ],
)
def test_the_longest_texts_are_parsed_in_less_than_two_seconds(text):
    start = time.process_time()
    parse_autoj(text)
    assert time.process_time() - start < 2


# --- Options


@pytest.fixture
def build(tmp_path):
    """A function that builds the judge with options, and with the template of a policy."""

    def build(policy=None, seed=0, **options):
        return AutoJSection(**options).build(JudgeResources(tmp_path, tmp_path, seed, "cpu", policy=policy))

    return build


@pytest.fixture
def check(tmp_path):
    """A function that checks the judge with options before a run; no data are prepared."""
    return lambda **options: AutoJSection(**options).check_data(tmp_path)


def refusal(options, kind="autoj"):
    """The message by which a recipe with these options of a judge is refused."""
    with pytest.raises(RecipeError) as error:
        load_recipe("debug", [f"evaluation.judge={{kind: {kind}, {options}}}"])
    return str(error.value)


def test_a_recipe_with_the_judge_is_written_and_read_back_unchanged(tmp_path):
    recipe = load_recipe(
        "debug",
        [
            "evaluation.judge={kind: autoj, base_url: 'http://127.0.0.1:1/v1', model: m, api_key_env: A_KEY}",
        ],
    )
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "r.yaml")) == recipe
    assert recipe.evaluation.judge.api_key_env == "A_KEY"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("max_new_token: 3", "did you mean 'evaluation.judge.max_new_tokens'?"),
        ("retries: -1", "'evaluation.judge.retries' is -1"),
        ("prompt_file: autoj/pairwis", "Did you mean 'autoj/pairwise'?"),
        ("base_url: 'ftp://x'", "base_url must be the root of an endpoint"),
        ("base_url: 'http://x:port/v1'", "base_url must be the root of an endpoint"),
        ("api_key_env: A_KEY", "evaluation.judge.api_key_env is for an endpoint: set base_url too"),
    ],
)
def test_an_invalid_option_is_refused_with_the_recipe(options, message):
    assert message in refusal(options)


@pytest.mark.parametrize(
    "options",
    [
        f"base_url: 'http://x/v1', api_key_env: {KEY}",
        f"base_url: 'http://x/v1', api_key: {KEY}",
        f"base_url: 'http://user:{KEY}@x/v1'",
        f"base_url: 'http://x/v1?key={KEY}'",
        f"api_key:{KEY}",
        f"api_key={KEY}",
        f"api_key {KEY}",
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(options):
    message = refusal(options)
    assert "evaluation.judge" in message
    assert KEY not in message


def test_a_key_in_place_of_its_variables_name_is_refused_with_what_is_expected():
    message = refusal(f"base_url: 'http://x/v1', api_key_env: {KEY}")
    assert "must be the NAME of an environment variable" in message


@pytest.mark.parametrize("pair", [f"api_key:{KEY}", f"api_key={KEY}", f"api_key {KEY}"])
def test_a_value_that_is_not_separated_from_its_key_is_refused_with_the_separator(pair):
    message = refusal(pair)
    assert "unknown key 'evaluation.judge.api_key' with more in the same word" in message
    assert "a colon and a space" in message


def test_the_selector_judge_takes_no_options():
    message = refusal("model: m", kind="selector")
    assert "unknown key 'evaluation.judge.model'" in message


def test_the_projects_instruction_has_the_originals_placeholders_and_asks_for_a_final_decision():
    assert PAIRWISE.fields == ("prompt", "response", "response_another")
    assert "the final decision is" in PAIRWISE.pieces[-1]


def test_an_instruction_of_a_file_has_the_originals_placeholders_in_their_order(tmp_path):
    path = tmp_path / "original.txt"
    path.write_text(
        "Q {prompt} A {response} B {response_another}"
        " end with: the final decision is Response 1 / Response 2 / Tie\n"
    )
    recipe = load_recipe("debug", [f"evaluation.judge={{kind: autoj, prompt_file: {path}}}"])
    assert recipe.evaluation.judge.prompt_file.name == str(path)
    path = tmp_path / "wrong.txt"
    path.write_text("{prompt} {response_another} {response}")
    assert "{response} must come before {response_another}" in refusal(f"prompt_file: {path}")


# --- Checks before a run


def test_the_judge_needs_no_training_pairs(check):
    assert check(base_url="http://127.0.0.1:1/v1") is None


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_key_is_refused_before_anything_is_trained(check, monkeypatch, value):
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(UserError, match=rf"environment variable {VARIABLE}.* is not set"):
        check(base_url="http://127.0.0.1:1/v1", api_key_env=VARIABLE)


def test_a_key_with_characters_that_no_header_can_carry_is_refused_and_not_repeated(check, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"{KEY}\nX-Other: y")
    with pytest.raises(UserError, match=VARIABLE) as error:
        check(base_url="http://127.0.0.1:1/v1", api_key_env=VARIABLE)
    assert KEY not in str(error.value)


LOCAL = {
    "model": "tiny-random",
    "max_prompt_tokens": 1600,
    "max_new_tokens": 6,
    "batch_size": 5,
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_prompt_tokens": 2047},
            "at most 2048 tokens, but .*max_prompt_tokens 2047 and max_new_tokens 6 make 2053: lower them",
        ),
        ({"model": "/nowhere/at/all"}, "the judge's model '/nowhere/at/all' cannot be read"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_before_anything_is_trained(check, options, message):
    with pytest.raises(UserError, match=message):
        check(**LOCAL | options)


def test_a_quantized_checkpoint_is_refused(check, tmp_path):
    from components.models.backbone import fetch_backbone

    settings = json.loads((Path(fetch_backbone("tiny-random")) / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"quantized checkpoint \(gptq\).*use the unquantized model"):
        check(**LOCAL | {"model": str(tmp_path)})


# --- A local model


@pytest.fixture
def local_judge(build):
    return build(**LOCAL)


@pytest.fixture
def replace_generation(monkeypatch):
    """A function that replaces the model's judgments by a function of what it reads."""

    def replace(judge):
        def write(policy, prompts, **_):
            return [Reply(judge(policy.render(prompt).text), True) for prompt in prompts]

        monkeypatch.setattr(Policy, "write", write)

    return replace


def read_by(judge, comparison):
    """Token ids that a local model reads for a comparison, and whether a text was truncated."""
    ids = judge.model.encode(judge.prompt(comparison))
    return ids, judge.figures == {"judge_shortened": 1}


def test_a_local_model_judges_greedily_in_batches_of_any_size_and_with_any_seed(build, local_judge):
    single = build(seed=7, **LOCAL | {"batch_size": 1})
    assert local_judge.compare(COMPARISONS) == [UNPARSABLE] * 12
    assert single.compare(COMPARISONS) == [UNPARSABLE] * 12
    assert local_judge.texts == single.texts
    assert local_judge.figures == {"judge_shortened": 0}


def test_each_judgment_is_kept_with_its_comparison_and_verdict(local_judge):
    local_judge.compare(COMPARISONS)
    assert len(local_judge.texts) == 12
    assert all(row["text"] for row in local_judge.texts)
    row = dict(local_judge.texts[3])
    row.pop("text")
    assert row == {
        "prompt": "query 3",
        "response_1": "one 3",
        "response_2": "two 3",
        "verdict": "unparsable",
    }


def test_the_description_names_the_model_and_its_place(local_judge):
    assert "tiny-random on this machine" in local_judge.description


def test_the_verdict_is_parsed_from_the_models_judgment(local_judge, replace_generation):
    def prefer_second(prompt):
        shows_original_order = "RESPONSE 1 one" in prompt.replace("\n", " ")
        return f"So, the final decision is Response {2 if shows_original_order else 1}"

    replace_generation(prefer_second)
    judged = judge_contest(local_judge, {f"p{n}": pair for n, pair in enumerate(COMPARISONS)})
    assert judged.verdicts == [SECOND] * 12
    assert judged.consistency == 1.0
    assert len(local_judge.texts) == 24


def test_the_instruction_stands_between_inst_marks(local_judge):
    text = PAIRWISE.render(prompt="query 0", response="one 0", response_another="two 0")
    ids, truncated = read_by(local_judge, COMPARISONS[0])
    assert ids == local_judge.model.tokenizer.encode(f"[INST] {text} [/INST]")
    assert not truncated


def test_the_instruction_is_formatted_with_the_models_own_chat_template_on_request(build):
    judge = build(**LOCAL, chat_template=True)
    text = PAIRWISE.render(prompt="query 0", response="one 0", response_another="two 0")
    ids, _ = read_by(judge, COMPARISONS[0])
    assert judge.model.tokenizer.decode(ids) == f"<bos>user: {text}<eos><bos>assistant: "


@pytest.mark.parametrize(
    ("template", "query"),
    [
        (None, "query 3"),
        ("summarization/policy", f"{SUMMARY_INSTRUCTION}\n\nquery 3"),
    ],
)
def test_the_query_is_the_policys_instruction_with_the_prompt(build, replace_generation, template, query):
    """Without a policy's template the prompt is the complete query."""
    prompts = []
    replace_generation(lambda prompt: prompts.append(prompt) or "")
    judge = build(policy=template and load_template(template, "policy"), **LOCAL)
    judge.compare(COMPARISONS[3:4])
    text = PAIRWISE.render(prompt=query, response="one 3", response_another="two 3")
    assert prompts == [f"[INST] {text} [/INST]"]
    assert judge.texts[-1]["prompt"] == query


def shown_text(prompt, heading):
    """The text under a heading of the instruction."""
    return prompt.split(f"{heading}\n")[1].split("\n===")[0]


@pytest.mark.parametrize("name", ["summarization/policy", "summarization/policy_short"])
def test_a_query_that_is_too_long_loses_the_prompts_end_and_not_the_policys_instruction(build, name):
    policy = load_template(name, "policy")
    judge = build(policy, **LOCAL | {"max_prompt_tokens": 1400})
    ids, truncated = read_by(judge, Comparison("q" * 2000, "x" * 100, "y" * 100))
    query = shown_text(judge.model.tokenizer.decode(ids), "MESSAGE")
    remaining = query.count("q")
    assert truncated
    assert len(ids) == 1400
    assert 0 < remaining < 2000
    assert query == user_message(policy, "q" * remaining)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((400, 100, 100), (100, 100, 100)),
        ((20, 400, 100), (0, 200, 100)),
        ((20, 300, 300), (0, 150, 150)),
    ],
)
def test_the_query_is_truncated_before_the_responses_and_the_instruction_never(
    local_judge, build, lengths, expected
):
    """The texts have one token per character, and 300 tokens are left for them."""
    tokenizer = local_judge.model.tokenizer
    empty = PAIRWISE.render(prompt="", response="", response_another="")
    max_tokens = len(tokenizer.encode(f"[INST] {empty} [/INST]")) + 300
    comparison = Comparison("q" * lengths[0], "x" * lengths[1], "y" * lengths[2])
    ids, truncated = read_by(build(**LOCAL | {"max_prompt_tokens": max_tokens}), comparison)
    prompt = tokenizer.decode(ids)
    assert truncated
    assert len(ids) == max_tokens
    assert prompt.startswith(f"[INST] {PAIRWISE.pieces[0]}")
    assert prompt.endswith(f"{PAIRWISE.pieces[-1]} [/INST]")
    assert shown_text(prompt, "MESSAGE") == "q" * expected[0]
    assert shown_text(prompt, "RESPONSE 1") == "x" * expected[1]
    assert shown_text(prompt, "RESPONSE 2") == "y" * expected[2]


def test_truncated_inputs_are_counted(local_judge):
    local_judge.compare([COMPARISONS[0], Comparison("q" * 2000, "a", "b")])
    assert local_judge.figures == {"judge_shortened": 1}


def test_an_instruction_that_leaves_no_room_is_refused_with_both_numbers_of_tokens(build):
    judge = build(**LOCAL | {"max_prompt_tokens": 64})
    with pytest.raises(
        UserError,
        match=r"instruction 'autoj/pairwise' alone takes \d+ tokens, "
        r"more than evaluation.judge.max_prompt_tokens 64",
    ):
        judge.compare(COMPARISONS[:1])


# --- An endpoint


class Server:
    """An OpenAI-compatible endpoint on loopback that answers by a function.

    Attributes:
        answer: function of a request's body and number, from 1; gives status, content and headers.
        requests: body, path and headers of each request.
        active, max_active: number of requests in progress, and its maximum.
    """

    def __init__(self):
        self.requests = []
        self.active = 0
        self.max_active = 0
        self.lock = threading.Lock()
        self.answer = lambda body, number: (200, decision("Response 1"), {})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                request = SimpleNamespace(body=body, path=self.path, headers=dict(self.headers))
                status, content, headers = server.handle(request)
                payload = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in ({"content-length": str(len(payload))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_):
                pass

        return Handler

    def handle(self, request):
        with self.lock:
            self.requests.append(request)
            self.active += 1
            self.max_active = max(self.max_active, self.active)
            number = len(self.requests)
        answer = self.answer(request.body, number)
        with self.lock:
            self.active -= 1
        return answer


def decision(name):
    """A chat completion that decides for a name."""
    content = f"1. Facts.\nSo, the final decision is {name}"
    return {"choices": [{"message": {"role": "assistant", "content": content}}]}


def query_number(body):
    """The number of the query that a request shows."""
    return int(body["messages"][0]["content"].split("query ")[1].split("\n")[0])


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


@pytest.fixture
def remote(server, build, monkeypatch):
    """A function that builds judges behind the server, with a key and without pauses."""
    monkeypatch.setenv(VARIABLE, KEY)
    defaults = {
        "base_url": server.url,
        "model": "judge-7",
        "api_key_env": VARIABLE,
        "backoff": 0.0,
        "retries": 2,
    }
    return lambda **options: build(**defaults | options)


def test_a_request_is_a_greedy_chat_completion_with_the_key_in_its_header(server, remote):
    assert remote(base_url=f"{server.url}/", max_new_tokens=77).compare(COMPARISONS[:1]) == [FIRST]
    (request,) = server.requests
    headers = {name.lower(): value for name, value in request.headers.items()}
    text = PAIRWISE.render(prompt="query 0", response="one 0", response_another="two 0")
    assert request.path == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert request.body == {
        "model": "judge-7",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 77,
    }


def test_an_endpoint_sees_the_policys_instruction_too(server, build):
    policy = load_template("summarization/policy_short", "policy")
    judge = build(policy=policy, base_url=server.url, model="judge-7")
    judge.compare(COMPARISONS[:1])
    query = "query 0\n\nSummarize this paper in one short sentence of at most 25 words."
    text = PAIRWISE.render(prompt=query, response="one 0", response_another="two 0")
    assert server.requests[0].body["messages"][0]["content"] == text
    assert judge.texts[0]["prompt"] == query


def test_without_a_key_no_header_is_sent(server, remote):
    remote(api_key_env=None).compare(COMPARISONS[:1])
    assert "authorization" not in {name.lower() for name in server.requests[0].headers}


def test_a_recipe_may_add_fields_to_the_request_and_remove_others(server, remote):
    fields = {
        "max_tokens": None,
        "max_completion_tokens": 9,
        "temperature": None,
        "seed": 1,
    }
    remote(request=fields).compare(COMPARISONS[:1])
    body = dict(server.requests[0].body)
    body.pop("model")
    body.pop("messages")
    assert body == {"max_completion_tokens": 9, "seed": 1}


def test_verdicts_keep_the_order_of_the_comparisons_if_answers_arrive_in_another(server, remote):
    def answer(body, number):
        kind = query_number(body) % 3
        time.sleep(0.05 if kind == 0 else 0.0)
        return 200, decision(("Response 1", "Response 2", "Tie")[kind]), {}

    server.answer = answer
    judge = remote()
    assert judge.compare(COMPARISONS) == [FIRST, SECOND, TIE] * 4
    assert [row["prompt"] for row in judge.texts] == [comparison.prompt for comparison in COMPARISONS]


def test_the_number_of_concurrent_requests_is_that_of_the_recipe(server, remote):
    three = threading.Event()

    def answer(body, number):
        if server.active == 3:
            three.set()
        three.wait(60)
        time.sleep(0.02)  # a fourth would come now
        return 200, decision("Tie"), {}

    server.answer = answer
    remote(concurrency=3).compare(COMPARISONS)
    assert server.max_active == 3


@pytest.mark.parametrize(
    "fault",
    [
        (429, {"error": {"message": "slow down"}}, {}),
        (500, b"oops", {}),
        (503, b"", {}),
        (200, b"<html>not json</html>", {}),
        (200, {"choices": []}, {}),
        (200, [1], {}),
        (200, {"choices": [{"message": {"content": [{"text": "x"}]}}]}, {}),
    ],
)
def test_a_passing_fault_is_retried(server, remote, fault):
    server.answer = lambda body, number: fault if number < 3 else (200, decision("Response 2"), {})
    assert remote().compare(COMPARISONS[:1]) == [SECOND]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((500, b"oops", {}), "answered 500 Internal Server Error: 'oops'; 3 requests"),
        ((429, b"slow down", {}), "answered 429 Too Many Requests: 'slow down'; 3 requests"),
        ((200, b"<html>not json</html>", {}), "'<html>not json</html>'; 3 requests"),
    ],
)
def test_a_lasting_fault_is_reported_after_the_last_retry_with_the_address(server, remote, fault, message):
    server.answer = lambda body, number: fault
    with pytest.raises(UserError) as error:
        remote().compare(COMPARISONS[:1])
    assert message in str(error.value)
    assert server.url in str(error.value)
    assert len(server.requests) == 3


def test_a_refused_request_is_not_retried_and_cancels_the_others(server, remote):
    server.answer = lambda body, number: (404, {"error": {"message": "no model judge-7"}}, {})
    with pytest.raises(
        UserError, match="answered 404 Not Found: .*no model judge-7.* evaluation.judge: model"
    ):
        remote(concurrency=1).compare(COMPARISONS)
    assert len(server.requests) < len(COMPARISONS)


def test_a_failure_does_not_wait_for_the_retries_of_other_requests(server, remote):
    server.answer = lambda body, number: (400, b"bad", {}) if query_number(body) == 1 else (500, b"oops", {})
    start = time.perf_counter()
    with pytest.raises(UserError):
        remote(backoff=200.0, concurrency=2).compare(COMPARISONS[1:3])
    assert time.perf_counter() - start < 100


def test_pauses_double_and_follow_a_retry_after_header_up_to_a_minute(server, remote, monkeypatch):
    pauses = []
    event = SimpleNamespace(wait=pauses.append, set=lambda: None)
    monkeypatch.setattr(chat, "threading", SimpleNamespace(Event=lambda: event))
    headers = {
        5: {"retry-after": "7"},
        6: {"retry-after": "9999"},
        7: {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"},
    }
    server.answer = lambda body, number: (429, b"", headers.get(number, {}))
    with pytest.raises(UserError):
        remote(backoff=1.0, retries=8).compare(COMPARISONS[:1])
    assert pauses == [1, 2, 4, 8, 7, 60, 60, 60]


def test_an_endpoint_that_cannot_be_reached_is_an_error_after_the_last_retry(remote):
    with pytest.raises(UserError, match=r"gave no answer \(ConnectError: .*3 requests"):
        remote(base_url="http://127.0.0.1:1/v1").compare(COMPARISONS[:1])


def test_an_answer_that_takes_too_long_is_an_error(server, remote):
    def answer(body, number):
        time.sleep(0.3)
        return 200, decision("Tie"), {}

    server.answer = answer
    with pytest.raises(UserError, match=r"gave no answer \(ReadTimeout"):
        remote(timeout=0.1, retries=0).compare(COMPARISONS[:1])


@pytest.mark.parametrize("status", [401, 500])
def test_the_key_is_masked_in_errors_that_repeat_it(server, remote, caplog, status):
    caplog.set_level(logging.DEBUG)
    server.answer = lambda body, number: (status, {"error": {"message": f"wrong key: {KEY}"}}, {})
    with pytest.raises(UserError) as error:
        remote().compare(COMPARISONS[:1])
    assert KEY not in str(error.value)
    assert "wrong key: [key]" in str(error.value)
    assert error.value.__cause__ is None
    assert KEY not in caplog.text


def test_the_key_is_in_no_log_judgment_figure_or_description(server, remote, caplog):
    caplog.set_level(logging.DEBUG)
    judge = remote()
    judge.compare(COMPARISONS[:2])
    for text in (caplog.text, json.dumps(judge.texts), json.dumps(judge.figures), judge.description):
        assert KEY not in text


def test_an_empty_message_is_unparsable_and_white_space_around_a_judgment_is_left_out(server, remote):
    server.answer = lambda body, number: (200, {"choices": [{"message": {"content": None}}]}, {})
    assert remote().compare(COMPARISONS[:1]) == [UNPARSABLE]
    server.answer = lambda body, number: (200, decision("Tie\n\n"), {})
    judge = remote()
    assert judge.compare(COMPARISONS[:1]) == [TIE]
    assert judge.texts[0]["text"].endswith("the final decision is Tie")
