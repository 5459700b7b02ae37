"""Runs the scripts of a job one after the other, and writes what each saw as a line of JSON."""

import json
import traceback


def record(scripts, path):
    """Runs each script; what it returns, or its error, is a line of the file at `path`."""
    with path.open("w") as file:
        for script in scripts:
            print(f"replaying {script.__name__}", flush=True)
            line = {"script": script.__name__}
            try:
                line["saw"] = script()
            except Exception:
                line["error"] = traceback.format_exc()
            file.write(json.dumps(line) + "\n")
            file.flush()
