from ml_collections import ConfigDict


def get_config():
    config = ConfigDict()
    config.dataset = "mnist"
    return config
