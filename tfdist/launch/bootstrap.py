"""Entry file of a task's Python: imports this copy of tfdist and runs one of its modules.

The launcher runs this file by its path, so that tasks use the launcher's copy of tfdist.
`sys.path` then has only the entries that the program expects.
"""

import sys
from importlib import import_module
from os.path import dirname, realpath

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the directory of this file
    root = dirname(dirname(dirname(realpath(__file__))))
    sys.path.insert(0, root)
    import_module("tfdist")  # only the package: a backport beside it must not replace a module
    sys.path.remove(root)
    import_module("tfdist.launch." + sys.argv[1]).main(sys.argv[2:])
