from configs.digits_ps import get_config as digits


def get_config():
    config = digits()
    config.global_batch_size = 32
    return config
