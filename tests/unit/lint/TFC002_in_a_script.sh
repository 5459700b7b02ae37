#!/bin/sh
export TF_CONFIG="{'cluster': {'worker': ['a.example:2222']}, 'task': {'type': 'worker', 'index': 0}}"
python train.py
