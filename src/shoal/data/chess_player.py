"""A cheap chess player: it samples from the moves of one ply, weighted by captures and by where pieces stand.

Its games look like chess (pieces are developed, kings castle, hanging pieces are taken) and differ from each other.
The `chess` package keeps the board and checks the moves, so every game is legal.
"""

import random
from collections.abc import Callable
from math import exp
from typing import Any

import chess

# Piece values in pawns. The king's is high so that it does not approach enemy pieces.
_VALUES = {
    chess.PAWN: 1.0,
    chess.KNIGHT: 3.0,
    chess.BISHOP: 3.2,
    chess.ROOK: 5.0,
    chess.QUEEN: 9.0,
    chess.KING: 20.0,
}
# Softmax temperature over move values: lower plays better, higher plays more diverse games.
_TEMPERATURE = 0.2
_PROMOTED = exp(8 / _TEMPERATURE)
_CASTLED = exp(1.0 / _TEMPERATURE)

_NOT_A, _NOT_H = ~chess.BB_FILE_A, ~chess.BB_FILE_H


def play_game(generator: random.Random, plies: int) -> list[str]:
    """One game in UCI moves: `plies` long, or shorter where it ends in mate or stalemate."""
    board = chess.Board()
    played: list[str] = []
    while len(played) < plies:
        move = choose_move(board, generator)
        if move is None:
            break
        played.append(move.uci())
        board.push(move)
    return played


def choose_move(board: chess.Board, generator: random.Random) -> chess.Move | None:
    """A legal move, sampled with a probability that grows with its estimated value; None if there is none."""
    # Sampling among pseudo-legal moves and checking the sampled one is cheaper than checking all of them.
    moves, odds = _candidates(board)
    while moves:
        index = generator.choices(range(len(moves)), odds)[0]
        start, target, promotion = moves[index]
        move = chess.Move(start, target, promotion)
        if not board.is_into_check(move):
            return move
        del moves[index], odds[index]
    return None


Candidate = tuple[int, int, int | None]  # square left, square reached, promotion


def _candidates(board: chess.Board) -> tuple[list[Candidate], list[float]]:
    """The pseudo-legal moves and their odds, computed together: this is the hot loop."""
    mine, theirs = board.turn, not board.turn
    friends, enemies = board.occupied_co[mine], board.occupied_co[theirs]
    by_pawns = _pawn_attacks(board.pawns & enemies, theirs)
    guarded = by_pawns
    for square in chess.scan_reversed(enemies & ~board.pawns):
        guarded |= board.attacks_mask(square)
    moves: list[Candidate] = []
    odds: list[float] = []
    victim_at = board.piece_type_at
    for piece, bitboard in (
        (chess.KNIGHT, board.knights),
        (chess.BISHOP, board.bishops),
        (chess.ROOK, board.rooks),
        (chess.QUEEN, board.queens),
        (chess.KING, board.kings),
    ):
        risks = _TAKE[piece]
        for start in chess.scan_reversed(bitboard & friends):
            step = _STEP[mine][piece][start]
            hurry = _FLEE[piece] if by_pawns >> start & 1 else 1.0
            targets = board.attacks_mask(start) & ~friends
            for kind, squares in enumerate((targets & ~guarded, targets & guarded & ~by_pawns, targets & by_pawns)):
                factor = risks[0][kind] * hurry
                while squares:
                    target = squares.bit_length() - 1
                    squares ^= 1 << target
                    moves.append((start, target, None))
                    if enemies >> target & 1:
                        odds.append(step[target] * risks[victim_at(target)][kind] * hurry)
                    else:
                        odds.append(step[target] * factor)
    _add_pawns(board, guarded, by_pawns, moves, odds)
    if board.castling_rights & (chess.BB_RANK_1 if mine else chess.BB_RANK_8):
        for move in board.generate_castling_moves():
            moves.append((move.from_square, move.to_square, None))
            odds.append(_CASTLED)
    return moves, odds


