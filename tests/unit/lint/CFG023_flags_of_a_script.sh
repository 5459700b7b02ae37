#!/bin/sh
exec python -m tfdist.train --config.strategy=mirrored --config.max_staleness=4
