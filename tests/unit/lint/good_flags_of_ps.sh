#!/bin/sh
python -m tfdist.launch --ps 1 --split_bytes 4000000 --profile_ps --config.max_staleness=4
python -m tfdist.launch --strategy "$STRATEGY" --split_bytes 4000000 --config.max_staleness=4
python -m tfdist.launch --workers 4 train.py --split_bytes 4000000
