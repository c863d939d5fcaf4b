"""The policy: prompts that keep their template, and generation independent of the batch."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
import torch

from components.models import continuous_batch, generation
from components.models import policy as policy_module
from components.models.adapters import AdapterSlot, attach_lora, export_adapter
from components.models.backbone import load_backbone
from components.models.generation import find_stop_ids, generate_completions
from components.models.policy import (
    ClientPolicySet,
    Policy,
    PolicyError,
    PolicyTexts,
    assign_round_robin,
    check_prompts,
    client_adapter_folders,
    has_client_adapters,
    save_client_adapters,
)
from components.models.resident import ResidentPolicy
from components.models.samples import Completion, GenerationSettings, Reply, SampleKey
from components.models.tokens import decode_cut, decode_unfinished
from tests.support.adapters import random_tensors

PROMPTS = [
    "a paper",
    "quite another and a longer paper",
    "x",
    "the fourth of the papers is the longest by far, and says little",
]
LONG_PROMPT = "".join(f"{i}," for i in range(400))


@pytest.fixture(scope="module")
def policy(debug):
    return Policy(debug.policy.model_copy(update={"generation_batch_size": 3}), "cpu")


def change_config(policy, monkeypatch, **settings):
    monkeypatch.setattr(policy_module, "load_tokenizer", lambda backbone: policy.tokenizer)
    changed = PolicyTexts(policy.config.model_copy(update=settings))
    monkeypatch.setattr(policy, "config", changed.config)
    monkeypatch.setattr(policy, "chat", changed.chat)


# --- prompts


def test_a_prompt_is_the_users_turn_of_the_chat_template_and_the_answer_follows_it(policy):
    text = policy.tokenizer.decode(policy.encode("the paper"))
    assert text == f"<bos>user: {policy.template.render(prompt='the paper').strip()}<eos><bos>assistant: "


@pytest.mark.parametrize("system", ["", "be brief"])
def test_a_system_turn_precedes_the_users_turn_and_is_not_truncated(policy, monkeypatch, system):
    plain = policy.tokenizer.decode(policy.encode("the paper"))
    change_config(policy, monkeypatch, system=system)
    beginning = f"<bos>system: {system}<eos>"
    assert policy.tokenizer.decode(policy.encode("the paper")) == beginning + plain
    assert policy.tokenizer.decode(policy.encode(LONG_PROMPT)).startswith(f"{beginning}<bos>user: ")


def test_a_system_turn_that_the_chat_template_does_not_accept_is_refused_before_a_model_is_loaded(
    policy, monkeypatch
):
    refusal = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    monkeypatch.setattr(policy.tokenizer, "chat_template", refusal + policy.tokenizer.chat_template)
    monkeypatch.setattr(policy_module, "load_tokenizer", lambda backbone: policy.tokenizer)
    check_prompts(policy.config)
    with pytest.raises(PolicyError, match=r"\(System role not supported\).*leave out policy.system"):
        check_prompts(policy.config.model_copy(update={"system": "be brief"}))


def test_a_template_that_does_not_fit_is_refused_with_its_length_before_a_model_is_loaded(policy):
    words = r"'summarization/policy' alone takes \d+ tokens, more than policy.max_prompt_tokens 20: raise it"
    with pytest.raises(PolicyError, match=words):
        check_prompts(policy.config.model_copy(update={"max_prompt_tokens": 20}))


def test_without_a_chat_template_the_prompt_is_the_policy_template(policy, monkeypatch):
    texts = ("the film", " was great")
    with_template = policy.encode_texts(*texts)
    change_config(policy, monkeypatch, chat="none")
    unused = policy.encode_texts(*texts)
    monkeypatch.setattr(policy.tokenizer, "chat_template", None)
    change_config(policy, monkeypatch, chat="auto")
    assert policy.tokenizer.decode(policy.encode("the film")) == policy.template.render(prompt="the film")
    assert policy.encode_texts(*texts) == unused
    assert unused != with_template


DIALOGUE = "Human: Hello?\n\nAssistant: Hi.\n\nHuman: Well?"


def test_turns_of_a_dialogue_are_those_of_the_chat_template_and_a_long_one_loses_its_first(
    policy, monkeypatch
):
    change_config(policy, monkeypatch, chat="turns")
    text = policy.tokenizer.decode(policy.encode(DIALOGUE))
    assert text == "<bos>user: Hello?<eos><bos>assistant: Hi.<eos><bos>user: Well?<eos><bos>assistant: "
    dialogue = "\n\n".join([DIALOGUE] * 20)
    change_config(policy, monkeypatch, chat="turns", truncation_mode="keep_end", max_prompt_tokens=80)
    ids = policy.encode(dialogue)
    text = policy.tokenizer.decode(ids)
    assert 40 < len(ids) <= 80
    assert text.startswith("<bos>user: ")
    assert text.endswith("<bos>user: Well?<eos><bos>assistant: ")


def test_a_turn_each_is_refused_without_a_chat_template(policy, monkeypatch):
    monkeypatch.setattr(policy.tokenizer, "chat_template", None)
    monkeypatch.setattr(policy_module, "load_tokenizer", lambda backbone: policy.tokenizer)
    with pytest.raises(PolicyError, match=r"policy.chat is 'turns', and .* has no chat template"):
        check_prompts(policy.config.model_copy(update={"chat": "turns"}))


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("length", [260, 290, 320])
def test_a_long_prompt_is_truncated_at_one_end_and_the_template_stays(policy, length, mode):
    config = policy.config.model_copy(update={"max_prompt_tokens": length, "truncation_mode": mode})
    ids = PolicyTexts(config).encode(LONG_PROMPT)
    before, after = policy.tokenizer.decode(policy.encode("@")).split("@")
    text = policy.tokenizer.decode(ids)
    assert len(ids) == length
    assert text.startswith(before)
    assert text.endswith(after)
    context = text[len(before) : -len(after)]
    assert 0 < len(context) < len(LONG_PROMPT)
    assert LONG_PROMPT.startswith(context) if mode == "keep_start" else LONG_PROMPT.endswith(context)


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("length", range(230, 234))
def test_a_prompt_and_a_completion_are_cut_at_whole_characters(policy, length, mode):
    config = policy.config.model_copy(update={"max_prompt_tokens": length, "truncation_mode": mode})
    shown = policy.tokenizer.decode(PolicyTexts(config).encode("語" * 100))
    assert "語語" in shown and "\ufffd" not in shown
    ids = policy.tokenizer.encode("語" * 100, add_special_tokens=False)[:length]
    assert set(decode_unfinished(policy.tokenizer, ids)) == {"語"}
    kept = "a\ufffd b \ufffd"
    assert decode_cut(policy.tokenizer, policy.tokenizer.encode(kept), kept) == kept


# --- greedy generation


def test_greedy_answers_are_the_arg_max_of_the_logits_in_any_batch_and_order(policy):
    together = policy.generate(PROMPTS, seed=0)
    assert together == [policy.generate([prompt], seed=9)[0] for prompt in PROMPTS]
    assert together == policy.generate(PROMPTS[::-1], seed=1)[::-1]
    ids = policy.encode(PROMPTS[1])
    expected = []
    for _ in range(4):
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([[*ids, *expected]])).logits
        expected.append(int(logits[0, -1].argmax()))
    assert policy.generate([PROMPTS[1]], seed=0, max_new_tokens=4)[0][0].ids == tuple(expected)


def test_several_greedy_completions_are_refused(policy):
    with pytest.raises(PolicyError, match="2 greedy completions of a prompt would be the same"):
        policy.generate(PROMPTS, seed=0, count=2)


# --- sampling


def test_a_completion_with_a_key_does_not_depend_on_others_and_a_seed_stands_for_all_keys(policy):
    keys = [SampleKey(7, 0), SampleKey(3, 4), *(SampleKey(9, n) for n in range(len(PROMPTS) - 2))]
    together = policy.generate(PROMPTS, keys, temperature=0.7, count=2)
    for prompt, key, completions in zip(PROMPTS, keys, together, strict=True):
        assert policy.generate([prompt], [key], temperature=0.7, count=2) == [completions]
    assert policy.generate(PROMPTS[::-1], keys[::-1], temperature=0.7, count=2) == together[::-1]
    assert policy.generate([PROMPTS[0]], [SampleKey(8, 0)], temperature=0.7, count=2) != [together[0]]
    assert all(first.ids != second.ids for first, second in together)
    keys = [SampleKey(1, n) for n in range(len(PROMPTS))]
    assert policy.generate(PROMPTS, keys, temperature=0.7) == policy.generate(PROMPTS, 1, temperature=0.7)


def test_sampling_does_not_change_the_global_generator(policy):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    policy.generate(PROMPTS, seed=1, temperature=0.7)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_models_softmax(policy, temperature):
    ids = policy.tokenizer.encode("x")
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([ids])).logits[0, -1].double()
    expected = (logits / temperature).softmax(0)
    count = 6000
    settings = GenerationSettings(batch_size=1500, max_new_tokens=1, temperature=temperature, count=count)
    (samples,) = generate_completions(policy.model, policy.tokenizer, [ids], settings, seed=3)
    tokens = torch.tensor([sample.ids[0] for sample in samples])
    shares = torch.bincount(tokens, minlength=len(expected)) / count
    standard_errors = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() / standard_errors).max() < 5
    assert (shares - expected).abs().sum() / 2 < 0.15
    assert expected.max() / expected.min() > 1.2


@pytest.mark.parametrize("continuous", [True, False])
def test_the_backbones_generation_settings_do_not_change_samples(policy, monkeypatch, continuous):
    monkeypatch.setattr(continuous_batch, "supports_continuous_batch", lambda model: continuous)

    def load_with_settings(*arguments):
        model = load_backbone(*arguments)
        model.generation_config.suppress_tokens = list(range(100, 250))
        model.generation_config.eos_token_id = [3, 4]
        return model

    monkeypatch.setattr(policy_module, "load_backbone", load_with_settings)
    other = Policy(policy.config, "cpu")
    samples = policy.generate(PROMPTS, seed=1, temperature=0.7)
    assert other.generate(PROMPTS, seed=1, temperature=0.7) == samples
    stop_ids = find_stop_ids(other.model.generation_config, other.tokenizer)
    assert set(stop_ids) == {3, 4, other.tokenizer.eos_token_id}
    other.model.generation_config.suppress_tokens = list(range(100, 250))
    has_effect = other.generate(PROMPTS, seed=1, temperature=0.7) != samples
    assert has_effect != continuous, "transformers reads the settings, a continuous batch does not"


def test_clients_in_parallel_sample_as_they_do_one_after_the_other(debug):
    policies = [Policy(debug.policy, "cpu") for _ in range(2)]

    def sample(client):
        seeds = range(3 * client, 3 * client + 3)
        return [policies[client].generate(PROMPTS, seed, 1.0, max_new_tokens=12) for seed in seeds]

    def build_models():
        for _ in range(4):  # PEFT draws initial values from the process's generator
            ResidentPolicy(debug.policy, "cpu")

    sequential = [sample(0), sample(1)]
    with ThreadPoolExecutor(3) as pool:
        building = pool.submit(build_models)
        parallel = list(pool.map(sample, range(2)))
        building.result()
    assert parallel == sequential
    assert sequential[0] != sequential[1]


# --- the end of a completion


def test_a_completion_ends_with_its_first_stop_token_or_at_the_limit(policy, monkeypatch):
    stop_ids = list(range(2, 25))
    monkeypatch.setattr(generation, "find_stop_ids", lambda *_: stop_ids)
    samples = policy.generate(PROMPTS, seed=3, temperature=1.0, count=8)
    completions = list(chain.from_iterable(samples))
    assert {completion.finished for completion in completions} == {True, False}
    for completion in completions:
        assert not set(completion.ids[:-1]) & set(stop_ids)
        assert (completion.ids[-1] in stop_ids) == completion.finished
        assert completion.finished or len(completion.ids) == policy.config.max_new_tokens


def test_the_end_of_sequence_token_is_part_of_the_ids_and_not_of_the_text(policy, monkeypatch):
    def generate(input_ids, **_):
        return torch.cat([input_ids, torch.tensor([[41, 42, 2, 0, 0]])], 1)

    monkeypatch.setattr(continuous_batch, "supports_continuous_batch", lambda model: False)
    monkeypatch.setattr(policy.model, "generate", generate)
    completion = policy.generate(["p"], seed=0)[0][0]
    assert 2 in find_stop_ids(policy.model.generation_config, policy.tokenizer)
    assert completion.ids == (41, 42, 2)
    assert completion.finished
    assert "<eos>" not in completion.text
    assert completion.text == policy.tokenizer.decode([41, 42]).strip()


def test_progress_ends_with_all_rows(policy):
    reported = []
    policy.generate(PROMPTS, 0, 1.0, 2, max_new_tokens=1, progress=lambda *rows: reported.append(rows))
    assert reported == [(3, 8), (6, 8), (8, 8)]


# --- adapters


@pytest.fixture(scope="module")
def slot(debug):
    return AdapterSlot(attach_lora(load_backbone(debug.policy.backbone, "cpu"), debug.policy.lora))


def test_an_adapter_folder_changes_the_answers_and_can_be_disabled(debug, policy, slot, tmp_path):
    adapter = random_tensors(slot, seed=0, scale=1.0)
    folder = export_adapter(adapter, debug.policy.lora, debug.policy.backbone, tmp_path / "adapter")
    adapted = Policy(debug.policy, "cpu", folder)
    plain = policy.generate(PROMPTS, seed=0)
    assert adapted.generate(PROMPTS, seed=0) != plain
    with adapted.model.disable_adapter():
        assert adapted.generate(PROMPTS, seed=0) == plain


def test_prompts_are_assigned_to_clients_in_turn_by_their_sorted_names():
    assert assign_round_robin(5, ["cyd", "ada", "bea"]) == ["ada", "bea", "cyd", "ada", "bea"]


@pytest.fixture(scope="module")
def client_folder(debug, slot, tmp_path_factory):
    """A folder with random adapters of two clients."""
    adapters = {name: random_tensors(slot, seed, scale=1.0) for seed, name in enumerate(["bea", "ada"])}
    return save_client_adapters(adapters, debug.policy, tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def policies(debug, client_folder):
    return ClientPolicySet(debug.policy, "cpu", client_folder)


def test_a_folder_of_client_adapters_has_a_peft_folder_for_each_client(client_folder):
    folders = client_adapter_folders(client_folder)
    assert sorted(folders) == ["ada", "bea"]
    for folder in folders.values():
        assert (folder / "adapter_config.json").is_file()
        assert not has_client_adapters(folder)
    assert has_client_adapters(client_folder)
    assert not has_client_adapters(None)


def test_each_prompt_is_answered_by_the_policy_of_its_client_which_may_be_selected(
    policies, debug, client_folder
):
    expected = {
        client: Policy(debug.policy, "cpu", folder).generate(PROMPTS, seed=0)
        for client, folder in client_adapter_folders(client_folder).items()
    }
    clients = ["ada", "bea", "bea", "ada"]
    answers = policies.generate(PROMPTS, clients, seed=0)
    assert answers == [expected[client][n] for n, client in enumerate(clients)]
    assert expected["ada"] != expected["bea"]
    for client in ("ada", "bea", "ada"):
        assert policies.select(client).generate(PROMPTS, seed=0) == expected[client]


def test_a_client_without_a_policy_is_refused_with_the_names_of_the_others(policies):
    with pytest.raises(PolicyError, match="client_id 'nobody' has no policy here .*2: ada, bea"):
        policies.select("nobody")


def test_adapters_with_different_lora_configurations_are_refused(debug, slot, tmp_path):
    folder = save_client_adapters({"ada": slot.initial_adapter(0)}, debug.policy, tmp_path)
    wider = debug.policy.lora.model_copy(update={"r": 3})
    export_adapter(slot.initial_adapter(0), wider, debug.policy.backbone, folder / "bea")
    (folder / "clients.json").write_text('{"ada": "ada", "bea": "bea"}')
    with pytest.raises(PolicyError, match="do not have the same LoRA configuration"):
        ClientPolicySet(debug.policy, "cpu", folder)


@pytest.mark.parametrize("finished", [True, False])
def test_a_reply_keeps_the_white_space_that_a_completions_text_loses(policy, monkeypatch, finished):
    end = [policy.tokenizer.eos_token_id] if finished else []
    ids = (*policy.tokenizer.encode(" 1\n", add_special_tokens=False), *end)
    monkeypatch.setattr(policy, "generate", lambda *_, **__: [[Completion(ids, "1", finished)]])
    assert policy.write(["x"]) == [Reply(" 1\n", finished)]
