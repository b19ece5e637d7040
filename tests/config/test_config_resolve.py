"""`train.precision: auto` is resolved for the device that is planned or trained on."""

import pytest

from shoal.config import config_from_mapping
from shoal.config.resolve import with_precision
from shoal.parallel.device import Device
from tests.plan.planning import plan


@pytest.mark.parametrize(
    ("capability", "precision"),
    [(None, "32-true"), ((7, 0), "16-mixed"), ((7, 5), "16-mixed"), ((8, 0), "bf16-mixed"), ((9, 0), "bf16-mixed")],
    ids=["cpu", "volta", "turing", "ampere", "hopper"],
)
def test_training_takes_the_precision_that_the_tensor_cores_have(capability, precision):
    assert Device(None, None, capability).auto_precision == precision


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
