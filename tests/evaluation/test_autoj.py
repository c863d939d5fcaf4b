"""The Auto-J judge: its verdicts from any text, its instruction, a model on this machine, and an endpoint on loopback."""

import json
import logging
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from components.config import RecipeError
from components.data.templates import load as load_template
from components.evaluation import autoj
from components.evaluation.judge_protocol import JudgeError
from components.evaluation.judges import build_judge, check_judge, judge_pairs, parse_autoj
from components.evaluation.winrate import Verdict
from components.models.selector import Comparison
from components.recipes import dump_recipe, load_recipe

FIRST, SECOND, TIE, UNPARSABLE = Verdict
KEY = "sk-very-secret-0123"
VARIABLE = "FED_RLHF_TEST_KEY"
QUESTIONS = [Comparison(f"query {i}", f"one {i}", f"two {i}") for i in range(12)]


# --- the parser

@pytest.mark.parametrize(("text", "verdict"), [
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
    ("At first the final decision is Response 1. On reflection, the final decision is Response 2.", SECOND)])
def test_the_verdict_is_the_name_behind_the_last_final_decision(text, verdict):
    assert parse_autoj(text) is verdict


@pytest.mark.parametrize("text", [
    "", "\ud800", "Response 1 is better.", "the final decision is", "the final decision is clear", "the final decision is Response 3", "the final decision is Response 10",
    "the final decision is Response 1.5", "the final decision is not Response 1", "the final decision is Response 1 / Response 2 / Tie", "the final decision is Response 1 or 2",
    "the final decision is **Response 1** or a **Tie**", "the final decision is Response 1, Response 2", "the final decision is Response 1, Response 2. I cannot choose.",
    "the final decision is Response 1 / tie", "the final decision is Response 1, Response 2, Tie", "the final decision is Response 1, 2", "the final decision is Response 1, and Response 2.",
    "the final decision is Response 1, Response 2 or Tie, as you like", "the final decision is Response 1 or Response 2, depending on taste",
    "the final decision is that Response 1 and Response 2 are tied", "the final decision is Response 1/Response 2 are equal", "the final decision is Response 1 (Response 2)\nBoth are good.", "the final decision is both Response 1 and Response 2", "the final decision is Response 2\nTie",
    "the final decision is Response 1. I mean, the final decision is", "the final decision is tiers of Response 1", "So, the final decision is <name>"])
def test_no_name_or_several_names_are_unparsable(text):
    assert parse_autoj(text) is UNPARSABLE


def test_any_text_has_a_verdict_and_what_comes_before_the_last_mark_changes_nothing():
    numbers = random.Random(0)
    parts = ["final decision is ", "Final Decision Is:", "final decision issues", "Response 1", "response 2", "Tie", "tied", "1", "2", "10", " ", "\n", "*", "_", "/", ".", ",", ":", "or", "and", "that", "a", "\0", "é", "\ud83d", "９", "²"]
    seen = set()
    for _ in range(4000):
        text = "".join(numbers.choice(parts) + numbers.choice(["", " "]) for _ in range(numbers.randrange(14)))
        verdict = parse_autoj(text)
        seen.add(verdict)
        assert isinstance(verdict, Verdict)
        last = max(text.lower().rfind(mark) for mark in ("final decision is ", "final decision is:"))
        assert verdict is (parse_autoj(text[last:]) if last >= 0 else UNPARSABLE)
    assert seen == set(Verdict)


@pytest.mark.parametrize("text", [
    "final decision is " + "-_ " * 100_000, "final decision is Response 1" + "*_" * 100_000 + "x", "final decision is " * 20_000, "final decision is " + "that " * 100_000,
    "final decision is Response 1 or" + " _" * 100_000, "final decision is Response 1" + ", Response 2" * 100_000 + " x", "final decision is Response 1" + ", 2" * 100_000 + " x",
    "final decision is Response 1" + (", Response 2" + " _" * 200) * 500 + " x"])
def test_a_text_that_never_ends_is_read_in_no_time(text):
    start = time.perf_counter()
    parse_autoj(text)
    assert time.perf_counter() - start < 2


# --- recipe and options

def options(config, **chosen):
    return config.model_copy(update={"kind": "autoj", "options": chosen})


@pytest.fixture
def config(debug):
    return debug.evaluation.judge


def refused(*overrides):
    with pytest.raises(RecipeError) as error:
        load_recipe("debug", overrides)
    return str(error.value)


