"""Every config and command in the documents that shoal is measured against (docs/coverage.md)."""

import pytest

from tests.convert.configs.translated import holds, keys_of, ours, translated

DIST = """
trainer.dist:
  mode: "fsdp"
  fsdp: ["full_shard", "auto_wrap"]
  fsdp_config:
    use_orig_params: true
    activation_checkpointing: false
    limit_all_gathers: true
    forward_prefetch: true
    sync_module_states: true
    fsdp_auto_wrap_policy: "SIZE_BASED_WRAP"
    fsdp_min_num_params: 1000000
"""


def test_trainer_dist_of_a_hydra_template(tmp_path):
    found = translated(tmp_path, DIST)
    holds(found, parallel__strategy="fsdp", parallel__sharding="full_shard", parallel__wrap__min_params=1_000_000)
    holds(found, train__recompute="none", parallel__prefetch=1)
    block = "trainer.dist.fsdp_config."
    assert keys_of(found, "no meaning") == {
        block + key for key in ("use_orig_params", "limit_all_gathers", "sync_module_states")
    }
    assert keys_of(found, "not carried") == set()
    ddp = translated(
        tmp_path, DIST.replace('mode: "fsdp"', 'mode: "ddp"').replace("checkpointing: false", "checkpointing: true")
    )
    assert ours(ddp) == {"parallel.strategy": "ddp"}


def test_the_launcher_of_a_hydra_template(tmp_path):
    found = translated(
        tmp_path,
        "compute: {gpus_per_node: 4}\nhydra:\n  launcher:\n    tasks_per_node: ${compute.gpus_per_node}\n"
        '    timeout_min: 90\n    setup: ["export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID"]\n',
    )
    holds(found, hardware__devices=4, slurm__time="01:30:00")
    holds(found, slurm__setup=["export CUDA_VISIBLE_DEVICES=$SLURM_LOCALID"])


LITGPT = "litgpt finetune_lora meta-llama/Llama-2-7b-hf --data JSON --data.json_path data/alpaca.json "


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (LITGPT + "--devices 4", {"hardware.devices": 4, "parallel.strategy": "fsdp", "data.path": "data/alpaca.json"}),
        (LITGPT + "--devices 8 --num_nodes 2", {"hardware.devices": 8, "hardware.nodes": 2, "adapter.kind": "lora"}),
        (
            LITGPT + "--devices 8 --train.global_batch_size 16 --train.micro_batch_size 1 --lora_r 8",
            {
                "train.global_batch": 16,
                "train.micro_batch": 1,
                "adapter.rank": 8,
                "adapter.targets": ["q_proj", "v_proj"],
            },
        ),
        (
            LITGPT.replace("lora", "full") + "--devices 4 --train.learning_rate 3e-5",
            {"adapter.kind": "none", "train.lr": 3e-5, "train.recompute": "full", "train.clip": None},
        ),
        (
            "litgpt pretrain tiny-llama-1.1b --devices 8 --train.global_batch_size 512 "
            "--train.micro_batch_size 8 --data Alpaca2k",
            {"model.shape": "tinyllama-1.1b", "data.path": "mhenrichsen/alpaca_2k_test", "train.global_batch": 512},
        ),
        (
            "litgpt pretrain llama-2-7b --devices 8 --num_nodes 4 --train.global_batch_size 1024 --data RedPajama",
            {
                "model.shape": "llama2-7b",
                "hardware.nodes": 4,
                "parallel.sharding": "hybrid_shard",
                "train.global_batch": 1024,
            },
        ),
        ("litgpt pretrain tiny-llama-1.1b --devices 8 --precision bf16-mixed", {"train.precision": "bf16-mixed"}),
        ("litgpt pretrain tiny-llama-1.1b --devices 8 --precision 16-mixed", {"train.precision": "16-mixed"}),
        (
            "litgpt finetune_lora meta-llama/Llama-2-7b-hf --quantize bnb.nf4 --devices 1",
            {"adapter.kind": "qlora", "adapter.quantize": "bnb.nf4", "hardware.devices": 1},
        ),
        (
            "litgpt pretrain tiny-llama-1.1b --devices 8 --out_dir checkpoints/tinyllama-pretrain",
            {"run_dir": "checkpoints", "name": "tinyllama-pretrain"},
        ),
        ("litgpt pretrain tiny-llama-1.1b --devices 8 --resume checkpoints/x/", {"hardware.devices": 8}),
        ("NCCL_DEBUG=INFO NCCL_IB_DISABLE=0 litgpt pretrain tiny-llama-1.1b --devices 8", {"hardware.devices": 8}),
        ("litgpt pretrain tiny-llama-1.1b --devices 8 --train.max_steps 100 --profile", {"train.steps": 100}),
        (
            "litgpt finetune_lora meta-llama/Llama-3.1-405B --devices 8 --num_nodes 8 --precision bf16-mixed "
            "--train.global_batch_size 128 --train.micro_batch_size 1 --train.max_seq_length 4096 --lora_r 16 "
            "--data JSON --data.json_path data/alpaca.json",
            {
                "data.max_length": 4096,
                "adapter.rank": 16,
                "model.from": "meta-llama/Llama-3.1-405B",
                "train.global_batch": 128,
            },
        ),
        (
            "torchrun --nproc_per_node=8 --nnodes=4 --node_rank=$NODE_RANK "
            "--master_addr=$MASTER_ADDR --master_port=29500 "
            "-m litgpt pretrain llama-2-7b",
            {"hardware.devices": 8, "hardware.nodes": 4, "model.shape": "llama2-7b"},
        ),
        ("torchrun --nproc_per_node=4 train.py", {"hardware.devices": 4}),
        (
            'torchrun --nproc_per_node=4 --nnodes=2 --node_rank=0 --master_addr="192.168.1.1" '
            "--master_port=29500 train.py",
            {"hardware.devices": 4, "hardware.nodes": 2},
        ),
    ],
)
def test_a_command_of_the_documents(command, expected, tmp_path):
    found = translated(tmp_path, command=command)
    values = ours(found)
    assert {key: values.get(key, "(not there)") for key in expected} == expected


