"""References that train nothing: examples in the prompt, and selectors by a rule."""

import numpy as np
import pytest

from components.config import RecipeError
from components.federation.clients.few_shot_client import draw_examples
from components.federation.clients.rule_selector import RuleSelector
from components.federation.clients.worker import build_trainer
from components.federation.protocol import GenerateJob, Generation, MeasureJob, build_federation
from components.models.policy import PolicyError, PolicyTexts
from components.models.selector import Comparison
from components.recipes import load_recipe
from components.recipes.model_checks import model_uses
from tests.support.bound_methods import put_values

PAIRS = [
    Comparison("Why?", "Because it is so, as everybody knows.", "So."),
    Comparison("Where?", "There.", "Over there, behind the house."),
]


def recipe(method, *overrides):
    return load_recipe("debug", [f"federation.method={method}", *overrides])


@pytest.mark.parametrize("method", ["few_shot", "few_shot_selector", "rule"])
def test_a_method_without_rounds_ends_where_it_starts(method, store):
    config = recipe(method).federation
    bound = config.options
    federation = build_federation({"ada": {"train": 2, "validation": 0}}, put_values(store, [0.0]), 1)
    state = bound.start(federation, 0)
    assert bound.local().rounds(config) == 0
    assert bound.local().gradient_evaluations(config, 8) == 0
    outcome = bound.outcome(state)
    assert outcome.adapters == {bound.trained_model: federation.initial}
    assert outcome.clients == (["ada"] if method == "few_shot" else [])


# --- examples


@pytest.fixture(scope="module")
def few_shot():
    return build_trainer(recipe("few_shot", "federation.options.shots=2"), "cpu")


def measured(trainer, contexts, client="ada"):
    start = contexts.adapters.put(trainer.initial_adapter(0))
    job = MeasureJob(client=client, round=0, seed=0, adapters=(start,), split="test")
    return trainer.run(job, contexts.open(client)).output


def test_the_examples_are_the_clients_own_training_pairs_and_the_same_each_time(contexts):
    own = contexts.open("ada")
    drawn = draw_examples(own, 3, 0)
    assert drawn == draw_examples(own, 3, 0)
    training = own.rows("train")
    assert len(drawn) == 3
    assert all(row in training for row in drawn)
    assert draw_examples(own, 3, 1) != drawn
    assert len(draw_examples(own, 10_000, 0)) == len(training)


def test_pairs_are_scored_after_the_examples_and_the_reference_without(few_shot, contexts):
    policy = few_shot.resident.policy
    figures = measured(few_shot, contexts)
    assert policy.examples == ()
    (row,) = draw_examples(contexts.open("ada"), 2, 0)[:1]
    pair = contexts.open("ada").rows("test")[0]
    plain = few_shot.resident.score([few_shot.resident.encode(*pair.texts)], 1)
    policy.examples, policy.max_example_tokens = ((row.prompt, row.chosen),), 1024
    try:
        ids = few_shot.resident.encode(*pair.texts)
        shown = few_shot.resident.score([ids], 1)
    finally:
        policy.examples = ()
    assert row.chosen in policy.tokenizer.decode(ids[0])
    assert not np.allclose(plain, shown)
    assert figures["margin"] != 0


def test_answers_and_kl_are_those_with_the_examples_shown(few_shot, contexts):
    start = contexts.adapters.put(few_shot.initial_adapter(0))
    head = {"client": "ada", "round": 0, "seed": 0, "adapters": (start,)}
    one = (Generation(prompts=("Why?",), seed=1, temperature=1.0),)
    kl = few_shot.run(GenerateJob(**head, generations=one, kl=True), contexts.open("ada"))
    assert kl.output[0] > 0
    wanted = (Generation(prompts=("Why?",), seed=0, temperature=1.0, count=2),)
    answers = few_shot.run(GenerateJob(**head, generations=wanted), contexts.open("ada"))
    assert len(answers.output[0][0]) == 2
    assert few_shot.resident.policy.examples == ()


def test_whole_examples_are_left_out_where_they_take_too_many_tokens():
    texts = PolicyTexts(recipe("few_shot").policy)
    alone = texts.encode("Why?")
    texts.examples = (("One?", "First."), ("Two?", "Second."))
    texts.max_example_tokens = 10_000
    both = texts.encode("Why?")
    texts.examples = texts.examples[:1]
    one = texts.encode("Why?")
    assert len(alone) < len(one) < len(both)
    texts.examples = (("One?", "First."), ("Two?", "Second."))
    texts.max_example_tokens = len(one) - len(alone)
    assert texts.encode("Why?") == one
    texts.max_example_tokens -= 1
    with pytest.raises(PolicyError, match="the first one takes 202 tokens, and .*max_example_tokens is 201"):
        texts.encode("Why?")