def test_a_recipe_with_the_judge_reads_back_the_same(tmp_path):
    recipe = load_recipe("debug", ["evaluation.judge.kind=autoj", "evaluation.judge.options={base_url: 'http://127.0.0.1:1/v1', model: m, api_key_env: A_KEY}"])
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "r.yaml")) == recipe and recipe.evaluation.judge.options["api_key_env"] == "A_KEY"


@pytest.mark.parametrize(("override", "words"), [
    ("{max_new_token: 3}", "did you mean 'evaluation.judge.options.max_new_tokens'?"),
    ("{retries: -1}", "'evaluation.judge.options.retries' is -1"),
    ("{prompt_file: autoj/pairwis}", "Did you mean 'autoj/pairwise'?"),
    ("{base_url: 'ftp://x'}", "options.base_url must be the root of an endpoint"),
    ("{base_url: 'http://x:port/v1'}", "options.base_url must be the root of an endpoint"),
    ("{api_key_env: A_KEY}", "api_key_env is for an endpoint: give base_url too")])
def test_an_option_that_cannot_be_is_refused_with_the_recipe(override, words):
    assert words in refused("evaluation.judge.kind=autoj", f"evaluation.judge.options={override}")


def test_a_secret_that_was_put_into_a_recipe_is_refused_and_not_repeated():
    for chosen in (f"{{base_url: 'http://x/v1', api_key_env: {KEY}}}", f"{{base_url: 'http://x/v1', api_key: {KEY}}}", f"{{base_url: 'http://user:{KEY}@x/v1'}}", f"{{base_url: 'http://x/v1?key={KEY}'}}"):
        message = refused("evaluation.judge.kind=autoj", f"evaluation.judge.options={chosen}")
        assert "evaluation.judge.options" in message and KEY not in message
    assert "must be the NAME of an environment variable" in refused("evaluation.judge.kind=autoj", f"evaluation.judge.options={{base_url: 'http://x/v1', api_key_env: {KEY}}}")


@pytest.mark.parametrize("glued", ["{api_key:%s}", "{api_key=%s}", "{api_key %s}", "api_key:%s"])
def test_a_secret_that_sticks_to_its_key_is_not_repeated_either(glued):
    message = refused("evaluation.judge.kind=autoj", f"evaluation.judge.options={glued % KEY}")
    assert "evaluation.judge.options" in message and KEY not in message
    assert not glued.startswith("{") or "unknown key 'evaluation.judge.options.api_key' with more in the same word (between a key and its value stand a colon and a space)" in message


def test_the_selector_judge_takes_no_options():
    assert "unknown key 'evaluation.judge.options.model'. No keys are allowed here." in refused("evaluation.judge.options={model: m}")


def test_the_instruction_is_a_file_with_the_originals_placeholders(config, tmp_path):
    own = load_template("autoj/pairwise", "pairwise")
    assert own.fields == ("prompt", "response", "response_another") and "the final decision is" in own.pieces[-1]
    (tmp_path / "original.txt").write_text("Q {prompt} A {response} B {response_another} end with: the final decision is Response 1 / Response 2 / Tie\n")
    load_recipe("debug", ["evaluation.judge.kind=autoj", f"evaluation.judge.options={{prompt_file: {tmp_path / 'original.txt'}}}"])
    (tmp_path / "wrong.txt").write_text("{prompt} {response_another} {response}")
    assert "{response} must come before {response_another}" in refused("evaluation.judge.kind=autoj", f"evaluation.judge.options={{prompt_file: {tmp_path / 'wrong.txt'}}}")


def test_the_judge_needs_no_pairs_to_learn_from(config, tmp_path):
    check_judge(options(config, base_url="http://127.0.0.1:1/v1"), tmp_path)


def test_a_key_that_is_not_set_or_no_key_is_refused_before_anything_is_trained(config, tmp_path, monkeypatch):
    asked = options(config, base_url="http://127.0.0.1:1/v1", api_key_env=VARIABLE)
    for value in ("", "  "):
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(JudgeError, match=rf"environment variable {VARIABLE}.* is not set"):
            check_judge(asked, tmp_path)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(JudgeError, match=rf"environment variable {VARIABLE}.* is not set"):
        check_judge(asked, tmp_path)
    monkeypatch.setenv(VARIABLE, f"{KEY}\nX-Other: y")
    with pytest.raises(JudgeError, match="characters that a key cannot have") as error:
        check_judge(asked, tmp_path)
    assert KEY not in str(error.value)


