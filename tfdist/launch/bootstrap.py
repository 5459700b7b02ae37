"""Entry file of a process of tfdist: imports this copy of tfdist and runs `main` of a module.

tfdist runs this file by its path, so that the process uses the same copy of tfdist. `sys.path`
then has only the entries that a program expects, and not the working directory.
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
    name = sys.argv[1] if "." in sys.argv[1] else f"tfdist.launch.{sys.argv[1]}"
    sys.exit(import_module(name).main(sys.argv[2:]))
