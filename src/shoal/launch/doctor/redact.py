"""Remove secrets from text that leaves the machine: credentials, the home folder, and the names of user and host."""

import getpass
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Self

HIDDEN = "[hidden]"
# Words of names whose values are secret: of variables, keys of a config, options of a command, parameters of a URL.
_SECRET_WORDS = (
    r"pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|account[_-]?key|credentials?"
    r"|auth(?:orization)?|cookie|signature|sig|dsn"
)
# A word by itself or between separators: MY_TOKEN and apiKey, but neither `tokens` nor `tokenizer`.
_SECRET_NAME = re.compile(rf"(?:^|[^a-z])(?:{_SECRET_WORDS}|key|pat)(?:$|[^a-z])", re.IGNORECASE)
# What follows the word in the name of something about it: token_dtype, pad_token_id.
_ABOUT = r"_(?:dtype|type|ids?|count|length)\b"
# Names that have such a word and are not secret.
_PUBLIC = re.compile(r"^(?:SSH_AUTH_SOCK|TOKENIZERS_PARALLELISM|PWD|OLDPWD)$")
# Shapes of credentials that are secret whatever they are called.
_SHAPES = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\b(?:hf_|api_org_)[A-Za-z0-9]{16,}"),  # Hugging Face
    re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,})"),
    re.compile(r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\bAIza[\w-]{30,}"),
    re.compile(r"\bxox[abprs]-[\w-]{10,}"),
    re.compile(r"\bwandb_v1_[\w-]{16,}"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # JSON Web Tokens
    re.compile(r"(?<=Bearer )[\w.~+/=-]{8,}", re.IGNORECASE),
    re.compile(r"(?<=Basic )[A-Za-z0-9+/=]{8,}"),
)
_URL_USER = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
# `password: x`, `"api_key": "x"`, `--token x`, `?sig=x`. The value ends at a space, unless it is quoted: a credential
# may have any other character, so that some text after it is hidden too.
_ASSIGNED = re.compile(
    rf"(?P<name>[\w.-]*(?<![A-Za-z])(?:{_SECRET_WORDS})(?![A-Za-z]|{_ABOUT})[\w.-]*[\"']?"
    r"(?:[ \t]*[:=][ \t]*|(?<=\w)[ \t]+(?=\S)))"
    r"(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|\S+)",
    re.IGNORECASE,
)
_EMPTY = re.compile(r"[\"']?(?:null|none|true|false|~)?[\"']?[,}\])]*", re.IGNORECASE)
_TOKEN_ID = re.compile(r"token[\w.-]*[\"']?\s*[:=]\s*$", re.IGNORECASE)  # pad_token_id: 0
# A secret this short would be found inside of other words.
SHORTEST = 6
# Accounts that say nothing about a person, and words that a text may have.
_COMMON_USERS = {"root", "user", "ubuntu", "admin", "runner", "jovyan"}


def is_secret(name: str) -> bool:
    """Whether the value of a variable or key of this name is a secret."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)  # apiKey
    return bool(_SECRET_NAME.search(spaced)) and not _PUBLIC.match(name)


class Redactor:
    """Hides what would identify the user or give access to something."""

    def __init__(self, secrets: tuple[str, ...], home: str, user: str, hosts: tuple[str, ...]) -> None:
        # The longest first: one may be a part of another.
        self._secrets = sorted({one for one in secrets if len(one) >= SHORTEST}, key=len, reverse=True)
        self._home = home.rstrip("/")
        self._names = [(host, "HOST") for host in sorted(set(hosts), key=len, reverse=True) if len(host) > 1]
        if len(user) > 1 and user not in _COMMON_USERS:
            self._names.append((user, "USER"))

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """With the secrets of the environment: they may be printed anywhere."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container without an entry for the user
            user = ""
        host = socket.gethostname()
        hosts = {host, host.partition(".")[0]} - {"localhost"}
        secrets = tuple(value for name, value in environment.items() if is_secret(name))
        return cls(secrets, str(Path.home()), user, tuple(hosts))

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for shape in _SHAPES:
            text = shape.sub(HIDDEN, text)
        text = _URL_USER.sub(HIDDEN, text)
        text = _ASSIGNED.sub(_hide_value, text)
        if len(self._home) > 1:
            text = re.sub(rf"{re.escape(self._home)}(?![\w.-])", "~", text)
        for name, instead in self._names:
            text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", instead, text)
        return text

    def variable(self, name: str, value: str) -> str:
        return HIDDEN if is_secret(name) and value else self(value)


def _hide_value(found: re.Match[str]) -> str:
    if _EMPTY.fullmatch(found["value"]) or found["value"].startswith(HIDDEN):
        return found[0]
    if _TOKEN_ID.search(found["name"]) and re.fullmatch(r"\d{1,9}[,}\])]*", found["value"]):
        return found[0]
    separated = re.search(r"[:=]\s*$", found["name"])
    option = found["name"].lstrip("\"'").startswith("--")
    if not separated and not option:  # a sentence, such as “the token is”
        return found[0]
    return found["name"] + HIDDEN
