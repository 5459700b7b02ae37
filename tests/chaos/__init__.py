"""Faults at any moment of a job, and whether it ends as if there had been none."""
