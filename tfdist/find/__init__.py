"""Finders: search for settings by trial before a run.

learning_rate  a range test under every strategy, and its suggestion
batch_size     the largest batch that fits, tried in child processes, without TensorFlow
"""
