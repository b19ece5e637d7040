"""`shoal ui` over HTTP: what it shows, what it refuses, and that the planner answers as `shoal plan` does."""

import json
import os
import re
import socket
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from shoal.cli.app import app as command
from shoal.mistakes import UserMistake
from shoal.observe import figures
from shoal.observe.run_reader import RunReader
from shoal.ui.app import make_app
from shoal.ui.controls import CONTROLS
from shoal.ui.serve import check_folder, listen
from tests.observe.written_runs import append, event, training_line, write_run

PORT = 8710
HOST = f"127.0.0.1:{PORT}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "first")
    write_run(tmp_path / "runs" / "sweep" / "second", lr=3e-4, state=None)
    return tmp_path / "runs"


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(make_app(folder, PORT), base_url=f"http://{HOST}")


def sections_of(answer: Any) -> dict[str, str]:
    found = (re.match(r'<\w+ [^>]*?id="([\w-]+)"', html) for html in answer.json()["sections"])
    return {match[1]: unescape(re.sub("<[^>]+>", " ", match.string)) for match in found if match}


def test_runs_below_the_folder_are_listed(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert 'href="/runs/first"' in page.text
    assert 'href="/runs/sweep/second"' in page.text
    assert "state-died" in page.text


def test_runs_that_have_not_changed_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen = RunReader.read, []

    def counted(self: RunReader, **options: Any) -> Any:
        seen.append((self.run.path.name, options["config"]))
        return read(self, **options)

    monkeypatch.setattr(RunReader, "read", counted)
    app = make_app(folder, PORT)
    client = TestClient(app, base_url=f"http://{HOST}")
    app.state.runs.read_all()
    first = client.get("/").text
    assert seen == [("first", False), ("second", False)]  # nor is their YAML parsed, which the list does not show
    assert client.get("/").text == first
    append(folder / "first" / "metrics.jsonl", training_line(60))
    assert "step 60 of 100" in unescape(re.sub("<[^>]+>", " ", client.get("/").text))
    assert seen[2:] == [("first", False)]
    assert "learning rate" in client.get("/runs/first").text
    assert seen[3:] == [("first", True)]


def test_a_page_is_told_what_has_changed_and_nothing_else(client: TestClient, folder: Path) -> None:
    first = client.get("/api/runs/first")
    assert "step 50 of 100" in sections_of(first)["headline"]
    known = {"X-Known": first.json()["stamp"]}
    assert client.get("/api/runs/first", headers=known).status_code == 204
    append(folder / "first" / "metrics.jsonl", training_line(60))
    changed = client.get("/api/runs/first", headers=known)
    assert "step 60 of 100" in sections_of(changed)["headline"]
    loss = next(chart for chart in changed.json()["charts"] if chart["id"] == "loss")
    assert loss["series"][0]["step"][-1] == 60


def test_the_list_changes_with_each_run(client: TestClient, folder: Path) -> None:
    known = {"X-Known": client.get("/api/runs").json()["stamp"]}
    assert client.get("/api/runs", headers=known).status_code == 204
    write_run(folder / "third")
    assert "third" in sections_of(client.get("/api/runs", headers=known))["runs"]


def test_runs_are_compared(client: TestClient) -> None:
    found = client.get("/api/compare", params={"run": ["first", "sweep/second"]})
    assert sections_of(found)["differences"].split()[-3:] == ["train.lr", "0.001", "0.0003"]
    assert client.get("/compare").status_code == 200
    assert client.get("/compare", params={"run": "nothing"}).status_code == 404


def test_the_report_is_a_download(client: TestClient) -> None:
    answer = client.get("/report/first")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert "default-src &#x27;none&#x27;" in answer.text


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    client = TestClient(make_app(tmp_path, PORT), base_url=f"http://{HOST}")
    assert "No runs yet" in client.get("/").text


def test_a_run_with_half_written_files_is_shown(client: TestClient, folder: Path) -> None:
    for name in ("plan.json", "config.yaml", "metrics.jsonl", "events.jsonl"):
        text = (folder / "first" / name).read_text()
        (folder / "first" / name).write_text(text[: len(text) // 2])
    assert client.get("/runs/first").status_code == 200
    assert 'href="/runs/first"' in client.get("/").text


# What may not be read


# Encoded, or the client would shorten them before they are sent.
OUTSIDE = (
    "/runs/%2e%2e",
    "/runs/%2e%2e/secret",
    "/runs/first/%2e%2e/%2e%2e/secret",
    "/runs/%2e%2e%2fsecret",
    "/runs//etc",
    "/runs/elsewhere",
    "/runs/.hidden",
    "/runs/first/checkpoints",
    "/runs/first%00",
    "/api/runs/elsewhere",
    "/report/%2e%2e/secret",
    "/static/%2e%2e/app.py",
    "/static/%2e%2e%2fapp.py",
    "/compare?run=../secret",
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_outside_of_the_folder_is_served(client: TestClient, folder: Path, path: str) -> None:
    secret = write_run(folder.parent / "secret")
    os.rename(write_run(folder / "hidden"), folder / ".hidden")
    (folder / "elsewhere").symlink_to(secret)
    assert client.get(path).status_code == 404
    assert "elsewhere" not in client.get("/").text


def test_links_within_a_run_are_not_followed(client: TestClient, folder: Path) -> None:
    secret = folder.parent / "secret.txt"
    secret.write_text("the secret of this machine: 1\n")
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl"):
        (folder / "first" / name).unlink()
        (folder / "first" / name).symlink_to(secret)
    os.rename(folder / "first" / "checkpoints", folder.parent / "checkpoints")
    (folder / "first" / "checkpoints").symlink_to(folder.parent / "checkpoints")
    answer = client.get("/runs/first")
    assert answer.status_code == 200
    assert "secret" not in answer.text
    assert "3.0 MiB" not in answer.text


REFUSED = {
    "another host": ({"host": "example.com"}, 421),
    "rebound name with our port": ({"host": f"example.com:{PORT}"}, 421),
    "another port": ({"host": "127.0.0.1:80"}, 421),
    "another origin": ({"origin": "http://example.com"}, 403),
    "no origin to speak of": ({"origin": "null"}, 403),
    "another port's pages": ({"origin": "http://127.0.0.1:3000"}, 403),
    "an image of another page": ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    "a script of another port": ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
}


@pytest.mark.parametrize("case", REFUSED)
def test_requests_from_elsewhere_are_refused(client: TestClient, case: str) -> None:
    headers, status = REFUSED[case]
    for path in ("/", "/api/runs", "/api/plan", "/static/live.js"):
        answer = client.get(path, headers=headers)
        assert answer.status_code == status
        assert "first" not in answer.text


def test_its_own_pages_and_links_from_elsewhere_are_served(client: TestClient) -> None:
    own = {"origin": f"http://localhost:{PORT}", "host": f"localhost:{PORT}", "sec-fetch-site": "same-origin"}
    assert client.get("/api/runs", headers=own).status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=link).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(client: TestClient, method: str) -> None:
    for path in ("/", "/runs/first", "/api/plan"):
        assert client.request(method, path).status_code == 405


def test_every_answer_forbids_what_the_pages_do_not_need(client: TestClient) -> None:
    for path in ("/", "/runs/first", "/plan", "/nothing", "/static/live.js"):
        answer = client.get(path)
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(
            r"<script(?! (src=\"/static/|type=\"application/json\"))|<style| style=| on\w+=", answer.text
        )
        assert not re.search(r"(src|href)=\"(?!/|#|\?)", answer.text)


def test_what_comes_from_run_files_is_text(client: TestClient, folder: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    append(folder / "first" / "events.jsonl", event("warning", 50, text=hostile))
    page = client.get("/runs/first").text
    assert hostile not in page
    assert hostile.replace("<", "&lt;").replace(">", "&gt;") in page


# The planner


def test_the_planner_answers_as_the_command_does(client: TestClient, tmp_path: Path) -> None:
    given = {
        "model.shape": "llama2-7b",
        "hardware.gpu": "a100-40gb",
        "hardware.devices": "4",
        "train.recompute": "full",
    }
    found = sections_of(client.get("/api/plan", params=given))
    written = found["yaml"].split("As a config file", 1)[1].rsplit("Copy", 1)[0].strip()
    (tmp_path / "planned.yaml").write_text(written)
    ended = CliRunner().invoke(command, ["plan", str(tmp_path / "planned.yaml"), "--json"])
    plan = json.loads(ended.stdout)
    assert plan["hardware"] | {"gpu": "a100-40gb", "devices": 4} == plan["hardware"]
    assert figures.gib(plan["memory"]["reserved_gib"]) in found["figures"]
    assert figures.count(plan["speed"]["tokens_per_second_per_gpu"]) in found["figures"]
    assert ("It fits" in found["verdict"]) == plan["fits"]
    for name in plan["memory"]["terms"]:
        assert name in found["memory"]


def test_what_does_not_fit_comes_with_what_would(client: TestClient) -> None:
    answer = client.get("/api/plan", params={"hardware.devices": "1"})
    assert "It does not fit" in sections_of(answer)["verdict"]
    link = re.search(r'href="(/plan\?[^"]*adapter.kind=lora[^"]*)"', answer.json()["sections"][4])
    assert link is not None
    assert "It fits" in client.get(unescape(link[1])).text


MISTAKEN = {
    "train.global_batch": ("7", "not divisible by the 8 data-parallel ranks"),
    "hardware.devices": ("many", "GPUs per node: many is not a whole number"),
    "hardware.nodes": ("", "Nodes: nothing is not a whole number"),
    "model.shape": ("{from: /etc}", "is not one of the choices"),
    "hardware.price": ("1e999x", "Price per GPU hour"),
    "data.max_length": ("-5", "data.max_length"),
    "parallel.tp": ("3", "tp"),
    "train.tokens": ("9" * 5000, "Tokens to train on"),
}


@pytest.mark.parametrize("key", MISTAKEN)
def test_a_mistake_in_a_control_is_a_sentence(client: TestClient, key: str) -> None:
    value, words = MISTAKEN[key]
    answer = client.get("/api/plan", params={key: value})
    assert answer.status_code == 200
    assert "This cannot be planned" in sections_of(answer)["verdict"]
    assert words in sections_of(answer)["verdict"]


def test_every_control_has_a_label_and_a_default_that_it_accepts(client: TestClient) -> None:
    page = client.get("/plan").text
    for control in CONTROLS:
        assert control.read(control.default) == control.default
        identifier = f"control-{control.key.replace('.', '-')}"
        assert f'<label for="{identifier}">' in page
        assert f'id="{identifier}" name="{control.key}"' in page


# The command


def test_a_port_in_use_is_not_an_end() -> None:
    said: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with listen(port, said.append) as opened:
            address, found = opened.getsockname()
    assert address == "127.0.0.1"
    assert said == [f"Port {port} is in use; taking {found} instead."]


def test_a_folder_that_is_none_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    assert check_folder(None, said.append) == Path("runs")
    assert check_folder(tmp_path, said.append) == tmp_path
    assert said == [
        "There is no folder runs here yet; runs appear when it exists.",
        f"There are no runs in {tmp_path} yet; they appear when they start.",
    ]
    with pytest.raises(UserMistake, match="elsewhere does not exist; give the folder"):
        check_folder(tmp_path / "elsewhere", said.append)
    (tmp_path / "file").touch()
    with pytest.raises(UserMistake, match="is not a folder"):
        check_folder(tmp_path / "file", said.append)


def test_neither_pages_nor_planner_import_torch() -> None:
    program = "import sys, shoal.ui.app, shoal.observe.report_page; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.strip() == "False"
