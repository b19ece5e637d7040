"""Evaluates the model of recipes/chess-tiny.yaml: the share of legal moves that it samples in unseen games.

Three samplers are compared at plies 10 to 40 of new games, at temperature 1: the model before training, a bigram table
of the moves in the training games, and the trained model. The models are loaded from the exported folder with plain
transformers, without shoal.

usage: python examples/chess_demo.py [RUN], after `shoal train recipes/chess-tiny.yaml`; `make demo` does both
       python examples/chess_demo.py --how-long RECIPE, before it: estimate how long the demo takes on this machine
"""

import json
import os
import random
import shutil
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import chess
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from shoal import api
from shoal.data.chess_games import Match, play, played_file
from shoal.models.families import transformers_config
from shoal.paths import cache_root

PLIES = range(10, 41)
FRESH_GAMES = 150  # with 31 plies each: more than 4,000 moves per sampler
FRESH_SEED = 1  # the training games use seed 0

SAMPLE_GAMES, SAMPLE_STEPS = 40, 6  # samples for the time estimate
# Time of a data-parallel step of two processes, relative to one of a plain single-process loop; measured on two cores.
SHARED_STEP = 1.35
# Time of startup, export and evaluation, in steps of such a loop.
OTHER_STEPS = 400

Games = Sequence[Sequence[str]]  # each a list of moves in UCI
Sampler = Callable[[Games], Iterator[list[str]]]  # for each of PLIES, a move for each game


