"""Elastic multiworker: survivors of a lost worker go on within the job, with the same bits."""
