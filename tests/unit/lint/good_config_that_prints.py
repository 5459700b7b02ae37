from tfdist.configs import base


def get_config():
    print("{}")
    return base()
