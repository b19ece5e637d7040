"""`shoal doctor`: checks of a machine and of a group of processes before a run, and a report of a run for an issue."""
