"""Runs of torchtune 0.6.1 that a random generator chose: its recipes for one device, with its own configs for them.

    python benchmarks/gpu/drawn_torchtune.py FILE [--count 16] [--seconds 540] [--tiny]

A run is `full_finetune_single_device` or `lora_finetune_single_device` with the recipe's YAML of the model, of which
only what is drawn is set. Replaced are components that its config names: the dataset, which has random tokens, packed
by torchtune's own PackedDataset where it is packed; the tokenizer, which only says what pads; the checkpointer, which
makes random weights on the device; and the logger, which also counts steps and ends the run after the last. Peaks of
memory are those that the recipe logs of every step, since it resets them. Full training, LoRA and QLoRA take turns.
torchtune imports torchao's NF4 from where torchao 0.14 had it last, so that one lies before any other on the path. On a
CPU packed sequences have a dense mask instead of flex attention.
"""

import gc
import importlib.util
import multiprocessing
import random
import re
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import datasets  # noqa: F401  looks for torchvision, and must not find what stands for it below
import torch
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from drawn_runs import LINEAR, fits
from peers.clock import Clock
from peers.task import Task
from trainer_runs import measured_row, row, run_drawn

# Which torchtune imports for downloads, tokenizers and images.
UNUSED = ("kagglehub", "kagglehub.auth", "kagglehub.exceptions", "kagglehub.handle", "sentencepiece", "tiktoken")
UNUSED += ("tiktoken.load", "torchvision", "torchvision.transforms", "torchvision.transforms.v2")


class Absent(types.ModuleType):
    """Stands for a module that is not installed, and has every class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def standing_in(names: tuple[str, ...]) -> Iterator[None]:
    missing = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules.update({name: Absent(name) for name in missing})
    yield
    for name in missing:
        del sys.modules[name]


with standing_in(UNUSED):
    import torchtune
    from torchtune import config, training
    from torchtune.datasets import PackedDataset
    from torchtune.training.metric_logging import DiskLogger

# 0.6.1 upcasts logits in parts; 0.7 computes them in parts, which is what the forecast has for the month.
SOURCE, SEED, SYSTEM, TRAITS = "torchtune-h200-drawn", 2111, "torchtune@2026-11", {"chunks": "upcast"}
RECIPES = Path(torchtune.__file__).parents[1] / "recipes"
CONFIGS = {"llama3.2-1b": "llama3_2/1B", "llama3.2-3b": "llama3_2/3B", "llama3.1-8b": "llama3_1/8B"}
LLAMA = tuple(CONFIGS)  # only of these it has configs with quantized weights
CONFIGS |= {f"qwen2.5-{size}b": f"qwen2_5/{size}B" for size in ("0.5", "1.5", "3", "7")}
# The first is the one of its configs.
TARGETS = ([one for one in LINEAR if one != "k_proj"], LINEAR, ["q_proj", "v_proj"])
PAGED = {"paged_optimizer": True, "optimizer_in_backward": True}
# The optimizers of its configs for full training; LoRA's is a fused AdamW.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: PAGED if name.startswith("qwen") else {"optimizer": "adamw8bit", **PAGED} for name in CONFIGS},
    "qwen2.5-0.5b": {},
}
FUSED = {"_component_": "torch.optim.AdamW", "fused": True, "lr": 2e-5}
DOCUMENTS = 4
PACKED = f"packed, {DOCUMENTS} documents to a sequence, which flex attention keeps apart; the forecast is without"
# What `--tiny` makes of every model; NF4 needs matrices of 16,384 elements.
SIZES = {"vocab_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 256, "max_seq_len": 128}


class Measured(Exception):
    """The last step is over."""


def draw(count: int) -> Iterator[dict[str, Any]]:
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        kind = ("full", "LoRA", "QLoRA")[drawn % 3]
        sequence = choice((256, 512, 1024) if drawn % 4 == 3 else (512, 1024, 2048, 4096, 8192))
        tokens = choice((256, 512, 1024) if drawn % 4 == 3 else (4096, 8192, 16384))
        model, accum = choice(LLAMA if kind == "QLoRA" else tuple(CONFIGS)), choice((1, 1, 2))
        rank, targets = choice((8, 16, 64)), choice((TARGETS[0], *TARGETS))
        settings: dict[str, Any] = {"recompute": choice(("none", "full"))}
        configured, packed = choice((True, True, False)), drawn % 4 == 2
        if kind == "full" and configured:
            settings |= OPTIMIZERS[model]
            accum = 1 if "optimizer_in_backward" in settings else accum
        if kind != "full":
            settings["adapter"] = {"rank": rank, "targets": targets}
        if kind == "QLoRA":
            settings["adapter"] |= {"quantize": "nf4", "double_quantized": True}
        case = row(model, max(1, tokens // sequence), sequence, "bf16-true", **settings)
        case |= {"source": SOURCE, "system": SYSTEM, "accum": accum, "loss": "chunked", "clips": False}
        case |= {"traits": TRAITS, "unknown": PACKED if packed else ""}
        if fits(case):
            drawn += 1
            yield case


class RandomTokenizer:
    def __init__(self, max_seq_len: int, **_: Any) -> None:
        self.max_seq_len, self.pad_id = max_seq_len, 0


class RandomTokens(torch.utils.data.Dataset):
    """Sequences, or documents of them, in lists as torchtune's SFTDataset has them."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, vocabulary, (count, length), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": list(self.tokens[index]), "labels": list(self.tokens[index])}


