"""The setting of torch by which a frozen reward model's products use TF32."""

import threading

import pytest
import torch

from components.models.rewards.classifier import tf32_products

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(params=["none", "ieee", "tf32"])
def before(request):
    """A setting of the process, which the test finds and must leave."""
    torch.set_float32_matmul_precision("high" if request.param == "tf32" else "highest")
    MATMUL.fp32_precision = request.param
    yield request.param
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = "none"


def test_products_use_tf32_inside_and_the_setting_is_restored_even_after_an_error(before):
    with tf32_products():
        assert MATMUL.fp32_precision == "tf32"
    assert MATMUL.fp32_precision == before
    with tf32_products():
        assert MATMUL.allow_tf32
    assert MATMUL.allow_tf32 == (before == "tf32")
    assert torch.get_float32_matmul_precision() == ("high" if before == "tf32" else "highest")
    with pytest.raises(KeyError), tf32_products():
        raise KeyError
    assert MATMUL.fp32_precision == before


def test_the_setting_stays_until_the_last_thread_has_left(before):
    entered, leave = threading.Event(), threading.Event()

    def score():
        with tf32_products():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=score)
    with tf32_products():
        thread.start()
        assert entered.wait(60)
    assert MATMUL.fp32_precision == "tf32"
    leave.set()
    thread.join()
    assert MATMUL.fp32_precision == before
