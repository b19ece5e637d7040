import gzip
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chess
import pytest

from shoal.config.schema_model import ShapeConfig
from shoal.data import chess_games, chess_player, load_tokenizer, prepare
from shoal.data.chess_games import Match, play, played_file
from shoal.data.sources import Reading, read_records
from shoal.data.sources.find import find_files
from shoal.mistakes import UserMistake

Write = Callable[[str, Any], Path]
SHORT = Match(games=12, plies=30, player="quick")
TEXTS = ["", "e2e4", "e2e4 e7e5 g1f3", "a7a8q h2h1r b7a8b g7g8n", "e1g1 e8c8", "e2e4 e7"]


def games_in(path: Path) -> list[str]:
    return [record.fields["text"] for record in read_records(Reading("chess", tuple(find_files("chess", path))))]


def replay(game: str) -> chess.Board:
    board = chess.Board()
    for move in game.split():
        board.push(board.parse_uci(move))  # raises where a move is not legal
    return board


def test_generated_games_are_legal_and_no_two_are_alike() -> None:
    games = list(play(Match(games=40, plies=120, player="quick")))
    boards = [replay(game) for game in games]
    assert all(board.ply() == 120 or board.is_game_over() for board in boards)
    assert len({game[:60] for game in games}) == len(games)


def test_the_player_finds_every_legal_move_and_no_other() -> None:
    # The player has its own move generator, for speed. It promotes pawns to queens and knights only.
    source = random.Random(3)
    for game in play(Match(games=6, plies=60, player="quick", seed=9)):
        board = chess.Board()
        for text in game.split():
            moves, _ = chess_player._candidates(board)
            legal = {move for move in board.legal_moves if move.promotion in (None, chess.QUEEN, chess.KNIGHT)}
            assert {move for one in moves if not board.is_into_check(move := chess.Move(*one))} == legal
            assert chess_player.choose_move(board, source) in legal
            board.push_uci(text)


def test_the_player_stops_at_mate_and_at_stalemate() -> None:
    for position in ("7k/6Q1/6K1/8/8/8/8/8 b - - 0 1", "7k/5Q2/6K1/8/8/8/8/8 b - - 0 1"):
        assert chess_player.choose_move(chess.Board(position), random.Random(0)) is None


@pytest.mark.slow
def test_the_same_match_gives_the_same_games_in_one_process_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(play(SHORT))
    monkeypatch.setattr(chess_games, "_GAMES_WORTH_A_PROCESS", 4)
    monkeypatch.setattr(chess_games, "_cores", lambda: 3)
    assert list(play(SHORT)) == alone
    assert set(play(Match(**{**vars(SHORT), "seed": 1}))).isdisjoint(alone)


def test_a_player_process_that_dies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chess_games, "_GAMES_WORTH_A_PROCESS", 4)
    monkeypatch.setattr(chess_games, "_cores", lambda: 2)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="exited early"):
        list(play(SHORT))


def test_games_are_generated_once_and_cached(
    settings: Any, said: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings(source="chess", games=12, plies=30, max_length=64, pack=False)
    sequences = prepare(data, load_tokenizer("chess"), report=said.append)
    assert len(sequences) == 12
    (file,) = cache.glob("games/*/games.txt")
    assert file.read_text().splitlines() == list(play(SHORT))
    monkeypatch.setattr(chess_games, "play", lambda *_: pytest.fail("played again"))
    again = prepare(
        settings(source="chess", games=12, plies=30, max_length=32), load_tokenizer("chess"), report=said.append
    )
    assert again.summary.documents == 12
    assert any("games from the cache" in sentence for sentence in said)


@pytest.mark.parametrize("change", [{"games": 13}, {"plies": 20}, {"seed": 5}])
def test_another_match_is_another_file(tmp_path: Path, change: dict[str, int]) -> None:
    other = Match(**{**vars(SHORT), **change})
    assert played_file(SHORT, tmp_path, print) != played_file(other, tmp_path, print)


def test_a_sequence_is_one_game_between_begin_and_end(settings: Any, said: list[str]) -> None:
    tokenizer = load_tokenizer("chess")
    data = settings(source="chess", games=3, plies=10, max_length=64, pack=False)
    sequences = prepare(data, tokenizer, report=said.append)
    games = list(play(Match(games=3, plies=10, player="quick")))
    for index, game in enumerate(games):
        tokens, _ = sequences[index]
        assert tokens.tolist() == [tokenizer.begin, *tokenizer.encode(game).tolist(), tokenizer.end]
        assert sequences.counted[index] == 2 * len(game.split()) + 1


def test_stockfish_that_is_not_there_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chess_games.shutil, "which", lambda _: None)
    with pytest.raises(UserMistake, match=r"apt install stockfish.*data\.player: quick"):
        list(play(Match(games=1, plies=4, player="stockfish")))


@pytest.mark.skipif(not any(map(chess_games.shutil.which, chess_games.ENGINES)), reason="stockfish is not installed")
def test_stockfish_plays_legal_games_from_various_openings() -> None:
    games = list(play(Match(games=3, plies=20, player="stockfish")))
    assert all(replay(game).ply() == 20 for game in games)
    assert len(set(games)) == 3


def test_lines_of_moves_are_read(write: Write) -> None:
    file = write("games.txt", "e2e4 e7e5  g1f3\r\n\n d2d4 d7d5 \n")
    assert games_in(file) == ["e2e4 e7e5 g1f3", "d2d4 d7d5"]


