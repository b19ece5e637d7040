"""Error messages of invalid configs: one sentence, with file and line, without pydantic's wording."""

from pathlib import Path

import pytest

from shoal.config import Config, config_from_mapping, load_config
from shoal.config.schema import every_key
from shoal.config.unbuilt import LIMITS
from shoal.mistakes import UserMistake

BASE = "model: {shape: gpt2}\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def mistake_in(text: str, *overrides: str) -> str:
    Path("run.yaml").write_text(text)
    with pytest.raises(UserMistake) as caught:
        load_config("run.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n  lrr: 1", "run.yaml:3: train.lrr is not a key shoal knows. Did you mean lr?"),
        ("\nlr: 1", "run.yaml:3: lr is not a key shoal knows. Did you mean train.lr?"),
        ("train: {rank: 1}", "run.yaml:2: train.rank is not a key shoal knows. Did you mean adapter.rank?"),
        ("train.lr: 1", "run.yaml:2: train.lr is not a key shoal knows. Write lr inside the block train."),
        ("qqq: 1", "run.yaml:2: qqq is not a key shoal knows."),
        (
            "train:\n  recompute:\n    evry: 2",
            "run.yaml:4: train.recompute.evry is not a key shoal knows. Did you mean every?",
        ),
    ],
)
def test_an_unknown_key_names_its_line_and_the_key_that_was_meant(text: str, says: str) -> None:
    assert mistake_in(BASE + text) == says


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n  lr: fast", 'run.yaml:3: train.lr is "fast", but must be a number.'),
        ("train:\n  lr: 0", "run.yaml:3: train.lr is 0, but must be above 0."),
        ("train: {steps: 0}", "run.yaml:2: train.steps is 0, but must be at least 1."),
        ("train: {clip: x}", 'run.yaml:2: train.clip is "x", but must be a number or null.'),
        (
            "train: {tokens: 1e9}",
            "run.yaml:2: train.tokens is 1000000000.0, but must be an integer or null. Write 1000000000.",
        ),
        (
            "train: {micro_batch: 0}",
            "run.yaml:2: train.micro_batch is 0, but must be an integer (at least 1) or auto.",
        ),
        (
            "train: {compile: maybe}",
            'run.yaml:2: train.compile is "maybe", but must be true, false, auto or aot_eager.',
        ),
        (
            "train: {precision: bf16-mixd}",
            'run.yaml:2: train.precision is "bf16-mixd", but must be one of '
            "auto, bf16-mixed, bf16-true, 16-mixed, 32-true or fp8. Did you mean bf16-mixed?",
        ),
        (
            "train: {optimizer: {betas: [0.9]}}",
            "run.yaml:2: train.optimizer.betas is [0.9], but must be a list of 2 numbers.",
        ),
        (
            "train:\n  optimizer:\n    betas:\n      - 0.9\n      - x",
            'run.yaml:6: train.optimizer.betas[1] is "x", but must be a number.',
        ),
        (
            "train: {early_stop: 3}",
            "run.yaml:2: train.early_stop is 3, but must be a mapping such as {patience: 3} or null.",
        ),
        ("train: 3", "run.yaml:2: train is 3, but must be a mapping such as {global_batch: 64}."),
        ("train:", "run.yaml:2: train is null, but must be a mapping such as {global_batch: 64}."),
        ("name: 12", "run.yaml:2: name is 12, but must be a string. Put it in quotes."),
        (
            "train: {micro_batch: 1000000000000}",
            "run.yaml:2: train.micro_batch is 1000000000000, but must be an integer (at least 1 and at most "
            "1000000000) or auto.",
        ),
        ('name: "\\ud800"', "run.yaml:2: a lone surrogate (\\ud800 to \\udfff) is not a character."),
        ("seed: 4294967296", "run.yaml:2: seed is 4294967296, but must be at most 4294967295."),
        ("seed: .inf", "run.yaml:2: seed is Infinity, but must be an integer."),
        ("train: {lr: .nan}", "run.yaml:2: train.lr is NaN, but must be a finite number."),
        ("log: {to: [x]}", 'run.yaml:2: log.to[0] is "x", but must be one of tensorboard, csv, wandb or mlflow.'),
        ("log: {to: csv}", 'run.yaml:2: log.to is "csv", but must be a list of tensorboard, csv, wandb or mlflow.'),
        ("train:\n  lr_groups:\n    a.*: x", 'run.yaml:4: train.lr_groups.a.* is "x", but must be a number.'),
        ("data:\n  source:\n  - weight: 0", "run.yaml:4: data.source[0].weight is 0, but must be above 0."),
        (
            "data: {validation: 1.5}",
            "run.yaml:2: data.validation is 1.5, but must be a number (at least 0 and below 1) or a string.",
        ),
    ],
)
def test_a_wrong_value_names_its_line_and_what_it_must_be(text: str, says: str) -> None:
    assert mistake_in(BASE + text) == says


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=0", "override train.steps=0: must be at least 1."),
        ("train.lrr=1", "override train.lrr=1: train.lrr is not a key shoal knows. Did you mean lr?"),
        ("foo.bar=1", "override foo.bar=1: foo is not a key shoal knows."),
        ("seed.x=1", 'override seed.x=1: seed is {"x": 1}, but must be an integer.'),
        ("train={lr: 0}", "override train={lr: 0}: train.lr is 0, but must be above 0."),
        ("name=off", "override name=off: must be a string. In a shell: 'name=\"off\"'."),
        (
            "train.schedule={nme: linear}",
            "override train.schedule={nme: linear}: train.schedule.nme is not a key shoal knows. Did you mean name?",
        ),
        (
            "train.compile=thunder",
            "override train.compile=thunder: train.compile thunder is not built yet. Use auto: "
            "lightning-thunder 0.2.6 cannot be imported with torch 2.13, which has no Tensor.align_as.",
        ),
    ],
)
def test_a_wrong_override_is_quoted(override: str, says: str) -> None:
    assert mistake_in(BASE, override) == says


