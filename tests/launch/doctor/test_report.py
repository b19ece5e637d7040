"""`shoal doctor --report`: what a user may paste into an issue."""

import json
from pathlib import Path

import pytest

from shoal.launch.doctor.redact import Redactor, is_secret
from tests.launch.command import Ended, environment, forked_shoal

HUB = "hf_" + "Ab3" * 10
KEY = "0123456789abcdef0123456789abcdef01234567"  # as wandb's, which has no shape of its own
SECRETS = {
    "HF_TOKEN": HUB,
    "WANDB_API_KEY": KEY,
    "MLFLOW_TRACKING_PASSWORD": "correct-horse",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLE",
}
# Each with what must not be in the report.
PLANTED = (
    ("fetching https://alice:hunter2@hub.example.org/data.jsonl?sig=qwErTy12&x=1", ("hunter2", "qwErTy12")),
    (f"loading with {HUB}", (HUB,)),
    (f"wandb: logged in with {KEY}", (KEY,)),
    ("curl -H 'Authorization: Bearer abc.def-ghi123'", ("abc.def-ghi123",)),
    ("postgres://mlflow:p@ss/w0rd@db/mlflow", ("p@ss",)),
    ("key AKIAIOSFODNN7EXAMPLE of the bucket", ("AKIAIOSFODNN7EXAMPLE",)),
    ('{"api_key": "s p a c e", "loss": 2.5}', ("s p a c e",)),
    ("login --password hunter3, then", ("hunter3",)),
    ("password=12345678", ("12345678",)),
    ("-----BEGIN OPENSSH PRIVATE KEY-----", ()),
    ("b3BlbnNzaC1rZXktdjEAAAAA", ("b3BlbnNzaC1rZXktdjEAAAAA",)),
    ("-----END OPENSSH PRIVATE KEY-----", ()),
    ("FileNotFoundError: /home/alice/data/x.jsonl on node0815.cluster", ("alice",)),
    ("reading /scratch/alice/corpus and /home/alice", ("alice",)),
)
CONFIG = """\
name: tiny
model: {from: /home/alice/models/tiny, tokenizer: bytes}
data: {path: https://bob:swordfish@files.example.org/rows.jsonl}
train: {steps: 5, global_batch: 8}
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("report")
    run = folder / "runs" / "tiny"
    (run / "logs").mkdir(parents=True)
    (run / "checkpoints" / "step-00000005").mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    (run / "plan.json").write_text('{"fits": true, "chosen": {"strategy": "ddp"}, "memory": {"long": 1}}')
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 2.0}) + "\n" for n in range(1, 21)))
    (run / "logs" / "rank-1.log").write_text("early\n" * 50 + "".join(f"{line}\n" for line, _ in PLANTED))
    (run / "logs" / "tensorboard").mkdir()
    (run / "logs" / "tensorboard" / "events.out.tfevents.1.host.2.0").write_bytes(b"\x18\x00\x00\nbrain.Event:2\xff")
    (run / "logs" / "crash-20260101-000000-a.txt").write_text("shoal 0\n\nTraceback …\nValueError: 3 rows in ```x```\n")
    user = {"HOME": "/home/alice", "LOGNAME": "alice", "NCCL_DEBUG": "WARN", "UNRELATED": "private-matter"}
    return forked_shoal(folder, "doctor", "--report", "runs/tiny", env=environment(folder, **SECRETS, **user))


def test_a_report_has_what_an_issue_needs(report: Ended) -> None:
    assert (report.status, report.err) == (0, "")
    for needed in (
        "## shoal report of tiny",
        "transformers ",
        "ValueError: 3 rows",
        "global_batch: 8",
        '"strategy": "ddp"',
        '{"step": 20, "loss": 2.0}',
        "step-00000005 (not complete)",
        "### Last lines of logs/rank-1.log",
        "NCCL_DEBUG=WARN",
        "HF_TOKEN=[hidden]",
        "run directory",
        "~/data/x.jsonl",
        "/scratch/USER/corpus",
    ):
        assert needed in report.out, needed
    assert '{"step": 12,' not in report.out  # a tail, not all of it
    assert "brain.Event" not in report.out  # no text
    assert "````\nshoal 0" in report.out  # a fence that its text does not end


@pytest.mark.parametrize(
    "secret",
    [*SECRETS.values(), *(one for _, secrets in PLANTED for one in secrets), "swordfish", "private-matter", "/home/"],
)
def test_no_planted_secret_is_in_a_report(secret: str, report: Ended) -> None:
    assert secret not in report.out


def test_a_folder_without_a_run_is_a_mistake(tmp_path: Path) -> None:
    forked_shoal(tmp_path, "doctor", "--report", "runs/x").hold_mistake(
        "--report: there is no run in runs/x; give the folder of a run, such as runs/NAME."
    )


@pytest.mark.parametrize(
    "harmless",
    [
        "tokens_per_second: 1000.5",
        "tokenizer: bytes",
        '"loss_tokens": 12',
        "eos_token_id: 2",
        "token_dtype: auto",
        "the token is new",
        "author: jane",
        "password: null",
        "data.train_on: answers",
        "malice in /home/alice2",
    ],
)
def test_what_is_no_secret_stays(harmless: str) -> None:
    assert Redactor(("s3cret!",), "/home/alice", "alice", ("gpu01",))(harmless) == harmless


@pytest.mark.parametrize(
    ("name", "secret"),
    [("GH_PAT", True), ("apiKey", True), ("DB_PASS", True), ("TOKENIZERS_PARALLELISM", False), ("KEYBOARD", False)],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) is secret