def _add_pawns(board: chess.Board, guarded: int, by_pawns: int, moves: list[Candidate], odds: list[float]) -> None:
    mine = board.turn
    enemies = board.occupied_co[not mine]
    if board.ep_square is not None:
        enemies |= 1 << board.ep_square
    forward = 8 if mine else -8
    second = 1 if mine else 6
    risks = _TAKE[chess.PAWN]
    for start in chess.scan_reversed(board.pawns & board.occupied_co[mine]):
        targets = list(chess.scan_reversed(chess.BB_PAWN_ATTACKS[mine][start] & enemies))
        if not board.occupied >> (start + forward) & 1:
            targets.append(start + forward)
            if start >> 3 == second and not board.occupied >> (start + 2 * forward) & 1:
                targets.append(start + 2 * forward)
        step = _STEP[mine][chess.PAWN][start]
        for target in targets:
            kind = 2 if by_pawns >> target & 1 else guarded >> target & 1
            weight = step[target] * risks[board.piece_type_at(target) or 0][kind]
            if 8 <= target < 56:
                moves.append((start, target, None))
                odds.append(weight)
            else:
                moves += ((start, target, chess.QUEEN), (start, target, chess.KNIGHT))
                odds += (weight * _PROMOTED, weight * _PROMOTED / 20)


def _pawn_attacks(pawns: int, color: bool) -> int:
    if color:
        return ((pawns & _NOT_A) << 7 | (pawns & _NOT_H) << 9) & chess.BB_ALL
    return (pawns & _NOT_A) >> 9 | (pawns & _NOT_H) >> 7


def _standing(piece: int, square: int) -> float:
    """How well a white piece stands on a square, in pawns."""
    file, rank = chess.square_file(square), chess.square_rank(square)
    centre = 3.5 - max(abs(file - 3.5), abs(rank - 3.5))  # 0 at the rim, 3 in the middle
    if piece == chess.PAWN:
        return 0.15 * rank + (0.2 * centre if 2 <= file <= 5 else 0.0)
    if piece in (chess.KNIGHT, chess.BISHOP):
        return 0.35 * centre + (0.3 if rank > 0 else 0.0)
    if piece == chess.ROOK:
        return 0.1 * (3 - abs(file - 3.5)) + (0.4 if rank == 6 else 0.0)
    if piece == chess.QUEEN:
        return 0.1 * centre
    return -0.5 * rank - 0.15 * centre


def _table(odds: Callable[..., float], *sizes: int) -> Any:
    """odds(i, j, …) for all i, j, … below `sizes`, as nested lists: looking up is cheaper than computing."""
    if not sizes:
        return odds()
    return [_table(lambda *rest, first=first: odds(first, *rest), *sizes[1:]) for first in range(sizes[0])]


def _step_odds(color: int, piece: int, start: int, target: int) -> float:
    if piece == 0:
        return 1.0
    if not color:
        start, target = chess.square_mirror(start), chess.square_mirror(target)
    return exp((_standing(piece, target) - _standing(piece, start)) / _TEMPERATURE)


def _take_odds(piece: int, victim: int, guard: int) -> float:
    """`guard`: the target is not attacked (0), attacked by some piece (1) or by a pawn (2)."""
    if piece == 0:
        return 1.0
    worth = _VALUES.get(victim, 0.0)
    risk = 0.0 if guard == 0 else _VALUES[piece] if guard == 2 or victim else 0.5 * _VALUES[piece]
    if piece == chess.PAWN:
        risk *= 0.5
    return exp(min(max(worth - risk, -4.0), 4.0) / _TEMPERATURE)


_STEP: Any = _table(_step_odds, 2, 7, 64, 64)
_TAKE: Any = _table(_take_odds, 7, 7, 3)
_FLEE: Any = [exp((_VALUES.get(piece, 1.0) - 1) * 0.5 / _TEMPERATURE) for piece in range(7)]
