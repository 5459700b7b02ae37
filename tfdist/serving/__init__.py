"""Serving: a trained model as a verified SavedModel in a version directory, and its service.

export      from a model, a run or checkpoints to a version that has been checked and published

protocol    frames between front and replicas; addresses, codes and messages that need no model
rest        TensorFlow Serving's JSON, to and from arrays
dispatch    the requests of a model: which replica gets which, what is tried again
versions    which version is served, loaded or refused
model       a version that is loaded: batches of requests in, answers out; loads TensorFlow
replica     the process around it
front       the process that clients talk to, and what it counts
supervisor  holds the sockets, starts and replaces the others

on_ray      the same models as a deployment of Ray Serve
load        requests to a model server, and how long they take
"""
