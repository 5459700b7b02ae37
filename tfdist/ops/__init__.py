"""Operations around a job: lint of its files, preflight of its hosts, submission.

rules    what a rule of both checks is: code, severity, meaning
lint     what is wrong with a job's files; `python -m tfdist.lint`
doctor   what is wrong with its hosts; `python -m tfdist.doctor`
submit   a text for Slurm or Kubernetes; `python -m tfdist.submit`
"""
