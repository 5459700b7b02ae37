"""Pipeline parallelism: one model over several tasks, with stages and micro-batches.

A stage is a sequence of the model's layers that one task computes. A link sends activations to the
next stage and gradients back (Huang et al., 2019,
https://arxiv.org/abs/1811.06965; Narayanan et al., 2019, https://arxiv.org/abs/1806.03377).

    cuts          possible cuts of a model, and the choice of cuts by measured times
    schedule      order of each stage's passes, and balance of the stages (pure functions)
    stage         passes, gradient sums and messages of a stage
    link          transfer of arrays between two neighbouring stages
    staged_model  one task's view of the compiled model: loss, metrics and optimizer of its stage
    union         owner of each variable, and transfer of values from the owner
    engine        step blocks of a pipeline job
"""
