"""Entry file of a task's Python: imports this tfdist and runs a module of it.

Run by its path, so that it works wherever the launcher itself was imported from, with
nothing on `sys.path` but what the program is to find there.
"""

import sys
from importlib import import_module
from os.path import dirname, realpath

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of this file
    root = dirname(dirname(dirname(realpath(__file__))))
    sys.path.insert(0, root)
    module = import_module("tfdist.launch." + sys.argv[1])
    sys.path.remove(root)
    module.main(sys.argv[2:])
