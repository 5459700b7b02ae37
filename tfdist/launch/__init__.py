"""Launcher: starts, supervises and ends the processes of a job."""
