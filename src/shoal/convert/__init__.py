"""Foreign checkpoint formats, in and out."""
