"""Chess games: one document per game."""

from collections.abc import Iterator
from pathlib import Path

from shoal.catalogue.data_files import uncompressed_suffix
from shoal.data.sources.record import OnBad, Record
from shoal.mistakes import UserMistake


def read_chess(file: Path, on_bad: OnBad) -> Iterator[Record]:
    """One document per game, in UCI moves: one game per line, or a PGN file."""
    from shoal.data import chess_games  # slow to import, and most runs do not need it

    games = chess_games.read_pgn(file) if uncompressed_suffix(file.name) == ".pgn" else chess_games.read_lines(file)
    found = False
    for game in games:
        found = True
        if game.problem is None:
            yield Record({"text": game.moves}, file, game.line)
        else:
            on_bad(
                UserMistake(
                    f"{file}:{game.line} is not a game of chess: {game.problem}. Fix it, or set data.on_error: skip."
                )
            )
    if not found:
        on_bad(UserMistake(f"{file} contains no games. Remove it, or set data.on_error: skip."))
