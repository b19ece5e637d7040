"""Configs as the systems' own examples have them: what becomes of each key, and that nothing is dropped silently."""

import json
import re
from pathlib import Path

import pytest
import yaml

from shoal.config.schema import every_key
from shoal.convert.configs.document import PAGES, refreshed
from shoal.convert.configs.draft import nested_leaves
from shoal.convert.configs.recognise import SYSTEMS
from shoal.mistakes import UserMistake
from tests.convert.configs.translated import holds, keys_of, ours, translated

# The DeepSpeed config that transformers' documentation proposes for ZeRO 3: most values are the Trainer's.
AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 2000,
}


def test_auto_of_deepspeed_is_what_the_trainer_says(tmp_path):
    command = (
        "deepspeed --num_gpus 4 run_clm.py --deepspeed given0.json --model_name_or_path gpt2 --train_file a.txt "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 3 --learning_rate 2e-5 --bf16 "
        "--lr_scheduler_type cosine --warmup_ratio 0.03 --max_steps -1 --num_train_epochs 2 --output_dir out/x "
        "--fp16 false --block_size 512"
    )
    found = translated(tmp_path, AUTO, command=command)
    holds(found, train__global_batch=24, train__micro_batch=2, train__lr=2e-5, train__epochs=2, data__max_length=512)
    holds(found, parallel__strategy="zero3", parallel__offload__optimizer="nvme", parallel__offload__path="/local_nvme")
    holds(found, train__precision="bf16-mixed", train__schedule__warmup=0.03, model__from_="gpt2", data__path="a.txt")
    holds(found, train__optimizer__betas=[0.9, 0.999], train__optimizer__weight_decay=0.0, run_dir="out", name="x")
    assert "gradient_clipping" in keys_of(found, "no meaning")
    # Two schedules are a contradiction, and DeepSpeed's is the one that runs.
    assert any("lr_scheduler_type" in one and "scheduler.type" in one for one in found.contradictions)


def test_deepspeed_offload_and_stages(tmp_path):
    for stage, strategy in enumerate(("ddp", "zero1", "zero2", "zero3")):
        holds(translated(tmp_path, {"zero_optimization": {"stage": stage}}), parallel__strategy=strategy)
    only = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    holds(translated(tmp_path, only), parallel__offload="cpu")
    # ZeRO 2 has no parameters to offload; an unknown stage is said.
    found = translated(tmp_path, {"zero_optimization": {"stage": 7}, "gradient_clipping": 0.5})
    assert keys_of(found, "not carried") == {"zero_optimization.stage"}


def test_an_unknown_key_is_named_with_whose_it_may_be(tmp_path):
    found = translated(
        tmp_path,
        {
            "zero_optimization": {"stage": 1, "bogus": 3},
            "learning_rate": 1e-4,
            "sample_packing": True,
            "gradient_clipping": 1,
        },
    )
    says = {line.key: line.says for line in found.lines if line.outcome == "not carried"}
    assert says.keys() == {"zero_optimization.bogus", "learning_rate", "sample_packing"}
    assert "train.lr" in says["learning_rate"]
    assert "data.pack" in says["sample_packing"]