def test_a_mistake_names_the_override_and_not_the_line_it_overrides() -> None:
    assert mistake_in(BASE + "train: {lr: 1}", "train.lr=0") == "override train.lr=0: must be above 0."
    assert (
        mistake_in(BASE + "train: {lr: 0, clip: 0}", "train.lr=1")
        == "run.yaml:2: train.clip is 0, but must be above 0."
    )


def test_mistakes_in_included_files_name_those_files() -> None:
    Path("parts").mkdir()
    Path("parts/base.yaml").write_text("\n\n\n\n\ntrain:\n  lr: 0\n  clip: 0\n")
    text = BASE + "include: [parts/base.yaml]\ntrain:\n\n  clip: -1\n"
    assert mistake_in(text).splitlines() == [
        "parts/base.yaml:7: train.lr is 0, but must be above 0.",
        "run.yaml:5: train.clip is -1, but must be above 0.",
    ]


def test_every_mistake_gets_a_line_of_its_own_in_the_order_of_the_file() -> None:
    text = BASE + "log: {every: 0}\ntrain:\n  lrr: 1\n  lr: fast\nseed: x\n"
    assert [line.split(" ")[:2] for line in mistake_in(text).splitlines()] == [
        ["run.yaml:2:", "log.every"],
        ["run.yaml:4:", "train.lrr"],
        ["run.yaml:5:", "train.lr"],
        ["run.yaml:6:", "seed"],
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "seed: 1",
            "run.yaml: model.from or model.shape must be given: from loads weights, shape initializes random ones.",
        ),
        ("", "run.yaml: model.from or model.shape must be given: from loads weights, shape initializes random ones."),
        (
            "model:\n  from: x\n  shape: gpt2",
            "run.yaml:3: model.from and model.shape contradict each other: set one of them to null.",
        ),
        (
            BASE + "train:\n  epochs: 1\n  steps: 2",
            "run.yaml:4: train.epochs and train.steps contradict each other: "
            "give one length and set the others to null.",
        ),
        (
            BASE + "train: {lr_scaling: linear}",
            "run.yaml:2: train.lr_scaling linear needs train.base_batch, the global batch that lr refers to.",
        ),
        (
            BASE + "train: {micro_batch: 65}",
            "run.yaml:2: train.micro_batch (65) is larger than train.global_batch (64).",
        ),
        (
            BASE + "parallel: {strategy: single}\nhardware: {devices: 2}",
            "run.yaml:3: hardware.devices 2 contradicts parallel.strategy single, which uses one device.",
        ),
        (
            BASE + "parallel:\n  strategy: single\n  tp: 2",
            "run.yaml:4: parallel.tp above 1 contradicts parallel.strategy single.",
        ),
        (
            "model:\n  shape:\n    hidden: 100\n    heads: 7",
            "run.yaml:4: model.shape: hidden (100) is not divisible by 7 heads: make hidden a multiple of heads.",
        ),
        (
            "model: {shape: {heads: 8, kv_heads: 3}}",
            "run.yaml:1: model.shape: 8 heads are not divisible by 3 kv_heads: make heads a multiple of kv_heads.",
        ),
        (
            "model: {shape: {family: gpt2, heads: 4, head_size: 32}}",
            "run.yaml:1: model.shape: head_size (32) is not supported by the family gpt2, whose heads are hidden / "
            "heads wide: omit head_size, or use llama, mistral or qwen3.",
        ),
        (
            "model:\n  shape: {heads: 4, head_size: 31}",
            "run.yaml:2: model.shape: The head dimension is 31, but rotary embeddings need an even one: choose other "
            "sizes.",
        ),
        (BASE + "parallel: {wrap: {}}", "run.yaml:2: parallel.wrap takes either min_params or classes."),
        (BASE + "data: {source: []}", "run.yaml:2: data.source is an empty list: name at least one block."),
        (
            BASE + "data: {source: [{path: a.jsonl}, {weight: 2}]}",
            "run.yaml:2: data.source[1] has no path: give each block its own.",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(text: str, says: str) -> None:
    assert mistake_in(text) == says


def test_a_contradiction_with_an_override_quotes_the_override() -> None:
    assert mistake_in(BASE + "train: {steps: 9}", "train.epochs=1").startswith(
        "override train.epochs=1: train.epochs and"
    )


@pytest.mark.parametrize(
    ("text", "begins", "contains"),
    [
        ("model: {shape: gpt2}\ntrain:\n\tlr: 1", "run.yaml:3: this is not YAML: ", "Indent with spaces, not tabs."),
        # What other parsers read, or crash on.
        ("train: {steps: 3\t}", "run.yaml:1: this is not YAML: ", "Indent with spaces, not tabs."),
        ("checkpoint: {keep: 2?, every: 1}", "run.yaml:1: this is not YAML: ", "expected ',' or '}', but got '?'"),
        ("name: |#\n", "run.yaml:1: this is not YAML: ", "expected chomping or indentation indicators"),
        pytest.param(f"name: {'[' * 100_000}", "run.yaml: this YAML cannot be converted", "recursion", id="long"),
        ("train: [1\nseed: 2", "run.yaml:2: this is not YAML: ", "expected ',' or ']'"),
        ("a: b: c", "run.yaml:1: this is not YAML: ", "mapping values are not allowed here"),
        ("seed: 1\n---\nseed: 2", "run.yaml:2: this is not YAML: ", "single document"),
        (
            "name: !!python/object/apply:os.getcwd []",
            "run.yaml:1: this is not YAML: ",
            "could not determine a constructor",
        ),
        ("name: \x01", "run.yaml: this is not YAML: ", "special characters are not allowed"),
        ("- 1\n- 2", "run.yaml must hold keys with values", "[1, 2]"),
        ("just text", "run.yaml must hold keys with values", "just text"),
        (
            "seed: 1\ntrain:\n  lr: 1\n  lr: 2",
            "run.yaml:4: ",
            "the key lr is set twice in this block, first in line 3; ",
        ),
        ("on: 1", "run.yaml:1: ", "the key on is not text"),
        ("? [a]\n: 1", "run.yaml:1: ", "a key is not text"),
        ("name: &x [*x]", "run.yaml:1: ", "contains itself"),
    ],
)
def test_a_file_that_cannot_be_parsed_says_where_and_why(text: str, begins: str, contains: str) -> None:
    says = mistake_in(text)
    assert says.startswith(begins)
    assert contains in says
    assert "\n" not in says


def test_a_missing_file_suggests_a_similar_name() -> None:
    Path("alpaca.yaml").write_text(BASE)
    with pytest.raises(UserMistake, match=r"^alpcaa.yaml does not exist. Did you mean alpaca.yaml\?$"):
        load_config("alpcaa.yaml")
    with pytest.raises(UserMistake, match=r"^model.shape=gpt2 is an override, but a config file comes first:"):
        load_config("model.shape=gpt2")
    with pytest.raises(UserMistake, match=r"^nowhere/run.yaml does not exist.$"):
        load_config(Path("nowhere/run.yaml"))


def test_a_folder_and_a_binary_file_are_not_configs() -> None:
    with pytest.raises(UserMistake, match=r"^\. is a folder; name the YAML file of a run\.$"):
        load_config(".")
    Path("run.yaml").write_text(BASE)
    with pytest.raises(UserMistake, match=r"^\. is a folder; name the YAML file of a run: run.yaml\.$"):
        load_config(".")
    Path("run.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserMistake, match=r"is not a text file in UTF-8; save it as UTF-8, or name another file\.$"):
        load_config("run.bin")


@pytest.mark.parametrize(
    ("override", "meanwhile"),
    [
        ("model.attention=flash", "Use auto"),
        ("train.objective=kto", "Use apo_zero_unpaired"),
        ("train.compile=thunder", "Use auto: lightning-thunder 0.2.6 cannot be imported with torch 2.13"),
    ],
)
def test_what_is_not_built_yet_is_refused_with_an_alternative(override: str, meanwhile: str) -> None:
    says = mistake_in(BASE, override)
    assert says.startswith(f"override {override}: {override.partition('=')[0]}")
    assert " is not built yet. " in says
    assert meanwhile in says
    assert "\n" not in says


def test_a_family_that_is_only_forecast_is_refused_in_training_and_can_be_planned() -> None:
    override = "model.shape={family: mpt}"
    assert "model.shape.family mpt is only forecast" in mistake_in(BASE, override)
    planned = load_config(None, [override], planned=True)
    assert planned.model.shape.named().family == "mpt"


@pytest.mark.parametrize(
    "override",
    [
        "model.attention=eager",
        "data.source=text",
        "data.source=parquet",
        "data.source=tokens",
        "data.source=cells",
        "data.format=text",
        "data.format=chat",
        "data.train_on=last",
        "data.chat_template=chatml",
        "train.precision=16-mixed",
        "train.compile=false",
        "train.loss_impl=chunked",
        "train.optimizer.name=muon",
        "train.optimizer.name=adamw8bit",
        "train.on_nan=stop",
        "train.on_nan={action: rollback, after: 2}",
        "train.on_spike=skip",
        "checkpoint.format=full",
        "checkpoint.async=true",
        "checkpoint.fallback=/tmp",
        "train.on_spike={sigma: 4}",
        "train.recompute=full",
        "train.recompute={every: 2}",
        "parallel.strategy=fsdp",
        "parallel.strategy=zero2",
        "parallel={strategy: fsdp, sharding: HYBRID_SHARD, replicate: 2}",
        "parallel.tp=2",
        "parallel={pp: 4, pp_schedule: zero-bubble}",
        "parallel={cp: 2, cp_method: ulysses}",
        "parallel.wrap={min_params: 5}",
        "parallel={strategy: fsdp, offload: cpu}",
        "parallel.compress=powersgd",
        "parallel.prefetch=3",
        "parallel.reshard=true",
        "hardware={devices: 8, nodes: 4, gpu: h200}",
        "log.to=[csv]",
    ],
)
def test_what_is_built_is_accepted(override: str) -> None:
    assert isinstance(load_config(None, ["model.shape=gpt2", override]), Config)


def test_what_is_not_built_yet_is_located_in_the_file() -> None:
    text = BASE + "train:\n  compile: thunder\n"
    assert mistake_in(text).splitlines() == [
        "run.yaml:3: train.compile thunder is not built yet. Use auto: lightning-thunder 0.2.6 cannot be imported with "
        "torch 2.13, which has no Tensor.align_as.",
    ]


def test_the_table_of_the_unbuilt_names_real_keys_once() -> None:
    keys = [limit.key for limit in LIMITS]
    assert set(keys) <= {key for key, _ in every_key()}
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "mapping", [{"train": {"lr": object()}}, {"train": {"lrr": 1}}, {"model": []}, {"seed": {1.5}}]
)
def test_a_wrong_mapping_raises_the_same_kind_of_mistake_without_a_location(mapping: dict[str, object]) -> None:
    with pytest.raises(UserMistake, match=r"^(train\.lr|train\.lrr|model|seed) is ") as caught:
        config_from_mapping({"model": {"shape": "gpt2"}, **mapping})
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize("key", [key for key, _ in every_key()])
def test_every_invalid_value_of_any_key_gives_an_error_message(key: str) -> None:
    odd = [None, True, -1, 0, 1, 1.5, float("nan"), "", "x", [], [1], ["x"], [{}], [{"x": 1}], {}, {"x": 1}, {"x": {}}]
    refused = 0
    for value in odd:
        inner: object = value
        for part in reversed(key.split(".")):
            inner = {part: inner}
        said = ""
        try:
            config_from_mapping({"model": {"shape": "gpt2"}, **dict(inner)})  # type: ignore[call-overload]
        except UserMistake as mistake:
            said = str(mistake)
            refused += 1
        assert all(line.endswith((".", "?")) for line in said.splitlines()), said
    assert refused >= 8  # no key takes every kind of value
