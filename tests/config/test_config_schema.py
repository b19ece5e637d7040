"""The keys of the config: names, defaults, types, spellings, bounds."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from shoal.config import Config, config_from_mapping, config_to_yaml, json_schema, load_config
from shoal.config.schema import TrainConfig, every_key
from shoal.mistakes import UserMistake

SHAPE = {"model": {"shape": "gpt2"}}

# Every key and its default.
DEFAULTS = """
name: run
run_dir: runs
seed: 1234
include: []
model: {from: null, shape: gpt2, tokenizer: null, attention: auto, dropout: null, freeze: [], add_tokens: []}
adapter:
  {kind: none, from: null, rank: 8, alpha: 16, dropout: 0.0, targets: auto, quantize: nf4,
   dora: false, rslora: false, train_also: []}
data:
  source: auto
  path: null
  split: train
  subset: null
  token_dtype: auto
  games: 12000
  plies: 42
  player: quick
  format: auto
  columns: {}
  max_length: 2048
  long_documents: auto
  pack: auto
  document_mask: false
  train_on: answers
  chat_template: null
  label: null
  cells:
    tokens: rank_value
    gene_vocab: auto
    gene_names: null
    max_genes: null
    cls: true
    matrix: auto
    normalized: false
    target_sum: 10000.0
    log1p: true
    medians: auto
    bins: 51
    binning: quantile
    min_genes: 0
    highly_variable: null
    backed: true
    same_names: false
  validation: 0.02
  mixing: {by: tokens, when_exhausted: repeat}
  streaming: false
  workers: 2
  on_error: stop
train:
  epochs: 1
  steps: null
  tokens: null
  global_batch: 64
  grad_accum: null
  micro_batch: auto
  lr: 0.0001
  lr_scaling: none
  base_batch: null
  lr_groups: {}
  schedule: {name: cosine, warmup: 0.05, total_steps: null, min_ratio: 0.1, decay: 0.2}
  optimizer:
    {name: adamw, betas: [0.9, 0.95], eps: 0.00000001, weight_decay: 0.1, momentum: 0.9, in_backward: false,
     paged: false, rounding: nearest}
  clip: 1.0
  precision: auto
  fp8_head: false
  reduce_dtype: fp32
  loss_scale: {initial: 65536.0, fixed: false}
  recompute: none
  compile: auto
  cuda_graphs: auto
  objective: causal_lm
  mask_ratio: 0.15
  masking: {mask: 0.8, random: 0.1}
  preference: {beta: null, gamma: null, desirable_weight: null, undesirable_weight: null}
  loss_impl: auto
  deterministic: false
  early_stop: null
  on_nan: skip
  on_spike: report
  on_oom: stop
  slow_rank: {behind: 0.3, steps: 50}
  hang_timeout: 600
eval: {every: 200, batches: 50, prompts: [], tokens: 32}
parallel:
  strategy: auto
  sharding: full_shard
  replicate: auto
  tp: 1
  pp: 1
  sequence_parallel: true
  pp_schedule: 1f1b
  pp_stages: auto
  optimizer_ranks: auto
  cp: 1
  cp_method: gather
  wrap: auto
  prefetch: 1
  reshard: auto
  offload: none
  compress: none
  engine: native
hardware:
  {devices: auto, nodes: 1, gpu: auto, link: auto, network: auto, host_gib: null, host_block_ms: null, price: null,
   mtbf_hours: null, restart_minutes: null, disk_gb_per_second: null}
checkpoint:
  {every: 200, at_end: true, keep: 2, keep_best: 3, keep_every: null, metric: eval_loss, format: sharded, async: true,
   fallback: null}
log:
  every: 10
  to: [tensorboard]
  wandb: {project: null, entity: null, mode: null}
  mlflow: {experiment: null}
  level: info
slurm:
  partition: null
  account: null
  qos: null
  constraint: null
  time: "02:00:00"
  signal: 120
  requeue: true
  gpu_type: null
  cpus_per_task: 8
  mem: null
  cpu_bind: null
  setup: []
  env: {}
  python: null
  container: null
  container_runtime: auto
  container_mounts: []
  extra: []
