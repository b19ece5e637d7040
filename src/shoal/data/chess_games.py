"""Chess games as text, one game per line in UCI moves (`e2e4 e7e5 g1f3`): generated here, or read from files.

Generated games are written to the cache once, in a file that `data.path` could name as well.
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
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

import chess
import chess.engine
import chess.pgn

from shoal.data import chess_player
from shoal.data.cache import Report, obtain
from shoal.data.sources.compressed import open_data
from shoal.mistakes import UserMistake

# Part of the cache key. Raise it when the same settings would give different games.
PLAYERS_VERSION = 1
# Games are a dataset, like a file: another `seed` in the config reshuffles them and does not generate new ones.
TRAINING_SEED = 0

ENGINES = ("stockfish", "/usr/games/stockfish")  # Debian installs it outside many PATHs
_RANDOM_PLIES = 8  # random opening of engine games, because the engine is deterministic
_ENGINE_NODES = 200  # positions the engine searches per move: about a millisecond
_GAMES_WORTH_A_PROCESS = 200
_UCI = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")


@dataclass(frozen=True)
class Match:
    """Which games are generated. The same match gives the same games (with `stockfish`: of the same version)."""

    games: int
    plies: int  # games are truncated after this many
    player: str  # quick, stockfish
    seed: int = TRAINING_SEED


def played_file(match: Match, cache: Path, report: Report) -> Path:
    """The file with the games of `match`, from the cache or generated now."""
    described = [PLAYERS_VERSION, match.games, match.plies, match.player, match.seed]
    key = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        with (folder / "games.txt").open("w") as file:
            file.writelines(game + "\n" for game in play(match, report))

    folder, ready = obtain(cache / "games", key, build, report)
    if ready:
        report(f"Loaded {match.games:,} chess games from the cache: {folder / 'games.txt'}.")
    return folder / "games.txt"


def play(match: Match, report: Report = lambda _: None) -> Iterator[str]:
    """The games of `match`, in the same order for any number of processes."""
    engine = find_engine() if match.player == "stockfish" else None
    processes = max(min(_cores(), match.games // _GAMES_WORTH_A_PROCESS), 1)
    games = _play_share(match, engine, 0, 1) if processes == 1 else _play_in_processes(match, engine, processes)
    next_report = time.monotonic() + 2  # a short match reports nothing
    first = None  # when the first game arrived: excludes the start of the processes
    for done, game in enumerate(games, start=1):
        yield game
        now = time.monotonic()
        first = first or now
        if now > next_report and done < match.games:
            left = f", about {(now - first) / done * (match.games - done):.0f}s left" if done >= 100 else ""
            report(f"Generating chess games in {processes} processes: {done:,} of {match.games:,} games{left}.")
            next_report = now + 10


def _play_in_processes(match: Match, engine: str | None, processes: int) -> Iterator[str]:
    # Subprocesses rather than forks or multiprocessing: the caller may have threads (of torch, of a tokenizer), and may
    # be a script that multiprocessing would run a second time.
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
                raise RuntimeError(f"A process that generates chess games exited early with status {player.wait()}.")
            yield game.rstrip("\n")
    finally:
        for player in players:
            player.kill()
            player.wait()
            assert player.stdout is not None
            player.stdout.close()


def _play_share(match: Match, engine: str | None, first: int, step: int) -> Iterator[str]:
    """Every `step`-th game of a match. Each has its own random generator, so it does not depend on the process."""
    generators = (random.Random(f"{match.seed}/{number}") for number in range(first, match.games, step))
    if engine is None:
        for generator in generators:
            yield " ".join(chess_player.play_game(generator, match.plies))
    else:
        with chess.engine.SimpleEngine.popen_uci(engine) as opened:
            for generator in generators:
                yield " ".join(_play_with_engine(opened, generator, match.plies))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _play_with_engine(engine: chess.engine.SimpleEngine, generator: random.Random, plies: int) -> list[str]:
    board = chess.Board()
    opening = generator.randint(2, _RANDOM_PLIES)
    limit = chess.engine.Limit(nodes=_ENGINE_NODES)
    while len(board.move_stack) < plies and not board.is_game_over():
        if len(board.move_stack) < opening:
            move = chess_player.choose_move(board, generator)
        else:
            # A new `game` object resets the engine's state, so that the same seed gives the same moves.
            move = engine.play(board, limit, game=generator).move
        assert move is not None
        board.push(move)
    return [move.uci() for move in board.move_stack]


def find_engine() -> str:
    for name in ENGINES:
        if (found := shutil.which(name)) is not None:
            return found
    raise UserMistake(
        "data.player is stockfish, but stockfish is not installed. Install it (apt install stockfish), or set "
        "data.player: quick, which is built in."
    )


@dataclass(frozen=True)
class Game:
    """A game read from a file: its first line, its moves in UCI, and what is wrong with it, if anything."""

    line: int
    moves: str
    problem: str | None


def read_lines(file: Path) -> Iterator[Game]:
    """One game per line, in UCI moves."""
    with open_data(file) as raw, TextIOWrapper(raw, encoding="utf-8-sig", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield Game(number, " ".join(line.split()), find_problem(line.split()))


def find_problem(moves: Sequence[str]) -> str | None:
    """Why these are not moves in UCI notation, or None. Legality is not checked: that takes minutes."""
    for number, move in enumerate(moves, start=1):
        if _UCI.fullmatch(move) is None:
            return f"{move!r} (ply {number}) is not a move in UCI notation, such as e2e4 or e7e8q"
    return None


def read_pgn(file: Path) -> Iterator[Game]:
    """The main lines of a PGN file's games."""
    with open_data(file) as raw, TextIOWrapper(raw, encoding="utf-8-sig", errors="replace") as stream:
        lines = _CountedLines(stream)
        while (game := chess.pgn.read_game(lines, Visitor=_QuietBuilder)) is not None:  # type: ignore[call-overload]
            problem = None
            if game.errors:
                problem = str(game.errors[0])
            elif game.board().fen() != chess.STARTING_FEN:
                problem = "it does not start from the initial position"
            elif not game.variations:
                problem = "it has no moves"
            yield Game(lines.begins, " ".join(move.uci() for move in game.mainline_moves()), problem)
            lines.begins = 0


class _CountedLines:
    """The one method of a file that chess.pgn calls, and the number of the first line that is not blank."""

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
    """Collects a game's errors instead of logging them."""

    def handle_error(self, error: Exception) -> None:
        self.game.errors.append(error)


def _main(match: str, engine: str, first: str, step: str) -> None:
    for game in _play_share(Match(**json.loads(match)), engine or None, int(first), int(step)):
        print(game)


if __name__ == "__main__":
    _main(*sys.argv[1:])