# --- a model on this machine

LOCAL = {"model": "tiny-random", "max_prompt_tokens": 1600, "max_new_tokens": 6, "batch_size": 5}


@pytest.fixture
def local(config, tmp_path):
    return build_judge(options(config, **LOCAL), tmp_path, tmp_path, 0, "cpu")


def test_a_local_model_judges_greedily_and_what_it_wrote_is_kept(config, local, tmp_path):
    verdicts = local.compare(QUESTIONS)
    again = build_judge(options(config, **LOCAL | {"batch_size": 1}), tmp_path, tmp_path, 7, "cpu")
    assert verdicts == again.compare(QUESTIONS) == [UNPARSABLE] * 12
    assert local.texts == again.texts and len(local.texts) == 12 and local.figures == {"judge_shortened": 0}
    assert local.texts[3] | {"text": ""} == {"prompt": "query 3", "response_1": "one 3", "response_2": "two 3", "text": "", "verdict": "unparsable"}
    assert all(len(row["text"]) > 0 for row in local.texts) and "tiny-random on this machine" in local.description


def test_what_a_model_writes_decides(local, monkeypatch):
    def write(model, tokenizer, encoded, *_, **__):
        asked = [tokenizer.decode(ids).replace("\n", " ") for ids in encoded]
        return [[SimpleNamespace(text=f"So, the final decision is Response {1 + ('RESPONSE 1 one' in text)}")] for text in asked]

    monkeypatch.setattr(autoj, "complete", write)
    judged = judge_pairs(local, [q.prompt for q in QUESTIONS], [q.first for q in QUESTIONS], [q.second for q in QUESTIONS], 100, 0)
    assert judged.verdicts == [SECOND] * 12 and judged.consistency == 1.0 and len(local.texts) == 24


def test_the_instruction_stands_between_inst_marks_or_in_the_models_own_chat_template(local, config):
    tokenizer, template = local._writer.tokenizer, local._writer.template
    text = template.render(**autoj.fields_of(QUESTIONS[0]))
    plain, cut = autoj.encode_question(tokenizer, template, QUESTIONS[0], autoj.AutoJOptions(**LOCAL))
    assert plain == tokenizer.encode(f"[INST] {text} [/INST]") and not cut
    chat, _ = autoj.encode_question(tokenizer, template, QUESTIONS[0], autoj.AutoJOptions(**LOCAL, chat_template=True))
    assert tokenizer.decode(chat) == f"<bos>user: {text}<eos><bos>assistant: "


def test_the_query_is_the_policys_instruction_with_the_prompt_and_is_kept_as_it_was_asked(local, config, tmp_path, monkeypatch):
    """A post alone says nothing of a summary; without a policy's template the prompt is the whole query."""
    shown = []

    def write(model, tokenizer, encoded, *_, **__):
        shown.extend(tokenizer.decode(ids) for ids in encoded)
        return [[SimpleNamespace(text="")] for _ in encoded]

    monkeypatch.setattr(autoj, "complete", write)
    told = build_judge(options(config, **LOCAL), tmp_path, tmp_path, 0, "cpu", policy=load_template("summarization/policy", "policy"))
    message = "Write a summary of the text in one paragraph of at most 50 words.\n\nquery 3"
    for judge, query in ((told, message), (local, "query 3")):
        judge.compare(QUESTIONS[3:4])
        assert shown.pop() == f"[INST] {judge._writer.template.render(prompt=query, response='one 3', response_another='two 3')} [/INST]"
        assert judge.texts[-1]["prompt"] == query


@pytest.mark.parametrize("name", ["summarization/policy", "summarization/policy_short"])
def test_a_query_that_is_too_long_loses_the_prompts_end_and_not_the_policys_instruction(local, name):
    tokenizer, template, policy = local._writer.tokenizer, local._writer.template, load_template(name, "policy")
    asked = autoj.AutoJOptions(**LOCAL | {"max_prompt_tokens": 1400})
    ids, cut = autoj.encode_question(tokenizer, template, Comparison("q" * 2000, "x" * 100, "y" * 100), asked, policy)
    shown = tokenizer.decode(ids).split("MESSAGE\n")[1].split("\n===")[0]
    left = shown.count("q")
    assert cut and len(ids) == 1400 and 0 < left < 2000 and shown == autoj.user_message(policy, "q" * left)


