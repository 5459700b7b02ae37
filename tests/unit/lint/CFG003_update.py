from tfdist.configs import base


def get_config():
    config = base()
    config.update(learning_rte=0.1)
    return config
