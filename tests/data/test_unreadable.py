"""Data that cannot be read: one sentence, which names the key to change, before a model is built."""

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from tests.harness import run_ranks, settings

REGULAR = r"data is read more than once, so give a regular file or a folder\."
HUGE = ['{"text": "a"}', f'{{"text": "b", "id": {"9" * 5000}}}', '{"text": "c"}']


def write(folder: Path) -> None:
    """Every file that a test below names."""
    (folder / "good.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 8)
    (folder / "huge.jsonl").write_text("\n".join(HUGE))
    (folder / "huge.json").write_text(f"[{','.join(HUGE)}]")
    (folder / "huge-and-broken.json").write_text(f'[{{"id": {"9" * 5000}, "text": }}]')
    (folder / "deep.json").write_text(f'[{{"id": {"9" * 5000}, "text": {"[" * 100_000}}}]')
    (folder / "deep.jsonl").write_text('{"text": ' + "[" * 100_000)
    (folder / "nul.jsonl").write_bytes(b'{"text": "a\0b"}\n')
    (folder / "surrogate.jsonl").write_text('{"text": "\\ud800"}\n')
    (folder / "odd-key.jsonl").write_text('{"\\ud800": 1}\n')
    (folder / "utf16.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    (folder / "empty.jsonl").write_text("")
    (folder / "mark.jsonl").write_bytes(b"\xef\xbb\xbf")
    (folder / "long.jsonl").write_text(json.dumps({"instruction": "x" * 1000, "output": "y"}))
    (folder / "link.jsonl").symlink_to("gone.jsonl")
    (folder / "circle.jsonl").symlink_to("circle.jsonl")
    for name in ("bare", "piped", "linked"):
        (folder / name).mkdir()
    os.mkfifo(folder / "pipe.jsonl")
    os.mkfifo(folder / "piped" / "pipe.jsonl")
    (folder / "linked" / "link.jsonl").symlink_to("gone.jsonl")


def mistake(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> str:
    write(folder)
    monkeypatch.chdir(folder)
    config = settings(folder / "good.jsonl", train__global_batch=4, **changes)
    with pytest.raises(UserMistake) as caught:
        api.dry_run(api.config_from_mapping(config))
    return str(caught.value)


@pytest.mark.parametrize("key", ["path", "validation"])
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("god.jsonl", r"KEY god\.jsonl does not exist \(.+\)\. Check the path\. Did you mean good\.jsonl.*\?"),
        ("good.jsonl/x", r"KEY good\.jsonl/x does not exist .+"),
        ("no*.jsonl", r"No file matches KEY no\*\.jsonl .+"),
        ("x" * 5000, r"KEY x{200}… cannot be read: File name too long\."),
        ("~nosuchuser/x", r"KEY ~nosuchuser/x cannot be read: there is no home folder of nosuchuser\."),
        ("a\0b", r"KEY 'a\\x00b' cannot be read: embedded null byte\."),
        ("circle.jsonl", r"KEY circle\.jsonl cannot be read: Too many levels of symbolic links\."),
        ("link.jsonl", r"KEY link\.jsonl is a link to gone\.jsonl, which does not exist\."),
        ("linked", r"\S+/link\.jsonl cannot be read.+"),
        ("pipe.jsonl", rf"KEY pipe\.jsonl is a pipe; {REGULAR}"),
        ("/dev/null", rf"KEY /dev/null is a device; {REGULAR}"),
        ("piped", rf"KEY piped holds pipe\.jsonl, which is a pipe; {REGULAR}"),
        ("bare", r"The folder bare holds no .+ files\. Point KEY at the data, .+"),
        ("long.jsonl", r"None of the 1 documents in KEY has a loss token: .+"),
        ("empty.jsonl", r"\S+empty\.jsonl is empty\. .+"),
        ("mark.jsonl", r"\S+mark\.jsonl is empty\. .+|\S+mark\.jsonl:1 is not a JSON record: .+"),
        ("nul.jsonl", r"\S+nul\.jsonl:1 is not a JSON record: Invalid control character .+"),
        ("surrogate.jsonl", r"\S+surrogate\.jsonl:1.*(lone surrogate|lacks instruction).+"),
        ("odd-key.jsonl", r".+ \S+odd-key\.jsonl:1, which has the keys \\ud800\. .+|.+ its keys are \\ud800\. .+"),
        ("utf16.jsonl", r"\S+utf16\.jsonl:1 is not a JSON record: byte 0 of the line is not UTF-8\. .+"),
        ("deep.jsonl", r"\S+deep\.jsonl:1 is not a JSON record: nested too deeply\. .+"),
        ("deep.json", r"\S+deep\.json:1 is not a JSON record: nested too deeply\. .+"),
        ("huge-and-broken.json", r"\S+broken\.json:1 is not a JSON record: Expecting value .+"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_key_of_the_data_is_named(
    key: str, path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = mistake(tmp_path, monkeypatch, **{f"data__{key}": path})
    assert re.fullmatch(says.replace("KEY", rf"data\.{key}"), said)


def test_a_socket_is_not_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("listening")
        said = mistake(tmp_path, monkeypatch, data__path="listening")
    assert re.fullmatch(rf"data\.path listening is a socket; {REGULAR}", said)


def test_nothing_but_skipped_validation_data_names_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = mistake(tmp_path, monkeypatch, data__validation="empty.jsonl", data__on_error="skip")
    assert re.fullmatch(
        r"There is no record in \S+empty\.jsonl \(skipped: 1; the first: \S+empty\.jsonl is empty\)\. "
        r"Check data\.validation\.",
        said,
    )


@pytest.mark.parametrize(("name", "line"), [("huge.jsonl", 2), ("huge.json", 1)])
def test_an_integer_that_python_refuses_is_a_bad_record_that_can_be_skipped(
    name: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = mistake(tmp_path, monkeypatch, data__path=name)
    assert re.fullmatch(
        rf"\S+{name}:{line} is not a JSON record: an integer has more than 4300 digits\. "
        r"Fix the line or set data\.on_error: skip\.",
        said,
    )
    config = settings(tmp_path / name, data__source="json", data__on_error="skip", train__global_batch=4)
    api.dry_run(api.config_from_mapping(config))
    reported = capsys.readouterr().err
    assert "2 documents (text)" in reported
    assert "1 invalid records or files were skipped" in reported


def test_a_folder_that_may_not_be_read_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "data.jsonl").write_text('{"text": "a"}')
    folder.chmod(0)

    try:
        said = run_ranks(1, without_rights(lambda: [refused(folder), refused(folder / "data.jsonl")]))[0]
    finally:
        folder.chmod(0o700)
    assert said == [f"data.path {path} cannot be read: Permission denied." for path in (folder, folder / "data.jsonl")]


def refused(path: Path) -> str:
    config = api.config_from_mapping(settings(path, data__source="json"))
    with pytest.raises(UserMistake) as caught:
        api.train(config)
    return str(caught.value)


def without_rights(act: Callable[[], Any]) -> Callable[[], Any]:
    """`act` as a user who may not read what others keep to themselves: root may read everything."""

    def change_user() -> Any:
        if os.geteuid() == 0:
            os.seteuid(65534)
        return act()

    return change_user