"""


def with_value(key: str, value: Any) -> dict[str, Any]:
    """A mapping that is a complete config but for `key`."""
    inner: Any = value
    for part in reversed(key.split(".")):
        inner = {part: inner}
    block = next(iter(inner))
    return {**SHAPE, **inner} if block != "model" else {"model": {**SHAPE["model"], **inner["model"]}}


def value_of(config: Config, key: str) -> Any:
    """The values of the config as written to YAML."""
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value


def test_the_keys_and_their_defaults_are_exactly_these() -> None:
    assert config_from_mapping(SHAPE).model_dump(mode="json") == yaml.safe_load(DEFAULTS)


def test_every_key_has_a_sentence_of_help() -> None:
    keys = dict(every_key())
    assert {"name", "train.optimizer.betas", "model.from", "model.shape.kv_heads", "data.source.weight"} <= keys.keys()
    for key, field in keys.items():
        assert field.description, key
        assert field.description[0].isalnum(), key
        assert field.description.endswith("."), key


def test_every_key_but_those_with_alternatives_is_in_the_json_schema_with_its_help() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    train = schema["$defs"]["TrainConfig"]["properties"]
    assert set(train) == set(TrainConfig.model_fields)
    assert train["lr"]["description"] == "Peak learning rate."
    assert "from" in schema["$defs"]["ModelConfig"]["properties"]
    assert "async" in schema["$defs"]["CheckpointConfig"]["properties"]


def test_keys_that_are_python_words_are_reached_with_an_underscore() -> None:
    config = config_from_mapping({"model": {"from": "some/model"}, "checkpoint": {"async": False}})
    assert config.model.from_ == "some/model"
    assert config.checkpoint.async_ is False
    same = {"model": {"from_": "some/model"}, "checkpoint": {"async_": False}}
    assert config_from_mapping(same) == config


def test_a_loaded_config_does_not_change() -> None:
    config = config_from_mapping(SHAPE)
    with pytest.raises(ValidationError):
        config.train.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "written", "meant"),
    [
        ("parallel.sharding", "FULL_SHARD", "full_shard"),
        ("parallel.sharding", "HYBRID_SHARD", "hybrid_shard"),
        ("parallel.sharding", "SHARD_GRAD_OP", "shard_grad_op"),
        ("parallel.pp_schedule", "Interleaved1F1B", "interleaved"),
        ("parallel.strategy", "DDP", "ddp"),
        ("parallel.strategy", "FSDP", "fsdp"),
        ("train.precision", "bf16-mixed", "bf16-mixed"),
        ("train.precision", "bf16", "bf16-mixed"),
        ("train.precision", "16-mixed", "16-mixed"),
        ("train.precision", "fp32", "32-true"),
        ("train.precision", "32", "32-true"),
        ("train.precision", 32, "32-true"),
        ("train.precision", "FP8", "fp8"),
        ("train.reduce_dtype", "bfloat16", "bf16"),
        ("train.optimizer.name", "AdamW", "adamw"),
        ("train.optimizer.name", "adamw_torch", "adamw"),
        ("train.optimizer.name", "adamw_8bit", "adamw8bit"),
        ("train.schedule.name", "warmup_stable_decay", "wsd"),
        ("adapter.quantize", "BNB.NF4_DQ", "bnb.nf4-dq"),
        ("train.cuda_graphs", True, True),
        ("data.source", "jsonl", "json"),
        ("parallel.engine", "shoal", "native"),
        ("parallel.engine", "DeepSpeed", "deepspeed"),
        ("train.compile", True, True),
        ("train.compile", False, False),
    ],
)
def test_spellings_of_other_tools_are_accepted(key: str, written: Any, meant: Any) -> None:
    assert value_of(config_from_mapping(with_value(key, written)), key) == meant


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.recompute", {"every": 2}),
        ("train.on_spike", {"sigma": 5, "action": "skip"}),
        ("parallel.wrap", {"min_params": 1_000_000}),
        ("parallel.offload", {"optimizer": "nvme", "path": "/scratch"}),
        ("parallel.offload", {"optimizer": "cpu", "parameters": "nvme", "path": "/scratch"}),
        ("parallel.reshard", 4),
        ("data.streaming", {"chunk": 10}),
        ("data.source", [{"source": "json", "path": "a.json", "weight": 2}, {"source": "text", "path": "b"}]),
    ],
)
def test_a_block_or_a_list_is_kept_where_a_word_would_do(key: str, value: Any) -> None:
    found = value_of(Config.model_validate(with_value(key, value)), key)  # some of them are not built yet
    for kept, given in zip(found, value, strict=True) if isinstance(value, list) else [(found, value)]:
        assert kept == ({**kept, **given} if isinstance(given, dict) else given)


def test_a_spelling_of_what_is_not_built_yet_is_understood() -> None:
    config = Config.model_validate(with_value("model.attention", "flash_attention_2"))
    assert config.model.attention == "flash"


@pytest.mark.parametrize(
    ("key", "lowest", "too_low"),
    [
        ("train.lr", 1e-9, 0),
        ("train.clip", 0.1, 0),
        ("train.steps", 1, 0),
        ("train.global_batch", 1, 0),
        ("train.schedule.warmup", 0, -1),
        ("train.schedule.min_ratio", 0, -0.1),
        ("train.optimizer.weight_decay", 0, -1),
        ("train.optimizer.eps", 1e-9, 0),
        ("train.lr_groups", {"a": 0}, {"a": -1}),
        ("data.max_length", 2, 1),
        ("data.workers", 0, -1),
        ("data.validation", 0, -0.1),
        ("parallel.prefetch", 0, -1),
        ("hardware.nodes", 1, 0),
        ("hardware.devices", 1, 0),
        ("checkpoint.keep_best", 0, -1),
        ("eval.every", 1, 0),
        ("log.every", 1, 0),
        ("seed", 0, -1),
    ],
)
def test_numbers_have_a_lowest_value(key: str, lowest: Any, too_low: Any) -> None:
    config_from_mapping(with_value(key, lowest))
    with pytest.raises(UserMistake, match="must be"):
        config_from_mapping(with_value(key, too_low))


@pytest.mark.parametrize(
    ("key", "highest", "too_high"),
    [
        ("train.schedule.min_ratio", 1, 1.1),
        ("train.schedule.warmup", 0.99, 1.5),
        ("train.optimizer.momentum", 0.99, 1),
        ("train.optimizer.betas", [0.9, 0.999], [0.9, 1]),
        ("data.validation", 0.9, 1),
        ("seed", 2**32 - 1, 2**32),
        ("train.lr", 1e9, float("inf")),
    ],
)
def test_numbers_have_a_highest_value(key: str, highest: Any, too_high: Any) -> None:
    config_from_mapping(with_value(key, highest))
    with pytest.raises(UserMistake, match="must be"):
        config_from_mapping(with_value(key, too_high))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.lr", "0.1"),
        ("train.lr", True),
        ("train.steps", 2.0),
        ("train.steps", "2"),
        ("train.deterministic", 1),
        ("train.deterministic", "true"),
        ("train.optimizer.betas", [0.9]),
        ("train.optimizer.betas", ["0.9", 0.95]),
        ("name", 12),
        ("model.freeze", "embed*"),
        ("model.freeze", [1]),
        ("log.to", "csv"),
        ("train.lr_groups", [1]),
        ("eval", None),
        ("parallel.reshard", 1),
    ],
)
def test_a_value_of_another_type_is_refused_and_not_converted(key: str, value: Any) -> None:
    with pytest.raises(UserMistake, match=r"must be"):
        config_from_mapping(with_value(key, value))


def test_integers_are_accepted_for_floats() -> None:
    config = config_from_mapping({**SHAPE, "train": {"lr": 1, "clip": 2}})
    assert (config.train.lr, config.train.clip) == (1.0, 2.0)
    assert isinstance(config.train.lr, float)


@pytest.mark.parametrize(("length", "value"), [("epochs", 3), ("steps", 10), ("tokens", 1_000_000)])
def test_one_length_is_enough_and_leaves_the_others_unset(length: str, value: int) -> None:
    train = config_from_mapping({**SHAPE, "train": {length: value}}).train
    lengths = {"epochs": train.epochs, "steps": train.steps, "tokens": train.tokens}
    assert lengths == {"epochs": None, "steps": None, "tokens": None, length: value}


def test_without_a_length_there_is_one_epoch() -> None:
    assert config_from_mapping({**SHAPE, "train": {"epochs": None}}).train.epochs == 1


def test_omitted_dimensions_of_a_shape_follow_from_the_others() -> None:
    shape = Config.model_validate({"model": {"shape": {"hidden": 256, "heads": 8}}}).model.shape
    assert not isinstance(shape, str)
    assert shape is not None
    named = shape.named()
    # Two thirds of four times 256 is 682.7; the next multiple of 64 is 704.
    assert (named.kv_heads, named.ffn, named.family) == (8, 704, "llama")


@pytest.mark.parametrize("name", ["llama-alpaca", "run_2", "a.b+c", "Überlauf"])
def test_a_name_may_be_a_folder_name(name: str) -> None:
    assert config_from_mapping({**SHAPE, "name": name}).name == name


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a b"])
def test_a_name_that_would_put_the_run_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(UserMistake, match="must be made of letters") as refused:
        config_from_mapping({**SHAPE, "name": name})
    if name == "a b":
        assert str(refused.value).endswith("after the first, as in a-b.")


def test_an_example_with_every_block_loads(tmp_path: Path) -> None:
    example = tmp_path / "run.yaml"
    example.write_text(
        """
