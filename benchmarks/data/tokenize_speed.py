"""Speed and memory of `prepare` (read, format, tokenize, write, pack), beside the bare tokenizers library.

    python benchmarks/data/tokenize_speed.py OUTPUT.json [--only alpaca,text,chat,memory]

The data is real: the functions of Python's standard library and packages as instructions and as chats, their files as
plain text, tokenized by a byte-level BPE of 32,000 tokens that is trained on a part of them. `prepare` reads JSON lines
and writes packed sequences; the bare library gets the same texts, formatted and in memory, in `encode_batch_fast` with
its threads, and its results are thrown away. Both use all cores, and begin with a new tokenizer, whose cache is empty.
They alternate, because the machine may be shared: each preparation is compared with the mean of the bare runs before
and after it. `speed_of_bare` is the median of these ratios by the wall clock, and `processor_time_of_bare` that of the
processor time, which depends less on other load; `load` is the load average before and after. Chats have no limit:
their template is rendered too, which takes as long as to tokenize a short one. It takes three or four minutes on two
cores without other load; `--only alpaca,text` measures these alone.

Memory is that of another process that prepares a million records as bytes, which gives the most tokens (the BPE would
take long), and fewer with the BPE: the peak of the sum over that process and its workers, of the pages that each has to
itself or its share of common ones (PSS), and without files that are mapped, which the system may drop (anonymous).
"""

import ast
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shoal.config.schema import DataConfig
from shoal.data import load_tokenizer, prepare
from shoal.data.formats.choose import alpaca_prompt
from shoal.data.workers import available_cores

ROUNDS = 7
CHARACTERS = 8_000_000
TEXTS_AT_ONCE = 2_000
LIMIT = 0.8
ROWS = {"bytes": 1_000_000, "bpe": 50_000}
LENGTH = 2048


def sources() -> Iterator[str]:
    """The files of Python's standard library, and of the packages that are installed with it."""
    paths = sysconfig.get_paths()
    for folder in (Path(paths["stdlib"]), Path(paths["purelib"])):
        for file in sorted(folder.rglob("*.py")):
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # the library's tests have some in other encodings


