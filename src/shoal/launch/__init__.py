"""How processes start and find each other."""