name: llama-alpaca
seed: 1234
include: []
model:
  from: meta-llama/Llama-2-7b-hf
  shape: null
  tokenizer: null
  attention: auto
  freeze: []
  add_tokens: []
adapter: {kind: none, rank: 8, alpha: 16, dropout: 0.0, targets: auto, quantize: nf4, dora: false, rslora: false}
data:
  source: json
  path: data/alpaca.json
  format: auto
  max_length: 2048
  pack: true
  train_on: answers
  validation: 0.02
  mixing: {by: tokens, when_exhausted: repeat}
  streaming: false
train:
  epochs: 3
  global_batch: 64
  micro_batch: auto
  lr: 1e-4
  lr_scaling: none
  lr_groups: {}
  schedule: {name: cosine, warmup: 100, min_ratio: 0.1}
  optimizer: {name: adamw, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1}
  clip: 1.0
  precision: bf16-mixed
  early_stop: {patience: 3}
  on_spike: {sigma: 6}
eval: {every: 200, batches: 50, prompts: [], tokens: 32}
parallel: {strategy: auto, sharding: FULL_SHARD, reshard: auto, prefetch: 1}
hardware: {devices: auto, nodes: 1, gpu: h100-80gb, link: auto}
checkpoint: {every: 200, keep: 2, keep_best: 3, metric: eval_loss, format: sharded, fallback: null}
log: {every: 10, to: [tensorboard, csv]}
"""
    )
    config = load_config(example)
    assert config.train.lr == 1e-4
    assert config.train.optimizer.eps == 1e-8
    assert config.train.early_stop is not None
    assert config.train.early_stop.patience == 3


@pytest.mark.parametrize(
    "mapping",
    [
        SHAPE,
        {"model": {"shape": {"hidden": 64, "heads": 4}}, "train": {"steps": 7}},
        {**SHAPE, "name": "1e-4"},
        {**SHAPE, "name": "007", "data": {"path": "12:30:00", "validation": "2024-01-01"}},
        {**SHAPE, "data": {"path": "null", "validation": 0.5}},
        {**SHAPE, "data": {"path": r"\${seed}/x"}},
        {**SHAPE, "data": {"path": r"a\\\${seed}${seed}"}},
        {**SHAPE, "data": {"path": "größe: # {x}\nzwei"}},
        {**SHAPE, "train": {"lr": 1e-30, "lr_groups": {"lm_head.*": 0.1, "1": 2}, "compile": True, "clip": None}},
        {**SHAPE, "train": {"on_spike": {"sigma": 4}, "early_stop": {}, "schedule": {"warmup": 0.03}}},
        {**SHAPE, "log": {"to": []}, "model": {"from": "x", "freeze": ["*", "on", "[a]"]}},
    ],
)
def test_a_config_written_out_loads_as_the_same_config(mapping: dict[str, Any], tmp_path: Path) -> None:
    config = config_from_mapping(mapping)
    written = tmp_path / "config.yaml"
    written.write_text(config_to_yaml(config))
    assert load_config(written) == config
    assert config_to_yaml(load_config(written)) == written.read_text()


def test_python_callers_may_pass_paths_and_tuples(tmp_path: Path) -> None:
    config = config_from_mapping({**SHAPE, "data": {"path": tmp_path}, "train": {"optimizer": {"betas": (0.8, 0.9)}}})
    assert config.data.path == str(tmp_path)
    assert config.train.optimizer.betas == (0.8, 0.9)
