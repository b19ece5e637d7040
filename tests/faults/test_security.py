"""No file contents are executed, no environment variable is logged, and a run listens on loopback only."""

import ast
import json
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import shoal as package
from shoal import api
from shoal.checkpoint.choose import choose_checkpoint
from shoal.checkpoint.store import MANIFEST, read_manifest
from shoal.data.tokenizer import load_tokenizer
from shoal.mistakes import UserMistake
from tests.faults.damage import as_json, hashed_anew
from tests.harness import settings, train_again_on, weights
from tests.launch.command import ForkedCommand, descendants, environment, forked_shoal, training_lines, write_config

SECRET = "xyzzy-4711-plugh"


class Trap:
    """Code that creates a marker file when it is executed or unpickled."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "MARK"
        self.command = f"touch {self.mark}"
        self.code = (
            f"open({str(self.mark)!r}, 'w').close()\n"
            "from transformers import LlamaConfig as TrapConfig, LlamaForCausalLM as TrapModel\n"
            "from transformers import PreTrainedTokenizerFast as TrapTokenizer\n"
        )

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)

    def write_pickle(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Trap]:
    one = Trap(tmp_path)
    yield one
    assert not one.mark.exists(), "something ran"


def test_the_trap_works(tmp_path: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    trap = Trap(tmp_path)
    pickle.loads(pickle.dumps(trap))
    assert trap.mark.exists()
    trap.mark.unlink()
    exec(trap.code)
    assert trap.mark.exists()


# Model and tokenizer folders.


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A small Llama as Hugging Face saves it."""
    folder = tmp_path / "model"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=260, bos_token_id=256, eos_token_id=257)).save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return folder


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def use(folder: Path, data: Path) -> None:
    """Every way to load a model folder: for inference and for training."""
    config = settings(data, model={"from": str(folder)})
    refusals = []
    for load in (lambda: api.load_run(folder, device="cpu"), lambda: api.dry_run(api.config_from_mapping(config))):
        try:
            load()
        except UserMistake as mistake:
            refusals.append(str(mistake))
    if refusals:
        assert len(refusals) == 2, f"refused in one way only: {refusals}"
        raise UserMistake(refusals[0])


MAP = {
    "AutoConfig": "trap.TrapConfig",
    "AutoModelForCausalLM": "trap.TrapModel",
    "AutoTokenizer": ["trap.TrapTokenizer", "trap.TrapTokenizer"],
}


@pytest.mark.parametrize("kind", ["trap", "llama"])
def test_code_that_comes_with_a_model_is_not_run(kind: str, trap: Trap, model_folder: Path, instructions: Path) -> None:
    (model_folder / "trap.py").write_text(trap.code)
    wanted = {"model_type": kind, "auto_map": MAP, "trust_remote_code": True, "architectures": ["TrapModel"]}
    change(model_folder / "config.json", **wanted)
    if kind == "trap":  # which only that code knows
        with pytest.raises(UserMistake, match=r"model/config\.json cannot be read as a transformers model: "):
            use(model_folder, instructions)
    else:
        use(model_folder, instructions)


def test_code_that_comes_with_a_tokenizer_is_not_run(trap: Trap, model_folder: Path, instructions: Path) -> None:
    (model_folder / "trap.py").write_text(trap.code)
    change(
        model_folder / "tokenizer_config.json", tokenizer_class="TrapTokenizer", auto_map=MAP, trust_remote_code=True
    )
    with pytest.raises(UserMistake, match="No tokenizer could be loaded from"):
        use(model_folder, instructions)


def test_a_chat_template_cannot_access_python(trap: Trap, model_folder: Path) -> None:
    reach = f"{{{{ cycler.__init__.__globals__.os.system({trap.command!r}) }}}}"
    load_tokenizer("bytes").save(model_folder)
    (model_folder / "chat_template.jinja").write_text(reach)
    said: list[str] = []
    api.chat(model_folder, ["Hello."], write=lambda _: None, say=said.append, tokens=1, device="cpu")
    assert "The chat template of" in said[-1]
    assert "failed: access to attribute '__init__'" in said[-1]


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_a_model_cannot_name_a_kernel_to_be_fetched(
    key: str, trap: Trap, model_folder: Path, instructions: Path
) -> None:
    """An attention with a name like this is code on the hub, which transformers would fetch and run."""
    change(model_folder / "config.json", **{key: "somebody/trap"})
    use(model_folder, instructions)


def test_a_folder_of_pickles_is_refused(trap: Trap, model_folder: Path, instructions: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    trap.write_pickle(model_folder / "pytorch_model.bin")
    with pytest.raises(UserMistake, match=r"pytorch_model\.bin is a pickle, which shoal does not read"):
        use(model_folder, instructions)


def test_a_pickle_under_another_name_is_not_read_as_one(trap: Trap, model_folder: Path, instructions: Path) -> None:
    trap.write_pickle(model_folder / "model.safetensors")
    with pytest.raises(UserMistake, match=r"model\.safetensors is damaged"):
        use(model_folder, instructions)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "../outside.safetensors", "/etc/passwd", "..", ""])
