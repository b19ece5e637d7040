"""Games of chess as text, one game a line in UCI moves (`e2e4 e7e5 g1f3`): played here, or read from files.

Games that are played are written once into the cache, as the very file that `data.path` could name.
"""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import chess
import chess.engine
import chess.pgn

from shoal.data import chess_player
from shoal.data.cache import Report, obtain
from shoal.mistakes import UserMistake

# Part of the cache key. Raise it when the same settings would give other games than before.
PLAYERS_VERSION = 1
# Games are a data set, like a file: another `seed` in the config shuffles them anew and does not play new ones.
TRAINING_SEED = 0

ENGINES = ("stockfish", "/usr/games/stockfish")  # Debian puts it where not every PATH looks
_RANDOM_PLIES = 8  # with which games of the engine open, because it would always play the same
_ENGINE_NODES = 200  # positions the engine looks at for a move: about a millisecond
_GAMES_WORTH_A_PROCESS = 200
_UCI = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")


@dataclass(frozen=True)
class Match:
    """Which games are played. The same match always gives the same games (by `stockfish`: of the same version)."""

    games: int
    plies: int  # where a game is cut
    player: str  # quick, stockfish
    seed: int = TRAINING_SEED


def played_file(match: Match, cache: Path, report: Report) -> Path:
    """The file of the games of `match`, from the cache or played now."""
    described = [PLAYERS_VERSION, match.games, match.plies, match.player, match.seed]
    key = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        with (folder / "games.txt").open("w") as file:
            file.writelines(game + "\n" for game in play(match, report))

    folder, ready = obtain(cache / "games", key, build, report)
    if ready:
        report(f"{match.games:,} games of chess were played before, and lie in {folder / 'games.txt'}.")
    return folder / "games.txt"


def play(match: Match, report: Report = lambda _: None) -> Iterator[str]:
    """The games of `match`, always in the same order however many processes play them."""
    engine = find_engine() if match.player == "stockfish" else None
    processes = max(min(_cores(), match.games // _GAMES_WORTH_A_PROCESS), 1)
    games = _play_share(match, engine, 0, 1) if processes == 1 else _play_in_processes(match, engine, processes)
    speak = time.monotonic() + 2  # a short match stays quiet
    first = None  # when it was there: the processes take a moment to start
    for done, game in enumerate(games, start=1):
        yield game
        now = time.monotonic()
        first = first or now
        if now > speak and done < match.games:
            left = f", about {(now - first) / done * (match.games - done):.0f}s left" if done >= 100 else ""
            report(f"Playing chess in {processes} processes: {done:,} of {match.games:,} games{left}.")
            speak = now + 10


def _play_in_processes(match: Match, engine: str | None, processes: int) -> Iterator[str]:
    # Programs of their own rather than forks: the caller may have threads (of torch, of a tokenizer), and may be a
    # script that multiprocessing would run a second time.
    command = [sys.executable, "-m", "shoal.data.chess_games", json.dumps(asdict(match)), engine or ""]
    players = [
        subprocess.Popen([*command, str(index), str(processes)], stdout=subprocess.PIPE, text=True)
        for index in range(processes)
    ]
    try:
        for number in range(match.games):
            player = players[number % processes]
            assert player.stdout is not None
            game = player.stdout.readline()
            if not game:
                raise RuntimeError(f"A process that played chess ended early, with status {player.wait()}.")
            yield game.rstrip("\n")
    finally:
        for player in players:
            player.kill()
            player.wait()
            assert player.stdout is not None
            player.stdout.close()


def _play_share(match: Match, engine: str | None, first: int, step: int) -> Iterator[str]:
    """Every `step`-th game of a match. Each has its own source of chance, so that who plays it does not matter."""
    sources = (random.Random(f"{match.seed}/{number}") for number in range(first, match.games, step))
    if engine is None:
        for source in sources:
            yield " ".join(chess_player.play_game(source, match.plies))
    else:
        with chess.engine.SimpleEngine.popen_uci(engine) as opened:
            for source in sources:
                yield " ".join(_play_with_engine(opened, source, match.plies))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _play_with_engine(engine: chess.engine.SimpleEngine, source: random.Random, plies: int) -> list[str]:
    board = chess.Board()
    opening = source.randint(2, _RANDOM_PLIES)
    limit = chess.engine.Limit(nodes=_ENGINE_NODES)
    while len(board.move_stack) < plies and not board.is_game_over():
        if len(board.move_stack) < opening:
            move = chess_player.choose_move(board, source)
        else:
            # A new game each, so that the engine remembers nothing and the same seed gives the same moves.
            move = engine.play(board, limit, game=source).move
        assert move is not None
        board.push(move)
    return [move.uci() for move in board.move_stack]


def find_engine() -> str:
    for place in ENGINES:
        if (found := shutil.which(place)) is not None:
            return found
    raise UserMistake(
        "data.player is stockfish, and no stockfish is installed here. Install it (apt install stockfish), or set "
        "data.player: quick, which needs nothing."
    )


@dataclass(frozen=True)
class Game:
    """A game as a file has it: the line where it begins, its moves in UCI, and what is wrong with it, if anything."""

    line: int
    moves: str
    problem: str | None


def read_lines(file: Path) -> Iterator[Game]:
    """A game a line, in UCI moves."""
    with file.open(encoding="utf-8-sig", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield Game(number, " ".join(line.split()), find_problem(line.split()))


def find_problem(moves: Sequence[str]) -> str | None:
    """Why these are not moves in UCI notation, or None. Whether they are legal is not asked: that takes minutes."""
    for place, move in enumerate(moves, start=1):
        if _UCI.fullmatch(move) is None:
            return f"{move!r}, at place {place}, is not a move in UCI notation, such as e2e4 or e7e8q"
    return None


def read_pgn(file: Path) -> Iterator[Game]:
    """The main lines of a PGN file's games."""
    with file.open(encoding="utf-8-sig", errors="replace") as stream:
        lines = _CountedLines(stream)
        while (game := chess.pgn.read_game(lines, Visitor=_QuietBuilder)) is not None:  # type: ignore[call-overload]
            problem = None
            if game.errors:
                problem = str(game.errors[0])
            elif game.board().fen() != chess.STARTING_FEN:
                problem = "it does not begin where games begin"
            elif not game.variations:
                problem = "it has no moves"
            yield Game(lines.begins, " ".join(move.uci() for move in game.mainline_moves()), problem)
            lines.begins = 0


class _CountedLines:
    """The one method that chess.pgn asks of a file, and the number of the first line with something on it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._read = 0
        self.begins = 0

    def readline(self) -> str:
        line = self._stream.readline()
        self._read += 1
        if not self.begins and line.strip():
            self.begins = self._read
        return line


class _QuietBuilder(chess.pgn.GameBuilder[chess.pgn.Game]):
    """Keeps what is wrong with a game, and leaves saying it to us."""

    def handle_error(self, error: Exception) -> None:
        self.game.errors.append(error)


def _main(match: str, engine: str, first: str, step: str) -> None:
    for game in _play_share(Match(**json.loads(match)), engine or None, int(first), int(step)):
        print(game)


if __name__ == "__main__":
    _main(*sys.argv[1:])
