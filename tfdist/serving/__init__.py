"""Serving: export of trained models to verified SavedModels, and a service for these models.

export      export of a model, a run or checkpoints as a checked and published version

protocol    frames between front and replicas, URL paths, status codes, states of versions
rest        conversion between TensorFlow Serving's JSON and arrays
dispatch    the request queue of a model: assignment to replicas, and retries
model_versions  the served, loading and refused versions of a model
model       a loaded version that answers batches of requests (imports TensorFlow)
replica     the process that runs a loaded version
front       the process that accepts requests, and its metrics
supervisor  the process that holds the sockets and starts and replaces the other processes

on_ray      the same models as a deployment of Ray Serve
"""