FSDP_2 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 16
parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_cp_size: 2, parallelism_config_dp_shard_size: 4}
"""


def test_accelerate_with_fsdp_2_and_parallelism(tmp_path):
    found = translated(tmp_path, FSDP_2)
    holds(found, parallel__strategy="fsdp", parallel__tp=2, parallel__cp=2, parallel__reshard=True)
    holds(found, hardware__devices=8, hardware__nodes=2, checkpoint__format="sharded", train__recompute="full")
    assert keys_of(found, "not carried") == set()
    # Four data-parallel replicas are left of 16 devices.
    flags = "python train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 3"
    holds(translated(tmp_path, FSDP_2, command=flags), train__global_batch=24)


def test_accelerate_with_fsdp_1_and_with_deepspeed(tmp_path):
    fsdp_1 = (
        "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: 'no'\nfsdp_config: {fsdp_sharding_strategy: 2, "
        "fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 2000, fsdp_offload_params: true, "
        "fsdp_backward_prefetch: NO_PREFETCH, fsdp_use_orig_params: false}\n"
    )
    found = translated(tmp_path, fsdp_1)
    holds(found, parallel__sharding="shard_grad_op", parallel__wrap__min_params=2000, parallel__offload="cpu")
    holds(found, train__precision="32-true")
    assert keys_of(found, "not carried") == {"fsdp_config.fsdp_backward_prefetch"}
    zero = (
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3, "
        "offload_optimizer_device: none, "
        "offload_param_device: cpu, gradient_accumulation_steps: 1, zero3_init_flag: true}\nmixed_precision: fp16\n"
    )
    holds(translated(tmp_path, zero), parallel__strategy="zero3", parallel__offload="cpu", train__precision="16-mixed")


def test_a_short_accelerate_file_is_no_mixture_with_the_trainer(tmp_path):
    found = translated(tmp_path, "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n")
    holds(found, parallel__strategy="fsdp")


def test_a_deepspeed_file_that_accelerate_names_is_read_too(tmp_path):
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "train_batch_size": 32}))
    config = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: zero.json}\n"
    found = translated(tmp_path, config)
    holds(found, parallel__strategy="zero1", train__global_batch=32)
    missing = translated(tmp_path, config.replace("zero.json", "gone.json"))
    assert keys_of(missing, "not carried") == {"deepspeed_config.deepspeed_config_file"}


def test_training_arguments_with_fsdp(tmp_path):
    arguments = {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 8,
        "num_train_epochs": 1.0,
        "optim": "paged_adamw_8bit",
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-5},
        "learning_rate": 1e-4,
        "warmup_steps": 20,
        "fsdp": "full_shard auto_wrap offload",
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "activation_checkpointing": True},
        "bf16": True,
        "eval_strategy": "steps",
        "eval_steps": 50,
        "save_total_limit": 2,
        "report_to": "none",
        "push_to_hub": True,
        "neftune_noise_alpha": 5,
        "save_strategy": "epoch",
    }
    found = translated(tmp_path, arguments)
    holds(found, parallel__strategy="fsdp", parallel__offload="cpu", parallel__wrap__classes=["LlamaDecoderLayer"])
    holds(found, train__optimizer__name="adamw8bit", train__schedule__min_ratio=0.1, train__schedule__warmup=20)
    holds(found, train__grad_accum=8, train__micro_batch=4, eval__every=50, log__to=[], checkpoint__keep=2, seed=42)
    assert keys_of(found, "not carried") == {"push_to_hub", "neftune_noise_alpha", "save_strategy"}


AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
model_type: LlamaForCausalLM
load_in_4bit: true
adapter: qlora
datasets:
  - {path: tatsu-lab/alpaca, type: alpaca}
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/out/qlora
sequence_len: 512
sample_packing: true
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 1
num_epochs: 4
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.00001
train_on_inputs: false
bf16: auto
fp16:
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
weight_decay: 0.0
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
special_tokens: {pad_token: <|end_of_text|>}
"""


def test_axolotl(tmp_path):
    found = translated(tmp_path, AXOLOTL)
    holds(found, model__from_="NousResearch/Meta-Llama-3-8B", adapter__kind="qlora", adapter__targets="all-linear")
    holds(found, data__path="tatsu-lab/alpaca", data__format="alpaca", data__pack=True, data__train_on="answers")
    holds(found, train__micro_batch=1, train__grad_accum=4, train__epochs=4, train__precision="bf16-mixed", seed=42)
    holds(found, parallel__offload="cpu", checkpoint__format="full", run_dir="outputs/out", name="qlora")
    assert keys_of(found, "not carried") == {"evals_per_epoch"}


