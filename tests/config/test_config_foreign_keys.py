"""Keys of other tools: the error names our key, wherever in the config they are."""

from itertools import cycle
from pathlib import Path

import pytest

from shoal.config import config_from_mapping, load_config
from shoal.config.foreign_keys import FOREIGN_KEYS, WORDS
from shoal.config.schema import every_key
from shoal.mistakes import UserMistake

BASE = "model: {shape: gpt2}\n"
ACCUMULATION = (
    "train.grad_accum sets the gradient accumulation steps; or train.global_batch sets the sequences per optimizer "
    "step, over all devices."
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def mistake_in(text: str, *overrides: str) -> str:
    Path("run.yaml").write_text(BASE + text)
    with pytest.raises(UserMistake) as caught:
        load_config("run.yaml", overrides)
    return str(caught.value)


def test_every_name_maps_to_an_existing_key_and_none_is_listed_twice() -> None:
    assert {ours.key for ours in FOREIGN_KEYS.values()} <= {key for key, _ in every_key()}
    names = [name for _, _, names in WORDS for name in names.split()]
    assert sorted(names) == sorted(set(names))


def test_no_key_of_ours_is_listed_as_another_tools() -> None:
    assert not {key for key, _ in every_key()} & FOREIGN_KEYS.keys()


def test_every_name_is_answered_with_one_sentence_at_the_top_and_in_a_block() -> None:
    known = {key for key, _ in every_key()}
    blocks = cycle(["train", "data", "parallel", "training"])
    wrong = []
    for name, ours in FOREIGN_KEYS.items():
        *block, key = name.split(".")
        for above in [*block] or ["", next(blocks)]:
            dotted = f"{above}.{key}"
            if dotted in known:
                continue
            with pytest.raises(UserMistake) as caught:
                config_from_mapping({"model": {"shape": "gpt2"}, **({above: {key: 1}} if above else {key: 1})})
            if str(caught.value) != f"{dotted.lstrip('.')} is not a key shoal knows: {ours.key} {ours.says}.":
                wrong.append(str(caught.value))
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "train:\n  gradient_accumulation_steps: 4",
            f"run.yaml:3: train.gradient_accumulation_steps is not a key shoal knows: {ACCUMULATION}",
        ),
        (
            "learning_rate: 1",
            "run.yaml:2: learning_rate is not a key shoal knows: train.lr sets the peak learning rate.",
        ),
        (
            "train.gradient-accumulation-steps: 4",
            f"run.yaml:2: train.gradient-accumulation-steps is not a key shoal knows: {ACCUMULATION}",
        ),
        (
            "zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}",
            "run.yaml:2: zero_optimization is not a key shoal knows: parallel.strategy takes zero1, zero2 or zero3 for "
            "the stages of ZeRO.",
        ),
        (
            "eval: {max_iters: 9}",
            "run.yaml:2: eval.max_iters is not a key shoal knows: eval.batches takes the most batches in one "
            "evaluation.",
        ),
        (
            "defaults: [base, {optimizer: adam}]",
            "run.yaml:2: defaults is not a key shoal knows: include takes the YAML files that this one builds on, as "
            "in "
            "[base.yaml]; shoal import CONFIG.yaml translates a config of Hydra.",
        ),
        (
            "train: {loss: fused}",
            "run.yaml:2: train.loss is not a key shoal knows: train.loss_impl takes chunked or fused, which never "
            "store all logits, plain or auto.",
        ),
    ],
)
def test_another_tools_key_is_answered_with_ours(text: str, says: str) -> None:
    assert mistake_in(text) == says


def test_another_tools_block_is_answered_key_by_key() -> None:
    text = "training:\n  seq_len: 2048\n  local_batch_size: 8\n"
    assert mistake_in(text).splitlines() == [
        "run.yaml:3: training.seq_len is not a key shoal knows: data.max_length sets the tokens per sequence.",
        "run.yaml:4: training.local_batch_size is not a key shoal knows: train.micro_batch sets the sequences per "
        "device and forward pass.",
    ]
    lines = mistake_in("training:\n  seq_len: 2048\n  dataset_qqq: x\n").splitlines()
    assert [line.partition(" is not")[0] for line in lines] == ["run.yaml:2: training", "run.yaml:3: training.seq_len"]


@pytest.mark.parametrize(
    "key", ["gradient_accumulation_steps", "train.gradient_accumulation_steps", "job.grad_accum_steps"]
)
def test_an_override_with_another_tools_key_is_answered_with_ours(key: str) -> None:
    assert mistake_in("", f"{key}=4") == f"override {key}=4: {key} is not a key shoal knows: {ACCUMULATION}"
