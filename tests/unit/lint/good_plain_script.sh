#!/bin/sh
exec python -m tfdist.launch --workers 4 -m tfdist.train --config.checkpoints=5
