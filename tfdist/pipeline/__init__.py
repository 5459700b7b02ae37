"""One model over several tasks: stages, micro-batches and their schedules.

A stage is a run of the model's layers that one task computes. What crosses from one stage to the
next travels over a link; gradients come back over it (Huang et al., 2019,
https://arxiv.org/abs/1811.06965; Narayanan et al., 2019, https://arxiv.org/abs/1806.03377).

    cuts      where a model can be cut, and where it is: by measured times of its parts
    schedule  the order of each stage's passes, and the balance of stages by it; pure
    stage     the passes of one stage, its sums of gradients, and the messages of both
    link      arrays between two neighbouring stages
    staged    the compiled model as one task has it: losses, metrics and optimizer of its stage
    union     whose each variable is, and who gets it
    engine    the blocks of steps of a pipeline job
"""
