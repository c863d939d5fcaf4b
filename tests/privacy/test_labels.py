"""Randomised response on verdicts, and estimates that are corrected for it."""

import math
import os
from collections import Counter
from dataclasses import replace

import pytest

from components.config.privacy import LabelPrivacy
from components.data.records import Pair
from components.privacy.labels import NoisedVerdicts
from components.privacy.secrets import digest, kept_secret, simulated_secret

SECRET = bytes(range(32))


def pairs(count, swapped=()):
    made = []
    for n in range(count):
        texts = (f"answer {n}", f"reply {n}")
        chosen, rejected = texts[::-1] if n in swapped else texts
        made.append(Pair(f"prompt {n}", chosen, rejected, "ada", pair_id=str(n), margin=1.0, domain="d"))
    return made


def is_exchanged(pair):
    return pair.chosen.startswith("reply")


@pytest.mark.parametrize(("epsilon", "flip"), [(1, 0.26894), (2, 0.11920)])
def test_verdicts_are_exchanged_with_the_probability_of_epsilon(epsilon, flip):
    section = LabelPrivacy(epsilon=epsilon)
    assert section.flip == pytest.approx(flip, abs=1e-5)
    assert math.log((1 - section.flip) / section.flip) == pytest.approx(epsilon)
    for swapped, share in ((range(0), flip), (range(20_000), 1 - flip)):
        noised = NoisedVerdicts(section.flip, SECRET).apply(pairs(20_000, swapped))
        exchanged = sum(map(is_exchanged, noised))
        deviation = math.sqrt(20_000 * flip * (1 - flip))
        assert abs(exchanged - 20_000 * share) < 4 * deviation


def test_the_noise_is_the_same_each_time_and_that_of_the_secret():
    noised = NoisedVerdicts(0.3, SECRET).apply(pairs(200))
    assert NoisedVerdicts(0.3, SECRET).apply(pairs(200)[::-1]) == noised
    some = {pair.prompt: pair for pair in NoisedVerdicts(0.3, SECRET).apply(pairs(100))}
    assert all(some[pair.prompt] == pair for pair in noised if pair.prompt in some), "in all jobs and splits"
    other = NoisedVerdicts(0.3, bytes(32)).apply(pairs(200))
    assert 20 < sum(one != two for one, two in zip(noised, other, strict=True)) < 180


def test_what_is_replaced_by_coins_does_not_depend_on_the_verdict(monkeypatch):
    """Where all verdicts are replaced by coins, rows, their order and ids are the same for all verdicts."""
    coin = lambda self, texts, place, number: bytes(8) + digest(SECRET, *texts, str(number))  # noqa: E731
    monkeypatch.setattr(NoisedVerdicts, "_draw", coin)
    replaced = NoisedVerdicts(0.3, SECRET)
    assert replaced.apply(pairs(100)) == replaced.apply(pairs(100, swapped=range(0, 100, 3)))
    one, other = (replace(pair, domain=name) for name, pair in zip("ab", pairs(1) * 2, strict=True))
    both = [replaced.apply([one, swap(other)]), replaced.apply([swap(one), other])]
    assert [[pair.domain for pair in rows] for rows in both] == [["a", "b"]] * 2
    assert {pair.margin for pair in replaced.apply(pairs(5))} == {None}
    assert {pair.domain for pair in replaced.apply(pairs(5))} == {"d"}


def swap(pair):
    return replace(pair, chosen=pair.rejected, rejected=pair.chosen)


def test_another_epsilon_and_a_changed_verdict_have_independent_noise():
    """With common draws, two answers that differ would tell which verdict is the true one."""
    first = [is_exchanged(pair) for pair in NoisedVerdicts(0.3, SECRET).apply(pairs(20_000))]
    for flip, swapped in ((0.2, range(0)), (0.3, range(20_000))):
        again = [is_exchanged(pair) for pair in NoisedVerdicts(flip, SECRET).apply(pairs(20_000, swapped))]
        expected = 0.3 * (1 - flip if swapped else flip)
        both = sum(a and b for a, b in zip(first, again, strict=True)) / 20_000
        assert abs(both - expected) < 4 * math.sqrt(expected * (1 - expected) / 20_000)


def test_a_further_judgement_of_the_same_texts_leaves_the_noise_of_the_others():
    own, other = pairs(1)[0], swap(pairs(1)[0])
    for n in range(50):
        noise = NoisedVerdicts(0.4, n.to_bytes(32, "big"))
        (alone,) = noise.apply([own])
        assert alone.chosen in {pair.chosen for pair in noise.apply([own, other])}


def test_each_of_several_judgements_of_the_same_texts_has_noise_of_its_own():
    one = pairs(1)[0]
    other = pairs(1, swapped=[0])[0]
    outcomes = Counter()
    for n in range(4000):
        noised = NoisedVerdicts(0.25, n.to_bytes(32, "big")).apply([one, other])
        assert len({pair.pair_id for pair in noised}) == 2
        outcomes[sum(map(is_exchanged, noised))] += 1
    # Of independent noise: both exchanged to one verdict with 2 p (1 - p), each way with half of it.
    for both in (0, 2):
        assert abs(outcomes[both] - 4000 * 0.1875) < 4 * math.sqrt(4000 * 0.1875 * 0.8125)


def test_a_secret_is_made_once_and_only_its_owner_reads_it(tmp_path):
    path = tmp_path / "client" / "secret"
    secret = kept_secret(path)
    assert len(secret) == 32 and kept_secret(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["secret"]
    assert kept_secret(tmp_path / "other") != secret
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes"):
        kept_secret(path)


def test_digests_separate_their_parts():
    assert digest(SECRET, "ab", "c") != digest(SECRET, "a", "bc")
    assert digest(SECRET, "ab") != digest(bytes(32), "ab")
    assert simulated_secret(0, "ada") == simulated_secret(0, "ada")
    assert len({simulated_secret(0, "ada"), simulated_secret(1, "ada"), simulated_secret(0, "bea")}) == 3
