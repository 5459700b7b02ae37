from tfdist.configs import base


def get_config():
    config = base()
    config.strategy = "multiworker"
    config.max_staleness = 4
    return config
