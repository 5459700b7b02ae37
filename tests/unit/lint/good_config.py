from tfdist.configs import base


def get_config():
    config = base()
    config.dataset = "mnist"
    config.augmentation.std = (255.0,)
    config.total_examples = 60_000 * 5
    config.warmup_examples = config.total_examples // 10
    config.profile_steps = (100, 120)
    if config.model == "cnn":
        config.dropout = 0.5
    return config
