"""A conversation: lines in, answers out, with the tokenizer's chat template around them."""

from collections.abc import Callable, Generator, Iterable
from typing import Any

from shoal.mistakes import UserMistake
from shoal.use.generate import Answer, Sampling
from shoal.use.load import LoadedRun
from shoal.use.prompt import Prompt, make_prompt, room_for_answer, trained_on_instructions

RESET = "/reset"

Message = dict[str, str]


class Chat:
    """Keeps what was said. Without a chat template, a run trained on instructions takes each line as one of its own."""

    def __init__(self, loaded: LoadedRun, sampling: Sampling, say: Callable[[str], None] = lambda _: None) -> None:
        self.history: list[Message] = []
        self.cut_off = False  # the last answer, because the model had no positions left
        self._loaded = loaded
        self._sampling = sampling
        self._say = say
        self._template = bool(getattr(loaded.tokenizer.hugging_face, "chat_template", None))
        if self._template:
            say(f"Ctrl-D ends, {RESET} forgets what was said.")
        elif trained_on_instructions(loaded):
            say("Trained on instructions: each line is one of its own, and nothing is remembered. Ctrl-D ends.")
        else:
            known = "the run was not trained on instructions" if loaded.config else "its folder names no run's data"
            raise UserMistake(
                f"The tokenizer of {loaded.path} has no chat template, and {known}, so there is no telling a question "
                f"from an answer; let it go on with a text: shoal generate {loaded.path} TEXT"
            )

    def ask(self, line: str) -> Generator[str, None, None]:
        """The pieces of the answer, which is then part of the history, as far as it was heard."""
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
        room_for_answer(self._loaded, ids, 1)  # a line that is too long by itself is refused, and nothing forgotten
        if forgotten := (len(self.history) + 1 - len(kept)) // 2:
            self._say(f"(forgotten for want of positions: the oldest {forgotten} of your lines and their answers)")
        self.history = kept
        return Prompt(ids, continues=False)

    def _ids(self, messages: list[Message]) -> list[int]:
        tokenizer: Any = self._loaded.tokenizer.hugging_face
        try:
            made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program, and may refuse or break in any way
            raise UserMistake(f"The chat template of {self._loaded.path} failed: {error}") from None
        return [int(token) for token in made]


def converse(chat: Chat, lines: Iterable[str], write: Callable[[str], None], say: Callable[[str], None]) -> None:
    """Answer each line until there are no more. Ctrl-C ends an answer, not the conversation."""
    for line in lines:
        text = line.strip()
        if text == RESET:
            chat.history.clear()
        elif text:
            pieces = chat.ask(text)
            try:
                for piece in pieces:
                    write(piece)
            except KeyboardInterrupt:
                pieces.close()
            except UserMistake as mistake:  # a line too long is no reason to hang up
                say(str(mistake))
                continue
            write("\n")
            if chat.cut_off:
                say("(cut off: the model has no more positions)")
