"""What the commands of a page find in the reader's folder, where the page says `<!-- given: PATH … -->`.

A page about a run or about data of the reader's cannot show all of it. These are small stand-ins, made once for all
pages and copied into the folder of each: files are written here, runs are trained by `shoal train`.
"""

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page_blocks import DOCS, blocks

RUN = """name: first
model:
  shape: {family: llama, hidden: 16, layers: 1, heads: 2, ffn: 32, vocab: 260, positions: 512}
  tokenizer: bytes
data: {path: texts, max_length: 64, validation: 0.02}
train: {steps: 200, global_batch: 8, lr: 1e-3, precision: 32-true}
checkpoint: {every: 200}
eval: {every: 200, batches: 2}
log: {every: 50}
"""
HELPER = """name: helper
model: {from: models/smollm2-135m}
data: {path: chats.jsonl, max_length: 256, validation: test.jsonl}
train: {steps: 2, global_batch: 4, micro_batch: 4, lr: 1e-3, precision: 32-true}
"""
SCORES = """def close(answer, expected, record):
    return float(answer.strip().lower() == expected.strip().lower())
"""
COLOURS = {"sky": "blue", "sea": "blue", "grass": "green", "snow": "white", "coal": "black", "sun": "yellow"}
WORDS = (
    *("the", "shoal", "turns", "as", "one", "and", "every", "swimmer", "follows", "its", "nearest", "neighbours"),
    *(
        "through",
        "dark",
        "cold",
        "water",
        "until",
        "the",
        "light",
        "of",
        "the",
        "morning",
        "falls",
        "on",
        "it",
        "again",
    ),
)


@dataclass(frozen=True)
class PageFiles:
    """`folder` has what was made; `run` runs a line, `shoal …`, there."""

    folder: Path
    run: Callable[[str], None]

    def provide(self, given: str, folder: Path) -> None:
        """Copy into `folder` what a page asks for: `PATH`, or `PATH=OTHER` for a copy under another name."""
        for word in given.split():
            path, _, other = word.partition("=")
            self.copy(other or path, path, folder)

    def copy(self, name: str, path: str, folder: Path) -> None:
        needed, make = MADE[name]
        for one in needed:
            self.copy(one, one, folder)
        if not (source := self.folder / name).exists():
            source.parent.mkdir(parents=True, exist_ok=True)
            for one in needed:
                self.copy(one, one, self.folder)
            make(self)
        target = folder / path
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, target)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_lines(self, name: str, records: Iterable[Any]) -> None:
        self.write(name, "".join(json.dumps(record) + "\n" for record in records))


def _sentence(source: random.Random, least: int = 5, most: int = 12) -> str:
    return f"{' '.join(source.choices(WORDS, k=source.randint(least, most))).capitalize()}."


def texts(made: PageFiles) -> None:
    source = random.Random(1)
    for index in range(30):
        made.write(f"texts/{index:02}.txt", " ".join(_sentence(source) for _ in range(12)) + "\n")


def chats(made: PageFiles) -> None:
    source = random.Random(2)
    made.write_lines("chats.jsonl", (_chat(source) for _ in range(400)))


def _chat(source: random.Random) -> dict[str, Any]:
    turns = [{"role": "system", "content": "Be brief."}] if source.random() < 0.3 else []
    for opening in ("colour", "and")[: source.randint(1, 2)]:
        thing = source.choice([*COLOURS])
        turns.append({"role": "user", "content": f"{opening} of the {thing}?"})
        turns.append({"role": "assistant", "content": f"the {thing} is {COLOURS[thing]}"})
    return {"messages": turns}


def test_chats(made: PageFiles) -> None:
    source = random.Random(3)
    made.write_lines("test.jsonl", (_chat(source) for _ in range(4)))


def alpaca(made: PageFiles) -> None:
    """The last record is there twice, and some are longer than 256 tokens of `base`."""
    source = random.Random(4)
    records = [
        {
            "instruction": f"Write about {_sentence(source).lower()}",
            "output": " ".join(_sentence(source) for _ in range(source.choice([1, 2, 2, 3, 3, 4, 6, 24]))),
        }
        for _ in range(300)
    ]
    made.write_lines("alpaca.jsonl", [*records, records[-1]])


def broken(made: PageFiles) -> None:
    good = (made.folder / "alpaca.jsonl").read_text().splitlines(keepends=True)[:40]
    made.write("broken.jsonl", "".join([*good, '{"instruction": "a tab\tin it"}\n', '{"instruction": "no answer"}\n']))