def test_an_index_names_safetensors_of_its_own_folder_only(
    file: str, trap: Trap, model_folder: Path, instructions: Path
) -> None:
    names = list(LlamaForCausalLM.from_pretrained(model_folder).state_dict())
    (model_folder / "model.safetensors").unlink()
    trap.write_pickle(model_folder / "pytorch_model.bin")
    save_file({"x": torch.zeros(1)}, model_folder.parent / "outside.safetensors")
    (model_folder / "model.safetensors.index.json").write_bytes(as_json({"weight_map": dict.fromkeys(names, file)}))
    with pytest.raises(UserMistake, match=r"is damaged|is not a file of that folder"):
        use(model_folder, instructions)


# Data.


def test_an_example_of_a_dataset_is_only_text(trap: Trap, tmp_path: Path) -> None:
    hostile = [
        f"!!python/object/apply:os.system ['{trap.command}']",
        f"{{{{ cycler.__init__.__globals__.os.system('{trap.command}') }}}}",
        f"__import__('os').system('{trap.command}')",
        f"$({trap.command}) `{trap.command}`",
        "${oc.env:SHOAL_TEST_SECRET} %s {0.__class__} {instruction}",
        "<|end|>",
    ]
    data = tmp_path / "examples.jsonl"
    examples = [{"instruction": text, "output": text, "__class__": "os.system", "__reduce__": text} for text in hostile]
    data.write_text("".join(json.dumps(row) + "\n" for row in examples))
    config = settings(data, data__max_length=512, data__train_on="all", train__global_batch=1, train__micro_batch=1)
    seen = set()
    for seed in range(40):  # each shows its first sequence
        sample = api.dry_run(api.config_from_mapping({**config, "seed": seed})).sample
        seen |= {text for text in hostile if sample.count(text) >= 2}
        if seen == set(hostile):
            break
    assert seen == set(hostile)


# Checkpoints.


@pytest.fixture(scope="module")
def trained(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    short = {"train__steps": 2, "data__max_length": 48, "data__train_on": "all", "checkpoint__every": 2}
    return train_again_on(1, settings(instructions, **short), tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000002"


def hold_true(run: Path, trained: Path) -> None:
    """The run's model is the trained one."""
    found, true = api.load_run(run, device="cpu").model.state_dict(), weights(trained)
    assert all(torch.equal(found[name], tensor) for name, tensor in true.items())


def test_pickles_next_to_a_checkpoint_are_not_read(trap: Trap, run: Path, trained: Path) -> None:
    for name in ("rank-00000.pt", "optimizer.pt", "training_args.bin", ".metadata", "model.pkl", "__0_0.distcp"):
        trap.write_pickle(newest(run) / name)
        trap.write_pickle(run / "model" / name)
    assert [one.state for one in api.checkpoints(run, verify=True)] == ["whole"]
    hold_true(run, trained)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors"])
def test_a_pickle_instead_of_tensors_is_refused_even_if_the_manifest_lists_it(name: str, trap: Trap, run: Path) -> None:
    for path, contents in hashed_anew(newest(run) / name, pickle.dumps(trap)).items():
        path.write_bytes(contents)
    with pytest.raises(UserMistake, match=rf"{name} is damaged"):
        api.load_run(run, device="cpu")


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "progress.json"])
def test_a_file_that_the_manifest_does_not_list_is_not_read(name: str, run: Path) -> None:
    manifest = json.loads((newest(run) / MANIFEST).read_text())
    manifest["files"].pop(name, None)
    (newest(run) / MANIFEST).write_text(json.dumps(manifest))
    if not (newest(run) / name).exists():
        shutil.copy(newest(run) / "rank-00000.safetensors", newest(run) / name)
    with pytest.raises(UserMistake, match="holds no complete checkpoint"):
        api.load_run(run, device="cpu")


def test_a_link_out_of_a_checkpoint_gives_what_was_saved_or_an_error(run: Path, trained: Path, tmp_path: Path) -> None:
    tensors = newest(run) / "rank-00000.safetensors"
    moved = tmp_path / "elsewhere"
    tensors.rename(moved)
    tensors.symlink_to(moved)
    hold_true(run, trained)  # links are legitimate: only the contents count
    other = bytearray(moved.read_bytes())
    other[-1] ^= 1
    moved.write_bytes(other)
    with pytest.raises(UserMistake, match=r"rank-00000\.safetensors is damaged"):
        choose_checkpoint(run, None)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", MANIFEST])
