"""Two models, two optimizers: a GAN on the digits, under every strategy.

    python -m tfdist.launch --strategy multiworker --workers 2 docs/examples/gan.py --steps 400

`fit` trains one model with one optimizer. `StepLoop` runs a step function of one's own by the same
engine: many steps in one compiled call, the order of the examples and every random draw a function
of the step, gradients reduced where they enter each optimizer.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf

import tfdist

NOISE = 16


def make_models() -> tuple[keras.Model, keras.Model]:
    """A generator of 8x8 images and a critic of them, each with its own optimizer."""
    layers = keras.layers
    generator = keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(128, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(64, activation="sigmoid"),
            layers.Reshape((8, 8, 1)),
        ]
    )
    critic = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )
    for model in (generator, critic):
        model.optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
        model.optimizer.build(model.trainable_variables)
    return generator, critic


def make_step(generator: keras.Model, critic: keras.Model, noise: keras.random.SeedGenerator):
    """One step on one replica's images, ``[examples, 8, 8, 1]``: the critic's update, then ours."""
    loss = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(images):
        z = keras.random.normal((tf.shape(images)[0], NOISE), seed=noise)
        with tf.GradientTape() as critic_tape, tf.GradientTape() as generator_tape:
            made = generator(z, training=True)
            real, fake = critic(images, training=True), critic(made, training=True)
            critic_loss = loss(tf.ones_like(real), real) + loss(tf.zeros_like(fake), fake)
            generator_loss = loss(tf.ones_like(fake), fake)
        for model, tape, value in (
            (critic, critic_tape, critic_loss),
            (generator, generator_tape, generator_loss),
        ):
            gradients = tape.gradient(value, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"critic": critic_loss, "generator": generator_loss}

    return step


def main() -> None:
    """Trains, and reports the losses every hundred steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save", help="where the chief writes the generator, a .keras file")
    arguments = parser.parse_args()

    strategy = tfdist.make_strategy()
    from sklearn.datasets import load_digits

    images = (load_digits().images[..., np.newaxis] / 16).astype("float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        generator, critic = make_models()
        noise = keras.random.SeedGenerator(7)
    loop = tfdist.StepLoop(
        make_step(generator, critic, noise), images, global_batch_size=64, seed=1
    )
    while loop.step < arguments.steps:
        logs = loop.run(min(100, arguments.steps - loop.step))
        if tfdist.is_chief():
            print(f"step {loop.step}: " + ", ".join(f"{k} {v:.3f}" for k, v in logs.items()))
    if tfdist.is_chief() and arguments.save:
        generator.save(arguments.save)
    tfdist.barrier()


if __name__ == "__main__":
    main()
