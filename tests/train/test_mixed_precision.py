"""bf16-mixed is as close to fp32 as autocast over fp32 weights is, which is what transformers' Trainer does.

Every test runs with emulated matmuls, and with the CPU's own where it has fast ones.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import DbrxConfig, DbrxForCausalLM, LlamaForCausalLM

from shoal import api
from shoal.catalogue.shapes import shape_from_sizes
from shoal.data import load_tokenizer, prepare_sets
from shoal.data.loader import batches
from shoal.models.emulate import VARIABLE, emulated_dtypes, emulated_matmuls, slow_dtypes
from shoal.models.families import transformers_config
from tests.harness import lines, settings, slow, train_on

LENGTH, SEQUENCES, STEPS, LR = 64, 4, 25, 3e-4


@pytest.fixture(params=["emulated", "native"], autouse=True)
def _matmuls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "native" and slow_dtypes():
        pytest.skip("this CPU has no fast bf16 or fp16 matmuls")
    monkeypatch.setenv(VARIABLE, request.param)
    slow_dtypes.cache_clear()
    yield
    slow_dtypes.cache_clear()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden": 128, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 352, "vocab": 260, "positions": LENGTH}
    folder = tmp_path_factory.mktemp("weights")
    LlamaForCausalLM(transformers_config(shape_from_sizes("llama", **sizes, tied=True))).save_pretrained(folder)
    return folder


def job(text: Path, weights: Path, precision: str, steps: int = STEPS) -> dict[str, Any]:
    return settings(
        text,
        name=precision,
        model={"from": str(weights), "tokenizer": "bytes"},
        data__max_length=LENGTH,
        data__pack=True,
        train__precision=precision,
        train__steps=steps,
        train__global_batch=SEQUENCES,
        train__micro_batch=SEQUENCES,
        train__lr=LR,
        train__schedule={"name": "constant", "warmup": 0},
        train__clip=None,
    )


def under_autocast(text: Path, weights: Path, steps: int) -> Iterator[float]:
    """The same steps by hand, with transformers' model and torch's AdamW."""
    config = api.config_from_mapping(job(text, weights, "32-true"))
    sets = prepare_sets(config.data, load_tokenizer("bytes"), seed=config.seed, report=lambda _: None)
    model = LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32)
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    chosen = config.train.optimizer
    groups = [{"params": decayed, "weight_decay": chosen.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=chosen.betas, eps=chosen.eps)
    sizes = {"first_step": 0, "global_batch": SEQUENCES, "micro_batch": SEQUENCES, "rank": 0, "ranks": 1, "pad": 0}
    for step in islice(batches(sets.training, sets.order, **sizes), steps):
        (batch,) = step.micro_batches
        emulated = emulated_matmuls(emulated_dtypes(torch.device("cpu"), torch.bfloat16))
        with emulated, torch.autocast("cpu", torch.bfloat16):
            logits = model(batch.inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def distance(found: list[float], exact: list[float]) -> float:
    return sum(abs(one - other) for one, other in zip(found, exact, strict=True)) / len(exact)


@pytest.mark.parametrize("steps", [12, slow(STEPS)])
def test_losses_are_as_close_to_fp32_as_with_autocast(steps, text, weights, tmp_path):
    exact, mixed = (
        [line["loss"] for line in lines(train_on(1, job(text, weights, precision, steps), tmp_path))]
        for precision in ("32-true", "bf16-mixed")
    )
    autocast = list(under_autocast(text, weights, steps))
    assert 0 < distance(autocast, exact) < 2e-3  # the same training
    assert distance(mixed, exact) < 2 * distance(autocast, exact)


@pytest.mark.parametrize(
    ("ranks", "parallel", "precision"),
    [
        (1, {}, "bf16-mixed"),
        slow(1, {}, "16-mixed"),
        *(slow(2, {"tp": 2}, precision) for precision in ("bf16-mixed", "16-mixed")),
        *(slow(2, {"strategy": "fsdp"}, precision) for precision in ("bf16-mixed", "16-mixed")),
    ],
    ids=str,
)
def test_an_update_of_a_norm_too_small_for_bf16_is_not_lost(ranks, parallel, precision, text, weights, tmp_path):
    """Only norms are trained, in steps of 1e-4 from one: the next bf16 value is 1.0078, the next fp16 value 1.001."""
    config = job(text, weights, precision) | {"parallel": parallel}
    config["model"]["freeze"] = ["*proj*", "*embed*"]
    found = {}
    for lr in (1e-4, 1e-12):
        train = config["train"] | {"lr": lr, "steps": 3, "micro_batch": 2 if "strategy" in parallel else 4}
        run = train_on(ranks, config | {"name": str(lr), "train": train}, tmp_path)
        found[lr] = [line["loss"] for line in lines(run)]
    learning, still = found[1e-4], found[1e-12]
    assert learning[0] == still[0]
    assert abs(learning[2] - still[2]) > 1e-5


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "recompute"), [({"strategy": "fsdp"}, "selective"), ({"tp": 2}, "full")], ids=str)
def test_compiled_blocks_round_like_eager_ones(parallel, recompute, text, weights, tmp_path):
    found = []
    for ranks, more in ((1, {}), (2, {"compile": True, "recompute": recompute})):
        config = job(text, weights, "bf16-mixed") | {"name": str(ranks), "parallel": parallel if ranks > 1 else {}}
        config["train"] |= {"steps": 5, "micro_batch": 2, "deterministic": False, **more}
        found.append([line["loss"] for line in lines(train_on(ranks, config, tmp_path))])
    assert found[1] == pytest.approx(found[0], rel=2e-3)


def test_a_family_whose_code_does_not_support_two_dtypes_trains_too(text, tmp_path):
    """DBRX adds the output of its experts, in the dtype of matrices, to a tensor like their input."""
    shape = DbrxConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=LENGTH,
        vocab_size=260,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    )
    torch.manual_seed(0)
    DbrxForCausalLM(shape).save_pretrained(tmp_path / "dbrx")
    found = []
    for precision in ("32-true", "bf16-mixed"):
        config = job(text, tmp_path / "dbrx", precision)
        config["train"] |= {"steps": 3}
        found.append([line["loss"] for line in lines(train_on(1, config, tmp_path))])
    assert found[1] == pytest.approx(found[0], rel=2e-3)
