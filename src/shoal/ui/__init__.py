"""The pages of `shoal ui`: runs as they train, and the planner."""