def main(run: Path) -> None:
    torch.set_num_threads(1)  # the model is too small to profit from threads
    config = api.load_config(run / "config.yaml")
    fresh = Match(FRESH_GAMES, max(PLIES), config.data.player, seed=FRESH_SEED)
    # All of one length, to be batched: games that end early or have a promotion (a third token) are left out.
    games = [game for line in play(fresh, say) if is_even(game := line.split())]
    training = Match(config.data.games, config.data.plies, config.data.player)
    table = fit_bigrams(played_file(training, cache_root(), lambda _: None).read_text().splitlines())

    folder = run / "hf"
    shutil.rmtree(folder, ignore_errors=True)
    api.export(run, folder)
    say(f"Exported to {folder}. The evaluation below uses plain transformers only.")
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))

    asked: dict[str, Sampler] = {
        "untrained": partial(sample_moves, untrained, tokenizer),
        "bigram table": partial(sample_bigrams, table),
        "trained": partial(sample_moves, trained, tokenizer),
    }
    found = {name: measure(name, sampler, games) for name, sampler in asked.items()}
    print(f"\nMoves sampled at temperature 1, plies {PLIES[0]} to {PLIES[-1]} of {len(games)} new games:\n")
    print(f"{'':14} {'legal':>7} {'of moves':>9} {'seconds':>8}")
    for name, line in found.items():
        print(f"{name:14} {line['legal_share']:7.1%} {line['moves']:9,} {line['seconds']:8.1f}")
    (run / "legal.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"\n(also in {run / 'legal.json'})")
    play_alone(trained, tokenizer)


def how_long(recipe: Path) -> None:
    """Estimate how long the demo takes on this machine, from a few games and a few training steps."""
    torch.set_num_threads(1)
    config = api.load_config(recipe)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    began = time.perf_counter()
    list(play(Match(SAMPLE_GAMES, config.data.plies, config.data.player)))
    games = (time.perf_counter() - began) / SAMPLE_GAMES * config.data.games / cores
    # Ranks share cores if there are fewer cores than ranks.
    turns = max(1.0, config.hardware.devices / cores)
    step = seconds_per_step(config)
    training = config.train.steps * SHARED_STEP * turns * step
    minutes = (games + training + OTHER_STEPS * step) / 60
    say(
        f"On this machine the demo takes about {max(1, round(minutes))} minute{'s' * (round(minutes) > 1)}: "
        f"{games:.0f} s to play {config.data.games:,} games (cached for the next run), {training / 60:.1f} min to "
        f"train {config.train.steps} steps, and the rest for startup, export and evaluation."
    )


def seconds_per_step(config: api.Config) -> float:
    """Median time of a step on one rank's micro-batch, in a plain loop."""
    shape = config.model.shape.named()
    model = AutoModelForCausalLM.from_config(transformers_config(shape))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(shape.vocab, (config.train.micro_batch, config.data.max_length))
    seconds = []
    for _ in range(SAMPLE_STEPS):
        began = time.perf_counter()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def say(sentence: str) -> None:
    print(sentence, flush=True)


def is_even(game: Sequence[str]) -> bool:
    return len(game) == max(PLIES) and all(len(move) == 4 for move in game)


def measure(name: str, sampler: Sampler, games: Games) -> dict[str, float]:
    """The share of sampled moves that `chess` accepts as legal."""
    began = time.monotonic()
    speak = began + 2
    legal = moves = 0
    boards = [board_after(game[: PLIES[0]]) for game in games]
    for ply, drawn in zip(PLIES, sampler(games), strict=True):
        for board, move, game in zip(boards, drawn, games, strict=True):
            legal += is_legal(board, move)
            moves += 1
            if ply < len(game):
                board.push_uci(game[ply])
        if time.monotonic() > speak:
            speak = time.monotonic() + 5
            say(f"Evaluating {name}: ply {ply} of {PLIES[-1]}, {legal / moves:.1%} legal so far.")
    return {"legal_share": legal / moves, "moves": moves, "seconds": round(time.monotonic() - began, 1)}


def board_after(moves: Sequence[str]) -> chess.Board:
    board = chess.Board()
    for move in moves:
        board.push_uci(move)
    return board


def is_legal(board: chess.Board, move: str) -> bool:
    try:
        return chess.Move.from_uci(move) in board.legal_moves
    except chess.InvalidMoveError:
        return False


@torch.no_grad()
def sample_moves(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, games: Games) -> Iterator[list[str]]:
    """For each ply of PLIES, sample a move for each game at that ply, from the full distribution."""
    ids = tokenizer([" ".join(game) for game in games], return_tensors="pt")["input_ids"]
    cache = DynamicCache(config=model.config)
    read = 0
    for ply in PLIES:
        known = 1 + 2 * ply  # the begin token, and two tokens per move
        new = ids[:, read:known]
        drawn = []
        for _ in range(3):  # from-square, to-square, and a promotion or the start of the next move
            logits = model(input_ids=new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            new = torch.multinomial(logits.softmax(-1), 1)
            drawn.append(new)
        cache.crop(-2)  # remove the sampled tokens: the game continues with its own moves
        read = known
        yield [first_word(text) for text in tokenizer.batch_decode(torch.cat(drawn, 1), skip_special_tokens=True)]


def first_word(text: str) -> str:
    return (text.split() or [""])[0]


Table = dict[str, Counter[str]]


def fit_bigrams(games: Sequence[str]) -> Table:
    """Count how often each move follows each other move."""
    table: Table = defaultdict(Counter)
    for game in games:
        moves = game.split()
        for before, after in pairwise(moves):
            table[before][after] += 1
    return table


def sample_bigrams(table: Table, games: Games) -> Iterator[list[str]]:
    """Like `sample_moves`, from the bigram table. After a move that is not in the table, the sample is empty."""
    source = random.Random(0)
    for ply in PLIES:
        seen = [table.get(game[ply - 1], Counter({"": 1})) for game in games]
        yield [source.choices(list(counts), list(counts.values()))[0] for counts in seen]


def play_alone(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, plies: int = 40, tries: int = 10) -> None:
    """Play one game of the model against itself. Illegal moves are sampled again and counted."""
    board = chess.Board()
    refused = 0
    while board.ply() < plies and not board.is_game_over():
        played = " ".join(move.uci() for move in board.move_stack)
        inputs = tokenizer(played, return_tensors="pt")
        answers = model.generate(
            **inputs, max_new_tokens=3, do_sample=True, temperature=1.0, top_k=0, num_return_sequences=tries
        )
        texts = tokenizer.batch_decode(answers[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        drawn = [first_word(text) for text in texts]
        index = next((index for index, move in enumerate(drawn) if is_legal(board, move)), None)
        if index is None:
            say(f"Stopped after {tries} illegal moves in a row.")
            break
        refused += index
        board.push_uci(drawn[index])
    print(f"\nA game against itself; {refused} illegal moves were sampled again:\n")
    print(chess.Board().variation_san(board.move_stack))
    print(f"\n{board}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--how-long"]:
        how_long(Path(sys.argv[2]))
    else:
        main(Path(*sys.argv[1:] or ["runs/chess-tiny"]))
