import tensorflow as tf

from tfdist.configs import base


def get_config():
    config = base()
    return config
