"""Jobs on several hosts: one launcher, and an agent on each other host."""