def test_thunder_and_redpajama_are_named_as_not_carried(tmp_path):
    found = translated(
        tmp_path,
        command="litgpt pretrain tiny-llama-1.1b --devices 8 --num_nodes 1 --compiler thunder "
        "--strategy fsdp --data RedPajama",
    )
    assert {"data.class_path"} <= keys_of(found, "not carried")
    assert "compiler" in keys_of(found, "not carried") or ours(found)["train.compile"] == "thunder"
    holds(found, parallel__strategy="fsdp", hardware__devices=8)


def test_the_batch_script_of_litgpt(tmp_path):
    script = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1

srun litgpt pretrain llama-2-7b \\
  --devices 8 \\
  --num_nodes 4 \\
  --data RedPajama
"""
    holds(translated(tmp_path, script), hardware__devices=8, hardware__nodes=4, model__shape="llama2-7b")


def test_the_batch_script_of_the_chess_workshop(tmp_path):
    script = """#!/bin/bash -l
#SBATCH --job-name=finetune_job       # Job name
#SBATCH --output=%x-%j.out            # File to write stdout
#SBATCH --nodes=1
#SBATCH --ntasks=2                    # One task per GPU
#SBATCH --partition=gpu
#SBATCH --cpus-per-task=10
#SBATCH --gres=gpu:2
#SBATCH --time=02:00:00
module purge
module load miniconda
conda activate workshop
TOTAL_BATCH_SIZE=8
BATCH_SIZE_PER_DEVICE=4
NUM_GPUS=$(echo $CUDA_VISIBLE_DEVICES | awk -F ',' '{print NF}')
GRADIENT_ACCUMULATION_STEPS=$((TOTAL_BATCH_SIZE / BATCH_SIZE_PER_DEVICE / NUM_GPUS))
echo "Using $NUM_GPUS GPUs"
torchrun \\
    --nnodes=1 \\
    --nproc-per-node=$NUM_GPUS \\
    chess.py \\
        --batch_size_per_device $BATCH_SIZE_PER_DEVICE \\
        --gradient_accumulation_steps $GRADIENT_ACCUMULATION_STEPS \\
        --gradient_checkpointing \\
        "$@"
