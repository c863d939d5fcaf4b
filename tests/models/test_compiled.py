"""The compiled step of a selector: the lengths of its rows, its values and gradients, its refusals."""

import pytest
import torch

from components.concurrency import run_concurrently
from components.models.compiled import CompiledLogits, CompileError, bucket_lengths, missing_tool
from components.models.selector import Comparison, Selector
from tests.support.adapters import random_tensors

NO_COMPILER = missing_tool("cpu")


@pytest.mark.parametrize(
    ("max_length", "lengths"),
    [
        (1024, [128, 256, 384, 512, 640, 768, 896, 1024]),
        (20, [3, 5, 8, 10, 13, 15, 18, 20]),
        (3, [1, 2, 3]),
        (1, [1]),
    ],
)
def test_rows_have_one_of_eight_lengths_up_to_the_longest_input(max_length, lengths):
    assert bucket_lengths(max_length) == lengths


@pytest.mark.parametrize(("length", "width"), [(1, 128), (128, 128), (129, 256), (1024, 1024)])
def test_a_batch_is_padded_to_the_next_length(length, width):
    logits = CompiledLogits.__new__(CompiledLogits)
    logits.lengths = bucket_lengths(1024)
    assert logits.width(length) == width


def test_a_missing_compiler_is_named_with_what_to_install(no_compiler):
    assert "g++" in missing_tool("cpu")
    with pytest.raises(CompileError, match=r"runtime\.compile.*C\+\+ compiler.*g\+\+"):
        CompiledLogits(lambda ids, last: ids, 16, "cpu")


@pytest.fixture(scope="module")
def selectors(debug):
    """The tiny selector without dropout, as it is and compiled, with equal adapters."""
    if NO_COMPILER:
        pytest.skip(NO_COMPILER)
    lora = debug.selector.lora.model_copy(update={"dropout": 0.0})
    config = debug.selector.model_copy(update={"lora": lora})
    plain, compiled = Selector(config, "cpu"), Selector(config, "cpu", compiled=True)
    adapter = random_tensors(plain.slot, seed=1, scale=0.2)
    for selector in (plain, compiled):
        selector.slot.load(adapter)
    yield plain, compiled
    torch.compiler.reset()


@pytest.fixture(scope="module")
def rows(selectors):
    """Six rows of token ids whose longest is not one of the padded lengths."""
    plain, compiled = selectors
    rows = [plain.encode(Comparison(f"prompt {n}" * n, "yes sure " * n, "no")) for n in range(1, 7)]
    assert max(map(len, rows)) not in compiled._compiled.lengths
    return rows


def logits_and_gradients(selector, rows):
    for parameter in selector.slot.parameters:
        parameter.grad = None
    logits = selector.training_logits(rows)
    torch.nn.functional.cross_entropy(logits, torch.arange(len(rows)) % 2).backward()
    return logits.detach(), [parameter.grad for parameter in selector.slot.parameters]


@pytest.mark.slow
def test_a_compiled_step_has_the_logits_and_the_gradients_of_the_step_as_it_is(selectors, rows):
    plain, compiled = (logits_and_gradients(selector, rows) for selector in selectors)
    assert torch.allclose(plain[0], compiled[0], atol=1e-5)
    assert any(gradient.abs().max() > 1e-3 for gradient in plain[1])
    for expected, gradient in zip(plain[1], compiled[1], strict=True):
        assert torch.allclose(expected, gradient, atol=1e-5)


@pytest.mark.slow
def test_concurrent_parts_have_the_bytes_of_one_part_after_the_other(selectors, rows):
    _, compiled = selectors

    def compute():
        return compiled.training_logits(rows).detach()

    first = compute()
    for logits in run_concurrently([compute, compute], at_once=2):
        assert torch.equal(logits, first)