def random_data(tokenizer: RandomTokenizer, count: int, vocabulary: int, packed: bool) -> torch.utils.data.Dataset:
    length = tokenizer.max_seq_len
    if not packed:
        return RandomTokens(count, length, vocabulary)
    return PackedDataset(RandomTokens(count * DOCUMENTS, length // DOCUMENTS, vocabulary), max_seq_len=length)


class RandomWeights:
    """A checkpointer without files. Its model has no adapters and is not quantized, as a checkpoint is."""

    model: dict[str, Any]
    device: str

    def __init__(self, **_: Any) -> None:
        pass

    def load_checkpoint(self) -> dict[str, Any]:
        with training.set_default_dtype(torch.bfloat16), torch.device(self.device):
            made = config.instantiate(OmegaConf.create(self.model))
        return {training.MODEL_KEY: made.state_dict()}


class StepLogger(DiskLogger):
    clock: Clock
    steps: int
    peaks: dict[str, float]

    def log_dict(self, payload: Any, step: int) -> None:
        super().log_dict(payload, step)
        for kind in ("alloc", "reserved"):
            name = f"peak_memory_{kind}"
            self.peaks[name] = max(self.peaks.get(name, 0.0), payload.get(name, 0.0))
        self.clock.step_done(torch.zeros(()))
        if step == self.steps:
            raise Measured


def measure(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    """In a process of its own: pages of optimizer state and compiled kernels would stay for the next run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["datasets", "transformers"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_here, case, steps, not isinstance(shape, str)).result()


def measure_here(case: dict[str, Any], steps: int, tiny: bool) -> dict[str, Any]:
    kind = "full" if case.get("adapter") is None else "lora"
    module = importlib.util.spec_from_file_location(kind, RECIPES / f"{kind}_finetune_single_device.py")
    recipes = importlib.util.module_from_spec(module)
    module.loader.exec_module(recipes)
    recipe_class = {"full": "FullFinetuneRecipeSingleDevice", "lora": "LoRAFinetuneRecipeSingleDevice"}[kind]
    with tempfile.TemporaryDirectory() as folder:
        settings = read_config(case, steps, folder, tiny)
        model = OmegaConf.to_container(settings.model)
        RandomWeights.device = settings.device
        RandomWeights.model = {name: value for name, value in model.items() if name in ("_component_", *SIZES)}
        RandomWeights.model["_component_"] = re.sub(r"\.q?lora_", ".", model["_component_"])
        task = Task("torchtune", case["model"], case["sequence"], case["micro_batch"], steps, "", time.time())
        StepLogger.clock, StepLogger.steps, StepLogger.peaks = Clock(task), steps, {}
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                recipe = getattr(recipes, recipe_class)(cfg=settings)
                recipe.setup(cfg=settings)
                gc.collect()
                StepLogger.clock.begin()
                recipe.train()
        except Measured:
            found, peaks = StepLogger.clock.result(), StepLogger.peaks
            found |= {"reserved_gib": peaks["peak_memory_reserved"], "allocated_gib": peaks["peak_memory_alloc"]}
            return measured_row(case, found) | {"unknown": case["unknown"]}
        raise AssertionError("The run ended before its last step.")


def read_config(case: dict[str, Any], steps: int, folder: str, tiny: bool) -> Any:
    """torchtune's config of the model and the recipe, with what was drawn and with the components above."""
    adapter, length, batch = case.get("adapter"), case["sequence"], case["micro_batch"]
    kind = "full" if adapter is None else "qlora" if "quantize" in adapter else "lora"
    found = OmegaConf.load(RECIPES / "configs" / f"{CONFIGS[case['model']]}_{kind}_single_device.yaml")
    vocabulary = SIZES["vocab_size"] if tiny else 100_000
    data = {"count": steps * batch * case["accum"], "vocabulary": vocabulary, "packed": case["unknown"] == PACKED}
    found.dataset = {"_component_": f"{__name__}.random_data", **data}
    found.tokenizer = {"_component_": f"{__name__}.RandomTokenizer", "max_seq_len": length}
    found.checkpointer._component_ = f"{__name__}.RandomWeights"
    found.metric_logger._component_ = f"{__name__}.StepLogger"
    found.output_dir, found.batch_size, found.gradient_accumulation_steps = folder, batch, case["accum"]
    found.enable_activation_checkpointing = case["recompute"] == "full"
    found.log_peak_memory_stats = True  # as in most of the configs
    found.device = "cuda" if torch.cuda.is_available() else "cpu"
    if adapter is None and "optimizer_in_backward" not in case:
        found.optimizer, found.optimizer_in_bwd = FUSED, False
    if tiny:
        lora = "" if adapter is None else "lora_"
        found.model = {**found.model, **SIZES, "_component_": f"torchtune.models.llama3_2.{lora}llama3_2"}
        if kind == "qlora":
            found.model.quantize_base = True
    if adapter is not None:
        attention = [name.replace("o_proj", "output_proj") for name in adapter["targets"] if name in LINEAR[:4]]
        found.model.lora_attn_modules, found.model.apply_lora_to_mlp = attention, "up_proj" in adapter["targets"]
        found.model.lora_rank, found.model.lora_alpha = adapter["rank"], 2 * adapter["rank"]
    return found


if __name__ == "__main__":
    run_drawn("Runs of torchtune that a random generator chose.", draw, 16, measure)
