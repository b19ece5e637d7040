"""Mistakes that the config alone does not show: status 2, one sentence, and no files left behind.

Most run in a fork of this process, which has torch imported already; a few in a new process, as for a user.
"""

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness import LLAMA, settings
from tests.launch.command import environment, forked_shoal, shoal, write_config


def nothing(folder: Path) -> None:
    pass


def empty_file(folder: Path) -> None:
    (folder / "empty.jsonl").write_text("")


def folder_without_data(folder: Path) -> None:
    (folder / "bare").mkdir()


def example_without_fields(folder: Path) -> None:
    (folder / "odd.jsonl").write_text('{"question": "why?"}\n')


def folder_without_config(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "notes.txt").write_text("no model here")


def folder_with_pickle(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (folder / "model" / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300})
    )


def folder_of_unknown_kind(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "abacus"}))


def tokenizer_without_an_end(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder / "endless")


def folder_that_is_no_checkpoint(folder: Path) -> None:
    (folder / "elsewhere").mkdir()


def broken_checkpoint(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    manifest = {"format": 1, "step": 3, "metrics": {}, "files": {"gone.safetensors": {"size": 5, "sha256": ""}}}
    (folder / "elsewhere" / "MANIFEST.json").write_text(json.dumps(manifest))


def file_in_place_of_runs(folder: Path) -> None:
    (folder / "runs").write_text("a file")


def file_in_place_of_the_run(folder: Path) -> None:
    (folder / "runs").mkdir()
    (folder / "runs" / "run").write_text("a file")


def another_programs_run(folder: Path) -> None:
    (folder / "runs" / "run" / "checkpoints").mkdir(parents=True)
    (folder / "runs" / "run" / "checkpoints" / "last.ckpt").write_text("precious")
    (folder / "runs" / "run" / "config.yaml").write_text("trainer: {max_epochs: 3}\n")


def config_in_place_of_the_run(folder: Path) -> None:
    (folder / "runs" / "run").mkdir(parents=True)
    (folder / "runs" / "run" / "config.yaml").write_text("# mine\n" + (folder / "run.yaml").read_text())


def somebody_elses_folder(folder: Path) -> None:
    (folder / "runs" / "run").mkdir(parents=True)
    (folder / "runs" / "run" / "thesis.tex").write_text("precious")


def nowhere_to_cache(folder: Path) -> None:
    (folder / "cache").write_text("a file")


@dataclass(frozen=True)
class Mistake:
    """Changes to a good config, and a pattern for the complete error message."""

    says: str
    arguments: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Path], None] = nothing
    foreign: bool = False  # runs/ holds something that is not ours