def test_axolotl_with_preferences_and_with_several_datasets(tmp_path):
    dpo = (
        "base_model: m/x\nrl: dpo\nchat_template: llama3\nsequence_len: 64\nlearning_rate: 1e-5\ndatasets:\n"
        "  - {path: a/b, type: chat_template.default, field_messages: conversation, field_chosen: good, split: train}\n"
    )
    found = translated(tmp_path, dpo)
    holds(found, train__objective="dpo", data__format="preference", data__columns__chosen="good")
    holds(found, data__chat_template="llama3", data__split="train")
    several = "base_model: m/x\ndatasets: [{path: a.jsonl, type: alpaca}, {path: b.jsonl, type: weird.kind}]\n"
    found = translated(tmp_path, several)
    assert [block["path"] for block in found.config["data"]["source"]] == ["a.jsonl", "b.jsonl"]
    # axolotl concatenates: a small dataset is not repeated until a large one has been read.
    holds(found, data__mixing__when_exhausted="end", data__long_documents="drop")
    assert keys_of(found, "not carried") == {"datasets.type"}


TORCHTUNE = """
output_dir: /tmp/torchtune/lora
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: /m/tokenizer.model, max_seq_len: 1024}
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /m/Llama
  output_dir: ${output_dir}
dataset: {_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: False}
seed: null
batch_size: 2
optimizer: {_component_: torch.optim.AdamW, fused: True, weight_decay: 0.01, lr: 3e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
epochs: 2
max_steps_per_epoch: 50
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: False
metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: "${output_dir}/logs"}
dtype: bf16
enable_activation_checkpointing: True
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: False}
"""


