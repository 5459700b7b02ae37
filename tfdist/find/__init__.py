"""Finders: what to set before a run, by trying it out.

learning_rate  a range test under every strategy, and what its losses suggest
batch_size     the largest batch that fits, tried in child processes; no TensorFlow
spec           shapes and types of a batch
"""