def test_examples_are_turns_before_the_prompt_and_after_the_system_turn():
    config = recipe("few_shot", "policy.backbone.name=embedded", "policy.system=Be brief.").policy
    texts = PolicyTexts(config)
    texts.examples, texts.max_example_tokens = (("One?", "First."),), 1024
    rendered = texts.render("Why?")
    assert [turn["role"] for turn in rendered.messages] == ["system", "user", "assistant", "user"]
    assert rendered.messages[2]["content"] == "First."
    assert rendered.text.index("Be brief.") < rendered.text.index("First.") < rendered.text.index("Why?")


def test_a_few_shot_selector_reads_solved_comparisons_first(contexts):
    trainer = build_trainer(recipe("few_shot_selector", "federation.options.shots=2"), "cpu")
    selector = trainer.selector
    plain = selector.encode(PAIRS[0])
    rows = draw_examples(contexts.open("ada"), 2, 0)
    prefix = trainer._encode_examples(rows)
    assert [prefix.count(choice) >= 1 for choice in selector.choices] == [True, True]
    text = selector.tokenizer.decode(prefix)
    assert text.index(rows[0].chosen[:20]) < text.index(rows[0].rejected[:20])
    assert text.index(rows[1].rejected[:20]) < text.rindex(rows[1].chosen[:20])
    selector.prefix = prefix
    assert selector.encode(PAIRS[0])[-len(plain) + 1 :] == plain[1:]
    selector.prefix = ()
    figures = measured(trainer, contexts)
    assert figures["pairs"] > 0
    assert selector.prefix == ()


@pytest.mark.parametrize(("method", "key"), [("few_shot", "policy"), ("few_shot_selector", "selector")])
def test_the_tokens_of_examples_belong_to_the_longest_input(method, key):
    plain, longer = (
        {
            use.key: use.length
            for use in model_uses(recipe(method, f"federation.options.max_example_tokens={n}"))
        }
        for n in (1, 101)
    )
    assert {name for name in plain if longer[name] != plain[name]} == {key}
    assert longer[key] == plain[key] + 100


def test_an_example_that_does_not_fit_is_left_out_and_a_later_one_is_shown():
    texts = PolicyTexts(recipe("few_shot").policy)
    texts.examples, texts.max_example_tokens = (("Two?", "Second."),), 10_000
    alone = texts.encode("Why?")
    texts.examples = (("One?", "First, and so on and on and on, for a long time."), ("Two?", "Second."))
    texts.max_example_tokens = len(alone) - len(PolicyTexts(texts.config).encode("Why?"))
    assert texts.encode("Why?") == alone


# --- rules


def margins(rule):
    return RuleSelector.of(recipe("rule", f"federation.options.rule={rule}"), "cpu").margins(PAIRS)


def test_the_longer_and_the_first_completion_are_chosen():
    assert margins("longer").tolist() == [len(PAIRS[0].first) - 3, 6 - len(PAIRS[1].second)]
    assert margins("first").tolist() == [1.0, 1.0]


def test_likelihood_is_the_mean_of_a_token_under_the_base_policy():
    selector = RuleSelector.of(recipe("rule", "federation.options.rule=likelihood"), "cpu")
    policy = selector._policy
    rows = [policy.encode(one.prompt, one.first, one.second) for one in PAIRS]
    logprobs = policy.score(rows, 2, reference=True)
    expected = [own[0] / len(row[1]) - own[1] / len(row[2]) for own, row in zip(logprobs, rows, strict=True)]
    assert selector.margins(PAIRS) == pytest.approx(expected)
    from components.models.selector_model import BatchShare

    shares = [selector.margins(PAIRS, BatchShare(n, 2)) for n in range(2)]
    assert sum(shares) == pytest.approx(expected)


def test_a_choice_of_the_first_is_right_on_half_of_the_pairs(contexts):
    trainer = build_trainer(recipe("rule", "federation.options.rule=first"), "cpu")
    figures = measured(trainer, contexts)
    assert figures["votes"] == figures["pairs"] / 2
    longer = measured(build_trainer(recipe("rule"), "cpu"), contexts)
    rows = contexts.open("ada").rows("test")
    gains = [len(row.chosen) - len(row.rejected) for row in rows]
    assert longer["votes"] == sum(1.0 if gain > 0 else 0.5 if gain == 0 else 0.0 for gain in gains)


def test_an_unknown_rule_is_refused():
    with pytest.raises(RecipeError, match="shorter"):
        recipe("rule", "federation.options.rule=shorter")