MISTAKES = {
    "the data is not there": Mistake(
        r"data\.path \S+/instrucions\.jsonl does not exist \(relative to .+\)\. Check the path\."
        r" Did you mean instructions\.jsonl\?",
        ("data.path={folder}/instrucions.jsonl",),
    ),
    "no path to the data": Mistake(r"data\.path is not set\. .+", ("data.path=null",)),
    "a folder without data": Mistake(
        r"The folder bare holds no .+ files\. .+", ("data.path=bare",), prepare=folder_without_data
    ),
    "an empty dataset": Mistake(r"\S*empty\.jsonl is empty\. .+", ("data.path=empty.jsonl",), prepare=empty_file),
    "an empty dataset whose errors are skipped": Mistake(
        r".*(empty|no document|no row|None of).*", ("data.path=empty.jsonl", "data.on_error=skip"), prepare=empty_file
    ),
    "examples of no known format": Mistake(r".*odd\.jsonl.*", ("data.path=odd.jsonl",), prepare=example_without_fields),
    "the validation data is not there": Mistake(
        r"data\.\w+ nowhere\.jsonl does not exist .+", ("data.validation=nowhere.jsonl",)
    ),
    "a tokenizer larger than the vocabulary": Mistake(
        r"The tokenizer has 259 tokens, but the model's vocabulary is 100; .+", ("model.shape.vocab=100",)
    ),
    "sequences longer than the model's context": Mistake(
        r"data\.max_length is 600, but the model supports 512 positions; .+", ("data.max_length=600",)
    ),
    "a shape without a tokenizer": Mistake(
        r"model\.shape gives random weights and no tokenizer; set model\.tokenizer .+", ("model.tokenizer=null",)
    ),
    "a tokenizer that is not there": Mistake(r".*nobody/nothing.*", ("model.tokenizer=nobody/nothing",)),
    "a batch that is no multiple of the micro-batch": Mistake(
        r"train\.global_batch 10 is not a multiple of micro_batch 4 × 1 ranks = 4; "
        r"the nearest values that are: 8 and 12\.",
        ("train.global_batch=10",),
    ),
    "a batch that does not divide over two devices": Mistake(
        r"train\.global_batch 7 is not divisible by the 2 data-parallel ranks; the nearest values that are: 6 and 8\.",
        ("train.global_batch=7", "train.micro_batch=auto", "hardware.devices=2"),
    ),
    "a batch larger than all epochs": Mistake(
        r"1 epoch of 300 sequences give less than one step of train\.global_batch 400; lower it to 300 or less, .+",
        ("train.steps=null", "train.epochs=1", "train.global_batch=400"),
    ),
    "a tokenizer without an end token": Mistake(
        r".*endless.* has no end token.*", ("model.tokenizer=endless",), prepare=tokenizer_without_an_end
    ),
    "an unknown GPU": Mistake(r"override hardware\.gpu=h300: .*h300.* Did you mean .*h100.*", ("hardware.gpu=h300",)),
    "a strategy by a wrong name": Mistake(
        r"override parallel\.strategy=fdsp: .*Did you mean fsdp\?", ("parallel.strategy=fdsp",)
    ),
    "an unknown shape": Mistake(
        r"override model\.shape=lama3-8b: No model shape is called 'lama3-8b'\. Did you mean llama3-8b .+",
        ("model.shape=lama3-8b",),
    ),
    "more processes than the cores can carry": Mistake(
        r"hardware\.devices is 900, but this machine has no CUDA device and \d+ cores, .+", ("hardware.devices=900",)
    ),
    "zero steps": Mistake(r"override train\.steps=0: must be at least 1\.", ("train.steps=0",)),
    "resuming a run that does not exist": Mistake(
        r"--resume: there is no run in runs/run; start it without --resume\.", ("--resume",)
    ),
    "starting from a folder that is no checkpoint": Mistake(
        r"--from: elsewhere is not a complete checkpoint: .+\.",
        ("--from", "elsewhere"),
        prepare=folder_that_is_no_checkpoint,
    ),
    "starting from a checkpoint whose files are gone": Mistake(
        r"--from: elsewhere is not a complete checkpoint: .+\.", ("--from", "elsewhere"), prepare=broken_checkpoint
    ),
    "starting on two devices from a folder that is no checkpoint": Mistake(
        r"--from: elsewhere is not a complete checkpoint: .+\.",
        ("--from", "elsewhere", "hardware.devices=2"),
        prepare=folder_that_is_no_checkpoint,
    ),
    "a model folder that is not there": Mistake(
        r"The model folder \./model does not exist; .+", ("model.from=./model", "model.shape=null")
    ),
    "a model folder without a config": Mistake(
        r"model holds no config\.json, so it is not a Hugging Face model folder\.",
        ("model.from=model", "model.shape=null"),
        prepare=folder_without_config,
    ),
    "a model of an unknown kind": Mistake(
        r"model/config\.json cannot be read as a transformers model: .+",
        ("model.from=model", "model.shape=null"),
        prepare=folder_of_unknown_kind,
    ),
    "a model whose weights are a pickle": Mistake(
        r"model holds no model\.safetensors \(pytorch_model\.bin is a pickle, which shoal does not read\); .+",
        ("model.from=model", "model.shape=null"),
        prepare=folder_with_pickle,
    ),
    "a pattern that freezes nothing": Mistake(
        r"model\.freeze: 'decoder\.\*' matches no parameter; one is named model\.embed_tokens\.weight\.",
        ("model.freeze=[decoder.*]",),
    ),
    "a pattern that freezes everything": Mistake(
        r"model\.freeze leaves no parameter to train\.", ("model.freeze=['*']",)
    ),
    "one device and two": Mistake(
        r".*hardware\.devices 2 contradicts parallel\.strategy single, which uses one device\.",
        ("parallel.strategy=single", "hardware.devices=2"),
    ),
    "several nodes from one process": Mistake(
        r"hardware\.nodes is 2, but this process was started alone; .+torchrun.+", ("hardware.nodes=2",)
    ),
    "runs is a file": Mistake(r"runs/run cannot be written: .+\.", prepare=file_in_place_of_runs, foreign=True),
    "runs is a file, for two devices": Mistake(
        r"runs/run cannot be written: .+\.", ("hardware.devices=2",), prepare=file_in_place_of_runs, foreign=True
    ),
    "the run is a file": Mistake(
        r"runs/run exists and is not a shoal run; choose another name=…",
        prepare=file_in_place_of_the_run,
        foreign=True,
    ),
    "the run's folder is somebody else's": Mistake(
        r"runs/run exists and is not a shoal run; choose another name=…",
        prepare=somebody_elses_folder,
        foreign=True,
    ),
    "somebody else's folder, with --overwrite": Mistake(
        r"runs/run exists and is not a shoal run; choose another name=…",
        ("--overwrite",),
        prepare=somebody_elses_folder,
        foreign=True,
    ),
    "another program's run": Mistake(
        r"runs/run exists and is not a shoal run; choose another name=…",
        prepare=another_programs_run,
        foreign=True,
    ),
    "another program's run, with --overwrite": Mistake(
        r"runs/run exists and is not a shoal run; choose another name=…",
        ("--overwrite",),
        prepare=another_programs_run,
        foreign=True,
    ),
    "a config that somebody wrote there": Mistake(
        r"runs/run exists and is not a shoal run; choose another name=…",
        prepare=config_in_place_of_the_run,
        foreign=True,
    ),
    "a config that somebody wrote there, with --resume": Mistake(
        r"--resume: there is no run in runs/run; start it without --resume\.",
        ("--resume",),
        prepare=config_in_place_of_the_run,
        foreign=True,
    ),
    "the cache cannot be written": Mistake(r".*cache.*", prepare=nowhere_to_cache),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(name: str, instructions: Path, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    write_config(tmp_path, settings(instructions, train__steps=2))
    mistake.prepare(tmp_path)
    before = contents(tmp_path / "runs")
    arguments = [one.replace("{folder}", str(instructions.parent)) for one in mistake.arguments]
    ended = forked_shoal(tmp_path, "train", "run.yaml", *arguments, "--json")
    said = ended.err.splitlines()
    # Other messages may come first: the data that was read, an option without effect. The mistake is the last line.
    assert (ended.status, ended.out) == (2, ""), ended.err
    assert [line for line in said if line.startswith("shoal: ")] == said[-1:], ended.err
    assert re.fullmatch("shoal: " + mistake.says, said[-1])
    assert "Traceback" not in ended.err
    if mistake.foreign:
        assert contents(tmp_path / "runs") == before
    else:
        assert not (tmp_path / "runs" / "run").exists()


def contents(folder: Path) -> dict[str, str] | str:
    if folder.is_file():
        return folder.read_text()
    return {str(path): path.read_text() if path.is_file() else "" for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    "arguments",
    [("model.freeze=[decoder.*]",), ("train.global_batch=10",), ("--from", "elsewhere")],
    ids=lambda a: a[0],
)
def test_after_a_mistake_the_corrected_command_runs(
    arguments: tuple[str, ...], instructions: Path, tmp_path: Path
) -> None:
    write_config(tmp_path, settings(instructions, train__steps=2))
    assert forked_shoal(tmp_path, "train", "run.yaml", *arguments).status == 2
    ended = forked_shoal(tmp_path, "train", "run.yaml", "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["step"] == 2


@pytest.fixture(scope="module")
def finished(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run in it."""
    folder = tmp_path_factory.mktemp("finished")
    write_config(folder, settings(instructions, train__steps=2))
    ended = forked_shoal(folder, "train", "run.yaml")
    assert ended.status == 0, ended.err
    return folder


@pytest.fixture
def snapshot(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder with a finished run, which the test must not change."""
    folder = shutil.copytree(finished, tmp_path / "copy")
    before = files(folder)
    yield folder
    assert files(folder) == before


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), r"runs/run already holds a run; add --resume .+, --overwrite .+, or another name=…"),
        (("--from", "runs/run/checkpoints/step-00000002"), r"runs/run already holds a run; .+"),
        (("--resume", "model.shape.layers=3"), r"--resume: model\.shape\.layers was 2 in .+ and is 3 now, .+"),
        (("--resume", "seed=5"), r"--resume: seed was 1234 in runs/run/config\.yaml and is 5 now, .+"),
        (("--resume", "train.global_batch=16"), r"--resume: train\.global_batch was 8 in .+ and is 16 now, .+"),
        (("--resume", "data.path=nowhere.jsonl"), r"data\.path nowhere\.jsonl does not exist .+"),
        (
            ("--resume", "data.path=run.yaml", "data.source=text"),
            r"--resume: data\.source was 'json' .+ and is 'text' now, .+",
        ),
        (("--overwrite", "data.path=nowhere.jsonl"), r"data\.path nowhere\.jsonl does not exist .+"),
        (("--overwrite", "model.freeze=[decoder.*]"), r"model\.freeze: 'decoder\.\*' matches no parameter; .+"),
        (("--overwrite", "train.global_batch=10"), r"train\.global_batch 10 is not a multiple of .+"),
        (("--overwrite", "--from", "runs"), r"--from: runs is not a complete checkpoint: .+"),
        (
            ("name=other", "--from", "runs/run"),
            r"--from: runs/run is a run; give a checkpoint of it, such as runs/run/checkpoints/step-00000002\.",
        ),
        (("--overwrite", "--from", "runz"), r"--from: runz is not a complete checkpoint: there is no such folder\."),
        (("--overwrite", "--resume"), r".*--resume.*--overwrite.*|.*--overwrite.*--resume.*"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_finished_run_is_not_touched_by_a_mistake(arguments: tuple[str, ...], says: str, snapshot: Path) -> None:
    ended = forked_shoal(snapshot, "train", "run.yaml", *arguments)
    assert (ended.status, ended.out) == (2, ""), ended.err
    assert re.fullmatch("shoal: " + says, ended.err.splitlines()[-1])
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere",), r"There is no run nowhere\. Give the folder of one, such as runs/NAME\."),
        (("runs/run", "--step", "7"), r"runs/run holds no complete checkpoint of step 7; available steps: [0-9, ]+\."),
        (("runs/run", "--output", "run.yaml"), r"run\.yaml already exists and is not empty; .+"),
        (("runs/run", "--output", "run.yaml/hf"), r".*run\.yaml/hf.*cannot be written.*"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_export_that_cannot_be_is_one_sentence(arguments: tuple[str, ...], says: str, snapshot: Path) -> None:
    ended = forked_shoal(snapshot, "export", *arguments)
    assert (ended.status, ended.out) == (2, ""), ended.err
    assert re.fullmatch(f"shoal: {says}\n", ended.err)


def test_a_model_that_is_not_on_this_machine_is_not_fetched_from_the_network(
    instructions: Path, tmp_path: Path
) -> None:
    """In a new process, because libraries read these variables when they are imported."""
    write_config(tmp_path, settings(instructions, model={"from": "nobody/nothing"}))
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
        ended = shoal(
            tmp_path, "train", "run.yaml", "--json", env=environment(tmp_path, HF_ENDPOINT=address, **proxies)
        )
        with pytest.raises(BlockingIOError):  # no connection was attempted
            hub.accept()
    ended.hold_mistake(
        f"nobody/nothing is neither a folder in {tmp_path}, where the command runs, nor in the local Hugging Face "
        "cache; on a machine with a network run: shoal download nobody/nothing"
    )
    assert not (tmp_path / "runs").exists()


def test_the_model_of_a_recipe_that_is_not_there_yet_is_named_as_download_takes_it(tmp_path: Path) -> None:
    assert forked_shoal(tmp_path, "init", "smollm2-lora").status == 0
    forked_shoal(tmp_path, "train", "smollm2-lora.yaml").hold_mistake(
        f"models/smollm2-135m is neither a folder in {tmp_path}, where the command runs, nor in the local Hugging Face "
        "cache; on a machine with a network run: shoal download smollm2-135m"
    )


@pytest.mark.slow
def test_a_mistake_that_only_the_ranks_can_find_is_reported_as_one_sentence(instructions: Path, tmp_path: Path) -> None:
    """Weights are read by the ranks: a damaged file is found there, after the launch."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"n_embd": LLAMA["hidden"], "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 512}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    (folder / "model.safetensors").write_bytes(b"not a file of tensors")
    write_config(tmp_path, settings(instructions, model={"from": "model", "tokenizer": "bytes"}))
    ended = forked_shoal(tmp_path, "train", "run.yaml", "hardware.devices=2", "--json")
    assert (ended.status, ended.out) == (2, ""), ended.err
    said = ended.err.splitlines()
    assert [line for line in said if line.startswith("shoal: ")] == said[-1:], ended.err
    assert said[-1].startswith("shoal: model/model.safetensors is damaged: ")
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs" / "run").exists()


def test_an_option_without_effect_is_a_warning_and_the_run_continues(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, settings(instructions, train__steps=1))
    useless = ("parallel.prefetch=3", "train.schedule={warmup: 0, decay: 0.5}", "hardware.gpu=a100-80gb")
    ended = forked_shoal(tmp_path, "train", "run.yaml", *useless)
    assert ended.status == 0, ended.err
    said = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    assert said == [
        "warning: hardware.gpu a100-80gb is for shoal plan: this run trains on a CPU, which this machine has.",
        "warning: train.schedule.decay 0.5 has no effect: only wsd has it.",
        "warning: parallel.prefetch 3 has no effect: parallel.strategy is single, which shards nothing.",
    ]