"""
    found = translated(tmp_path, script)
    assert ours(found) == {
        "name": "finetune_job",
        "train.micro_batch": 4,
        "train.global_batch": 8,
        "train.recompute": "full",
        "hardware.nodes": 1,
        "hardware.devices": 2,
        "slurm.partition": "gpu",
        "slurm.cpus_per_task": 10,
        "slurm.time": "02:00:00",
        "slurm.setup": ["module purge", "module load miniconda", "conda activate workshop"],
    }
    assert found.missing == ("model.from", "data.path")


SCALED = """
training:
  num_gpus: 4
  precision: bf16-mixed
  batch_size: 32
  max_epochs: 50
  gradient_clip: 1.0
  fsdp: {sharding_strategy: FULL_SHARD, cpu_offload: false, activation_checkpointing: true, min_num_params: 1000000}
"""


def test_scmodelforge(tmp_path):
    found = translated(tmp_path, SCALED)
    holds(found, hardware__devices=4, train__micro_batch=32, train__global_batch=128, train__epochs=50)
    holds(found, parallel__strategy="fsdp", parallel__wrap__min_params=1_000_000, train__recompute="full")
    ddp = (
        "training: {strategy: ddp, num_gpus: 4, precision: bf16-mixed, batch_size: 64, max_epochs: "
        "50, gradient_clip: 1.0}"
    )
    holds(translated(tmp_path, ddp), parallel__strategy="ddp", train__global_batch=256, train__epochs=50)
    accumulated = "training: {batch_size: 16, gradient_accumulation: 4, num_gpus: 4}"
    holds(translated(tmp_path, accumulated), train__global_batch=256, train__micro_batch=16)
    checkpointed = "training: {batch_size: 64, fsdp: {sharding_strategy: FULL_SHARD, activation_checkpointing: true}}"
    holds(translated(tmp_path, checkpointed), train__micro_batch=64, train__grad_accum=1, train__recompute="full")
    for precision in ("bf16-mixed", "16-mixed", "32-true"):
        holds(translated(tmp_path, f"training: {{precision: {precision}}}"), train__precision=precision)


def test_the_gpus_of_scmodelforge_are_a_total_and_those_of_its_script_per_node(tmp_path):
    script = """#!/bin/bash
#SBATCH --job-name=scmodelforge
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8        # 8 GPUs per node
#SBATCH --gpus-per-task=1
#SBATCH --time=48:00:00
source .venv/bin/activate
srun scmodelforge train --config given1.yaml
"""
    config = "training: {num_gpus: 32, num_nodes: 4, fsdp: {sharding_strategy: HYBRID_SHARD}}"
    found = translated(tmp_path, script, config)
    holds(found, hardware__devices=8, hardware__nodes=4, parallel__sharding="hybrid_shard", slurm__time="48:00:00")
    assert found.contradictions == ()


LARGE = """
data:
  source: local
  paths: [./data/preprocessed.h5ad]
  gene_vocab: human_protein_coding
  max_genes: 4096
  num_workers: 8
  streaming: true
  streaming_chunk_size: 10000
  streaming_shuffle_buffer: 50000
tokenizer: {strategy: rank_value, max_genes: 4096, prepend_cls: true, masking: {mask_ratio: 0.15}}
model:
  {architecture: transformer_encoder, hidden_dim: 1024, num_layers: 12, num_heads: 16, dropout: 0.1, max_seq_len: 4096}
training:
  num_gpus: 8
  batch_size: 16
  gradient_accumulation: 2
  max_epochs: 100
  optimizer: {name: adamw, lr: 1.0e-4, weight_decay: 0.01}
  scheduler: {name: cosine_warmup, warmup_steps: 5000, total_steps: 500000}
  fsdp: {sharding_strategy: FULL_SHARD, cpu_offload: false, activation_checkpointing: true, min_num_params: 1000000}
  log_every_n_steps: 50
  checkpoint_dir: ./checkpoints/large-model
  save_top_k: 3
