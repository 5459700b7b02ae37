"""A job on several hosts: how their launchers find each other and work as one."""
