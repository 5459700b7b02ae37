"""Elastic multiworker: the job continues without a lost worker, with the same bits."""