PGN = """[Event "One"]
[Result "1-0"]

1. e4 {best by test} e5 2. Qh5 (2. Nf3 Nc6) Nc6 3. Bc4 Nf6 4. Qxf7# 1-0

[Event "Two"]

1. d4 d5 *
"""


def test_the_main_lines_of_a_pgn_file_are_read(write: Write) -> None:
    assert games_in(write("games.pgn", PGN)) == ["e2e4 e7e5 d1h5 b8c6 f1c4 g8f6 h5f7", "d2d4 d7d5"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", "e2e4 e7e5\nd2d4 Nf6\n", r"a\.txt:2 is not a game of chess: 'Nf6' \(ply 2\) is not a move in UCI"),
        ("a.txt", "\n", r"contains no games"),
        ("a.pgn", "", r"contains no games"),
        ("a.pgn", PGN + '\n[Event "Three"]\n\n1. e4 e4 *\n', r"a\.pgn:10 is not a game of chess: illegal san: 'e4'"),
        ("a.pgn", '[FEN "7k/8/6K1/8/8/8/8/5Q2 w - - 0 1"]\n[SetUp "1"]\n\n1. Qf7 *\n', r"does not start from"),
    ],
)
def test_files_that_hold_no_games_say_where_and_why(write: Write, name: str, content: str, sentence: str) -> None:
    file = write(name, content)
    with pytest.raises(UserMistake, match=sentence):
        games_in(file)


def test_a_bad_game_can_be_skipped(settings: Any, write: Write, said: list[str]) -> None:
    data = settings(source="chess", path=write("games.txt", "e2e4 e7e5\nhello\n"), on_error="skip")
    sequences = prepare(data, load_tokenizer("chess"), report=said.append)
    assert (sequences.summary.documents, sequences.summary.skipped) == (1, 1)


def test_chess_and_its_export_give_the_same_ids_and_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer("chess")
    ours.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(str(tmp_path)), load_tokenizer("mine", tmp_path)
    assert (ours.begin, ours.end, ours.pad, ours.size) == (again.begin, again.end, again.pad, again.size)
    assert ours.size == len(theirs) == 136
    assert ours.prepends_begin == again.prepends_begin is True
    for text in [*TEXTS, *play(Match(games=20, plies=100, player="quick"))]:
        ids = ours.encode(text).tolist()
        assert ids == again.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert theirs(text)["input_ids"] == [ours.begin, *ids]
        assert ours.decode(ids) == theirs.decode(ids) == text
        assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == text
        around = [ours.begin, *ids, ours.end]
        assert ours.decode(around) == theirs.decode(around)
        assert ours.decode(around, keep_special=False) == text


def test_a_move_is_its_origin_and_its_destination_square() -> None:
    tokenizer = load_tokenizer("chess")
    assert [tokenizer.decode([token]) for token in tokenizer.encode("e2e4 e7e8q")] == ["e2", "e4", "e7", "e8", "q"]
    assert len({*tokenizer.encode("e2e4").tolist(), *tokenizer.encode("e4e2").tolist()}) == 4


@pytest.mark.parametrize("text", ["hello", "e2e4 Nf6", "e2 e7e5", "e2e9", "e7e8k", "e2e4e7e5", "q", "<|end|>"])
def test_text_that_is_no_move_is_a_mistake(text: str) -> None:
    with pytest.raises(UserMistake, match=r"is not a chess move in UCI notation; write moves such as e2e4"):
        load_tokenizer("chess").encode(text)


def test_the_exported_tokenizer_takes_other_text_as_unknown() -> None:
    theirs = load_tokenizer("chess").hugging_face
    assert theirs("e2e4 hello")["input_ids"][-1] == theirs.unk_token_id


def test_the_chess_tokenizer_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, shoal.data as data; data.load_tokenizer('chess').encode('e2e4');"
        "assert not {'torch', 'transformers', 'tokenizers', 'chess'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_sequence_of_the_recipe_is_a_whole_game(said: list[str]) -> None:
    from shoal.config import load_config

    config = load_config(Path(__file__).parents[2] / "recipes/chess-tiny.yaml", ["data.games=20"])
    tokenizer = load_tokenizer("chess")
    assert config.model.tokenizer == "chess"
    assert isinstance(config.model.shape, ShapeConfig)
    assert config.model.shape.vocab == tokenizer.size
    assert config.model.shape.positions >= config.data.max_length
    sequences = prepare(config.data, tokenizer, report=said.append)
    assert (len(sequences), sequences.summary.truncated) == (20, 0)
    for index in range(20):
        tokens = sequences[index][0].tolist()
        assert (tokens[0], tokens[-1]) == (tokenizer.begin, tokenizer.end)
        assert replay(tokenizer.decode(tokens[1:-1])).ply() > 10
    # The longest possible: three promotions, each of which is one more token.
    assert config.data.max_length + 1 >= 2 * config.data.plies + 2 + 3


def test_without_the_package_it_says_what_to_install(
    settings: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["shoal.data.prepare"], "find_spec", lambda name: None)
    with pytest.raises(UserMistake, match=r"needs the package chess: pip install 'shoal\[chess\]'"):
        prepare(settings(source="chess"), load_tokenizer("chess"), report=said.append)


def test_compressed_games_are_read(write: Write) -> None:
    assert games_in(write("games.pgn.gz", gzip.compress(b"1. e4 e5 2. Nf3 *\n"))) == ["e2e4 e7e5 g1f3"]
    assert games_in(write("games.uci.gz", gzip.compress(b"e2e4 e7e5\n"))) == ["e2e4 e7e5"]
