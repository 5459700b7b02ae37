"""One model over several tasks: stages, micro-batches and their schedules.

A stage is a run of the model's layers that one task computes. What crosses from one stage to the
next travels over a link; gradients come back over it (Huang et al., 2019,
https://arxiv.org/abs/1811.06965; Narayanan et al., 2019, https://arxiv.org/abs/1806.03377).
"""
