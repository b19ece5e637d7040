"""`train.precision: auto` is resolved for the device that is planned or trained on."""

import pytest

from shoal.config import config_from_mapping
from shoal.config.resolve import auto_precision, with_precision
from tests.plan.planning import plan


@pytest.mark.parametrize(
    ("is_cpu", "has_bf16", "precision"),
    [(True, True, "32-true"), (True, False, "32-true"), (False, True, "bf16-mixed"), (False, False, "16-mixed")],
)
def test_auto_is_fast_and_safe(is_cpu, has_bf16, precision):
    assert auto_precision(is_cpu=is_cpu, has_bf16=has_bf16) == precision


def test_an_explicit_precision_is_kept():
    model = {"shape": "gpt2", "tokenizer": "bytes"}
    asked = config_from_mapping({"model": model, "train": {"precision": "bf16-true"}})
    assert with_precision(asked, "32-true").train.precision == "bf16-true"
    assert with_precision(config_from_mapping({"model": model}), "32-true").train.precision == "32-true"


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [("h100-80gb", "bf16-mixed"), ("t4", "16-mixed"), ("v100-32gb", "16-mixed"), ("cpu", "32-true")],
)
def test_the_plan_is_for_the_precision_that_the_device_would_train_in(gpu, precision):
    assert plan("model.shape=pythia-160m", f"hardware.gpu={gpu}").choice.run.precision == precision
