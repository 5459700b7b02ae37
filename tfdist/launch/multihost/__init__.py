"""Jobs on several hosts: rendezvous and cooperation of their launchers."""
