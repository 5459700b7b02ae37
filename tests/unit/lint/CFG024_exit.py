import sys

from tfdist.configs import base


def get_config():
    sys.exit("no configuration today")
    return base()
