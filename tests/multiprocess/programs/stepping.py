"""A trial that counts to 20 and saves at each step; at the tenth it waits for the file ``go``.

Each look is a line of ``steps``, with the step and who takes it, so that two at once are seen.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

LAST, WAITS_AT = 20, 10


def main() -> None:
    told = json.loads(os.environ["_TFDIST_TRIAL"])
    run_dir, go = Path(told["run_dir"]), Path(told["sweep_dir"]) / "go"

    def save(signum: int, frame: FrameType | None) -> None:
        write(run_dir, f"{step} saved")
        sys.exit(143)

    saved = run_dir / "step"
    step = int(saved.read_text()) if saved.exists() else 0
    signal.signal(signal.SIGTERM, save)
    write(run_dir, f"{step} begins")
    while step < LAST:
        time.sleep(0.05)
        if step == WAITS_AT and not go.exists():
            write(run_dir, f"{step} waits")
            continue
        step += 1
        (run_dir / "step.new").write_text(str(step))
        os.replace(run_dir / "step.new", saved)
        write(run_dir, f"{step} done")
    line = {"step": step, "virtual_epoch": 1, "val_accuracy": 1 / (1 + told["values"]["x"])}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (run_dir / "summary.json").write_text('{"status": "done"}')


def write(run_dir: Path, what: str) -> None:
    with open(run_dir / "steps", "a") as file:
        file.write(f"{os.getpid()} {what}\n")


if __name__ == "__main__":
    main()
