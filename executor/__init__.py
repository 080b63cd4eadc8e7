"""Executes schedules: tapes on lanes over one arena."""