def test_torchtune(tmp_path, monkeypatch):
    found = translated(tmp_path, TORCHTUNE)
    holds(found, adapter__kind="lora", adapter__rank=8, model__from_="/m/Llama", data__path="yahma/alpaca-cleaned")
    holds(found, adapter__targets=["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    holds(found, train__steps=100, train__clip=None, train__precision="bf16-true", train__optimizer__betas=[0.9, 0.999])
    holds(found, train__schedule__name="cosine", train__schedule__min_ratio=0.0, data__max_length=1024)
    holds(found, data__train_on="all")  # alpaca's default there, and of no other dataset
    assert keys_of(found, "not carried") == {"epochs"}
    command = "tune run --nproc_per_node 4 lora_finetune_distributed --config given0.yaml batch_size=4 epochs=1"
    (tmp_path / "given0.yaml").write_text(TORCHTUNE)
    monkeypatch.chdir(tmp_path)
    found = translated(tmp_path, command=command)
    holds(found, train__global_batch=128, train__steps=50, parallel__strategy="fsdp", hardware__devices=4)


def test_flags_of_an_unknown_script_have_no_defaults_of_a_known_one(tmp_path):
    swift = "--sft_type lora --quantization_bit 4 --dataset d --output_dir out --num_train_epochs 1 --warmup_ratio 0.03"
    found = translated(tmp_path, command=f"python llm_sft.py {swift}")  # ms-swift: its words are LLaMA-Factory's too
    assert not [line for line in found.lines if line.default]
    found = translated(tmp_path, command="python train_qlora.py --lora_r=4 --lora_alpha=16 --model_name_or_path m")
    holds(found, adapter__kind="lora", adapter__rank=4, adapter__alpha=16.0)
    found = translated(tmp_path, command="python train.py --lora_r 4 --use_peft false --model_name_or_path m")
    assert "lora_r" in keys_of(found, "not carried")


LITGPT = """
checkpoint_dir: checkpoints/google/gemma-2b
out_dir: out/finetune/lora-gemma-2b
precision: bf16-true
devices: 1
lora_r: 8
lora_query: true
lora_key: true
lora_value: true
lora_projection: true
lora_mlp: true
lora_head: true
data:
  class_path: litgpt.data.Alpaca2k
  init_args: {mask_prompt: false, val_split_fraction: 0.03847, prompt_style: alpaca, num_workers: 4}
train:
  global_batch_size: 6
  micro_batch_size: 2
  lr_warmup_steps: 200
  epochs: 2
  max_steps:
  max_seq_length: 512
  max_norm:
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.0002, weight_decay: 0.0, betas: [0.9, 0.95]}
logger_name: csv
seed: 1337
"""


def test_litgpts_yaml(tmp_path):
    found = translated(tmp_path, LITGPT)
    holds(found, model__from_="google/gemma-2b", adapter__kind="lora", data__path="mhenrichsen/alpaca_2k_test")
    holds(
        found, adapter__targets=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    )
    holds(found, train__lr=2e-4, train__optimizer__betas=[0.9, 0.95], train__optimizer__weight_decay=0.0)
    holds(
        found, train__global_batch=6, train__epochs=2, train__clip=None, train__precision="bf16-true", log__to=["csv"]
    )
    assert keys_of(found, "not carried") == set()
    # Flags go before the file that the command names.
    command = f"litgpt finetune_lora --config {tmp_path / 'given0.yaml'} --train.epochs 3 --optimizer.init_args.lr 1e-3"
    holds(translated(tmp_path, command=command), train__epochs=3, train__lr=1e-3, train__global_batch=6)


def test_trl(tmp_path):
    found = translated(
        tmp_path,
        command="trl sft --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --packing "
        "--learning_rate 2.0e-4 "
        "--use_peft --lora_r 32 --lora_target_modules q_proj k_proj --load_in_4bit "
        "--use_bnb_nested_quant --output_dir out",
    )
    holds(found, adapter__kind="qlora", adapter__quantize="nf4-dq", adapter__rank=32, adapter__alpha=32.0)
    holds(found, adapter__targets=["q_proj", "k_proj"], data__pack=True, data__max_length=1024, train__lr=2e-4)
    holds(found, train__precision="bf16-mixed", train__recompute="full", train__micro_batch=8, train__epochs=3)
    dpo = translated(
        tmp_path,
        command="accelerate launch --num_processes 2 trl/scripts/dpo.py --model_name_or_path m/x --dataset_name d/y "
        "--beta 0.2 --loss_type ipo --max_prompt_length 128 --output_dir out",
    )
    holds(dpo, train__objective="ipo", train__preference__beta=0.2, train__lr=1e-6, train__global_batch=16)
    assert keys_of(dpo, "not carried") == {"max_prompt_length"}


LLAMAFACTORY = """
model_name_or_path: Qwen/Qwen3-0.6B
trust_remote_code: true
quantization_bit: 4
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
dataset: own_chats,own_tasks
template: llama3
cutoff_len: 1024
packing: true
max_samples: 50
output_dir: saves/small/lora
plot_loss: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
flash_attn: fa2
val_size: 0.1
eval_strategy: steps
eval_steps: 50
"""


def test_llama_factory_with_its_datasets_looked_up(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "examples").mkdir()
    columns = {"messages": "conversations", "tools": "tools"}
    known = {
        "own_chats": {"file_name": "chats.json", "formatting": "sharegpt", "columns": columns},
        "own_tasks": {"hf_hub_url": "someone/tasks", "columns": {"prompt": "question", "response": "output"}},
        "own_pairs": {"file_name": "pairs.json", "ranking": True, "columns": {"chosen": "good", "rejected": "bad"}},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(known))
    found = translated(tmp_path / "examples", LLAMAFACTORY)
    holds(found, adapter__kind="qlora", adapter__rank=16, adapter__alpha=32, adapter__quantize="nf4-dq")
    holds(found, adapter__targets="all-linear", data__chat_template="llama3", data__max_length=1024, data__pack=True)
    holds(found, train__objective="causal_lm", train__recompute="full", train__precision="bf16-mixed", train__epochs=2)
    holds(found, data__validation=0.1, eval__every=50, data__mixing__when_exhausted="end", model__attention="auto")
    chats, tasks = found.config["data"]["source"]
    assert chats["path"].endswith("data/chats.json")
    assert (chats["format"], chats["columns"]) == ("chat", {"messages": "conversations"})
    assert tasks == {"path": "someone/tasks", "format": "alpaca", "columns": {"instruction": "question"}}
    assert keys_of(found, "not carried") == {"trust_remote_code", "max_samples", "dataset.own_chats.tools"}

    pairs = LLAMAFACTORY.replace("stage: sft", "stage: dpo\npref_loss: simpo\npref_beta: 2.0")
    pairs = pairs.replace("own_chats,own_tasks", "own_pairs").replace("quantization_bit: 4", "")
    found = translated(tmp_path / "examples", pairs)
    holds(found, train__objective="simpo", train__preference__beta=2.0, adapter__kind="lora", data__format="preference")
    assert found.config["data"]["columns"] == {"chosen": "good", "rejected": "bad"}


def test_llama_factory_without_its_datasets_and_as_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "given0.yaml").write_text(LLAMAFACTORY)
    command = "llamafactory-cli train given0.yaml learning_rate=1e-5 finetuning_type=full stage=rm pure_bf16=true"
    found = translated(tmp_path, command=command)
    holds(found, train__lr=1e-5, adapter__kind="none", train__precision="bf16-true")
    says = {line.key: line.says for line in found.lines if line.outcome == "not carried"}
    assert "data/dataset_info.json, which is not there" in says["dataset"]
    assert "rm is not built" in says["stage"]
    assert "no adapter is trained" in says["lora_rank"]
    # The same arguments in LLaMA-Factory's script, under a launcher.
    found = translated(tmp_path, command="accelerate launch --num_processes 4 src/train.py given0.yaml")
    holds(found, adapter__kind="qlora", train__global_batch=32, hardware__devices=4)
    new = "model: a/b\nmodel_class: llm\ntrain_dataset: data.yaml\nmicro_batch_size: 1\n"
    with pytest.raises(UserMistake, match="the new version of LLaMA-Factory"):
        translated(tmp_path, new)


def test_a_file_of_accelerate_with_fsdp_is_not_a_mixture(tmp_path):
    # As Accelerate's own example for Slurm: few keys beside those of FSDP.
    given = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_offload_params: false}\n"
    holds(translated(tmp_path, given), parallel__strategy="fsdp")


