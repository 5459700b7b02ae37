"""Download the data once, and tell a Slack channel about each epoch.

    export SLACK_WEBHOOK_URL=https://hooks.slack.com/services/...
    python -m tfdist.launch --strategy multiworker --workers 2 docs/examples/slack.py URL_OF_DATA

The data is a .npz file with arrays `x` [n, features] and `y` [n].
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.request
from pathlib import Path

import keras
import numpy as np

import tfdist


class Slack(keras.callbacks.Callback):
    """Callback that posts the metrics of each epoch to an incoming webhook of Slack."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in (logs or {}).items())
        body = json.dumps({"text": f"epoch {epoch + 1}: {values}"}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=10).close()
        except OSError as error:  # the training does not depend on Slack
            print(f"Slack: {error}")


def download(url: str, path: Path) -> None:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        urllib.request.urlretrieve(url, part)
        part.rename(path)  # a killed job leaves no half of the file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--dir", type=Path, default=Path("runs/slack"), help="for the data")
    args = parser.parse_args()

    strategy = tfdist.make_strategy()
    with tfdist.chief_first():  # the chief downloads, and the other tasks find the file
        download(args.url, args.dir / "data.npz")
    with np.load(args.dir / "data.npz") as data:
        x, y = data["x"], data["y"]
    with strategy.scope():
        model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    slack = tfdist.on_chief(Slack(os.environ["SLACK_WEBHOOK_URL"]))
    model.fit(x, y, epochs=args.epochs, verbose=0, callbacks=[slack])


if __name__ == "__main__":
    main()