@pytest.mark.parametrize("endless", ["/dev/zero", "a pipe", "a folder"])
def test_an_endless_file_is_not_read(endless: str, name: str, run: Path) -> None:
    manifest = json.loads((newest(run) / MANIFEST).read_text())
    path = newest(run) / name
    path.unlink()
    if endless == "a pipe":
        os.mkfifo(path)
    elif endless == "a folder":
        path.mkdir()
    else:
        path.symlink_to(endless)
    if name != MANIFEST:
        manifest["files"][name]["size"] = path.stat().st_size
        (newest(run) / MANIFEST).write_text(json.dumps(manifest))
    assert read_manifest(newest(run)) is None
    assert [one.state for one in api.checkpoints(run, verify=True)] == ["not whole"]


# Real runs.


@pytest.mark.slow
def test_a_run_leaves_no_environment_variable_behind(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, settings(instructions, train__steps=3, log__to=["tensorboard", "csv"]))
    env = environment(tmp_path, SHOAL_TEST_SECRET=SECRET)
    ended = forked_shoal(tmp_path, "train", "run.yaml", "hardware.devices=2", "--json", env=env)
    assert ended.status == 0, ended.err
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert {"config.yaml", "plan.json", "metrics.jsonl", "rank-1.log", MANIFEST} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in ended.out + ended.err


@pytest.mark.slow
def test_a_run_that_crashes_does_not_print_the_environment(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, settings(instructions, train__steps=100, checkpoint__every=50))
    env = environment(tmp_path, SHOAL_TEST_SECRET=SECRET)
    run = tmp_path / "runs" / "run"
    with ForkedCommand(tmp_path, ["train", "run.yaml", "hardware.devices=2"], env) as command:
        command.wait_until(lambda: len(training_lines(run)) > 0)
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints").write_text("not a folder any more")
        ended = command.wait(60)
    assert ended.status == 1, ended.err
    assert SECRET not in ended.out + ended.err
    assert [path for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()] == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ss") is None, reason="ss is not installed")
def test_ss_sees_no_socket_of_a_run_that_is_not_on_loopback(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, settings(instructions, train__steps=500))
    run = tmp_path / "runs" / "run"
    with ForkedCommand(tmp_path, ["train", "run.yaml", "hardware.devices=2"]) as command:
        command.wait_until(lambda: len(training_lines(run)) > 2)
        processes = {command.process.pid, *descendants(command.process.pid)}
        seen = sockets_of(processes)
    # Not empty: gloo uses sockets, and a check of none would prove nothing.
    assert any(state == "LISTEN" for state, _ in seen)
    assert [one for one in seen if not re.match(r"127\.|\[::1\]|\[::ffff:127\.", one[1])] == []


def sockets_of(processes: set[int]) -> list[tuple[str, str]]:
    """State and own address of every TCP and UDP socket of these processes: those that listen, and all others."""
    listed = subprocess.run(["ss", "-H", "-tuanp"], capture_output=True, text=True, check=True).stdout
    found = []
    for line in listed.splitlines():
        owners = {int(number) for number in re.findall(r"pid=(\d+)", line)}
        if owners & processes:
            _, state, _, _, address, *_ = line.split()
            found.append((state, address))
    return found


# The source.

NEVER = {"eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler", "yaml.load", "yaml.unsafe_load",
         "yaml.full_load", "os.system", "os.popen", "marshal.load", "marshal.loads", "shelve.open",
         "joblib.load"}  # fmt: skip
# Calls that are only safe with this argument.
DEMANDED = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
# Calls that are never safe with this argument.
FORBIDDEN = (("shell", True), ("trust_remote_code", True), ("weights_only", False), ("allow_pickle", True))


def test_no_call_in_the_source_could_run_what_a_file_says() -> None:
    root = Path(package.__file__).parent
    sources = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    found = [
        f"{path.relative_to(root)}:{call.lineno}: {ast.unparse(call)[:80]}"
        for path, text in sources.items()
        if may_be_dangerous(text)
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and dangerous(call)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eval(x)", True),
        ("model.eval()", False),
        ("torch.load(x)", True),
        ("torch.load(x, weights_only=flag)", True),
        ("torch.load(x, weights_only=True)", False),
        ("run(x, shell=True)", True),
        ("f(trust_remote_code=allowed)", True),
        ("f(trust_remote_code=False)", False),
    ],
)
def test_the_guard_knows_what_is_dangerous(text: str, expected: bool) -> None:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert dangerous(call) == expected
    assert may_be_dangerous(text) or not expected


def may_be_dangerous(text: str) -> bool:
    """Whether all words of a dangerous call are in a file: the others need not be parsed, which takes seconds."""
    words = set(re.findall(r"\w+", text))
    calls = [*NEVER, *DEMANDED, *(argument for argument, _ in FORBIDDEN)]
    return any(words.issuperset(call.split(".")) for call in calls)


def dangerous(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    given = {keyword.arg: keyword.value for keyword in call.keywords}

    def says(argument: str, value: bool) -> bool:
        said = given.get(argument)
        return isinstance(said, ast.Constant) and said.value is value

    if name in NEVER or (name in DEMANDED and not says(*DEMANDED[name])):
        return True
    # A computed value could be the dangerous one.
    return any(argument in given and not says(argument, not value) for argument, value in FORBIDDEN)
