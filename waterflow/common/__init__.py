"""What everything else builds on: errors, units, files, the environment of a process."""