def functions(text: str) -> Iterator[dict[str, str]]:
    """Each function as an instruction."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            about = ast.get_docstring(node) or "It has no documentation."
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            yield {"instruction": f"Write the Python function {node.name}. {about}", "output": body}


def train_tokenizer(folder: Path, texts: list[str]) -> None:
    from transformers import PreTrainedTokenizerFast

    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    backend.train_from_iterator(texts, trainer)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(str(folder))


class Clock:
    """Seconds since it was made: of the wall, and of the processor in this process and its ended children."""

    def __init__(self) -> None:
        self._began = self._now()

    def read(self) -> np.ndarray:
        return self._now() - self._began

    def _now(self) -> np.ndarray:
        used = os.times()
        return np.array([time.perf_counter(), used.user + used.system + used.children_user + used.children_system])


def encode_bare(texts: list[str], folder: Path) -> np.ndarray:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    clock = Clock()
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        backend.encode_batch_fast(texts[first : first + TEXTS_AT_ONCE], add_special_tokens=False)
    seconds = clock.read()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return seconds


def settings(file: Path) -> DataConfig:
    return DataConfig(source="json", path=str(file), max_length=LENGTH, pack=True, validation=0, chat_template="chatml")


def conversation(one: dict[str, str]) -> dict[str, Any]:
    """An instruction as a chat."""
    turns = (("user", one["instruction"]), ("assistant", one["output"]))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def rendered(one: dict[str, str]) -> str:
    """The same as the template chatml renders it."""
    return "".join(
        f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in conversation(one)["messages"]
    )


def prepare_all(file: Path, folder: Path, name: str = "bpe") -> tuple[np.ndarray, Any]:
    tokenizer = load_tokenizer(name, folder)
    print("ready", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as cache:
        clock = Clock()
        sequences = prepare(settings(file), tokenizer, cache=Path(cache), report=lambda sentence: None)
        return clock.read(), sequences.summary


def limited(items: Iterator[Any], characters: Callable[[Any], int], most: int) -> list[Any]:
    taken, total = [], 0
    for item in items:
        taken.append(item)
        total += characters(item)
        if total >= most:
            break
    return taken


def compare(name: str, records: list[dict[str, str]], texts: list[str], work: Path, folder: Path) -> dict[str, Any]:
    """`prepare` on these records, and the bare library on the texts that it tokenizes."""
    file = work / f"{name}.jsonl"
    with file.open("w") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in records)
    load = [os.getloadavg()[0]]
    bare, ours, summary = [encode_bare(texts, folder)], [], None
    for _ in range(ROUNDS):
        seconds, summary = prepare_all(file, folder)
        ours.append(seconds)
        bare.append(encode_bare(texts, folder))
    load.append(os.getloadavg()[0])
    assert summary is not None
    neighbours = (np.array(bare[:-1]) + np.array(bare[1:])) / 2
    ratios = np.median(neighbours / np.array(ours), axis=0)
    wall = float(np.median(np.array(ours), axis=0)[0])
    found = {
        "records": len(records),
        "characters": sum(map(len, texts)),
        "tokens": summary.tokens,
        "filled": round(summary.filled, 4),
        "load": [round(one, 1) for one in load],
        "bare_seconds": [round(float(one[0]), 2) for one in bare],
        "prepare_seconds": [round(float(one[0]), 2) for one in ours],
        "bare_processor_seconds": [round(float(one[1]), 2) for one in bare],
        "prepare_processor_seconds": [round(float(one[1]), 2) for one in ours],
        "tokens_per_second": round(summary.tokens / wall),
        "speed_of_bare": round(float(ratios[0]), 3),
        "processor_time_of_bare": round(1 / float(ratios[1]), 3),
    }
    print(json.dumps({name: found}), flush=True)
    return found


def write_rows(file: Path, records: list[dict[str, str]], rows: int) -> None:
    """About 300 bytes per row: short functions, again and again, numbered."""
    short = [one for one in records if 100 < len(json.dumps(one)) < 450]
    with file.open("w") as stream:
        for row in range(rows):
            one = short[row % len(short)]
            stream.write(json.dumps({"instruction": f"{row}. {one['instruction']}", "output": one["output"]}) + "\n")


def memory_of(pid: int) -> tuple[int, int]:
    """PSS and anonymous KiB of a process and its children."""
    proportional = anonymous = 0
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in [str(pid), *children]:
        try:
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()[1:])
        except (OSError, ValueError):
            continue  # it has just ended
        proportional += int(lines["Pss"].split()[0])
        anonymous += int(lines["Pss_Anon"].split()[0])
    return proportional, anonymous


def measure_memory(file: Path, folder: Path, name: str) -> dict[str, Any]:
    began = time.perf_counter()
    command = [sys.executable, __file__, "--prepare", str(file), str(folder), name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stderr.readline()  # everything is imported, and the tokenizer loaded
    idle, _ = memory_of(process.pid)
    peak = peak_anonymous = 0
    while process.poll() is None:
        try:
            proportional, anonymous = memory_of(process.pid)
        except OSError:
            break
        peak, peak_anonymous = max(peak, proportional), max(peak_anonymous, anonymous)
        time.sleep(0.1)
    assert process.wait() == 0
    found = {
        "rows": ROWS[name],
        "file_mib": file.stat().st_size >> 20,
        "before_mib": idle >> 10,
        "peak_mib": peak >> 10,
        "peak_anonymous_mib": peak_anonymous >> 10,
        "seconds": round(time.perf_counter() - began),
        **json.loads(process.stdout.read()),
    }
    print(json.dumps({f"memory, {name}": found}), flush=True)
    return found


def prepare_in_this_process(file: Path, folder: Path, name: str) -> None:
    _, summary = prepare_all(file, folder, name)
    print(json.dumps({"tokens": summary.tokens, "sequences": summary.sequences, "filled": round(summary.filled, 4)}))


def main(output: Path, only: list[str]) -> None:
    files = limited(sources(), len, 2 * CHARACTERS)
    machine = {"cores": available_cores(), "python": platform.python_version()}
    results: dict[str, Any] = {"machine": machine, "limit": LIMIT}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folder = work / "bpe"
        train_tokenizer(folder, limited(iter(files[::4]), len, 8_000_000))
        plain = limited(iter(files), len, CHARACTERS)
        every = [one for file in files for one in functions(file)]
        alpaca = limited(iter(every), lambda one: len(one["instruction"]) + len(one["output"]), CHARACTERS)
        segments = [text for one in alpaca for text in (alpaca_prompt(one["instruction"]), one["output"])]
        cases: dict[str, tuple[list[Any], list[str]]] = {
            "alpaca": (alpaca, segments),
            "text": ([{"text": text} for text in plain], plain),
            "chat": ([conversation(one) for one in alpaca], [rendered(one) for one in alpaca]),
        }
        for case, (records, texts) in cases.items():
            if not only or case in only:
                results[case] = compare(case, records, texts, work, folder)
                output.write_text(json.dumps(results, indent=2) + "\n")
        for tokenizer, number in ROWS.items():
            if not only or "memory" in only:
                rows = work / "rows.jsonl"
                write_rows(rows, every, number)
                results[f"memory, {tokenizer}"] = measure_memory(rows, folder, tokenizer)
    output.write_text(json.dumps(results, indent=2) + "\n")
    if any(results[one]["speed_of_bare"] < LIMIT for one in ("alpaca", "text") if not only or one in only):
        raise SystemExit("The speed is below the limit.")


if __name__ == "__main__":
    if sys.argv[1] == "--prepare":
        prepare_in_this_process(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        main(Path(sys.argv[1]), sys.argv[3].split(",") if sys.argv[2:3] == ["--only"] else [])
