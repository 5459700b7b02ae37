from tfdist.configs import base


def config():
    return base()
