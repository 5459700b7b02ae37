"""Jobs for a scheduler: `python -m tfdist.submit` renders and submits a script or manifests."""
