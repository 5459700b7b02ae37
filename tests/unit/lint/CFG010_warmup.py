from tfdist.configs import base


def get_config():
    config = base()
    config.warmup_examples = config.total_examples
    return config
