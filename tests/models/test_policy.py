"""The policy: prompts that keep their template, and batched generation that does not depend on the batch."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from components.data.templates import load
from components.learning.policy import ResidentPolicy
from components.models.adapters import AdapterSlot, attach, export_adapter
from components.models.backbone import load_backbone
from components.models.policy import Policy, PolicyError, check_prompts, complete, encode_prompt, stop_ids

PROMPTS = ["a paper", "quite another and a longer paper", "x", "the fourth of the papers is the longest by far, and says little"]


@pytest.fixture(scope="module")
def policy(debug):
    config = debug.policy.model_copy(update={"generation_batch_size": 3})
    return Policy(config, "cpu")


def test_a_prompt_is_a_users_turn_in_the_chat_template_and_the_answer_begins_after_it(policy):
    text = policy.tokenizer.decode(policy.encode("the paper"))
    assert text == f"<bos>user: {policy.template.render(prompt='the paper').strip()}<eos><bos>assistant: "


def test_a_system_turn_stands_before_the_users_and_is_never_cut(policy, monkeypatch):
    plain = policy.tokenizer.decode(policy.encode("the paper"))
    for system in ("", "be brief"):
        monkeypatch.setattr(policy, "config", policy.config.model_copy(update={"system": system}))
        assert policy.tokenizer.decode(policy.encode("the paper")) == f"<bos>system: {system}<eos>{plain}"
    assert policy.tokenizer.decode(policy.encode("long " * 400)).startswith("<bos>system: be brief<eos><bos>user: ")


def test_a_chat_template_that_takes_no_system_turn_is_named_before_a_model_is_loaded(policy, monkeypatch):
    monkeypatch.setattr(policy.tokenizer, "chat_template", "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + policy.tokenizer.chat_template)
    monkeypatch.setattr("components.models.policy.load_tokenizer", lambda backbone: policy.tokenizer)
    check_prompts(policy.config)
    with pytest.raises(PolicyError, match=r"refuses the prompt \(System role not supported\), before which policy.system puts a system turn"):
        check_prompts(policy.config.model_copy(update={"system": "be brief"}))
    with pytest.raises(PolicyError, match="more than policy.max_prompt_tokens 20"):
        check_prompts(policy.config.model_copy(update={"max_prompt_tokens": 20}))


def test_without_a_chat_template_the_prompt_is_the_policy_template(policy, monkeypatch):
    monkeypatch.setattr(policy.tokenizer, "chat_template", None)
    assert policy.tokenizer.decode(policy.encode("the paper")) == policy.template.render(prompt="the paper")


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("most", [260, 290, 320])
def test_a_long_prompt_loses_one_end_and_the_template_stays(policy, most, mode):
    prompt = "".join(f"{i}," for i in range(400))
    ids = encode_prompt(policy.tokenizer, policy.template, prompt, most, mode)
    before, after = policy.tokenizer.decode(policy.encode("@")).split("@")
    text = policy.tokenizer.decode(ids)
    assert len(ids) == most and text.startswith(before) and text.endswith(after)
    kept = text[len(before):-len(after)]
    assert 0 < len(kept) < len(prompt) and (prompt.startswith(kept) if mode == "keep_start" else prompt.endswith(kept))


def test_the_recipe_says_which_end_of_a_long_prompt_stays(policy, monkeypatch):
    prompt, config = "".join(f"{i}," for i in range(400)), policy.config.model_copy(update={"max_prompt_tokens": 290})
    for mode in ("keep_start", "keep_end"):
        monkeypatch.setattr(policy, "config", config.model_copy(update={"truncation_mode": mode}))
        assert policy.encode(prompt) == encode_prompt(policy.tokenizer, policy.template, prompt, 290, mode)


def test_a_template_that_does_not_fit_is_refused(policy):
    with pytest.raises(PolicyError, match=r"'summarization/policy' alone takes \d+ tokens, more than policy.max_prompt_tokens 50"):
        encode_prompt(policy.tokenizer, load("summarization/policy", "policy"), "p", 50)


def test_greedy_answers_are_the_same_in_a_batch_alone_and_in_another_order(policy):
    together = policy.generate(PROMPTS, seed=0)
    assert together == [policy.generate([p], seed=9)[0] for p in PROMPTS] == policy.generate(PROMPTS[::-1], seed=1)[::-1]
    assert all(len(c) == 1 and len(c[0].ids) <= policy.config.max_new_tokens for c in together)


def test_a_greedy_answer_is_the_arg_max_of_the_models_own_logits(policy):
    ids, expected = policy.encode(PROMPTS[1]), []
    with torch.no_grad():
        for _ in range(4):
            expected.append(int(policy.model(input_ids=torch.tensor([[*ids, *expected]])).logits[0, -1].argmax()))
    assert policy.generate([PROMPTS[1]], seed=0, max_new_tokens=4)[0][0].ids == tuple(expected)


def test_samples_are_a_function_of_the_seed_and_the_global_generator_stays(policy):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = policy.generate(PROMPTS, seed=1, temperature=0.7, count=2)
    assert torch.equal(torch.rand(3), expected)
    assert first == policy.generate(PROMPTS, seed=1, temperature=0.7, count=2) != policy.generate(PROMPTS, seed=2, temperature=0.7, count=2)
    assert all(one.ids != two.ids for one, two in first)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_have_the_distribution_of_the_models_softmax(policy, temperature):
    ids = policy.encode("x")
    with torch.no_grad():
        wanted = (policy.model(input_ids=torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(0)
    count = 6000
    drawn = complete(policy.model, policy.tokenizer, [ids], "cpu", 1500, 1, seed=3, temperature=temperature, count=count)[0]
    found = torch.bincount(torch.tensor([one.ids[0] for one in drawn]), minlength=len(wanted)) / count
    errors = (wanted * (1 - wanted) / count).sqrt()
    assert ((found - wanted).abs() / errors).max() < 5 and (found - wanted).abs().sum() / 2 < 0.15 and wanted.max() / wanted.min() > 1.2


def test_what_the_backbones_own_generation_settings_do_to_logits_is_done_to_no_sample(debug, policy, monkeypatch):
    from components.models import policy as module

    def suppressing(*given):
        model = load_backbone(*given)
        model.generation_config.suppress_tokens, model.generation_config.eos_token_id = list(range(100, 250)), [7, 9]
        return model

    monkeypatch.setattr(module, "load_backbone", suppressing)
    other = Policy(policy.config, "cpu")
    assert other.generate(PROMPTS, seed=1, temperature=0.7) == policy.generate(PROMPTS, seed=1, temperature=0.7)
    assert set(stop_ids(other.model, other.tokenizer)) == {7, 9, other.tokenizer.eos_token_id}
    other.model.generation_config.suppress_tokens = list(range(100, 250))
    assert other.generate(PROMPTS, seed=1, temperature=0.7) != policy.generate(PROMPTS, seed=1, temperature=0.7)     # it would


def test_clients_side_by_side_sample_what_they_would_sample_one_after_the_other(debug):
    policies = [Policy(debug.policy, "cpu") for _ in range(2)]

    def answers(n):
        return [policies[n].generate(PROMPTS, seed, temperature=1.0, max_new_tokens=12) for seed in range(6 * n, 6 * n + 6)]

    def builds(_):
        for _ in range(6):      # draws first values of its LoRA from the process's generator
            ResidentPolicy(debug.policy, "cpu")

    alone = [answers(0), answers(1)]
    with ThreadPoolExecutor(3) as side_by_side:
        third = side_by_side.submit(builds, 0)
        assert list(side_by_side.map(answers, range(2))) == alone and alone[0] != alone[1]
        third.result()


def test_several_greedy_completions_are_refused(policy):
    with pytest.raises(PolicyError, match="2 greedy completions of a prompt would be the same"):
        policy.generate(PROMPTS, seed=0, count=2)


def test_a_completion_ends_with_its_first_stop_token_or_at_the_limit(policy, monkeypatch):
    stops = list(range(2, 25))
    monkeypatch.setattr("components.models.policy.stop_ids", lambda *_: stops)
    completions = [c for answers in policy.generate(PROMPTS, seed=3, temperature=1.0, count=8) for c in answers]
    assert {c.finished for c in completions} == {True, False}
    for c in completions:
        assert not set(c.ids[:-1]) & set(stops)
        assert (c.ids[-1] in stops) == c.finished and (c.finished or len(c.ids) == policy.config.max_new_tokens)


def test_the_end_of_sequence_token_is_in_the_ids_and_not_in_the_text(policy, monkeypatch):
    assert 2 in stop_ids(policy.model, policy.tokenizer)
    monkeypatch.setattr(policy.model, "generate", lambda input_ids, **_: torch.cat([input_ids, torch.tensor([[41, 42, 2, 0, 0]])], 1))
    completion = policy.generate(["p"], seed=0)[0][0]
    assert completion.ids == (41, 42, 2) and completion.finished and "<eos>" not in completion.text
    assert completion.text == policy.tokenizer.decode([41, 42]).strip()


def test_progress_ends_with_all_rows(policy):
    seen = []
    policy.generate(PROMPTS, seed=0, temperature=1.0, count=2, max_new_tokens=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 8), (6, 8), (8, 8)]


def test_an_adapter_folder_changes_the_answers_and_can_be_switched_off(debug, policy, tmp_path):
    from components.models.backbone import load_backbone

    slot = AdapterSlot(attach(load_backbone(debug.policy.backbone, "cpu"), debug.policy.lora))
    numbers = torch.Generator().manual_seed(0)
    adapter = {n: torch.randn(p.shape, generator=numbers) for n, p in zip(slot.names, slot.parameters, strict=True)}
    adapted = Policy(debug.policy, "cpu", export_adapter(adapter, debug.policy.lora, "tiny-random", tmp_path / "adapter"))
    plain = policy.generate(PROMPTS, seed=0)
    assert adapted.generate(PROMPTS, seed=0) != plain
    with adapted.model.disable_adapter():
        assert adapted.generate(PROMPTS, seed=0) == plain
