"""Launcher, which starts, supervises and stops the processes of a job."""