@pytest.mark.parametrize(("lengths", "kept"), [((400, 100, 100), "r1 r2"), ((20, 400, 100), "r2"), ((20, 300, 300), "")])
def test_what_is_too_long_loses_the_querys_end_first_and_never_the_instruction(local, lengths, kept):
    tokenizer, template = local._writer.tokenizer, local._writer.template
    frame = len(tokenizer.encode("[INST] " + template.render(prompt="", response="", response_another="") + " [/INST]"))
    most = frame + 300
    texts = [letter * n for letter, n in zip("qxy", lengths, strict=True)]
    ids, cut = autoj.encode_question(tokenizer, template, Comparison(*texts), autoj.AutoJOptions(**LOCAL | {"max_prompt_tokens": most}))
    shown = tokenizer.decode(ids)
    left = {letter: shown.split(f"{mark}\n")[1].split("\n===")[0].count(letter) for letter, mark in zip("qxy", ("MESSAGE", "RESPONSE 1", "RESPONSE 2"), strict=True)}
    assert cut and len(ids) == most and sum(left.values()) == 300
    assert shown.startswith("[INST] " + template.pieces[0]) and shown.endswith(template.pieces[-1] + " [/INST]")
    assert ("r1" in kept) == (left["x"] == lengths[1]) and ("r2" in kept) == (left["y"] == lengths[2])
    assert lengths[0] == 400 or left["q"] == 0
    assert kept or left["x"] == left["y"] == 150


def test_inputs_that_were_cut_are_counted(config, tmp_path):
    judge = build_judge(options(config, **LOCAL), tmp_path, tmp_path, 0, "cpu")
    judge.compare([QUESTIONS[0], Comparison("q" * 2000, "a", "b")])
    assert judge.figures == {"judge_shortened": 1}


@pytest.mark.parametrize(("chosen", "words"), [
    ({"max_prompt_tokens": 2047}, "at most 2048 tokens, but .*max_prompt_tokens 2047 and max_new_tokens 6 make 2053: lower them"),
    ({"model": "/nowhere/at/all"}, "the judge's model '/nowhere/at/all' cannot be read")])
def test_a_model_that_cannot_be_had_is_refused_before_anything_is_trained(config, tmp_path, chosen, words):
    with pytest.raises(JudgeError, match=words):
        check_judge(options(config, **LOCAL | chosen), tmp_path)


def test_an_instruction_that_leaves_no_room_is_one_sentence(config, tmp_path):
    judge = build_judge(options(config, **LOCAL | {"max_prompt_tokens": 64}), tmp_path, tmp_path, 0, "cpu")
    with pytest.raises(JudgeError, match=r"instruction 'autoj/pairwise' alone takes \d+ tokens, more than evaluation.judge.options.max_prompt_tokens 64"):
        judge.compare(QUESTIONS[:1])


@pytest.fixture
def gptq(tmp_path):
    """A folder with the configuration of a 4-bit GPTQ checkpoint, as Auto-J's has it."""
    from components.models.backbone import fetch_backbone

    folder = tmp_path / "gptq"
    folder.mkdir()
    config = json.loads((autoj.Path(fetch_backbone("tiny-random")) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}}))
    return str(folder)


@pytest.mark.parametrize(("installed", "words"), [
    ({}, r"is a GPTQ checkpoint, and optimum >= 1.24.0 and gptqmodel >= 1.4.3 to read it are not installed here: run `pip install optimum gptqmodel`"),
    ({"optimum": "2.0.0"}, r"and gptqmodel >= 1.4.3 to read it is not installed here"),
    ({"optimum": "1.9.0", "gptqmodel": "4.0.0"}, r"and optimum >= 1.24.0 to read it is not installed here")])
def test_a_gptq_checkpoint_names_the_libraries_that_are_missing(config, tmp_path, gptq, monkeypatch, installed, words):
    from importlib import metadata

    real = metadata.version

    def version(name):
        if name not in autoj.GPTQ_LIBRARIES:
            return real(name)
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(JudgeError, match=words):
        check_judge(options(config, **LOCAL | {"model": gptq}), tmp_path)


