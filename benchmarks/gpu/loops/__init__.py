"""The parts of own_loops.py: the loops, a process that trains one of them, and the comparison."""
