"""Chat with a model, one line per message, in the format it was trained on."""

import re
from collections.abc import Callable, Generator, Iterable

from shoal.mistakes import UserMistake
from shoal.use.generate import Answer, Sampling
from shoal.use.load import LoadedRun
from shoal.use.prompt import (
    Prompt,
    chat_prompt,
    make_prompt,
    room_for_answer,
    trained_on_chats,
    trained_on_instructions,
)

RESET, HELP, LEAVE = "/reset", "/help", ("/exit", "/quit", "/bye")
COMMAND = re.compile(r"/[a-z]+")
EMPTY = "(no text: the model ended its answer at once)"

Message = dict[str, str]


class Chat:
    """Keeps the message history. For a run trained on instructions, each line is an independent instruction."""

    def __init__(self, loaded: LoadedRun, sampling: Sampling, say: Callable[[str], None] = lambda _: None) -> None:
        self.history: list[Message] = []
        self.cut_off = False  # whether the last answer reached the model's context length
        self._loaded = loaded
        self._sampling = sampling
        self._say = say
        instructions, chats = trained_on_instructions(loaded), trained_on_chats(loaded)
        # A run answers in the format it was trained on, even if its tokenizer came with a chat template.
        self._template = not instructions and bool(loaded.tokenizer.chat_template)
        if instructions:
            alone = "each line is an independent instruction, without history"
            say(f"Trained on instructions: {alone}. {self.keys()}")
        elif self._template:
            if loaded.config is not None and not chats:
                say("Not trained on instructions: the chat template is the tokenizer's own, unseen in this training.")
            say(self.keys())
        else:
            reason = (
                "the run was not trained on instructions or conversations"
                if loaded.config
                else "a Hugging Face folder does not record how it was trained"
            )
            raise UserMistake(
                f"The tokenizer of {loaded.path} has no chat template, and {reason}; "
                f"use text completion instead: shoal generate {loaded.path} TEXT"
            )

    def keys(self) -> str:
        """What can be typed besides messages."""
        reset = f", {RESET} clears the history" if self._template else ""
        return f"Ctrl-D exits{reset}, Ctrl-C stops an answer."

    def ask(self, line: str) -> Generator[str, None, None]:
        """Stream the answer in chunks. What was streamed is added to the history."""
        with Answer(self._loaded, self._prompt(line), self._sampling) as answer:
            try:
                yield from answer
            finally:
                if self._template:
                    self.history.append({"role": "assistant", "content": answer.text})
        self.cut_off = answer.cut_off

    def _prompt(self, line: str) -> Prompt:
        if not self._template:
            return make_prompt(self._loaded, line)
        kept = [*self.history, {"role": "user", "content": line}]
        ids, positions = self._ids(kept), self._loaded.positions
        if positions is not None:
            room = min(self._sampling.tokens, positions // 2)
            while len(ids) + room > positions and len(kept) > 1:
                kept = kept[2:]
                ids = self._ids(kept)
        room_for_answer(self._loaded, ids, 1)  # refuses a line that is too long by itself, before history is dropped
        if dropped := (len(self.history) + 1 - len(kept)) // 2:
            self._say(f"(context length reached: the oldest {dropped} messages and their answers were dropped)")
        self.history = kept
        return Prompt(ids, continues=False)

    def _ids(self, messages: list[Message]) -> list[int]:
        return chat_prompt(self._loaded, messages).ids


def converse(chat: Chat, lines: Iterable[str], write: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Answer each line. Ctrl-C stops an answer, not the conversation."""
    for line in lines:
        text = line.strip()
        if text == RESET:
            chat.history.clear()
        elif text in LEAVE:
            return
        elif COMMAND.fullmatch(text):  # a word that the model was not meant to read
            say(chat.keys() if text == HELP else f"There is no {text}. {chat.keys()}")
        elif text:
            chunks, written = chat.ask(text), False
            try:
                for chunk in chunks:
                    write(chunk)
                    written = written or bool(chunk)
                if not written:
                    say(EMPTY)
            except KeyboardInterrupt:
                chunks.close()
            except UserMistake as mistake:  # such as a line that is too long: the conversation continues
                say(str(mistake))
                continue
            write("\n")
            if chat.cut_off:
                say("(truncated: the model's context length is reached)")
