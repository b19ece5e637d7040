"""The measured figures of README.md and docs/, one file per page, and the committed results that they come from."""
