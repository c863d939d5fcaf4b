"""The compiled step of a selector: the lengths of its rows, its values and gradients, its refusals."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from components.concurrency import run_concurrently
from components.models.compiled import CompiledLogits, CompileError, bucket_lengths, missing_tool
from tests.support.compiled import COMPARISONS, digest, load_selector, logits_and_gradients

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
    yield load_selector(debug), load_selector(debug, compiled=True)
    torch.compiler.reset()


@pytest.fixture(scope="module")
def rows(selectors):
    """Six rows of token ids whose longest is not one of the padded lengths."""
    plain, compiled = selectors
    rows = [plain.encode(comparison) for comparison in COMPARISONS]
    assert max(map(len, rows)) not in compiled._compiled.lengths
    return rows


@pytest.mark.slow
def test_a_compiled_step_has_the_logits_and_the_gradients_of_the_step_as_it_is(selectors, rows):
    plain, compiled = (logits_and_gradients(selector, rows) for selector in selectors)
    assert torch.allclose(plain[0], compiled[0], atol=1e-5)
    assert any(gradient.abs().max() > 1e-3 for gradient in plain[1])
    for expected, gradient in zip(plain[1], compiled[1], strict=True):
        assert torch.allclose(expected, gradient, atol=1e-5)


def test_padding_to_a_length_changes_no_logit(tiny_selector, random_adapter):
    tiny_selector.slot.load(random_adapter(0))
    rows = [tiny_selector.encode(comparison) for comparison in COMPARISONS]
    padded = tiny_selector.collate(rows, width=256)
    assert padded[0].shape == (6, 256)
    logits = tiny_selector.choice_logits(*tiny_selector.collate(rows))
    assert torch.allclose(tiny_selector.choice_logits(*padded), logits, atol=1e-5)
    assert logits.std() > 1e-3


@pytest.mark.slow
def test_another_process_computes_the_same_bytes(selectors, rows):
    program = (
        "import torch; torch.set_num_threads(1);"
        " from components.recipes import load_recipe; from tests.support import compiled;"
        " selector = compiled.load_selector(load_recipe('debug'), compiled=True);"
        " print(compiled.digest(selector, [selector.encode(row) for row in compiled.COMPARISONS]))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == digest(selectors[1], rows)


@pytest.mark.slow
def test_a_step_beside_a_compilation_has_the_bytes_of_one_alone(selectors, rows):
    """The halves of a minibatch are computed at a time, and may have two lengths."""
    _, compiled = selectors
    alone = digest(compiled, rows)
    digests, compiling, ended = set(), set(), threading.Event()

    def repeat():
        while not ended.is_set():
            logits = compiled.training_logits(rows)
            digests.add(logits.detach().numpy().tobytes())
            compiling.add(torch.compiler.is_compiling())
            ended.wait(0.2)  # leaves the cores to the compilation

    with ThreadPoolExecutor(1) as executor:
        repeated = executor.submit(repeat)
        try:
            compiled.training_logits([row[:20] for row in rows])
        finally:
            ended.set()
        repeated.result()
    assert True in compiling
    assert len(digests) == 1
    assert digest(compiled, rows) == alone


@pytest.mark.slow
def test_concurrent_parts_have_the_bytes_of_one_part_after_the_other(selectors, rows):
    _, compiled = selectors

    def compute():
        return compiled.training_logits(rows).detach()

    first = compute()
    for logits in run_concurrently([compute, compute], at_once=2):
        assert torch.equal(logits, first)
