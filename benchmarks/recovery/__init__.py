"""How soon a job is back after a fault, beside torchrun: see `__main__`."""
