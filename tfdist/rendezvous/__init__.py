"""The launchers of a job on several hosts find each other, and hear of each other's end."""
