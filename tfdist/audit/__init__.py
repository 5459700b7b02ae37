"""What a run did, looked at afterwards.

replay    one step of a run of `tfdist.train` again
"""