"""


def test_the_large_model_of_scmodelforge(tmp_path):
    found = translated(tmp_path, LARGE)
    holds(
        found, train__global_batch=256, train__steps=500_000, train__schedule__warmup=5000, data__streaming__chunk=10000
    )
    holds(found, run_dir="checkpoints", name="large-model", checkpoint__keep_best=3, log__every=50, data__workers=8)
    holds(found, data__source="cells", data__path=["./data/preprocessed.h5ad"], data__max_length=4096)
    holds(found, data__cells__gene_vocab="human_protein_coding", data__cells__max_genes=4096)
    holds(found, data__cells__tokens="rank_value", data__cells__cls=True, train__mask_ratio=0.15)
    holds(found, train__objective="masked_lm", model__shape__family="bert", model__shape__hidden=1024)
    holds(found, model__shape__layers=12, model__shape__heads=16, model__shape__positions=4096, model__dropout=0.1)
    assert [line.key for line in found.lines if line.outcome == "not carried"] == ["training.max_epochs"]
    assert found.missing == ()


def test_the_cells_of_scmodelforge_may_be_binned_and_masked_otherwise(tmp_path):
    given = """
data: {paths: a.h5ad, preprocessing: {normalize: null, hvg_selection: 2000, log1p: false}}
tokenizer: {strategy: binned_expression, n_bins: 21, binning_method: uniform, prepend_cls: false,
            masking: {random_replace_ratio: 0.2, keep_ratio: 0.2}}
training: {num_gpus: 1}
"""
    found = translated(tmp_path, given)
    holds(found, data__cells__tokens="binned", data__cells__bins=21, data__cells__binning="uniform")
    holds(found, data__cells__cls=False, data__cells__highly_variable=2000, data__cells__log1p=False)
    holds(found, train__masking__random=0.2, train__masking__mask=0.6)


ZERO_2 = {
    "train_batch_size": 256,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 1000, "total_num_steps": 100000},
    },
}


def test_deepspeed_of_the_course(tmp_path):
    found = translated(tmp_path, ZERO_2)
    assert ours(found) == {
        "train.global_batch": 256,
        "train.precision": "16-mixed",
        "train.loss_scale.initial": 65536.0,
        "parallel.strategy": "zero2",
        "parallel.offload": "optimizer",
        "train.clip": 1.0,
        "train.optimizer.name": "adamw",
        "train.lr": 1e-4,
        "train.optimizer.betas": [0.9, 0.999],
        "train.optimizer.eps": 1e-8,
        "train.optimizer.weight_decay": 0.01,
        "train.schedule.name": "linear",
        "train.schedule.min_ratio": 0.0,
        "train.schedule.warmup": 1000,
        "train.schedule.total_steps": 100_000,
    }
    # How many sequences a device has follows from the devices, of which this file knows nothing; with them it does.
    assert keys_of(found, "not carried") == {"gradient_accumulation_steps"}
    holds(translated(tmp_path, ZERO_2, command="torchrun --nproc_per_node=8 train.py"), train__micro_batch=8)


def test_zero_3_with_offload_of_the_course(tmp_path):
    device = {"device": "cpu", "pin_memory": True}
    stage_3 = {
        "stage": 3,
        "offload_param": device,
        "offload_optimizer": device,
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    found = translated(tmp_path, {"zero_optimization": stage_3})
    holds(found, parallel__strategy="zero3", parallel__offload="cpu", train__clip=None)
    assert keys_of(found, "not carried") == set()


def test_accelerate_of_the_course(tmp_path):
    config = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 8\n"
        "mixed_precision: bf16\ngradient_accumulation_steps: 4\n"
    )
    found = translated(tmp_path, config)
    holds(found, parallel__strategy="ddp", hardware__devices=8, train__precision="bf16-mixed")
    assert keys_of(found, "not carried") == {"gradient_accumulation_steps"}
    # With the script that it launches, the batch is known.
    flags = "accelerate launch --config_file given0.yaml train.py --per_device_train_batch_size 2"
    holds(translated(tmp_path, config, command=flags), train__global_batch=64, train__micro_batch=2)
