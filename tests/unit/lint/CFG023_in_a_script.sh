#!/bin/sh
exec python -m tfdist.launch --workers 4 --config.max_staleness=4
