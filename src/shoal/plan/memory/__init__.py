"""Bytes of a rank at every moment of a step, and what the allocator reserves beyond them."""
