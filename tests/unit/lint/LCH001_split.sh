#!/bin/sh
exec python -m tfdist.launch --workers 4 --split_bytes 4000000 train.py