def test_the_versions_that_gptq_needs_are_those_of_the_installed_transformers():
    from transformers.quantizers import quantizer_gptq

    assert autoj.GPTQ_LIBRARIES == {"optimum": quantizer_gptq.MIN_OPTIMUM_VERSION, "gptqmodel": quantizer_gptq.MIN_GPTQ_VERSION}


# --- an endpoint

class Server:
    """An OpenAI-compatible endpoint on loopback that answers by a script and remembers what it was asked."""

    def __init__(self):
        self.asked, self.under_way, self.most, self.lock = [], 0, 0, threading.Lock()
        self.answer = lambda body, number: (200, said("Response 1"), {})
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with server.lock:
                    server.asked.append(SimpleNamespace(body=body, path=self.path, headers=dict(self.headers)))
                    server.under_way += 1
                    server.most = max(server.most, server.under_way)
                    number = len(server.asked)
                status, content, headers = server.answer(body, number)
                with server.lock:
                    server.under_way -= 1
                payload = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in ({"content-length": str(len(payload))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


def said(name):
    return {"choices": [{"message": {"role": "assistant", "content": f"1. Facts.\nSo, the final decision is {name}"}}]}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    served = Server()
    thread = threading.Thread(target=served.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    served.http.shutdown()
    served.http.server_close()
    thread.join()


@pytest.fixture
def remote(server, config, tmp_path, monkeypatch):
    """A maker of judges behind the server, with a key and no waiting."""
    monkeypatch.setenv(VARIABLE, KEY)

    def make(**more):
        return build_judge(options(config, **{"base_url": server.url, "model": "judge-7", "api_key_env": VARIABLE, "backoff": 0.0, "retries": 2} | more), tmp_path, tmp_path, 0, "cpu")

    return make


def test_a_request_is_a_greedy_chat_completion_with_the_key_in_its_header(server, remote):
    assert remote(base_url=server.url + "/", max_new_tokens=77).compare(QUESTIONS[:1]) == [FIRST]
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions" and {k.lower(): v for k, v in asked.headers.items()}["authorization"] == f"Bearer {KEY}"
    text = load_template("autoj/pairwise", "pairwise").render(prompt="query 0", response="one 0", response_another="two 0")
    assert asked.body == {"model": "judge-7", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 77}


def test_an_endpoint_is_told_the_policys_instruction_too(server, config, tmp_path):
    judge = build_judge(options(config, base_url=server.url, model="judge-7"), tmp_path, tmp_path, 0, "cpu", policy=load_template("summarization/policy_short", "policy"))
    judge.compare(QUESTIONS[:1])
    query = "query 0\n\nSummarize this paper in one short sentence of at most 25 words."
    text = load_template("autoj/pairwise", "pairwise").render(prompt=query, response="one 0", response_another="two 0")
    assert server.asked[0].body["messages"][0]["content"] == text and judge.texts[0]["prompt"] == query


def test_without_a_key_no_header_is_sent(server, remote):
    remote(api_key_env=None).compare(QUESTIONS[:1])
    assert "authorization" not in {name.lower() for name in server.asked[0].headers}


def test_a_recipe_may_add_fields_to_the_request_and_leave_some_out(server, remote):
    remote(request={"max_tokens": None, "max_completion_tokens": 9, "temperature": None, "seed": 1}).compare(QUESTIONS[:1])
    assert {k: v for k, v in server.asked[0].body.items() if k not in ("model", "messages")} == {"max_completion_tokens": 9, "seed": 1}


def test_answers_keep_the_order_of_the_questions_although_they_come_in_another(server, remote):
    def answer(body, number):
        which = int(body["messages"][0]["content"].split("query ")[1].split("\n")[0])
        time.sleep(0.05 if which % 3 == 0 else 0.0)
        return 200, said(("Response 1", "Response 2", "Tie")[which % 3]), {}

    server.answer = answer
    judge = remote()
    assert judge.compare(QUESTIONS) == [FIRST, SECOND, TIE] * 4
    assert [row["prompt"] for row in judge.texts] == [q.prompt for q in QUESTIONS]


def test_no_more_requests_are_under_way_than_the_recipe_allows(server, remote):
    def answer(body, number):
        time.sleep(0.02)
        return 200, said("Tie"), {}

    server.answer = answer
    remote(concurrency=3).compare(QUESTIONS)
    assert server.most == 3


@pytest.mark.parametrize("fault", [
    (429, {"error": {"message": "slow down"}}, {}), (500, b"oops", {}), (503, b"", {}), (200, b"<html>not json</html>", {}), (200, {"choices": []}, {}), (200, [1], {}),
    (200, {"choices": [{"message": {"content": [{"text": "x"}]}}]}, {})])
def test_a_passing_fault_is_asked_again(server, remote, fault):
    server.answer = lambda body, number: fault if number < 3 else (200, said("Response 2"), {})
    assert remote().compare(QUESTIONS[:1]) == [SECOND] and len(server.asked) == 3


@pytest.mark.parametrize(("fault", "words"), [
    ((500, b"oops", {}), "answered 500 Internal Server Error: 'oops'; 3 requests for one answer failed"),
    ((429, b"slow down", {}), "answered 429 Too Many Requests: 'slow down'; 3 requests"),
    ((200, b"<html>not json</html>", {}), "answered in another form than a chat completion's: '<html>not json</html>'; 3 requests")])
def test_a_fault_that_stays_is_one_sentence_after_the_last_repetition(server, remote, fault, words):
    server.answer = lambda body, number: fault
    with pytest.raises(JudgeError) as error:
        remote().compare(QUESTIONS[:1])
    assert words in str(error.value) and server.url in str(error.value) and len(server.asked) == 3


def test_a_refused_request_is_not_repeated_and_ends_the_others(server, remote):
    server.answer = lambda body, number: (404, {"error": {"message": "no model judge-7"}}, {})
    with pytest.raises(JudgeError, match="answered 404 Not Found: .*no model judge-7.* See evaluation.judge.options: model"):
        remote(concurrency=1).compare(QUESTIONS)
    assert len(server.asked) < len(QUESTIONS)


def test_a_failure_does_not_wait_for_the_repetitions_of_others(server, remote):
    server.answer = lambda body, number: (400, b"bad", {}) if "query 1\n" in body["messages"][0]["content"] else (500, b"oops", {})
    start = time.perf_counter()
    with pytest.raises(JudgeError):
        remote(backoff=30.0, concurrency=2).compare(QUESTIONS[1:3])
    assert time.perf_counter() - start < 10


def test_the_wait_doubles_and_follows_the_servers_wish_up_to_a_minute(server, remote, monkeypatch):
    waits = []
    monkeypatch.setattr(threading.Event, "wait", lambda event, timeout=None, wait=threading.Event.wait: (waits.append(timeout), False)[1] if timeout in range(1, 61) else wait(event, timeout))
    server.answer = lambda body, number: (429, b"", {5: {"retry-after": "7"}, 6: {"retry-after": "9999"}, 7: {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}}.get(number, {}))
    with pytest.raises(JudgeError):
        remote(backoff=1.0, retries=8).compare(QUESTIONS[:1])
    assert waits == [1, 2, 4, 8, 7, 60, 60, 60]


def test_nobody_there_and_a_wait_that_is_too_long_are_one_sentence(server, remote):
    with pytest.raises(JudgeError, match=r"gave no answer \(ConnectError: .*3 requests for one answer failed"):
        remote(base_url="http://127.0.0.1:1/v1").compare(QUESTIONS[:1])
    server.answer = lambda body, number: (time.sleep(0.3), (200, said("Tie"), {}))[1]
    with pytest.raises(JudgeError, match=r"gave no answer \(ReadTimeout"):
        remote(timeout=0.1, retries=0).compare(QUESTIONS[:1])


def test_the_key_is_in_no_error_log_text_or_figure_even_where_the_server_repeats_it(server, remote, caplog):
    caplog.set_level(logging.DEBUG)
    judge = remote()
    for status in (401, 500):
        server.answer = lambda body, number, status=status: (status, {"error": {"message": f"wrong key: {KEY}"}}, {})
        with pytest.raises(JudgeError) as error:
            judge.compare(QUESTIONS[:1])
        assert KEY not in str(error.value) and "wrong key: [key]" in str(error.value) and error.value.__cause__ is None
    server.answer = lambda body, number: (200, said("Tie"), {})
    judge.compare(QUESTIONS[:2])
    assert KEY not in caplog.text + json.dumps(judge.texts) + json.dumps(judge.figures) + judge.description


def test_a_refusal_to_write_is_an_empty_judgement(server, remote):
    server.answer = lambda body, number: (200, {"choices": [{"message": {"content": None}}]}, {})
    assert remote().compare(QUESTIONS[:1]) == [UNPARSABLE]