def test_a_large_batch_per_device_is_carried_without_the_global_batch(tmp_path):
    given = {**yaml.safe_load(TORCHTUNE), "batch_size": 128, "gradient_accumulation_steps": 1}
    given["dataset_val"] = {**given["dataset"], "split": "train[95%:]"}
    found = translated(tmp_path, yaml.safe_dump(given))
    holds(found, train__micro_batch=128, train__grad_accum=1, data__validation="train[95%:]")


def test_the_tables_speak_of_keys_that_exist():
    known = {key for key, _ in every_key()}
    for system in SYSTEMS:
        for name, rule in system.keys.items():
            assert set(rule.ours) <= known, (system.name, name)
        # Every default has a rule that translates it.
        assert set(system.defaults) <= set(system.keys), system.name


@pytest.mark.parametrize(
    "content",
    [AUTO, AXOLOTL, TORCHTUNE, FSDP_2, LLAMAFACTORY],
    ids=["deepspeed", "axolotl", "torchtune", "accelerate", "llamafactory"],
)
def test_every_key_of_a_file_has_a_line(content, tmp_path):
    found = translated(tmp_path, content)
    tree = content if isinstance(content, dict) else yaml.safe_load(content)
    said = {line.key for line in found.lines if not line.default}
    for key, _ in nested_leaves(tree):
        parts = key.split(".")
        assert any(".".join(parts[:length]) in said for length in range(1, len(parts) + 1)), key
    assert ours(found)


FOLDER = Path(__file__).parents[3] / "docs" / "coming-from"


@pytest.mark.parametrize("name", PAGES)
def test_the_words_of_a_page_are_the_rules(name):
    page = FOLDER / f"{name}.md"
    assert page.read_text() == refreshed(page), "run make docs"


@pytest.mark.parametrize("name", ["torchtitan", "unsloth"])
def test_the_words_of_a_system_without_rules_lead_to_keys_that_exist(name):
    rows = re.findall(r"^\| `.*?` ?\| (`.*?`) \|", (FOLDER / f"{name}.md").read_text(), flags=re.MULTILINE)
    ours = {key for row in rows for key in re.findall(r"`([a-z_.]+)`", row)}
    assert len(ours) > 10
    assert ours <= {key for key, _ in every_key()}


def test_every_page_is_in_the_list():
    listed = set(re.findall(r"\(coming-from/(\w+)\.md\)", (FOLDER.parent / "coming-from.md").read_text()))
    assert listed == {page.stem for page in FOLDER.glob("*.md")}
