#!/bin/sh
exec python -m tfdist.launch --strategy=multiworker --profile-ps -m tfdist.train