def shards(made: PageFiles) -> None:
    source = random.Random(5)
    (made.folder / "shards").mkdir()
    for index in range(6):
        lines = (json.dumps({"text": " ".join(_sentence(source) for _ in range(4))}) + "\n" for _ in range(300))
        (made.folder / "shards" / f"{index}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))


def base(made: PageFiles) -> None:
    """A tiny Llama with a tokenizer of 591 tokens, trained on what is here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(
        vocab_size=591, special_tokens=[end], initial_alphabet=sorted(alphabet), show_progress=False
    )
    words = [(made.folder / name).read_text() for name in ("chats.jsonl", "alpaca.jsonl")]
    tokenizer.train_from_iterator([*words, *(f"letter {index} of many words" for index in range(400))], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
    fast.save_pretrained(made.folder / "base")
    _save_llama(made.folder / "base", vocab=len(fast), end=fast.eos_token_id)


def _save_llama(folder: Path, *, vocab: int, end: int | None) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = LlamaConfig(
        **sizes, vocab_size=vocab, max_position_embeddings=2048, eos_token_id=end, bos_token_id=None, pad_token_id=None
    )
    LlamaForCausalLM(shape).save_pretrained(folder)


def docstrings(made: PageFiles) -> None:
    """Of the form of examples/encoders/docstrings.py, which reads all of Python's standard library."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    source = random.Random(6)
    records = [{"text": _sentence(source), "package": source.choice(["os", "json"])} for _ in range(64)]
    for name, some in (("all", records), ("train", records[:48]), ("test", records[48:])):
        made.write_lines(f"data/docstrings/{name}.jsonl", some)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, ".", *sorted({word.lower() for word in WORDS}), *sorted({word.capitalize() for word in WORDS})]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{token[1:-1].lower()}_token": token for token in special}
    ).save_pretrained(made.folder / "data" / "docstrings" / "tokenizer")


def tiny_chat_model(made: PageFiles) -> None:
    """In place of SmolLM2: its special tokens and template, and hardly any weights."""
    from shoal.data.formats.chat_template import read_template
    from shoal.data.tokenizer import ByteTokenizer

    folder = made.folder / "models" / "smollm2-135m"
    tokenizer = ByteTokenizer(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = read_template("chatml")
    tokenizer.save(folder)
    _save_llama(folder, vocab=264, end=tokenizer.hugging_face.eos_token_id)


def deepspeed(made: PageFiles) -> None:
    """As DeepSpeed's ZeRO 1 and 2 save a model."""
    import torch

    place = made.folder / "ds" / "global_step1"
    place.mkdir(parents=True)
    torch.save({"module": _weights(made), "ds_version": "0.19"}, place / "mp_rank_00_model_states.pt")
    made.write("ds/latest", "global_step1")


def distributed_checkpoint(made: PageFiles) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(_weights(made), checkpoint_id=made.folder / "checkpoint" / "step-1000", no_dist=True)


def state_dict(made: PageFiles) -> None:
    import torch

    (made.folder / "full").mkdir(exist_ok=True)
    torch.save(_weights(made), made.folder / "full" / "pytorch_model.bin")


def _weights(made: PageFiles) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(made.folder / "llama" / "model.safetensors")


def run_of(file: str, *more: str) -> Callable[[PageFiles], None]:
    return lambda made: made.run(" ".join(["shoal train", file, *more]))


def written(name: str, text: str) -> Callable[[PageFiles], None]:
    return lambda made: made.write(name, text)


def shown_on(page: str, name: str) -> Callable[[PageFiles], None]:
    """A file that another page shows."""
    shown = next(block.body for block in blocks(DOCS / page) if block.title == name)
    return lambda made: made.write(name, shown)


# Path → what it needs beside it, and how it is made.
MADE: dict[str, tuple[tuple[str, ...], Callable[[PageFiles], None]]] = {
    "texts": ((), texts),
    "run.yaml": (("texts",), written("run.yaml", RUN)),
    "large.yaml": (("texts",), written("large.yaml", RUN.replace("global_batch: 8", "global_batch: 64"))),
    "runs/first": (("run.yaml",), run_of("run.yaml")),
    "other.txt": ((), written("other.txt", "A shoal turns as one. " * 40)),
    "chats.jsonl": ((), chats),
    "test.jsonl": ((), test_chats),
    "models/smollm2-135m": ((), tiny_chat_model),
    "helper.yaml": (("chats.jsonl", "test.jsonl", "models/smollm2-135m"), written("helper.yaml", HELPER)),
    "runs/helper": (("helper.yaml",), run_of("helper.yaml")),
    "my_scores.py": ((), written("my_scores.py", SCORES)),
    "alpaca.jsonl": ((), alpaca),
    "base": (("chats.jsonl", "alpaca.jsonl"), base),
    "qa.jsonl": (
        (),
        lambda made: made.write_lines(
            "qa.jsonl", ({"question": f"colour of the {one}?", "answer": COLOURS[one]} for one in COLOURS)
        ),
    ),
    "bad-turns.jsonl": (
        (),
        lambda made: made.write_lines(
            "bad-turns.jsonl", [{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}]
        ),
    ),
    "broken.jsonl": (("alpaca.jsonl",), broken),
    "shards": ((), shards),
    "data/docstrings": ((), docstrings),
    "llama": (("runs/first",), lambda made: made.run("shoal export runs/first --to hf --output llama")),
    "out/final": (("runs/first",), lambda made: made.run("shoal export runs/first --to litgpt --output out/final")),
    "ds_config.json": ((), shown_on("coming-from/deepspeed.md", "ds_config.json")),
    "accelerate.yaml": ((), shown_on("coming-from/accelerate.md", "accelerate.yaml")),
    "qlora.yml": ((), shown_on("coming-from/axolotl.md", "qlora.yml")),
    "job.sbatch": ((), shown_on("coming-from/launchers.md", "job.sbatch")),
    "ds": (("llama",), deepspeed),
    "checkpoint/step-1000": (("llama",), distributed_checkpoint),
    "full/pytorch_model.bin": (("llama",), state_dict),
}
